"""SIGTERM and SIGHUP end a run as Ctrl-C does: a checkpoint, and the shell's exit code (#16)."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ranks import outputs, start_ranks
from tests.e2e.runs import ROOT, losses, run

CODES = {signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Where a program puts its temporary files; there are none at the end."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    yield folder
    assert not list(folder.iterdir())


def words_of(recipe: Path, machine_file: Path, temporary: Path) -> list[str]:
    program = [sys.executable, "cli.py", "finetune", str(recipe), "--machine", str(machine_file)]
    return ["env", f"TMPDIR={temporary}", *program]


def start(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
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


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
def test_a_signal_to_all_processes_of_a_run_ends_it_with_a_checkpoint(
    number: signal.Signals, endless, tmp_path, machine_file, temporary
) -> None:
    process = start(words_of(endless, machine_file, temporary))
    wait_for_rows(tmp_path / "run", 2)
    os.killpg(process.pid, number)  # its data worker gets it too
    shown = process.communicate(timeout=120)[0]
    assert process.returncode == CODES[number], shown
    assert "continue with `--resume`" in shown
    assert "Traceback" not in shown
    done = len(losses(tmp_path / "run"))
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == [f"step-{done:07d}"]
    assert not (tmp_path / "run" / "run.lock").exists()


@pytest.mark.slow
def test_a_signal_before_the_first_step_leaves_nothing(
    endless, tmp_path, machine_file, temporary
) -> None:
    process = start(words_of(endless, machine_file, temporary))
    while not (tmp_path / "run" / "run.lock").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.terminate()
    shown = process.communicate(timeout=120)[0]
    assert process.returncode == 143, shown
    assert shown.endswith("stopped\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_hangup_that_nohup_ignores_stays_ignored(
    endless, tmp_path, machine_file, temporary
) -> None:
    process = start(["nohup", *words_of(endless, machine_file, temporary)])
    wait_for_rows(tmp_path / "run", 2)
    os.killpg(process.pid, signal.SIGHUP)
    wait_for_rows(tmp_path / "run", len(losses(tmp_path / "run")) + 3)
    os.killpg(process.pid, signal.SIGTERM)
    shown = process.communicate(timeout=120)[0]
    assert process.returncode == 143, shown


@pytest.mark.slow
def test_a_terminal_that_is_closed_costs_nothing(
    endless, tmp_path, machine_file, temporary
) -> None:
    words = words_of(endless, machine_file, temporary)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvp(words[0], words)
    metrics, end_s = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 240
    os.set_blocking(terminal, False)
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < end_s
        try:
            os.read(terminal, 65536)  # or the program waits for room
        except BlockingIOError:
            time.sleep(0.005)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    done = len(losses(tmp_path / "run"))
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == [f"step-{done:07d}"]


@pytest.mark.slow
def test_a_signal_to_one_of_two_ranks_stops_both_at_one_step(
    tmp_path, write_recipe, machine_file
) -> None:
    recipe = write_recipe(
        train={"steps": 100_000, "schedule": "constant"}, output={"checkpoint_every": 100_000}
    )
    words = ("cli.py", "finetune", recipe, "--machine", machine_file)
    processes = start_ranks(words, words)
    wait_for_rows(tmp_path / "run", 2)
    processes[1].send_signal(signal.SIGTERM)
    shown = outputs(processes)
    assert [process.returncode for process in processes] == [143, 143], "\n".join(shown)
    done = len(losses(tmp_path / "run"))
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == [f"step-{done:07d}"]


def test_resume_and_overwrite_exclude_each_other(write_recipe, machine_file, capsys) -> None:
    words = ("finetune", write_recipe(), "--machine", machine_file, "--resume", "--overwrite")
    assert run(*words) == 1
    assert (
        "error: both --resume and --overwrite\n\nhint: `--resume` continues it"
        in capsys.readouterr().err
    )
