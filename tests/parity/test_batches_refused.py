"""Batches, devices, blocks and models that a step cannot be run with: errors with a hint."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

import offload
from tests.parity.test_streamed_step import (
    MODELS,
    gradients,
    micro_batches,
    plain,
    rel_error,
    tiny,
)

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = micro_batches()[0]
IDS, LABELS = BATCH["input_ids"], BATCH["labels"]

REFUSED: dict[str, tuple[Any, str]] = {
    "fewer labels": ([BATCH | {"labels": LABELS[:, :5]}], r"`labels` of .* 0 is \(2, 5\), .*12\)"),
    "labels of another rank": ([BATCH | {"labels": LABELS[None]}], r"`labels` .* is \(1, 2, 12\)"),
    "labels of one row": ([BATCH, BATCH | {"labels": LABELS[:1]}], r"`labels` of micro-batch 1 is"),
    "a narrow mask": (
        [BATCH | {"attention_mask": torch.ones(2, 5)}],
        r"`attention_mask` of micro-batch 0 is \(2, 5\)",
    ),
    "a dict": (BATCH, "micro_batches is a dict"),
    "a number": (3, "micro_batches is a int"),
    "no micro-batch": ([], "micro_batches is empty"),
    "a tensor": ([IDS], "micro-batch 0 is a Tensor"),
    "no labels": ([{"input_ids": IDS}], "micro-batch 0 has no `labels`"),
    "no tokens": ([{"labels": LABELS}], "micro-batch 0 has no `input_ids`"),
    "lists": ([{"input_ids": IDS.tolist(), "labels": LABELS}], "`input_ids` .* is a list"),
    "no rows": ([BATCH, {n: t[:0] for n, t in BATCH.items()}], r"of micro-batch 1 is \(0, 12\)"),
    "one row": ([{n: t[0] for n, t in BATCH.items()}], r"`input_ids` of micro-batch 0 is \(12,\)"),
    "float tokens": ([BATCH | {"input_ids": IDS.float()}], "`input_ids` .* of torch.float32"),
    "float labels": ([BATCH | {"labels": LABELS.float()}], "`labels` .* is of torch.float32"),
}


@pytest.mark.parametrize(("batches", "what"), REFUSED.values(), ids=REFUSED)
def test_micro_batches_that_a_step_cannot_take_are_refused(batches: Any, what: str) -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    with pytest.raises(offload.OffloadError, match=rf"(?s){what}.*\n\nhint: "):
        engine.forward_backward(batches)
    assert all(p.grad is None for p in model.parameters())
    engine.detach()


def test_micro_batches_in_another_form_give_the_same_step() -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    expected = engine.forward_backward(micro_batches()).loss
    others: tuple[Any, ...] = (
        iter(micro_batches()),
        tuple(micro_batches()),
        [{n: t.int() for n, t in batch.items()} for batch in micro_batches()],
        [batch | {"position_ids": None} for batch in micro_batches()],
    )
    for other in others:
        assert engine.forward_backward(other).loss == expected
    engine.detach()


def test_a_forward_of_what_is_no_batch_is_refused() -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    with pytest.raises(offload.OffloadError, match="the batch is a list"):
        engine.forward([BATCH])  # type: ignore[arg-type] # what is wrong with it
    with pytest.raises(offload.OffloadError, match=r"`input_ids` of the batch is \(0, 12\)"):
        engine.forward({"input_ids": IDS[:0]})
    engine.detach()


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_a_step_where_gradients_are_switched_off_is_refused(block: Callable[[], Any]) -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    name = re.escape(f"`torch.{block.__name__}()`")
    with block(), pytest.raises(offload.OffloadError, match=rf"in {name}.*\n\nhint: leave"):
        engine.forward_backward(micro_batches())
    engine.detach()


def test_attaching_in_inference_mode_is_refused() -> None:
    model = tiny("qwen3")
    with torch.inference_mode(), pytest.raises(offload.OffloadError, match="inference_mode"):
        offload.attach(model, num_slots=2, device="cpu")


def test_an_evaluation_in_inference_mode_leaves_nothing_that_a_step_cannot_use() -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    with torch.inference_mode():
        engine.forward(BATCH)
    assert engine.forward_backward(micro_batches()).loss == pytest.approx(plain_loss(), rel=1e-5)
    engine.detach()


def plain_loss() -> float:
    return plain(tiny("qwen3"))[0]


@pytest.mark.parametrize("device", ["cuda:99", "mps", "gpu", ""])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    model = tiny("qwen3")
    with pytest.raises(offload.OffloadError, match=rf"device is '{device}'.*\n\nhint: `device="):
        offload.attach(model, num_slots=2, device=device)
    assert plain(model)[0] == plain_loss()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(offload.OffloadError, match=r"device is 'cuda'; torch finds no CUDA"):
        offload.attach(tiny("qwen3"), num_slots=2)


@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))])
def test_a_module_that_is_no_language_model_is_refused(model: nn.Module) -> None:
    with pytest.raises(offload.UnsupportedModelError, match=r"is no causal .*\n\nhint: attach the"):
        offload.attach(model, num_slots=2, device="cpu")


def test_a_model_without_a_head_is_refused_before_any_gradient() -> None:
    model = MODELS["qwen3"]().model
    model.requires_grad_(False)
    model.layers[0].requires_grad_(True)
    engine = offload.attach(model, num_slots=2, device="cpu")
    with pytest.raises(offload.UnsupportedModelError, match="returns no logits"):
        engine.forward_backward(micro_batches())
    assert all(p.grad is None for p in model.parameters())
    engine.detach()


def test_a_model_that_skips_layers_at_random_is_refused_at_attach() -> None:
    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        dropout=0.0,
        layerdrop=0.1,
    )
    model = get_peft_model(OPTForCausalLM(config), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(
        offload.UnsupportedModelError,
        match=r"`model.decoder.layerdrop` is 0.1.*\n\nhint: `get_submodule\('model.decoder'\)",
    ):
        offload.attach(model, num_slots=2, device="cpu")
    decoder: Any = model.get_base_model().get_submodule("model.decoder")
    decoder.layerdrop = 0.0
    offload.attach(model, num_slots=2, device="cpu").detach()


def test_reorder_a_config_without_named_outputs_trains_like_the_plain_model() -> None:
    model = tiny("qwen3")
    loss, expected = plain(model)
    model.config.return_dict = False
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    assert engine.forward_backward(micro_batches()).loss == pytest.approx(loss, rel=1e-5)
    assert rel_error(gradients(model), expected) < 1e-5
    engine.detach()
    assert model.config.return_dict is False


# ------------------------------------------------------------------- layers that detach


class Detached(nn.Module):
    """A layer whose output does not depend on its input, for autograd."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(hidden.detach(), *args, **kwargs)


