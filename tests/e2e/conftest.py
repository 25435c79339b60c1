"""A tiny model, its tokenizer and its rows on disk, a recipe over them, and a run of it."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from finetune.training import loop
from tests.doubles import tiny_tokenizer
from tests.e2e.forked import Forked
from tests.e2e.runs import run

RecipeWriter = Callable[..., Path]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def save_model(folder: Path) -> Path:
    """Write a tiny mixture with random weights, and its tokenizer; return the folder."""
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
    return write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl")


def write_rows(file: Path) -> Path:
    """Write forty prompts with completions of several lengths; return the file."""
    rows = [
        {"question": f"what follows {n}{'!' * (n % 5)}", "answer": f"{n + 1}"} for n in range(40)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time one step before the first; `finished_once` times as many as users' runs do."""
    monkeypatch.setattr(loop, "TIMED_S", 0.0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def slow_file(machine_file: Path, tmp_path: Path) -> Path:
    """Return the rates of a card of another kind, twice as slow in all."""
    here = json.loads(machine_file.read_text()) | {"name": "a slow card"}
    for name, rate in here.items():
        if name.endswith("_per_s") and rate is not None:
            rate["value"] /= 2
    here["launch_s"]["value"] *= 2
    file = tmp_path / "slow.json"
    file.write_text(json.dumps(here))
    return file


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    with Forked(tmp_path_factory.mktemp("forked")) as forked:
        yield forked


@pytest.fixture
def forked(fork_server: Forked) -> Iterator[Forked]:
    """Return what starts the program in a process of its own, without its seconds of imports."""
    yield fork_server
    fork_server.end_all()


@pytest.fixture
def write_recipe(tmp_path: Path, model_dir: Path, rows_file: Path, cache: Path) -> RecipeWriter:
    return recipe_writer(tmp_path, model_dir, rows_file)


@pytest.fixture(scope="session")
def finished_once(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, rows_file: Path, machine_file: Path
) -> Path:
    """Return a folder with a finished run, its recipe and what it printed, and a copy of it."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = recipe_writer(folder / "whole", model_dir, rows_file)(
        output={"eval_every": 3},
        report={
            **{"samples": 4, "log_to": [], "profile": 2},
            "notify": f"tee {folder / 'whole' / 'heard.json'}",
        },
    )
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert run("finetune", recipe, "--machine", machine_file) == 0
    (folder / "whole" / "shown.txt").write_text(shown.getvalue())
    shutil.copytree(folder / "whole", folder / "copy")
    return folder


@pytest.fixture
def finished(finished_once: Path, cache: Path) -> Path:
    """Return a run as it was when it had finished; a test may change it."""
    whole = finished_once / "whole"
    shutil.rmtree(whole)
    shutil.copytree(finished_once / "copy", whole)
    return whole / "run"


def recipe_writer(folder: Path, model_dir: Path, rows_file: Path) -> RecipeWriter:
    """Return what writes a recipe into a folder, with some of its sections changed."""

    def write(**sections: dict[str, object]) -> Path:
        recipe: dict[str, dict[str, object]] = {
            "model": {"path": str(model_dir), "dtype": "float32"},
            "adapter": {"rank": 4, "alpha": 8, "targets": "attention", "experts": True},
            "data": {
                "path": str(rows_file),
                "format": "prompt_completion",
                "columns": {"prompt": "question", "completion": "answer"},
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
            "output": {"name": "tiny", "dir": str(folder / "run"), "checkpoint_every": 2},
        }
        for name, section in sections.items():
            plain = {} if "method" in section else recipe.get(name, {})
            recipe[name] = {**plain, **section}
        folder.mkdir(exist_ok=True)
        file = folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        return file

    return write
