"""A tiny model, its tokenizer and its rows on disk, and a recipe over them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from offload.probe import probe
from tests.doubles import tiny_tokenizer

RecipeWriter = Callable[..., Path]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 128,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "train.jsonl"
    rows = [
        {"question": f"what follows {n}{'!' * (n % 5)}", "answer": f"{n + 1}"} for n in range(40)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def machine_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("machine") / "here.json"
    file.write_text(probe(device="cpu", seconds=0.5, dtype="float32").to_json())
    return file


@pytest.fixture
def write_recipe(
    tmp_path: Path, model_dir: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> RecipeWriter:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(**sections: dict[str, object]) -> Path:
        recipe: dict[str, dict[str, object]] = {
            "model": {"path": str(model_dir), "dtype": "float32"},
            "adapter": {"rank": 4, "alpha": 8, "targets": "attention", "experts": True},
            "data": {
                "path": str(rows_file),
                "format": "prompt_completion",
                "prompt_column": "question",
                "completion_column": "answer",
                "eval_frac": 0.1,
                "num_workers": 0,
            },
            "train": {
                "seq_len": 64,
                "micro_batch_size": 2,
                "grad_accum_steps": 3,
                "steps": 6,
                "lr": 0.02,
            },
            "offload": {"device": "cpu", "num_slots": 2},
            "output": {"name": "tiny", "dir": str(tmp_path / "run"), "checkpoint_every": 2},
        }
        for name, section in sections.items():
            recipe[name] = {**recipe.get(name, {}), **section}
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        return file

    return write
