"""What is shipped in recipes/: every recipe validates, every shape is a model's config."""

from pathlib import Path

import pytest

from finetune.errors import ConfigError
from finetune.recipe.load import load_recipe, load_shape, shipped_shapes
from finetune.recipe.recipe import recipes_dir, shipped_recipes

# Published numbers of parameters, in billions, or the exact number of our own small shapes.
PUBLISHED = {
    "gemma-3-12b-text": 11.77,
    "gemma-3-1b": 1.0,
    "gemma-3-27b-text": 27.0,
    "gemma-3-4b-text": 3.88,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
    "llama-2-7b": 6.74,
    "llama-3.1-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "mistral-7b-v0.3": 7.25,
    "mistral-nemo-12b": 12.25,
    "mixtral-8x7b": 46.7,
    "olmoe-1b-7b": 6.92,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-14b": 14.8,
    "qwen3-235b-a22b": 235.1,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.8,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "tiny-qwen3": 0.020235648,
    "tiny-qwen3-moe": 0.000095584,
    "tinyllama-1.1b": 1.10,
}


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_validates_by_name_and_by_path(name: str) -> None:
    by_name = load_recipe(name, [], check_files=False)
    assert load_recipe(str(shipped_recipes()[name]), [], check_files=False) == by_name


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_tells_a_reader_how_to_run_it(name: str) -> None:
    text = shipped_recipes()[name].read_text(encoding="ascii")
    assert text.startswith("# ")
    assert name in text.split("\nmodel:")[0]


def test_the_quickstart_streams_and_trains_attention_and_experts() -> None:
    recipe = load_recipe("quickstart", [], check_files=False)
    assert recipe.model.dtype == "float32"
    assert recipe.adapter.targets == "attention"
    assert recipe.adapter.experts
    assert recipe.offload.num_slots == 3
    assert recipe.train.num_micro_batches > 1
    assert recipe.report.samples > 0


def test_the_quickstart_finds_its_model_and_rows_beside_it_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("quickstart", [])
    assert Path(str(recipe.model.path)) == recipes_dir() / "quickstart" / "model"
    assert Path(recipe.data.path or "") == recipes_dir() / "quickstart" / "train.jsonl"


def test_the_30b_recipe_fills_a_step_of_48k_tokens_with_sequences_of_8k() -> None:
    recipe = load_recipe("qwen30b_lora_5090", [])
    assert recipe.model.path == "Qwen/Qwen3-30B-A3B"
    assert recipe.offload.codec == "native"
    assert (recipe.train.seq_len, recipe.train.micro_batch_size) == (8192, 1)
    assert recipe.train.tokens_per_step == 49_152


def test_the_4060ti_recipe_keeps_weights_in_nf4() -> None:
    assert load_recipe("qwen30b_qlora_4060ti", []).offload.codec == "nf4"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("qwen30b_dpo_5090", "dpo"),
        ("qwen30b_kto_5090", "kto"),
        ("qwen3_8b_dpo_4090", "dpo"),
        ("qwen3_8b_kto_4090", "kto"),
    ],
)
def test_recipes_of_preferences_compare_with_the_base_that_they_stream(
    name: str, method: str
) -> None:
    recipe = load_recipe(name, [])
    assert recipe.objective.method == method
    assert recipe.objective.computes_reference
    assert not recipe.train.is_full


def test_the_gsm8k_recipe_takes_files_at_hand_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    Path("tokenizer").mkdir()
    recipe = load_recipe(
        "gsm8k_lora",
        ["data.path=train.jsonl", "model.tokenizer=tokenizer", "train.steps=12"],
    )
    assert recipe.data.path == str(tmp_path / "train.jsonl")
    assert recipe.model.tokenizer == str(tmp_path / "tokenizer")
    assert (recipe.model.config, recipe.model.init) == ("tiny-qwen3", "random")
    assert recipe.train.steps == 12


def test_every_published_shape_is_here() -> None:
    assert set(shipped_shapes()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_shape_builds_a_model_of_the_published_size(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = load_shape(name)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)


def test_the_tiny_shape_has_the_vocabulary_of_qwen3() -> None:
    assert load_shape("tiny-qwen3")["vocab_size"] == load_shape("qwen3-0.6b")["vocab_size"]


def test_a_shape_is_read_from_a_config_json_or_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        '{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9}'
    )
    assert load_shape(str(file)) == load_shape(str(tmp_path))
    assert load_shape(str(file))["vocab_size"] == 9


def test_an_unknown_shape_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load_shape("Qwen3-30b-a3")
    assert caught.value.what == "Qwen3-30b-a3 is not a model shape"
    assert caught.value.hint.startswith("`model.config: qwen3-30b-a3b`; shipped are qwen3-30b-a3b")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "cannot be read: it is not JSON: Expecting property name"),
        ("[1]", "cannot be read: it holds [1], and should be an object"),
        ('{"hidden_size": 8, "vocab_size": 9}', "cannot be read: model_type is missing"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_shape(str(file))
    assert caught.value.what.startswith(f"{file} {what}")
