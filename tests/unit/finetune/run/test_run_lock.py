import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune import interrupts
from finetune.errors import CheckpointError
from finetune.run.run_lock import LOCK_FILE, holder, locked

ROOT = Path(__file__).parents[4]
HOLD = """
import sys
from pathlib import Path
from finetune.run.run_lock import locked
with locked(Path(sys.argv[1])):
    sys.stdout.write("held\\n")
    sys.stdout.flush()
    sys.stdin.read()
"""


def test_who_holds_a_lock_is_said_and_a_kill_releases_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    who = f"process {process.pid} on {socket.gethostname()}, since 20"
    with pytest.raises(CheckpointError, match=re.escape(f"{folder} is in use by {who}")):
        locked(folder).__enter__()
    assert str(holder(folder)).startswith(who)
    process.kill()
    process.communicate()
    assert holder(folder) is None
    with locked(folder) as notes:
        assert notes == ()
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on"):
            locked(folder).__enter__()


def test_a_directory_that_was_made_for_nothing_goes_again(tmp_path: Path) -> None:
    with locked(tmp_path / "runs" / "name"):
        assert (tmp_path / "runs" / "name" / LOCK_FILE).exists()
    assert not (tmp_path / "runs").exists()
    with locked(tmp_path / "runs"):
        (tmp_path / "runs" / "recipe.yaml").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("call", ["mkdir", "open", "fsync"])
def test_a_signal_while_a_lock_is_taken_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, call)

    def signalled(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(os, call, signalled)
    with interrupts.raised(), pytest.raises(interrupts.Interrupted), locked(tmp_path / "a" / "b"):
        raise AssertionError
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with locked(tmp_path) as (note,):
        assert note == (
            f"{tmp_path} cannot be locked (No locks available): see that no other process writes"
            " this run"
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file/run", "Not a directory"),
        ("file", "File exists"),
        ("x" * 300, "File name too long"),
        ("null\0byte", "embedded null byte"),
    ],
)
def test_a_path_that_cannot_be_a_directory_is_refused(
    name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"cannot be written: {reason}"):
        locked(tmp_path / name).__enter__()


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="cannot be written: Too many levels"):
        locked(tmp_path).__enter__()
    assert not (tmp_path / "elsewhere").exists()
