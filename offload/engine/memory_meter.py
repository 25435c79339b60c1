"""Measured memory: torch's statistics on a GPU, the kernel's counters on the host.

A claim on host memory is measured in held bytes: anonymous and shared pages, which must stay in
memory (or swap) while the process uses them. Pages of mapped files, such as a checkpoint that is
being read, are left out: the kernel can drop them and read them again.
"""

import ctypes
import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5): resets VmHWM to the current resident set


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _CLEAR_REFS.write_text(_RESET_PEAK)


def peak_bytes(device: torch.device) -> int:
    """Return the peak of allocated device memory since `reset_peak`, or of the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_host_bytes()


def peak_host_bytes() -> int:
    """Return the peak of the resident set, mapped files that were read included."""
    return _status_bytes("VmHWM")


def peak_reserved_bytes(device: torch.device) -> int | None:
    """Return the peak of GPU memory reserved by torch since `reset_peak`; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def held_bytes() -> int:
    """Return this process's resident memory without file pages: RssAnon + RssShmem.

    The kernel sums its per-CPU counters lazily: some hundred KB may be missing.
    """
    return _status_bytes("RssAnon") + _status_bytes("RssShmem")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arena:
    """Memory that the engine holds from step to step, under the plan's name for it."""

    name: str
    blocks: Sequence[torch.Tensor]

    @property
    def is_on_host(self) -> bool:
        """Whether it is host memory."""
        return all(block.device.type == "cpu" for block in self.blocks)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def resident_bytes(self) -> int | None:
        """Its resident bytes; None if the kernel does not report them."""
        found = [resident_bytes(block) for block in self.blocks]
        return None if None in found else sum(size for size in found if size is not None)


def resident_bytes(block: torch.Tensor) -> int | None:
    """Return the resident bytes of a tensor: all of it on a GPU, touched pages on the host.

    None if the kernel has no mincore, or a sandbox forbids it.
    """
    if block.device.type != "cpu" or not block.nbytes:
        return block.nbytes
    first = block.data_ptr() // mmap.PAGESIZE
    end = -(-(block.data_ptr() + block.nbytes) // mmap.PAGESIZE)
    states = torch.zeros(end - first, dtype=torch.uint8)
    libc = ctypes.CDLL(None)
    has_failed = libc.mincore(
        ctypes.c_void_p(first * mmap.PAGESIZE),
        ctypes.c_size_t((end - first) * mmap.PAGESIZE),
        ctypes.c_void_p(states.data_ptr()),
    )
    if has_failed:
        return None
    return min(block.nbytes, int(states.bitwise_and(1).sum()) * mmap.PAGESIZE)


def torch_pinned_bytes() -> int:
    """Return the bytes page-locked by torch's own allocator, with its rounding; 0 on a CPU.

    Memory that was locked in place is not included, see `offload.engine.host.pagelock.PageLock`.
    """
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024
