"""A run that is killed again and again at random moments ends as one that was never killed."""

import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.e2e.forked import Forked, Started
from tests.e2e.runs import adapter, losses

NUM_KILLS, NUM_STEPS = 40, 60
MOMENTS = ("any", "in a step", "while saving")


def wait_for_moment(process: Started, moment: str, run_dir: Path, chance: random.Random) -> None:
    """Wait for a moment to kill at, or the end of the run."""
    metrics, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"

    def num_rows() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    if moment == "any":  # most of a start's time goes before the first step
        end_s = time.monotonic() + chance.random() * 6
        process.wait_until(lambda: time.monotonic() > end_s)
        return
    goal = num_rows() + chance.randrange(1, 6)
    process.wait_until(lambda: num_rows() >= goal)
    if moment == "while saving":
        process.wait_until(lambda: any(checkpoints.glob("partial-*")))
    time.sleep(chance.random() * 0.02)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_runs_that_are_killed_end_as_one_that_is_not(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"steps": NUM_STEPS}, output={"checkpoint_every": 2})
    words = ("finetune", recipe, "--machine", machine_file)
    chance, counts = random.Random(16), dict.fromkeys(MOMENTS, 0)
    num_runs = 0
    with Forked(tmp_path) as forked:
        whole = tmp_path / "whole"
        assert forked.start(*words, f"output.dir={whole}").end() == 0
        expected = adapter(whole)
        while sum(counts.values()) < NUM_KILLS:
            num_runs += 1
            run_dir = tmp_path / f"killed-{num_runs}"
            code, num_starts = -1, 0
            while code != 0:
                resume = ("--resume",) if (run_dir / "recipe.yaml").exists() else ()
                process = forked.start(*words, f"output.dir={run_dir}", *resume)
                moment = chance.choice(MOMENTS)
                if sum(counts.values()) < NUM_KILLS and num_starts < 8:
                    wait_for_moment(process, moment, run_dir, chance)
                    code = process.end(signal.SIGKILL)
                else:
                    code = process.end()
                num_starts += 1
                assert code in (0, -signal.SIGKILL), process.shown
                counts[moment] += code != 0
            assert losses(run_dir) == losses(whole)
            resumed = adapter(run_dir)
            assert resumed.keys() == expected.keys()
            assert all(torch.equal(resumed[name], expected[name]) for name in expected)
            left = sorted(path.name for path in run_dir.rglob("*partial-*"))
            assert not left
    with capsys.disabled():
        sys.stdout.write(
            f"\n{sum(counts.values())} kills ({counts}) of {num_runs} runs:"
            f" {num_runs} ended equal to the bit, 0 lost\n"
        )
