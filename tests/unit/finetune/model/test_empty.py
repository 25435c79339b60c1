"""Models without memory: whichever way a config is found, the model is the one that computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import ModelError
from finetune.model.empty import empty_from, empty_of, empty_published
from finetune.recipe.sections import ModelSection

FP8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}
FIELDS = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
    "quantization_config": FP8,
}
BUILDERS = {
    "section": lambda folder: empty_of(ModelSection(path=str(folder), dtype="float32")),
    "fields": lambda folder: empty_from(json.loads((folder / "config.json").read_text())),
    "published": lambda folder: empty_published(str(folder), torch.float32).model,
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_an_empty_model_is_plain_where_its_config_is_quantised(build: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    model = build(tmp_path)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not hasattr(model.config, "quantization_config")
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float32)}


def test_what_a_config_says_about_quantised_weights_is_kept_for_their_reader(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    empty = empty_published(str(tmp_path), torch.bfloat16)
    assert empty.quantization == FP8
    assert not empty.is_composite


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_a_config_that_builds_no_model_is_one_error(build: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"model_type": "vit"}))
    with pytest.raises(ModelError, match=r" is no language model: ViTConfig"):
        build(tmp_path)
