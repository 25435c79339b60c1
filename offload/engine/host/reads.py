"""Reads of a file that bypass the page cache, several in flight.

A model larger than memory is read from end to end twice per step, so the page cache only costs: it
would copy each byte once more and evict useful pages. O_DIRECT moves disk blocks straight to their
destination. It needs whole blocks and aligned addresses. One read at a time leaves an NVMe drive
mostly idle, so a read is split into pieces that a few threads request in parallel. File systems
without O_DIRECT are read through the page cache, whose pages are dropped after each piece.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Literal, TypeVar

import torch

from offload.engine.host.mapping import aligned_empty
from offload.errors import OffloadError, TransferError
from offload.plan.facts.layer_layout import PAGE_BYTES

QUEUE_DEPTH = 8
READ_BYTES = 8 * 2**20

S = TypeVar("S")
T = TypeVar("T")


class FileReader:
    """An open file and the threads that read it.

    Attributes:
        mode: `direct` bypasses the page cache, `buffered` uses it.
        reason: Why it is not `direct`; empty if it is.
    """

    mode: Literal["direct", "buffered"]

    def __init__(
        self, path: Path, *, queue_depth: int = QUEUE_DEPTH, piece_bytes: int = READ_BYTES
    ) -> None:
        """Open the file and find out whether its file system can bypass the page cache.

        Args:
            path: The file; reads must be whole pages.
            queue_depth: Reads in flight.
            piece_bytes: Size of a read, whole pages.

        Raises:
            OSError: The file cannot be opened.
        """
        assert piece_bytes % PAGE_BYTES == 0
        self._path = path
        self._piece_bytes = piece_bytes
        self._descriptor, self.reason = _open(path)
        self.mode = "buffered" if self.reason else "direct"
        self._threads = ThreadPoolExecutor(queue_depth, thread_name_prefix="store-read")

    def read_into(self, offset: int, target: torch.Tensor) -> None:
        """Fill a tensor from the file and return when it is filled.

        Args:
            offset: Where in the file, whole pages.
            target: uint8 on the host, page-aligned, whole pages.

        Raises:
            TransferError: The file ends early, or the disk fails.
            OffloadError: The reader was closed.
        """
        assert target.data_ptr() % PAGE_BYTES == 0
        assert target.numel() % PAGE_BYTES == 0
        assert offset % PAGE_BYTES == 0
        buffer = target.numpy().data
        starts = range(0, target.numel(), self._piece_bytes)
        self.each(
            lambda start: self._read_piece(
                offset + start, buffer[start : start + self._piece_bytes]
            ),
            starts,
        )

    def each(self, work: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """Run `work` for each item on the reader's threads; wait for all even if one fails.

        Raises:
            OffloadError: The reader was closed.
        """
        if self._descriptor is None:
            raise OffloadError(
                f"{self._path} was closed",
                limit="it can be read while it is open",
                hint="attach the model again",
            )
        futures: list[Future[T]] = []
        try:
            futures.extend(self._threads.submit(work, item) for item in items)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # nobody writes to the target once this has returned

    def close(self) -> None:
        """Join the threads and close the file."""
        self._threads.shutdown()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read_piece(self, offset: int, buffer: memoryview) -> None:
        assert self._descriptor is not None
        done = 0
        while done < len(buffer):
            try:
                num_bytes = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise _failed(self._path, offset + done, str(error.strerror)) from error
            if num_bytes == 0:
                raise _failed(self._path, offset + done, "the file ends there")
            done += num_bytes
        if self.mode == "buffered":
            os.posix_fadvise(self._descriptor, offset, len(buffer), os.POSIX_FADV_DONTNEED)


def _open(path: Path) -> tuple[int | None, str]:
    """Open for reads that bypass the page cache; else through it, with the reason."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        reason = f"O_DIRECT is refused when the file is opened: {error.strerror}"
        return os.open(path, os.O_RDONLY), reason
    try:
        # Some file systems refuse only the read.
        os.preadv(descriptor, [aligned_empty(PAGE_BYTES).numpy().data], 0)
    except OSError as error:
        os.close(descriptor)
        reason = f"O_DIRECT is refused when the file is read: {error.strerror}"
        return os.open(path, os.O_RDONLY), reason
    return descriptor, ""


def _failed(path: Path, offset: int, why: str) -> TransferError:
    return TransferError(
        f"{path} cannot be read at byte {offset}: {why}",
        limit="layers are read again and again while training",
        hint="check the disk (`dmesg`); a removed store file is built again by the next start",
    )
