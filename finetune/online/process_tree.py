"""Processes that have begun with one, as Linux's /proc shows them: their memory, and their end."""

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NUM_TRIES, _PAUSE_S = 200, 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process that has not ended."""

    pid: int
    parent: int
    group: int
    session: int


def processes() -> list[Process]:
    """Return all processes of the machine that can be seen and have not ended."""
    found = []
    for name in (one.name for one in os.scandir("/proc") if one.name.isdecimal()):
        try:
            text = Path("/proc", name, "stat").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        # A program's name is in parentheses, and may have spaces and parentheses itself.
        state, parent, group, session = text.rpartition(b")")[2].split()[:4]
        if state not in (b"Z", b"X"):
            numbers = {"parent": int(parent), "group": int(group), "session": int(session)}
            found.append(Process(pid=int(name), **numbers))
    return found


def members(root: int, among: Iterable[Process]) -> list[Process]:
    """Return those that descend from a process or are of its session, without itself.

    A process that has left the session is found by its parents, and one whose parents have ended by
    its session. With `PR_SET_CHILD_SUBREAPER` in the root also one of which neither is left: it is
    then the root's child.
    """
    children: dict[int, list[Process]] = {}
    for process in among:
        for of in {process.parent, root if process.session == root else process.parent}:
            children.setdefault(of, []).append(process)
    found: dict[int, Process] = {}
    left = [root]
    while left:
        new = [one for one in children.get(left.pop(), ()) if one.pid not in {root, *found}]
        found |= {one.pid: one for one in new}
        left += [one.pid for one in new]
    return list(found.values())


def used_bytes(pids: Sequence[int], *, limit_bytes: int) -> int:
    """Return the resident memory of processes; exact if it is above the limit.

    What several of them share, as after a fork, is in the resident size of each. So a sum of sizes
    above the limit is computed again from proportional sizes, which take longer to read.
    """
    resident = sum(map(_resident_bytes, pids))
    return resident if resident <= limit_bytes else sum(map(_proportional_bytes, pids))


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended, or is another user's
        return _resident_bytes(pid)
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, and leave it to be waited for: its number stays taken."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def has_stopped(pid: int) -> bool:
    """Return whether a child has stopped or ended, and leave it to be waited for."""
    kinds = os.WEXITED | os.WSTOPPED
    return os.waitid(os.P_PID, pid, kinds | os.WNOHANG | os.WNOWAIT) is not None


def end(root: int) -> None:
    """Kill the members of a process, then itself if it is another; waits for them, 2 s at most.

    Groups are killed in addition to processes, because the system does that in one go: processes
    that multiply would be ahead of kills one by one.
    """
    for _ in range(_NUM_TRIES):
        left = members(root, processes())
        if not left:
            break
        for group in {process.group for process in left} - {root}:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    if root != os.getpid():
        with suppress(ProcessLookupError):
            os.kill(root, signal.SIGKILL)
