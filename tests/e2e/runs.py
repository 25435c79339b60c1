"""Runs of the command line, in this process and in one of their own, and what they leave."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command import run as run

ROOT = Path(__file__).parents[2]
# Sums are made in another order: some 1e-7 in a step, which later steps carry on.
LOSS_TOLERANCE = 2e-6
WEIGHT_TOLERANCE = 2e-5


def losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def adapter(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "adapter" / "adapter_model.safetensors")


def same_adapter(one: Path, other: Path) -> bool:
    """Return whether two runs have the same adapter, to the bit."""
    ours, theirs = adapter(one), adapter(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def start(recipe: Path, machine_file: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "cli.py", "finetune", str(recipe), "--machine", str(machine_file), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition, process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end_s
        time.sleep(0.0005)


def assert_same_training(ours: Path, theirs: Path) -> None:
    """Compare losses, tokens, validation and adapters of two runs (REORDER)."""
    for mine, other in zip(rows_of(ours), rows_of(theirs), strict=True):
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in other and other[name] is None:  # of a step that was skipped
                assert mine[name] is None
            elif name in other:
                assert mine[name] == pytest.approx(other[name], rel=LOSS_TOLERANCE), name
        for name in ("lr", "num_tokens", "num_label_tokens"):
            assert mine[name] == other[name]
    trained, expected = adapter(ours), adapter(theirs)
    for name, tensor in expected.items():
        error = (trained[name] - tensor).norm() / tensor.norm()
        assert error <= WEIGHT_TOLERANCE, name


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
