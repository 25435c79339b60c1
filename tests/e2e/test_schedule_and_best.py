"""Warm-ups, restarts, noise, longer runs, the best checkpoint and early stopping, as a run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import get_cosine_with_hard_restarts_schedule_with_warmup

from tests.e2e.runs import adapter, run


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def figures(run_dir: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "lr", "grad_norm", "eval_loss")
    return [tuple(row.get(name) for name in names) for row in rows(run_dir)]


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def forget_after(run_dir: Path, step: int) -> None:
    """Leave what a kill leaves after a step: no later checkpoint, no adapter, later metrics."""
    shutil.rmtree(run_dir / "adapter")
    for folder in (run_dir / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


@pytest.mark.slow
def test_noise_and_restarts_are_resumed_to_the_bit(tmp_path, write_recipe, machine_file) -> None:
    recipe = write_recipe(
        train={
            "neftune_alpha": 5.0,
            "schedule": "cosine_with_restarts",
            "num_cycles": 2,
            "warmup_ratio": 0.3,
        }
    )
    words = ("finetune", recipe, "--machine", machine_file)
    run_dir = tmp_path / "run"
    assert run(*words) == 0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    schedule = get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 2, 6, num_cycles=2)
    for row in rows(run_dir):
        assert row["lr"] == schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
    whole, trained = figures(run_dir), adapter(run_dir)
    forget_after(run_dir, 4)
    assert run(*words, "--resume") == 0
    assert figures(run_dir) == whole
    assert_same(adapter(run_dir), trained)


@pytest.mark.slow
def test_a_run_of_a_constant_rate_that_is_made_longer_is_the_longer_run_to_the_bit(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"schedule": "constant"})
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words) == 0
    assert run(*words, "train.steps=3", f"output.dir={tmp_path / 'short'}") == 0
    capsys.readouterr()
    longer = (*words, f"output.dir={tmp_path / 'short'}", "train.steps=6", "--resume")
    assert run(*longer) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "train.steps: 3 -> 6; the learning rate of the first 3 steps is the same" in shown
    assert figures(tmp_path / "short") == figures(tmp_path / "run")
    assert_same(adapter(tmp_path / "short"), adapter(tmp_path / "run"))
    seals = [row["prediction_sha256"] for row in rows(tmp_path / "short")]
    assert len(set(seals[:3])) == len(set(seals[3:])) == 1
    assert seals[2] != seals[3]
    assert json.loads((tmp_path / "short" / "predicted-2.json").read_text())["num_steps"] == 6
    assert run(*longer) == 0  # the run has six steps from now on
    assert run(*(word for word in longer if word != "train.steps=6"), "train.steps=3") == 1
    assert "train.steps: 6 -> 3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_made_longer_says_from_which_step_its_rate_differs(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"schedule": "linear", "steps": 4})
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words) == 0
    before = figures(tmp_path / "run")
    capsys.readouterr()
    assert run(*words, "--resume", "train.steps=8", "train.lr=0.5") == 1
    assert "train.lr: 0.02 -> 0.5" in capsys.readouterr().err
    assert run(*words, "--resume", "train.steps=8") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "with 8 steps the learning rate differs from step 2 on: steps 2 to 4 were" in shown
    after = figures(tmp_path / "run")
    assert after[:4] == before
    assert [row[2] for row in after[4:]] == [0.02 * ((8 - step) / 8) for step in range(4, 8)]


BEST: dict[str, Any] = {
    "train": {"steps": 8, "schedule": "constant", "lr": 0.3},  # too large: the loss rises again
    "output": {
        "eval_every": 1,
        "checkpoint_every": 4,
        "keep_checkpoints": 1,
        "best_checkpoint": "use",
    },
}


@pytest.mark.slow
def test_the_adapter_is_that_of_the_best_checkpoint_also_after_a_kill(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    words = ("finetune", write_recipe(**BEST), "--machine", machine_file)
    run_dir = tmp_path / "run"
    assert run(*words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    evals = {row["step"]: row["eval_loss"] for row in rows(run_dir)}
    best = min(evals, key=lambda step: evals[step])
    assert best < 8
    kept = sorted(folder.name for folder in (run_dir / "checkpoints").iterdir())
    assert kept == [f"step-{best:07d}", "step-0000008"]
    assert f"What was trained is that of step {best}: its loss on held-out rows, " in shown
    weights = load_file(run_dir / "checkpoints" / kept[0] / "trained.safetensors")
    saved = {name.replace(".default", ""): t for name, t in weights.items()}
    assert_same(adapter(run_dir), saved)
    report = json.loads((run_dir / "report.json").read_text())
    assert report["adapter_step"] == best
    whole, trained = figures(run_dir), adapter(run_dir)
    forget_after(run_dir, best)
    assert run(*words, "--resume") == 0
    assert figures(run_dir) == whole
    assert_same(adapter(run_dir), trained)


@pytest.mark.slow
def test_a_run_stops_early_and_is_not_made_longer(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(
        train={
            "steps": 40,
            "schedule": "constant",
            "lr": 0.3,
            "early_stopping_patience": 2,
            "early_stopping_min_delta": 0.01,
        },
        output={"eval_every": 1, "checkpoint_every": None, "best_checkpoint": "keep"},
    )
    words = ("finetune", recipe, "--machine", machine_file)
    run_dir = tmp_path / "run"
    assert run(*words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Stopped early: 2 losses on held-out rows in a row were no lower than" in shown
    losses = [row["eval_loss"] for row in rows(run_dir)]
    assert 2 < len(losses) < 40
    assert min(losses[:-2]) - 0.01 <= min(losses[-2:])
    trained = adapter(run_dir)
    shutil.rmtree(run_dir / "adapter")
    assert run(*words, "--resume") == 0  # nothing is left to run
    assert len(rows(run_dir)) == len(losses)
    assert_same(adapter(run_dir), trained)
    capsys.readouterr()
    assert run(*words, "--resume", "train.steps=50") == 1
    err = " ".join(capsys.readouterr().err.split())
    assert f"train.steps is raised to 50, and {run_dir} has stopped early" in err


def test_settings_that_the_number_of_steps_leaves_without_effect_are_refused(
    write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(
        train={"steps": None, "epochs": 0.5, "early_stopping_patience": 3},
        output={"eval_every": 1},
    )
    assert run("finetune", recipe, "--machine", machine_file) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "eval_every is 1 and train.epochs: 0.5 are 3 steps" in shown
