"""Optimizer states of layers in a file, and a ring of two layers' states in memory.

The file is scratch: it has no name once it is open, so that nothing is left when a process ends in
any way, and a checkpoint holds what a resume needs. All of its blocks are allocated at the
start: a disk that is too full is found before the first step.

A step moves states by reads and writes that bypass the page cache, as layers on disk are read.
Whoever reads or sets all of them between two steps (a checkpoint, a resume) goes through a mapping
of the file, whose pages the system may write back and drop at any time. The system keeps the two
coherent: before a direct read or write it writes changed pages of that range back, and after a
direct write it drops those that it has. The two never run at the same time.
"""

import errno
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from mmap import MADV_DONTNEED, mmap
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from offload.engine.host.reads import READ_BYTES, FileReader
from offload.errors import TransferError
from offload.plan.facts.layer_layout import PAGE_BYTES, to_pages
from offload.plan.machine.machine import GIB
from offload.plan.schedule.updates import NUM_STATE_BUFFERS


class StateFile:
    """States of layers on disk; those of a few are in memory while they are updated.

    A layer's states are read into a buffer, changed there, and written back, each once per step.
    What was changed and is not written yet stays in its buffer, whatever fails in between.

    Attributes:
        layer_bytes: States of each layer.
        read_bytes: What was read so far by `read`, whole pages.
        written_bytes: What was written so far by `write`, whole pages.
        buffers: The memory of the ring.
        mode: `direct` bypasses the page cache, `buffered` uses it.
    """

    def __init__(
        self,
        folder: Path,
        layer_bytes: Sequence[int],
        *,
        allocate: Callable[[int], torch.Tensor],
    ) -> None:
        """Make the file, all zeros.

        Args:
            folder: Where, on a fast drive.
            layer_bytes: States of each layer.
            allocate: Returns page-aligned uint8 host memory.

        Raises:
            TransferError: The disk is too full, or the folder cannot be written.
        """
        self.layer_bytes = tuple(layer_bytes)
        pages = list(map(to_pages, layer_bytes))
        *self._offsets, total = accumulate(pages, initial=0)
        self._page_bytes, self.read_bytes, self.written_bytes = pages, 0, 0
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=folder, prefix="states-", suffix=".tmp") as file:
                os.posix_fallocate(file.fileno(), 0, max(PAGE_BYTES, total))
                self._reader = FileReader(Path(file.name))
                self.mode = self._reader.mode
                direct = os.O_DIRECT if self.mode == "direct" else 0
                self._descriptor = os.open(file.name, os.O_WRONLY | direct)
                self._memory = mmap(file.fileno(), max(PAGE_BYTES, total))
        except OSError as error:
            raise self._refused(total, error) from error
        self._mapped = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.close = weakref.finalize(self, _close, self._reader, self._descriptor)
        self.buffers = [allocate(max(pages)) for _ in range(NUM_STATE_BUFFERS)]
        self._held: dict[int, int] = {}
        self._changed: set[int] = set()
        self._lock = threading.RLock()

    def mapped(self) -> list[torch.Tensor]:
        """Return the states of each layer as they are in the file, uint8, to be read or set.

        Between steps only, and after `settle`.
        """
        places = zip(self._offsets, self.layer_bytes, strict=True)
        return [self._mapped[offset : offset + size] for offset, size in places]

    def clear(self) -> None:
        """Set all states to zero, between two steps.

        Raises:
            TransferError: Another has taken the room meanwhile.
        """
        with self._lock:
            self._held.clear()
            self._changed.clear()
            try:
                os.ftruncate(self._descriptor, 0)
                os.posix_fallocate(self._descriptor, 0, len(self._memory))
            except OSError as error:
                raise self._refused(len(self._memory), error) from error

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a part of what `mapped` returns."""
        first = self._mapped.data_ptr()
        return first <= tensor.data_ptr() < first + self._mapped.numel()

    def memory(self, layer: int) -> torch.Tensor:
        """Return the states of a layer that was read, uint8."""
        return self.buffers[self._held[layer]][: self.layer_bytes[layer]]

    def read(self, layer: int, buffer: int) -> None:
        """Read a layer's states into a buffer, unless they are there; returns once they are.

        Raises:
            TransferError: The file ends early, or the disk fails.
        """
        with self._lock:
            if self._held.get(layer) == buffer:
                return
            for other, place in list(self._held.items()):  # left by a pass that has failed
                if other == layer or place == buffer:
                    self.write(other)
            target = self.buffers[buffer][: self._page_bytes[layer]]
            if target.numel():  # let go of pages that a checkpoint has read
                self._memory.madvise(MADV_DONTNEED, self._offsets[layer], target.numel())
            self._reader.read_into(self._offsets[layer], target)
            self.read_bytes += target.numel()
            self._held[layer] = buffer

    def changed(self, layer: int) -> None:
        """Note that the states of a layer in memory are newer than those in the file."""
        self._changed.add(layer)

    def write(self, layer: int) -> None:
        """Write a layer's states back if they were changed, and let go of their buffer.

        Raises:
            TransferError: The disk is full, or fails; they stay in memory.
        """
        with self._lock:
            if layer in self._changed:
                source = self.buffers[self._held[layer]][: self._page_bytes[layer]]
                content, offset = source.numpy().data, self._offsets[layer]
                self._reader.each(
                    lambda start: self._write_piece(
                        offset + start, content[start : start + READ_BYTES]
                    ),
                    range(0, source.numel(), READ_BYTES),
                )
                self.written_bytes += source.numel()
                self._changed.remove(layer)
            self._held.pop(layer, None)

    def settle(self) -> None:
        """Write what was changed and is still in memory, and let go of the rest.

        Raises:
            TransferError: As for `write`.
        """
        with self._lock:
            for layer in list(self._held):
                self.write(layer)

    def _write_piece(self, offset: int, content: memoryview) -> None:
        done = 0
        while done < len(content):
            try:
                done += os.pwritev(self._descriptor, [content[done:]], offset + done)
            except OSError as error:
                raise TransferError(
                    f"optimizer states cannot be written to {self._folder} at byte {offset + done}:"
                    f" {error.strerror}",
                    limit="each step writes the states of all layers there",
                    hint="check the disk (`df`, `dmesg`), then resume the run; or"
                    " `offload.states: ram`",
                ) from error
        if self.mode == "buffered":
            os.posix_fadvise(self._descriptor, offset, len(content), os.POSIX_FADV_DONTNEED)

    def _refused(self, num_bytes: int, error: OSError) -> TransferError:
        is_full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        free = ""
        if is_full and self._folder.exists():
            free = f", and {shutil.disk_usage(self._folder).free / GIB:.2f} GiB is free"
        return TransferError(
            f"{self._folder} needs {num_bytes / GIB:.2f} GiB for optimizer states{free}:"
            f" {error.strerror}",
            limit="they wait there between updates, in a file that is gone when the run ends",
            hint=f"free space (`df -h {self._folder}`), another folder (`XDG_CACHE_HOME`), or"
            " `offload.states: ram`",
        )


def _close(reader: FileReader, descriptor: int) -> None:
    reader.close()
    os.close(descriptor)
