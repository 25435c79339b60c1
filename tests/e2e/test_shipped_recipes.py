"""Every shipped recipe trains: with its own settings, on a tiny model of the same type."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.model.config import read_config
from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import shipped_recipes
from tests.doubles import tiny_tokenizer
from tests.e2e.runs import adapter, losses, run
from tests.tiers import mostly_slow

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "query_pre_attn_scalar": 8,
}
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"prompt": "what follows {}", "completion": "more"},
    "dpo": {"prompt": "what follows {}", "chosen": "more", "rejected": "less"},
    "kto": {"prompt": "what follows {}", "completion": "more", "label": True},
}
PUBLISHED = [
    name
    for name in shipped_recipes()
    if "/" in str(load_recipe(name, [], check_files=False).model.path or "")
    and not name.startswith("quickstart")
]


def shrunk(shape: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the config of a tiny model of the same type and kind."""
    small = {key: SIZES.get(key, value) for key, value in shape.items()}
    small |= {"vocab_size": vocab_size, "max_position_embeddings": 128}
    if small.get("sliding_window"):
        small["sliding_window"] = 8
    if "layer_types" in small:
        small["layer_types"] = small["layer_types"][: SIZES["num_hidden_layers"]]
    return small


def tiny_model(name: str, folder: Path) -> Path:
    """Write a model of a recipe's type, tiny and random, with a tokenizer."""
    tokenizer = tiny_tokenizer()
    shape = shrunk(read_config(load_recipe(name, [], check_files=False).model), len(tokenizer))
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def written_rows(method: str, file: Path) -> Path:
    row = ROWS[method]
    rows = [row | {"prompt": row["prompt"].format(n)} for n in range(40)]
    if method == "kto":
        rows = [one | {"label": n % 2 == 0} for n, one in enumerate(rows)]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return file


@pytest.mark.parametrize("name", mostly_slow(PUBLISHED, "qwen3_8b_dpo_4090"))
def test_a_shipped_recipe_trains_two_steps_of_a_tiny_model(
    name: str, tmp_path: Path, cache: Path, machine_file: Path
) -> None:
    recipe = load_recipe(name, [], check_files=False)
    settings = [
        f"model.path={tiny_model(name, tmp_path / 'model')}",
        f"data.path={written_rows(recipe.objective.method, tmp_path / 'rows.jsonl')}",
        f"output.dir={tmp_path / 'run'}",
        *("train.seq_len=64", "train.tokens_per_step=256", "train.steps=2"),
        *("data.eval_frac=0.2", "data.num_workers=0", "output.eval_every=1"),
        *("output.checkpoint_every=1", "train.warmup_steps=0", "offload.device=cpu"),
        "model.dtype=float32",  # of the rates that were measured
    ]
    assert run("finetune", name, *settings, "--machine", machine_file) == 0
    found = losses(tmp_path / "run")
    assert len(found) == 2
    assert all(0 < loss < 20 for loss in found)
    if recipe.train.is_full:
        return
    trained = {key: value for key, value in adapter(tmp_path / "run").items() if "lora_B" in key}
    assert trained
    assert all(tensor.abs().max() > 0 for tensor in trained.values())  # all of B began at 0


def test_twenty_recipes_of_published_models_are_shipped() -> None:
    assert len(PUBLISHED) >= 20
