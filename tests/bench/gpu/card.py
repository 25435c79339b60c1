"""A large card that stands in for a small one.

Two limits together: another process holds what is over the cap (the ballast), so that whatever asks
the driver sees a small card, its contexts and workspaces included; and torch's allocator may not
take more than what is left, so that it fails where a small card would.
"""

import subprocess
import sys
from types import TracebackType
from typing import Self

import torch

from offload.engine.streams import release_cached
from offload.plan.machine.machine import GIB

HOLD = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print(held.numel(), flush=True)
sys.stdin.read()
"""


class Card:
    """The device of a case, with as much memory as it is given; a CPU is left as it is.

    Attributes:
        ballast_bytes: What another process holds.
    """

    def __init__(self, device: str) -> None:
        """Leave the card as large as it is."""
        self._is_cuda = device == "cuda"
        self._holder: subprocess.Popen[str] | None = None
        self.ballast_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lift()

    def cap(self, vram_gib: float | None) -> None:
        """Leave this process so much memory, its context included; None leaves all.

        Raises:
            RuntimeError: The ballast could not be taken.
        """
        self.lift()
        if not self._is_cuda or vram_gib is None:
            return
        torch.zeros(1, device="cuda")
        release_cached(torch.device("cuda"))
        before, total = torch.cuda.mem_get_info()
        own_bytes = torch.cuda.memory_reserved() + _context_bytes(total - before)
        left = int(vram_gib * GIB) - own_bytes
        self._holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(max(0, left))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        told = self._holder.stdout.readline()
        if not told:
            raise RuntimeError(f"no ballast was taken, exit status {self._holder.wait()}")
        self.ballast_bytes = int(told)
        after, _ = torch.cuda.mem_get_info()
        most = after + torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))

    def lift(self) -> None:
        """Leave this process all of the card."""
        if self._holder is not None:
            self._holder.communicate()
            self._holder, self.ballast_bytes = None, 0
        if self._is_cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)


def _context_bytes(used_bytes: int) -> int:
    """Return what this process's context takes: what is used beyond what torch has reserved.

    Of a card that other programs use too, this counts theirs, as a small card would hold them.
    """
    return max(0, used_bytes - torch.cuda.memory_reserved())
