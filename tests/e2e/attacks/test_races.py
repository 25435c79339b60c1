"""Two processes and one run's directory: one of them writes it, the other says which."""

import re
import signal
import sys
from collections import Counter

import pytest
import torch

from tests.e2e.forked import Forked, Started
from tests.e2e.runs import adapter, losses

NUM_ROUNDS = 6
PAIRS = {
    "start and start": ((), ()),
    "start and overwrite": ((), ("--overwrite",)),
    "overwrite and overwrite": (("--overwrite",), ("--overwrite",)),
    "resume and resume": (("--resume",), ("--resume",)),
    "resume and overwrite": (("--resume",), ("--overwrite",)),
    "resume and start": (("--resume",), ()),
}


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_of_two_that_want_one_directory_one_gets_it(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"steps": 12})
    words = ("finetune", recipe, "--machine", machine_file)
    counts: Counter[str] = Counter()
    with Forked(tmp_path) as forked:
        whole = tmp_path / "whole"
        assert forked.start(*words, f"output.dir={whole}").end() == 0
        for number in range(NUM_ROUNDS):
            for name, (first, second) in PAIRS.items():
                run_dir = tmp_path / f"{name} {number}"
                here = (*words, f"output.dir={run_dir}")
                if "resume" in name:
                    begun = forked.start(*here)
                    begun.wait_until((run_dir / "checkpoints" / "step-0000004").exists)
                    assert begun.end(signal.SIGKILL) == -signal.SIGKILL
                both = [forked.start(*here, *flags) for flags in (first, second)]
                codes = [one.end() for one in both]
                for code, one in zip(codes, both, strict=True):
                    assert "Traceback" not in one.shown, one.shown
                    counts[outcome(code, one)] += 1
                assert 0 in codes, [one.shown for one in both]
                assert losses(run_dir) == losses(whole)
                ours, expected = adapter(run_dir), adapter(whole)
                assert all(torch.equal(ours[tensor], expected[tensor]) for tensor in expected)
                assert not (run_dir / "run.lock").exists()
    with capsys.disabled():
        sys.stdout.write(f"\n{NUM_ROUNDS * len(PAIRS)} races: {dict(counts)}, 0 tracebacks\n")


def outcome(code: int, process: Started) -> str:
    """Say how a process has ended: with the run, or with words for why not."""
    if code == 0:
        return "finished"
    assert code == 1, process.shown
    if re.search(r"is in use by process \d+ on \S+, since 2", process.shown):
        return "was told who writes it"
    assert "holds a run already" in process.shown, process.shown
    return "came after the other and found a run"
