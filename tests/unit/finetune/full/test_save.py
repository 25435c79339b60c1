"""Models whose own weights were trained, as plain transformers loads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from finetune.data.chat_template import Stops
from finetune.full.weights import save_model
from finetune.model.empty import empty_of
from finetune.recipe.sections import ModelSection
from tests.parity.steps import SHAPE

SIZES = {**SHAPE, "vocab_size": 64, "max_position_embeddings": 64, "head_dim": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OLD = {"transformers_version": "4.51.0", "torch_dtype": "bfloat16"}
TEXT = {**SIZES, "rope_theta": 5e5}
EXPERTS = {"num_local_experts": 2, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 1}
PUBLISHED: dict[str, dict[str, Any]] = {
    "older": {"model_type": "llama", **SIZES, **OLD, "rope_theta": 1e6, "rope_scaling": None},
    "scaled": {"model_type": "llama", **SIZES, **OLD, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "partial": {"model_type": "stablelm", **SIZES, **OLD, "rope_theta": 2e4},
    "newer": {
        **{"model_type": "qwen3", **SIZES, "dtype": "bfloat16"},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "typeless": {"model_type": "qwen2", **SIZES, "rope_theta": 1e6},
    "quantised, with code": {
        **{"model_type": "qwen3", **SIZES, **OLD, "rope_theta": 1e6},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]},
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig"},
    },
    "whole composite": {
        **{"model_type": "gemma3", **OLD},
        "text_config": {**TEXT, **OLD, "rope_local_base_freq": 3e4, "sliding_window_pattern": 2},
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    "text of a composite": {
        **{"model_type": "llama4", **OLD, "architectures": ["Llama4ForConditionalGeneration"]},
        "text_config": {**TEXT, "model_type": "llama4_text", "rope_scaling": LLAMA3, **EXPERTS},
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
}


CHANGED = {"architectures", "torch_dtype", "dtype", "quantization_config", "auto_map"}


def without_changed(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: without_changed(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if key not in CHANGED
    }


class _Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def test_tied_weights_trained_on_the_host_are_saved_once(tmp_path: Path) -> None:
    """On a card the trained tensor is not the one that the model computes with."""
    config: Any = Qwen3Config(**SHAPE, tie_word_embeddings=True)
    model: Any = Qwen3ForCausalLM(config)
    trained = {name: p.detach() + 1 for name, p in model.named_parameters()}
    tokenizer: Any = _Tokenizer()
    (tmp_path / "config.json").write_text(config.to_json_string())
    save_model(
        model,
        trained,
        tokenizer,
        tmp_path / "model",
        section=ModelSection(path=str(tmp_path)),
        stops=Stops(trained=(), base=()),
    )
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == set(trained)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert all(torch.equal(p, trained[name]) for name, p in loaded.named_parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_is_the_published_one(name: str, tmp_path: Path) -> None:
    """In transformers 5's layout alone, older readers found no `rope_theta` (#41)."""
    published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published))
    section = ModelSection(path=str(tmp_path), dtype="float32")
    model: Any = empty_of(section)
    model.to_empty(device="cpu")
    trained = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    tokenizer: Any = _Tokenizer()
    folder = tmp_path / "model"
    stops = Stops(trained=(), base=())
    save_model(model, trained, tokenizer, folder, section=section, stops=stops)
    found = json.loads((folder / "config.json").read_text())
    own = published["text_config"] if name == "text of a composite" else published
    assert without_changed(found) == without_changed(own)
    assert found["architectures"] == [type(model).__name__]
    types = {key: "float32" for key in ("torch_dtype", "dtype") if key in published}
    assert {key: found[key] for key in ("torch_dtype", "dtype") if key in found} == types
    assert "bfloat16" not in json.dumps(found)
    read = AutoConfig.from_pretrained(folder)
    assert type(read) is type(model.config)
    text, wanted = read.get_text_config(), model.config.get_text_config()
    assert text.rope_parameters == wanted.rope_parameters
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is type(model)
    assert loaded.dtype is torch.float32
