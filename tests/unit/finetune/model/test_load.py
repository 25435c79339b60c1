import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from finetune.errors import ModelError
from finetune.model.empty import empty_of
from finetune.model.load import load_model
from finetune.recipe.sections import ModelSection
from offload.engine.experts.autotune import find_experts
from offload.engine.experts.lora import SUFFIX
from offload.engine.experts.products import goes_through_interface
from offload.plan.machine.machine import ExpertsImplementation
from tests.checkpoints import loaded as load

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    Qwen3ForCausalLM(Qwen3Config.from_dict(SHAPE)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_soft_caps_of_scores_are_computed(tmp_path: Path) -> None:
    """Fused attention has none, and some versions of transformers choose it all the same."""
    capped = Gemma2Config.from_dict(SHAPE | {"attn_logit_softcapping": 0.01})
    torch.manual_seed(0)
    made: Any = Gemma2ForCausalLM(capped)
    for layer in made.model.layers:  # scores of more than a cap
        layer.self_attn.q_proj.weight.data *= 100
    made.save_pretrained(tmp_path)
    tokens = torch.arange(12).view(1, 12)
    made.set_attn_implementation("eager")
    loaded: Any = load(tmp_path).model
    with torch.no_grad():
        right, found = made(tokens).logits, loaded(tokens).logits
        for layer in made.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        uncapped = made(tokens).logits
    assert torch.equal(found, right)
    assert not torch.allclose(uncapped, right, rtol=0, atol=1e-3)


def test_random_weights_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        return next(random_moe("eager", seed=seed).parameters()).detach()

    torch.manual_seed(7)
    first, state = weights(1), torch.get_rng_state()
    assert torch.equal(first, weights(1))
    assert not torch.equal(first, weights(2))
    assert torch.equal(state, torch.get_rng_state())


def random_moe(way: ExpertsImplementation | None, *, seed: int = 0) -> PreTrainedModel:
    section = ModelSection(config="tiny-qwen3-moe", init="random", dtype="float32")
    return load_model(
        section,
        codec="native",
        device="cpu",
        seed=seed,
        tier="ram",
        experts_implementation=way,
    ).model


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_all_experts_compute_as_they_are_told(way: ExpertsImplementation) -> None:
    model = random_moe(way)
    experts = [module for module in model.modules() if goes_through_interface(module)]
    assert len(experts) == 4
    for module in experts:
        config: Any = module.config
        assert config._experts_implementation.removesuffix(SUFFIX) == way


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_are_known_before_the_model_is_loaded(
    dtype: Literal["bfloat16", "float32"],
) -> None:
    model = ModelSection(config="gpt-oss-20b", init="random", dtype=dtype)
    experts: Any = find_experts(empty_of(model))
    assert experts.gate_up_proj.shape == (32, 2880, 5760)
    assert experts.down_proj.dtype is getattr(torch, dtype)
    assert {p.device.type for p in experts.parameters()} == {"meta"}
    assert find_experts(empty_of(ModelSection(config="tiny-qwen3", init="random"))) is None


def test_a_missing_tensor_is_named(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors, such as model\.layers\.1\.mlp\.up"):
        load(model_dir)


def test_an_unexpected_tensor_is_named(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    tensors = {**load_file(file), "model.layers.0.mlp.extra.weight": torch.zeros(2)}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"unknown to the model, 1 tensors, such as .*extra"):
        load(model_dir)


def test_weights_of_other_sizes_than_the_config_says_are_named(model_dir: Path) -> None:
    file = model_dir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 48}))
    with pytest.raises(ModelError, match=r"in other sizes than its config's, 6 tensors, such as"):
        load(model_dir)


def test_weights_that_are_cut_off_are_an_error_not_a_traceback(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is cut off or damaged"):
        load(model_dir)
