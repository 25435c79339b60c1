"""Shipped shapes, and the models on the hub that they are of."""

from finetune.model.config import read_config
from finetune.recipe.load import load_shape, published_ids, shape_of_id, shipped_shapes
from finetune.recipe.sections import ModelSection


def test_every_shape_but_the_tiny_ones_names_its_model_on_the_hub() -> None:
    named = set(published_ids())
    assert {name for name in shipped_shapes() if name not in named} == {
        "tiny-qwen3",
        "tiny-qwen3-moe",
    }


def test_a_hub_id_finds_its_shape_by_what_is_published_or_by_its_name() -> None:
    assert shape_of_id("meta-llama/Llama-2-7b-hf") == "llama-2-7b"
    assert shape_of_id("Qwen/Qwen3-8B") == "qwen3-8b"
    assert shape_of_id("unsloth/Qwen3-8B") == "qwen3-8b"
    assert shape_of_id("Qwen/Qwen3-9000B") is None


def test_a_published_model_that_was_never_downloaded_is_read_from_its_shape() -> None:
    config = read_config(ModelSection(path="mistralai/Mixtral-8x7B-v0.1"))
    assert config == load_shape("mixtral-8x7b")
