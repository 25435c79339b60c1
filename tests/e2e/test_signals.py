"""SIGTERM and SIGHUP end a run as Ctrl-C does: a checkpoint, and the shell's exit code (#16)."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.forked import Forked
from tests.e2e.runs import ROOT, losses, run

CODES = {signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Where a program puts its temporary files; there are none at the end."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture
def start(endless: Path, machine_file: Path, temporary: Path, forked: Forked) -> Callable[..., Any]:
    """Return what starts an endless run in a session of its own."""
    return partial(
        forked.start,
        *("finetune", endless, "--machine", machine_file),
        variables={"TMPDIR": str(temporary)},
        has_session=True,
    )


def wait_for_rows(run_dir: Path, number: int) -> None:
    metrics, end_s = run_dir / "metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text().count("\n") >= number):
        assert time.monotonic() < end_s
        time.sleep(0.005)


@pytest.fixture
def endless(write_recipe) -> Path:
    recipe: Path = write_recipe(
        train={"steps": 100_000, "schedule": "constant"},
        data={"num_workers": 1},
        output={"checkpoint_every": 100_000},
    )
    return recipe


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
def test_a_signal_to_all_processes_of_a_run_ends_it_with_a_checkpoint(
    number: signal.Signals, start, tmp_path
) -> None:
    process = start()
    wait_for_rows(tmp_path / "run", 2)
    process.signal(number, to_group=True)  # its data worker gets it too
    assert process.end() == CODES[number], process.shown
    assert "continue with `--resume`" in process.shown
    assert "Traceback" not in process.shown
    assert_saved_at_its_last_step(tmp_path / "run")
    assert not (tmp_path / "run" / "run.lock").exists()


def assert_saved_at_its_last_step(run_dir: Path) -> None:
    done = len(losses(run_dir))
    saved = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert saved == [f"step-{done:07d}"]


@pytest.mark.slow
def test_a_signal_before_the_first_step_leaves_nothing(start, tmp_path) -> None:
    process = start()
    process.wait_for(lambda: (tmp_path / "run" / "run.lock").exists())
    assert process.end(signal.SIGTERM) == 143, process.shown
    assert process.shown.endswith("stopped\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_hangup_that_nohup_ignores_stays_ignored(
    endless, tmp_path, machine_file, temporary
) -> None:
    program = [sys.executable, "cli.py", "finetune", str(endless), "--machine", str(machine_file)]
    process = subprocess.Popen(
        ["env", f"TMPDIR={temporary}", "nohup", *program],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_rows(tmp_path / "run", 2)
    os.killpg(process.pid, signal.SIGHUP)
    wait_for_rows(tmp_path / "run", len(losses(tmp_path / "run")) + 3)
    os.killpg(process.pid, signal.SIGTERM)
    shown = process.communicate(timeout=120)[0]
    assert process.returncode == 143, shown


@pytest.mark.long
@pytest.mark.slow
def test_a_terminal_that_is_closed_costs_nothing(start, tmp_path) -> None:
    terminal, other_end = pty.openpty()
    process = start(output=os.ttyname(other_end), is_on_terminal=True)
    os.set_blocking(terminal, False)
    metrics = tmp_path / "run" / "metrics.jsonl"

    def has_rows() -> bool:
        with suppress(BlockingIOError):
            os.read(terminal, 65536)  # or the program waits for room
        return metrics.exists() and metrics.read_text().count("\n") >= 2

    process.wait_for(has_rows)
    os.close(other_end)
    os.close(terminal)
    assert process.end() == 129
    assert_saved_at_its_last_step(tmp_path / "run")


@pytest.mark.slow
def test_a_signal_to_one_of_two_ranks_stops_both_at_one_step(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = write_recipe(
        train={"steps": 100_000, "schedule": "constant"}, output={"checkpoint_every": 100_000}
    )
    ranks = forked.start_ranks("finetune", recipe, "--machine", machine_file)
    wait_for_rows(tmp_path / "run", 2)
    ranks[1].signal(signal.SIGTERM)
    assert [rank.end() for rank in ranks] == [143, 143], [rank.shown for rank in ranks]
    assert_saved_at_its_last_step(tmp_path / "run")


@pytest.mark.slow
def test_a_signal_before_the_first_step_to_one_of_two_ranks_is_named_by_the_other(
    tmp_path, endless, machine_file, forked
) -> None:
    ranks = forked.start_machines("finetune", endless, "--machine", machine_file, sizes=(1, 1))
    ranks[1].wait_for(lambda: (tmp_path / "run" / "run.lock").exists())
    assert ranks[1].end(signal.SIGTERM) == 143, ranks[1].shown
    assert ranks[0].end() == 1
    assert "error (rank 0): rank 1 was stopped before a step had ended" in ranks[0].shown


def test_resume_and_overwrite_exclude_each_other(write_recipe, machine_file, capsys) -> None:
    words = ("finetune", write_recipe(), "--machine", machine_file, "--resume", "--overwrite")
    assert run(*words) == 1
    assert (
        "error: both --resume and --overwrite\n\nhint: `--resume` continues it"
        in capsys.readouterr().err
    )
