"""QLoRA over mixtures: nearly all of the layers in nf4, and exact adapters on their experts."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

import offload
from finetune.adapter.lora import add_lora, save_adapter
from finetune.recipe.sections import AdapterSection
from tests.parity.architectures import micro_batches
from tests.parity.experts import TYPES, randomised
from tests.parity.rounding import rounded
from tests.parity.steps import assert_equal, gradients
from tests.parity.tiny_models import NUM_LAYERS, tiny_model
from tests.tiers import mostly_slow

# Wide enough for routers, norms and biases to weigh as little as they do in models of real size.
WIDE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


def base_of(model_type: str) -> PreTrainedModel:
    base = tiny_model(model_type, **WIDE)
    base.set_experts_implementation("eager")
    return base


def adapted(base: PreTrainedModel) -> PeftModel:
    section = AdapterSection(rank=4, alpha=8.0, targets="attention", experts=True)
    model = add_lora(base, section, seed=0)
    torch.manual_seed(0)
    randomised(model)
    return model.train()


@pytest.mark.parametrize("model_type", mostly_slow(TYPES, "gpt_oss"))
def test_nf4_covers_the_experts_and_adapters_on_them_are_exact(
    model_type: str, tmp_path: Path
) -> None:
    """MOVE: the step of a resident model whose weights are what nf4 makes of them."""
    base = base_of(model_type)
    model, resident = adapted(copy.deepcopy(base)), adapted(rounded(base, "nf4"))
    engine = offload.attach(model, num_slots=2, codec="nf4", device="cpu")
    assert engine.weights.layers_encoded_frac > 0.98
    experts = [row for row in engine.weights.rows if row.kind == "experts"]
    assert [row.codec for row in experts] == ["nf4"]
    assert sum(engine.layer_bytes) < 0.17 * engine.weights.decoded_bytes  # 0.129 of fp32, and pages
    expected = offload.attach(resident, num_slots=NUM_LAYERS, device="cpu")
    found = engine.forward_backward(micro_batches(), dropout_seed=0).loss, gradients(model)
    wanted = expected.forward_backward(micro_batches(), dropout_seed=0).loss, gradients(resident)
    assert_equal(found, wanted)
    assert any("experts" in name and bool(tensor.any()) for name, tensor in found[1].items())
    engine.detach()
    expected.detach()
    _require_same_elsewhere(model, rounded(base, "nf4"), tmp_path)


def _require_same_elsewhere(model: PeftModel, base: Any, folder: Path) -> None:
    """Check that plain transformers and peft compute the same with the saved adapter."""
    save_adapter(model, folder)
    plain = PeftModel.from_pretrained(base, folder).eval()
    input_ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        wanted = plain(input_ids=input_ids).logits
        torch.testing.assert_close(
            model.eval()(input_ids=input_ids).logits, wanted, rtol=1e-4, atol=1e-5
        )
        with plain.disable_adapter():
            assert not torch.allclose(plain(input_ids=input_ids).logits, wanted, atol=1e-2)
