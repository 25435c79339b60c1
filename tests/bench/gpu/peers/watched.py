"""A peer's program: within a time, its host memory watched, on a card of some size."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from offload.plan.machine.machine import GIB

SAMPLE_S, GRACE_S = 0.05, 5.0
HOLD = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
free, _ = torch.cuda.mem_get_info()
print(free, flush=True)
sys.stdin.read()
"""
"""Takes what is over a limit, context and all, so that others find that much free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a program ended.

    Attributes:
        status: Exit status; None where its time was over.
        seconds: What it took.
        peak_host_bytes: Most that it and its children held at once, files that are mapped left
            out: those can be read again.
    """

    status: int | None
    seconds: float
    peak_host_bytes: int


def run(command: Sequence[str], *, cwd: Path, log: Path, limit_s: float) -> Ended:
    """Run a program and all that it starts to its end, or end it when its time is over."""
    start_s, peak_bytes = time.perf_counter(), 0
    with (
        log.open("wb") as out,
        subprocess.Popen(command, cwd=cwd, stdout=out, stderr=subprocess.STDOUT) as child,
    ):
        try:
            while child.poll() is None and time.perf_counter() - start_s < limit_s:
                peak_bytes = max(peak_bytes, sum(map(host_bytes, family(child.pid))))
                time.sleep(SAMPLE_S)
            status = child.poll()
        finally:
            _end(child)
    return Ended(status=status, seconds=time.perf_counter() - start_s, peak_host_bytes=peak_bytes)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a program and its family, which is in the case's own process group."""
    members = family(child.pid)
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
    for pid in members[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def family(pid: int) -> list[int]:
    """Return a process and its descendants, as far as they are there."""
    found, at = [pid], 0
    while at < len(found):
        for tasks in Path(f"/proc/{found[at]}/task").glob("*/children"):
            try:
                found += map(int, tasks.read_text().split())
            except OSError:
                continue  # it has just ended
        at += 1
    return found


def host_bytes(pid: int) -> int:
    """Return the memory that a process holds for itself or shares, mapped files left out."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    held = (line.split() for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return sum(int(words[1]) * 1024 for words in held)


@contextmanager
def card(device: str, vram_gib: float | None) -> Iterator[int | None]:
    """Leave programs that much of the card, their contexts included; return what they find free.

    A CPU is left as it is, and so is a card for None.

    Raises:
        RuntimeError: The rest of the card could not be taken.
    """
    if device == "cpu" or vram_gib is None:
        yield None
        return
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(int(vram_gib * GIB))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            told = holder.stdout.readline()
            if not told:
                raise RuntimeError(f"no ballast was taken, exit status {holder.wait()}")
            yield int(told)
        finally:
            holder.kill()
