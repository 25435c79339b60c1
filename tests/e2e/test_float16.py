"""Training in float16 from a recipe: overflows are skipped and counted, and a resume keeps them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload.plan.machine.machine import Machine
from tests.e2e.runs import assert_same_training, rows_of, run
from tests.tiers import mostly_slow


@pytest.fixture
def steep_model(tmp_path: Path, model_dir: Path) -> Path:
    """Return a model of such small embeddings that gradients of its first layer are large."""
    folder = tmp_path / "steep"
    shutil.copytree(model_dir, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"] *= 2.0**-9
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def words(tmp_path: Path, machine_file: Path, write_recipe: Any, steep_model: Path) -> Any:
    here = replace(Machine.from_json(machine_file.read_text()), dtype="float16")
    file = tmp_path / "half.json"
    file.write_text(here.to_json())
    recipe = write_recipe(model={"path": str(steep_model), "dtype": "float16"}, train={"lr": 0.001})
    return ("finetune", recipe, "--machine", file)


def adapter(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "adapter" / "adapter_model.safetensors")


def numbers(run_dir: Path) -> list[tuple[object, ...]]:
    names = ("loss", "grad_norm", "loss_scale", "num_skipped_steps")
    return [tuple(row[name] for name in names) for row in rows_of(run_dir)]


@pytest.mark.thorough
@pytest.mark.parametrize("kept", mostly_slow([2, 4], 2))
def test_overflows_are_skipped_and_counted_and_a_resume_goes_on_to_the_bit(
    kept, tmp_path, words, capsys
) -> None:
    assert run(*words) == 0
    shown = capsys.readouterr().out
    run_dir = tmp_path / "run"
    rows = rows_of(run_dir)
    num = rows[-1]["num_skipped_steps"]
    assert 0 < num < 6
    assert shown.count("is skipped: a gradient overflows in float16") == num
    assert [row["grad_norm"] is None for row in rows].count(True) == num
    assert rows[0]["loss_scale"] == 2.0**16
    assert rows[-1]["loss_scale"] == 2.0 ** (16 - num)
    shutil.copytree(run_dir, tmp_path / "whole")
    for step in (2, 4, 6):
        if step > kept:
            shutil.rmtree(run_dir / "checkpoints" / f"step-{step:07d}", ignore_errors=True)
    shutil.rmtree(run_dir / "adapter")
    assert run(*words, "--resume") == 0
    assert numbers(run_dir) == numbers(tmp_path / "whole")
    ours, theirs = adapter(run_dir), adapter(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_two_ranks_skip_the_same_steps_as_one_process(tmp_path, words, forked) -> None:
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'two'}")
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert rows_of(tmp_path / "two")[-1]["num_skipped_steps"] > 0
    for mine, other in zip(numbers(tmp_path / "two"), numbers(tmp_path / "one"), strict=True):
        assert mine[2:] == other[2:]
    assert_same_training(tmp_path / "two", tmp_path / "one")
