"""Page-locking of the slab: all of it, else a small staging ring, else nothing.

A copy to the GPU is asynchronous, and runs at the link's rate, only from page-locked memory. The
slab is locked in place, at its exact size: torch's own allocator would round it up to a power of
two. The system may refuse, so there are three modes; the one in use is reported with its cost:

    pinned    the whole slab is locked
    staged    layers go through a few locked buffers, which the host lane fills piece by piece
    pageable  the driver copies in small pieces through buffers of its own

A size is tried in a child process before it is locked here, see `lock_trial`.
"""

import ctypes
import mmap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch

from offload.engine.host.cudart import CudaRuntime, loaded_runtime_path
from offload.engine.host.limits import free_host_bytes
from offload.engine.host.lock_trial import rehearse_lock
from offload.errors import TransferError
from offload.plan.facts.workload import to_pages
from offload.plan.machine.machine import GIB
from offload.plan.schedule.schedule import NUM_STAGING, PIECE_BYTES


def aligned_empty(num_bytes: int) -> torch.Tensor:
    """Return page-aligned memory, uint8 (num_bytes,), whose pages are allocated on first touch.

    torch aligns to 64 bytes; reads that bypass the page cache need whole disk blocks.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, max(1, num_bytes), flags=flags), dtype=torch.uint8)[
        :num_bytes
    ]


def map_file(descriptor: int, num_bytes: int, *, is_writable: bool) -> torch.Tensor:
    """Return the bytes of a file, uint8 (num_bytes,), shared with every process that maps it.

    Writing to a read-only tensor ends the process, since its memory belongs to another one.
    The descriptor may be closed afterwards; the mapping lives as long as any view of it.
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    memory = mmap.mmap(descriptor, max(1, num_bytes), flags=mmap.MAP_SHARED, prot=prot)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it has no read-only tensors
        return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def trim_heap() -> None:
    """Give the whole pages of freed memory back to the system; does nothing without glibc.

    malloc keeps freed blocks of up to 32 MiB. Small long-lived blocks are then placed inside them,
    the next large one no longer fits, and the heap grows with each tensor that comes and goes.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


_START_S = 30.0  # a child's start, its CUDA context, and a first GiB
_S_PER_GIB = 1.0  # pages are locked several times as fast
_HINT = (
    "to lock all, raise the limit: `ulimit -l unlimited`, in Docker `--ulimit memlock=-1`;"
    " on WSL2 Windows sets it"
)


class LockMode(StrEnum):
    """How layers leave host memory."""

    PINNED = "pinned"
    STAGED = "staged"
    PAGEABLE = "pageable"
    NOT_NEEDED = "not needed"


class Locker(Protocol):
    """Page-locks memory. Each call returns why it failed, or None; none leaves a CUDA error set."""

    def rehearse(self, num_bytes: int) -> str | None:
        """Try a lock of this size where a failure does no harm, and wait for the result."""

    def register(self, address: int, num_bytes: int) -> str | None:
        """Page-lock a range of this process."""

    def unregister(self, address: int) -> str | None:
        """Unlock what was registered at this address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLock:
    """What is page-locked."""

    mode: LockMode  # the mode in use
    num_bytes: int  # bytes that are locked
    reason: str  # which mode, why, and what it costs, for the user
    buffers: tuple[torch.Tensor, ...] = ()  # if staged: the locked buffers, uint8, all of one size
    addresses: tuple[int, ...] = ()  # start addresses of the locked ranges
    locker: Locker | None = None  # what locked them

    def release(self) -> None:
        """Unlock. Call it once, when no copy runs and before the memory is unmapped.

        Raises:
            TransferError: The system refuses to unlock.
        """
        for address in self.addresses:
            assert self.locker is not None
            failure = self.locker.unregister(address)
            if failure is not None:
                raise TransferError(
                    f"page-locked memory could not be unlocked: {failure}",
                    limit="it must be locked still, and the GPU alive",
                    hint="see the error before this one, or `dmesg`; end the process",
                )


_NOT_NEEDED = PageLock(
    mode=LockMode.NOT_NEEDED,
    num_bytes=0,
    reason="",
)


def page_lock(
    address: int,
    num_bytes: int,
    largest_record_bytes: int,
    locker: Locker | None,
    *,
    others_bytes: int = 0,
) -> PageLock:
    """Page-lock the slab, or a staging ring if the system allows no more; may wait.

    1. Try the whole size, then half of it and so on, down to a ring of staging buffers.
    2. If the whole size worked, lock the slab; if only a smaller one did, lock a ring.

    Args:
        address: Start of the slab, on a page boundary; its pages should be filled.
        num_bytes: Its length.
        largest_record_bytes: The largest layer; a staging buffer need not be larger.
        locker: From `open_locker`; None where no device needs locked memory.
        others_bytes: What is to be locked after it, and has no other way to the device.
    """
    if locker is None:
        return _NOT_NEEDED
    ring_bytes = NUM_STAGING * _piece_bytes(largest_record_bytes)
    worked_bytes, refusal = largest_lockable(num_bytes + others_bytes, ring_bytes, locker)
    if worked_bytes == num_bytes + others_bytes:
        refusal = locker.register(address, num_bytes) or ""
        if not refusal:
            return PageLock(
                mode=LockMode.PINNED,
                num_bytes=num_bytes,
                reason=f"all {_shown(num_bytes)} of layers are page-locked: copies are asynchronous"
                " and run at the link's rate",
                addresses=(address,),
                locker=locker,
            )
    also = f" and {_shown(others_bytes)} more" if others_bytes else ""
    why = f"page-locking {_shown(num_bytes)} of layers{also} was refused ({refusal})"
    if 0 < worked_bytes < num_bytes:
        why += f", of {_shown(worked_bytes)} not"
    if worked_bytes and ring_bytes < num_bytes:
        cost = f", which reads and writes each byte once more in host memory; {_HINT}"
        return _ring(largest_record_bytes, why, cost, locker)
    return _pageable(why)