@pytest.mark.parametrize("kept_graphs", [0, 4])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_reorder_below_a_layer_that_detaches_there_are_no_gradients(
    is_frozen: bool, kept_graphs: int
) -> None:
    """None, as in plain autograd, and not zero: a weight decay would act on those."""
    model: Any = tiny("qwen3")
    layers = model.get_base_model().model.layers
    layers[3] = Detached(layers[3])
    layers[3].attention_type = "full_attention"
    if is_frozen:
        layers[3].requires_grad_(False)
    loss, expected = reference(model)
    engine = offload.attach(
        model, num_slots=2, device="cpu", head_chunk_tokens=7, kept_graphs=kept_graphs
    )
    assert engine.forward_backward(micro_batches()).loss == pytest.approx(loss, rel=1e-5)
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    engine.detach()
    assert found.keys() == expected.keys()
    assert not any("layers.2." in name for name in found)
    assert any("layers.3." in name for name in found) is not is_frozen
    assert rel_error(found, expected) < 1e-5


def reference(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    batches = micro_batches()
    num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    loss = 0.0
    for batch in batches:
        part = model(**batch, use_cache=False, num_items_in_batch=num_items).loss
        part.backward()
        loss += part.item()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss, found


def test_a_layer_that_detaches_where_weights_train_on_the_host_is_refused() -> None:
    model: Any = MODELS["qwen3"]().train()
    model.model.layers[3] = Detached(model.model.layers[3])
    model.model.layers[3].attention_type = "full_attention"
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="host")
    with pytest.raises(offload.UnsupportedModelError, match="layer 3 passes no gradient on"):
        engine.forward_backward(micro_batches())
    engine.detach()
