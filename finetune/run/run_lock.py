"""Only one process writes a run's directory; others that try get an error that names it.

The lock is the system's (`flock`) on a file in the directory, so it ends with the process that
holds it, however that process ends; the file names the holder. The holder removes the file at the
end. A process that opened the file before that and locks it afterwards sees that it is gone, and
starts over.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from finetune.errors import CheckpointError
from finetune.interrupts import deferred

LOCK_FILE = "run.lock"
_WAIT_FOR_NAME_S = 1.0  # between taking the lock and writing the name down
_POLL_S = 0.02
_UNNAMED = "another process"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Which process holds a lock, and since when."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_alive(self) -> bool:
        """Whether the process may be alive; one on another host is assumed to be."""
        if self.host != socket.gethostname():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


@contextmanager
def locked(folder: Path) -> Iterator[tuple[str, ...]]:
    """Hold the lock of a directory, which is created if need be.

    Yields:
        What the user should know: that this file system has no locks.

    Raises:
        CheckpointError: Another process holds it, or the directory cannot be written.
    """
    taken: list[tuple[int, tuple[str, ...]]] = []
    with _created(folder):
        try:
            with deferred():  # else one could come between taking the lock and knowing of it
                taken.append(_taken(folder))
            yield taken[0][1]
        finally:
            for descriptor, _ in taken:
                _give_up(descriptor, folder / LOCK_FILE)


def holder(folder: Path) -> str | None:
    """Return which process writes a directory; None if none does."""
    return str(_living(folder / LOCK_FILE) or _UNNAMED) if _is_held(folder) else None


def holding(folder: Path) -> Holder | None:
    """Return the process that writes a directory; None if none does, or it is not recorded yet."""
    return _living(folder / LOCK_FILE) if _is_held(folder) else None


def _is_held(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no locks here
    finally:
        os.close(descriptor)
    return False


@contextmanager
def _created(folder: Path) -> Iterator[None]:
    """Create a directory, and remove it if nothing was written there."""
    missing: list[Path] = []
    try:
        try:
            missing += [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise _unwritable(folder, error) from error
        yield
    finally:
        for path in missing:
            with suppress(OSError, ValueError):  # something is in it
                path.rmdir()


def _taken(folder: Path) -> tuple[int, tuple[str, ...]]:
    """Open and lock the file, and record who holds it."""
    file = folder / LOCK_FILE
    while True:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise _unwritable(folder, error) from error
        is_held = False
        try:
            notes = _lock(descriptor, file)
            is_held = _is_still_there(descriptor, file)  # or its holder has removed it meanwhile
            if is_held:
                _write_name(descriptor, folder)
                return descriptor, notes
        except BaseException:
            if is_held:
                _give_up(descriptor, file)
            else:
                os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, file: Path) -> tuple[str, ...]:
    """Lock the file; wait only while the lock is held and no living holder is recorded."""
    end_s = time.monotonic() + _WAIT_FOR_NAME_S
    name: Holder | None = None
    while name is None and time.monotonic() < end_s:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            name = _living(file)
            time.sleep(_POLL_S)
        except OSError as error:  # some network file systems have none
            return (
                f"{file.parent} cannot be locked ({error.strerror}): see that no other process"
                " writes this run",
            )
        else:
            return ()
    raise CheckpointError(
        f"{file.parent} is in use by {name or _UNNAMED}",
        limit="one process writes a run",
        hint="wait for it, or stop it with Ctrl-C or `kill` (it writes a checkpoint first);"
        " `output.name=...` starts another run",
    )


def _is_still_there(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _give_up(descriptor: int, file: Path) -> None:
    with suppress(OSError):  # while it is held: a process that opened it meanwhile checks again
        file.unlink()
    os.close(descriptor)


def _write_name(descriptor: int, folder: Path) -> None:
    since = datetime.now(UTC).astimezone().isoformat(sep=" ", timespec="seconds")
    own = Holder(pid=os.getpid(), host=socket.gethostname(), since=since)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(own)).encode(), 0)
        os.fsync(descriptor)  # a disk that is full is found here
    except OSError as error:
        raise _unwritable(folder, error) from error


def _living(file: Path) -> Holder | None:
    """Read who holds the lock; None if that is not recorded yet, or the process is dead."""
    with suppress(OSError, ValueError, TypeError):
        named = Holder(**json.loads(file.read_text()))
        return named if named.is_alive else None
    return None


def _unwritable(folder: Path, error: Exception) -> CheckpointError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    where = error.filename if isinstance(error, OSError) and error.filename else folder
    is_own = str(where) in (str(folder), str(folder / LOCK_FILE))
    return CheckpointError(
        f"{folder} cannot be written: {reason}" + ("" if is_own else f" ({where})"),
        limit="a run writes checkpoints, metrics and its adapter",
        hint="`output.dir=...` where you may write and there is room (`df -h`)",
    )