def lock_ring(largest_record_bytes: int, why: str, locker: Locker | None) -> PageLock:
    """Page-lock a ring of staging buffers only; may wait.

    Args:
        largest_record_bytes: As for `page_lock`.
        why: Why no slab is locked, for the user: "layers lie on disk".
        locker: As for `page_lock`.
    """
    if locker is None:
        return _NOT_NEEDED
    ring_bytes = NUM_STAGING * _piece_bytes(largest_record_bytes)
    refusal = locker.rehearse(ring_bytes)
    if refusal is not None:
        return _pageable(_refused_ring(why, ring_bytes, refusal))
    return _ring(largest_record_bytes, why, "", locker)


def largest_lockable(num_bytes: int, least_bytes: int, locker: Locker) -> tuple[int, str]:
    """Try `num_bytes`, then half of it and so on, then `least_bytes`, until one works.

    Returns:
        The size that worked, 0 if none did, and why the first one that failed did.
    """
    first_refusal = ""
    for size in _rungs(num_bytes, least_bytes):
        refusal = locker.rehearse(size)
        if refusal is None:
            return size, first_refusal
        first_refusal = first_refusal or refusal
    return 0, first_refusal


def _rungs(num_bytes: int, least_bytes: int) -> Iterator[int]:
    yield num_bytes
    size = num_bytes // 2
    while size > least_bytes:
        yield size
        size //= 2
    if least_bytes < num_bytes:
        yield least_bytes


def _ring(largest_record_bytes: int, why: str, cost: str, locker: Locker) -> PageLock:
    """Allocate and lock a ring of buffers."""
    piece_bytes = _piece_bytes(largest_record_bytes)
    ring_bytes = NUM_STAGING * piece_bytes
    ring = aligned_empty(ring_bytes)
    refusal = locker.register(ring.data_ptr(), ring_bytes)
    if refusal is not None:
        return _pageable(_refused_ring(why, ring_bytes, refusal))
    return PageLock(
        mode=LockMode.STAGED,
        num_bytes=ring_bytes,
        reason=f"{why}: a thread puts them through {NUM_STAGING} page-locked buffers of"
        f" {_shown(piece_bytes)}{cost}",
        buffers=ring.split(piece_bytes),
        addresses=(ring.data_ptr(),),
        locker=locker,
    )


def _refused_ring(why: str, ring_bytes: int, refusal: str) -> str:
    return f"{why}; {_shown(ring_bytes)} to stage through was refused ({refusal})"


def _pageable(why: str) -> PageLock:
    return PageLock(
        mode=LockMode.PAGEABLE,
        num_bytes=0,
        reason=f"{why}: the driver copies them in small pieces, well below the link's rate, and"
        f" the thread that copies waits for it; {_HINT}",
    )


def _piece_bytes(largest_record_bytes: int) -> int:
    """Return the size of a staging buffer: at most one copy or one layer, in whole pages."""
    return to_pages(min(largest_record_bytes, PIECE_BYTES))


def _shown(num_bytes: int) -> str:
    if num_bytes < GIB // 10:
        return f"{num_bytes / 2**20:.2f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


# --------------------------------------------------------------------------------------------- CUDA


def open_locker(torch_device: torch.device, fd: int | None) -> Locker | None:
    """Return what page-locks for a device, None for a CPU.

    Args:
        torch_device: Where layers are copied to.
        fd: The slab's file descriptor, whose memory a trial shares; None tries with new memory,
            at most half of what is free.
    """
    if torch_device.type != "cuda":
        return None
    torch.cuda.init()
    path = loaded_runtime_path()
    if path is None:
        return _NoLocker()
    is_current = torch_device == torch.device("cuda")
    return CudaLocker(
        runtime=CudaRuntime(ctypes.CDLL(str(path))),
        path=path,
        device_index=torch.cuda.current_device() if is_current else torch_device.index,
        fd=fd,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaLocker:
    """Locks with the runtime that torch uses, and tries sizes with the same one in a child."""

    runtime: CudaRuntime  # the runtime
    path: Path  # its library file
    device_index: int  # the device that the memory is for
    fd: int | None  # the file that was opened, see `open_locker`

    def rehearse(self, num_bytes: int) -> str | None:
        """Try a lock of this size in a child process, and wait for the result."""
        if self.fd is None:
            num_bytes = min(num_bytes, free_host_bytes(Path("/")) // 2)
        return rehearse_lock(
            runtime=self.path,
            device_index=self.device_index,
            num_bytes=num_bytes,
            fd=self.fd,
            timeout_s=_START_S + _S_PER_GIB * num_bytes / GIB,
        )

    def register(self, address: int, num_bytes: int) -> str | None:
        """Page-lock a range of this process."""
        with torch.cuda.device(self.device_index):
            return self.runtime.register(address, num_bytes)

    def unregister(self, address: int) -> str | None:
        """Unlock what was registered at this address."""
        with torch.cuda.device(self.device_index):
            return self.runtime.unregister(address)


class _NoLocker:
    """Refuses all: torch's CUDA runtime is out of reach, so no error could be cleared."""

    _REFUSAL = "the CUDA runtime that this build of torch uses was not found"

    def rehearse(self, _num_bytes: int) -> str | None:
        return self._REFUSAL

    def register(self, _address: int, _num_bytes: int) -> str | None:
        return self._REFUSAL

    def unregister(self, _address: int) -> str | None:
        return None
