"""Every shipped recipe trains two steps, on two narrow layers of its model with all of its tokens.

Its settings are its own but for lengths: a step has two micro-batches of at most 512 tokens, and
what is counted in steps is due in each. The quickstart's recipes have their own model and rows.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.model.config import read_config
from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import Recipe, shipped_recipes
from tests.doubles import tiny_tokenizer
from tests.e2e.runs import adapter, losses, rows_of, run
from tests.published import publish
from tests.tiers import mostly_slow

MOST_TOKENS = 512  # of a micro-batch
NUM_LAYERS = 2
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "query_pre_attn_scalar": 16,
}
# Types with parts that these sizes do not name; what a tiny one takes besides its own defaults.
WITH_PARTS: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "gemma4": {"hidden_size_per_layer_input": 0},
    "glm4_moe_lite": {},
    "mistral3": {},
    "nemotron_h": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
}


def shrunk(shape: dict[str, Any]) -> dict[str, Any]:
    """Return the config of two narrow layers of the same type, with each kind of layer there is."""
    small = {key: SIZES.get(key, value) for key, value in shape.items()}
    if small.get("sliding_window"):
        small["sliding_window"] = 8
    if small.get("layer_types"):
        kinds = list(dict.fromkeys(small["layer_types"]))
        small["layer_types"] = (kinds * NUM_LAYERS)[:NUM_LAYERS]
    if small.get("num_kv_shared_layers"):  # two that have keys and values, and two that read them
        more = {"num_hidden_layers": 2 * NUM_LAYERS, "num_kv_shared_layers": NUM_LAYERS}
        small |= {**more, "layer_types": small["layer_types"] * 2, "hidden_size_per_layer_input": 8}
    return small


def tiny_model(recipe: Recipe, folder: Path) -> list[str]:
    """Write such a model, if the recipe's has weights, or its config; return the settings."""
    shape = read_config(recipe.model)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    if (model_type := shape["model_type"]) in WITH_PARTS:
        sizes = {"vocab_size": shape.get("text_config", shape)["vocab_size"]}
        sizes["max_position_embeddings"] = MOST_TOKENS
        publish(model_type, folder, **sizes, **WITH_PARTS[model_type])
        return [f"model.path={folder}"]
    shape = shrunk(shape)
    if recipe.model.path is None:
        (folder / "shape.yaml").write_text(yaml.safe_dump(shape))
        return [f"model.config={folder / 'shape.yaml'}", f"model.tokenizer={folder}"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, recipe.model.dtype))
    model.save_pretrained(folder)
    return [f"model.path={folder}"]


def written_rows(recipe: Recipe, file: Path) -> Path:
    """Write rows of several lengths, with the recipe's columns."""
    data, rows = recipe.data, list[dict[str, Any]]()
    asked = data.columns.get("prompt", "prompt")
    answered = data.columns.get("completion", "completion")
    for number in range(200):
        prompt, more = f"what follows {number}", "more " * (number % 7)
        row: dict[str, Any] = {asked: prompt}
        if recipe.objective.method == "dpo":
            row |= {"chosen": f"{more}{number + 1}", "rejected": f"{more}{number}"}
        else:
            row |= {answered: f"{more}{number + 1}"}
        if recipe.objective.samples_answers:
            row |= {"answer": f"{number + 1}"}
        if recipe.objective.method == "kto":
            row |= {"label": number % 2 == 0}
        rows.append(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def lengths(recipe: Recipe) -> list[str]:
    """Return the settings of two steps of two micro-batches."""
    train = recipe.train
    size = 8 if train.micro_batch_size == "auto" else train.sequences
    seq_len = min(train.seq_len, MOST_TOKENS // size)
    per_step = {"grad_accum_steps": 2}
    if train.tokens_per_step is not None:
        per_step = {"tokens_per_step": 2 * size * seq_len}
    due = [
        f"output.{name}=1"
        for name in ("checkpoint_every", "eval_every")
        if getattr(recipe.output, name) is not None
    ]
    return [
        *(f"train.{name}={value}" for name, value in per_step.items()),
        *(f"train.seq_len={seq_len}", "train.steps=2", "train.warmup_steps=0", *due),
        *[f"train.micro_batch_size={size}"] * (train.micro_batch_size == "auto"),
        *["objective.max_new_tokens=8"] * recipe.objective.samples_answers,
        *["image.max_tokens=null"] * (recipe.image.max_tokens is not None),  # rows are of text
    ]


@pytest.mark.parametrize("name", mostly_slow([*shipped_recipes()], "gsm8k_lora"))
def test_a_shipped_recipe_trains_two_steps(
    name: str, tmp_path: Path, cache: Path, machine_file: Path
) -> None:
    recipe = load_recipe(name, [], check_files=False)
    settings = ["offload.device=cpu", f"output.dir={tmp_path / 'run'}"]
    if name.startswith("quickstart"):
        settings += ["train.steps=2", "train.warmup_steps=0", "output.eval_every=1"]
        settings += [
            "output.checkpoint_every=1",
            *["report.samples=2"] * (recipe.report.samples > 0),
        ]
    else:
        rows = written_rows(recipe, tmp_path / "rows.jsonl")
        settings += [f"data.path={rows}", *tiny_model(recipe, tmp_path / "model"), *lengths(recipe)]
    rates = json.loads(machine_file.read_text()) | {"dtype": recipe.model.dtype}
    (tmp_path / "machine.json").write_text(json.dumps(rates))
    assert run("finetune", name, *settings, "--machine", tmp_path / "machine.json") == 0
    found = losses(tmp_path / "run")
    assert len(found) == 2
    if recipe.objective.samples_answers and not name.startswith("quickstart"):
        # random weights earn nothing; `test_online` sees learning
        assert found == [0.0, 0.0]
        return
    assert all(0 < loss < 20 for loss in found)
    assert all(row["num_label_tokens"] > 0 for row in rows_of(tmp_path / "run"))
    if recipe.train.is_full:
        return
    trained = {key: value for key, value in adapter(tmp_path / "run").items() if "lora_B" in key}
    assert trained
    assert all(tensor.abs().max() > 0 for tensor in trained.values())  # all of B began at 0


def test_each_recipe_of_a_published_model_is_shrunk_and_keeps_its_tokens() -> None:
    recipes = [load_recipe(name, [], check_files=False) for name in shipped_recipes()]
    published = [one for one in recipes if "/" in str(one.model.path) and one.model.config is None]
    assert len(published) >= 20
    shapes = [read_config(recipe.model) for recipe in recipes]
    for shape in [one for one in shapes if one["model_type"] not in WITH_PARTS]:
        small = shrunk(shape)
        assert small["vocab_size"] == shape["vocab_size"]
        num_layers = NUM_LAYERS * (2 if small.get("num_kv_shared_layers") else 1)
        assert (small["num_hidden_layers"], small["hidden_size"]) == (num_layers, 64)
