from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.neftune import activate_neftune

import offload
from finetune.adapter.lora import add_noise
from offload.engine.randomness import FRONT_LAYER
from offload.engine.seeding import seed_of
from tests.tiers import diagonal

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
}


def make_model(kind: str = "qwen3") -> Any:
    torch.manual_seed(0)
    plain: Any = (
        Qwen3ForCausalLM(Qwen3Config(**SHAPE))
        if kind == "qwen3"
        else Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE))  # scales its embeddings
    )
    model = get_peft_model(plain, LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 0.1)
    return model.train()


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("alpha", "width"), [(5.0, 7), (0.3, 24), (7.7, 1001)])
def test_the_noise_is_that_of_transformers_to_the_bit(
    kind: str, dtype: torch.dtype, alpha: float, width: int
) -> None:
    ids = torch.randint(0, 32, (2, width), generator=torch.Generator().manual_seed(1))
    ours, theirs = make_model(kind).to(dtype), make_model(kind).to(dtype)
    handle = add_noise(ours.get_base_model(), alpha=alpha)
    activate_neftune(theirs, alpha)
    embedded = []
    for model in (ours, theirs):
        torch.manual_seed(3)
        embedded.append(model.get_base_model().get_input_embeddings()(ids))
    assert torch.equal(*embedded)
    plain = make_model(kind).to(dtype).get_base_model().get_input_embeddings()(ids)
    assert not torch.equal(embedded[0], plain)
    ours.eval()
    assert torch.equal(ours.get_base_model().get_input_embeddings()(ids), plain)
    ours.train()
    handle.remove()
    assert torch.equal(ours.get_base_model().get_input_embeddings()(ids), plain)


@pytest.mark.thorough
@pytest.mark.parametrize(("stash", "kept_graphs"), diagonal(["device", "host"], [0, 2]))
def test_gradients_of_a_streamed_step_are_those_of_transformers_under_the_same_noise(
    stash: Any, kept_graphs: int
) -> None:
    """Padding counts in the width: rows are 10 of 16 tokens long."""
    ids = torch.randint(1, 32, (2, 2, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :, 10:] = -100
    model = make_model()
    add_noise(model.get_base_model(), alpha=5.0)
    engine = offload.attach(model, num_slots=2, device="cpu", stash=stash, kept_graphs=kept_graphs)
    found = engine.forward_backward(
        [{"input_ids": ids[m], "labels": labels[m]} for m in range(2)], dropout_seed=5
    )
    plain = make_model()
    activate_neftune(plain, 5.0)
    loss = torch.zeros(())
    for m in range(2):
        torch.manual_seed(seed_of(5, FRONT_LAYER, m))
        logits = plain(input_ids=ids[m]).logits[:, :-1]
        loss = loss + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[m][:, 1:].flatten(), reduction="sum"
        )
    loss = loss / int((labels[:, :, 1:] != -100).sum())
    loss.backward()
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    parameters = dict(model.named_parameters())
    for name, expected in plain.named_parameters():
        if expected.requires_grad:
            torch.testing.assert_close(parameters[name].grad, expected.grad, rtol=1e-4, atol=1e-6)
    quiet = make_model()
    still = offload.attach(quiet, num_slots=2, device="cpu").forward_backward(
        [{"input_ids": ids[m], "labels": labels[m]} for m in range(2)], dropout_seed=5
    )
    assert abs(still.loss - found.loss) > 1e-3
