"""Writes a store: tensor by tensor under another name, then renamed in one step.

Nothing is kept in memory. Disk space is reserved before the first layer is converted, so that a
full disk is found at once and not after an hour. No failure leaves a partial file.
"""

import errno
import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import IO

import torch
from torch import nn

from offload.engine.codecs.codec import NATIVE
from offload.engine.host.layer_layout import Field, Record, lay_out, stand_in
from offload.engine.host.mapping import aligned_empty
from offload.engine.host.slab import write
from offload.engine.host.store import (
    Entry,
    Header,
    Identity,
    StoredRecord,
    first_page,
)
from offload.errors import TransferError
from offload.plan.facts.layer_layout import PAGE_BYTES
from offload.plan.machine.machine import GIB

LOOK_S = 0.1  # between looks at another process's lock
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def sole_builder(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Wait until no other process builds this store, and lock others out.

    After a wait, look again: the store may exist now. The lock ends with the process that holds it,
    so a kill leaves no lock.

    Args:
        path: Of the store.
        on_wait: Called now and then while another process builds it.

    Raises:
        TransferError: The directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
        while not _is_locked(lock):
            on_wait()
            time.sleep(LOOK_S)
    except OSError as error:
        raise _failed(path, error, needed_bytes=0) from error
    with lock:
        yield


def _is_locked(file: IO[str]) -> bool:
    """Lock a file unless another process has it; return whether this one has it now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class StoreWriter:
    """A store being written; call `finish`, or `close` to remove it."""

    def __init__(
        self,
        path: Path,
        records: Sequence[Record],
        names: Sequence[Sequence[str]],
        *,
        encoding_device: torch.device | None = None,
    ) -> None:
        """Create the file and reserve disk space for the layers.

        Args:
            path: The final path of the store. Hold its `sole_builder`.
            records: The layers' layouts.
            names: The name of each of their fields.
            encoding_device: Where values are encoded; None encodes them on their own device.

        Raises:
            TransferError: The disk is full, or cannot be written.
        """
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._records, self._names = tuple(records), names
        self._encoding_device = encoding_device
        self._entries: list[list[Entry]] = [[] for _ in records]
        sizes = (record.num_bytes for record in records)
        *self._offsets, self._end = accumulate(sizes, initial=PAGE_BYTES)
        self._descriptor: int | None = None
        with self._named_errors():
            self._partial.unlink(missing_ok=True)  # from a killed build; a link is not followed
            self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            os.posix_fallocate(self._descriptor, 0, self._end)

    @property
    def names(self) -> set[str]:
        """Names of the tensors that were put."""
        return {entry.name for entries in self._entries for entry in entries}

    def put(self, layer: int, index: int, values: torch.Tensor) -> torch.Tensor:
        """Write a field's values.

        Returns:
            A placeholder of the same shape, without memory or values.

        Raises:
            TransferError: The disk is full, or cannot be written.
            CodecError: The values cannot be encoded in the field's form.
        """
        field, name = self._records[layer].fields[index], self._names[layer][index]
        self._entries[layer].append(
            self._write_field(name, field, values, record=self._offsets[layer])
        )
        return stand_in(field)

    def finish(self, rest: Mapping[str, torch.Tensor], identity: Identity) -> None:
        """Write everything else and the header, flush, and give the store its name.

        Args:
            rest: All other tensors of the model.
            identity: The source of the weights.

        Raises:
            TransferError: The disk is full, or cannot be written.
        """
        stored = [
            StoredRecord(
                offset=offset,
                num_bytes=record.num_bytes,
                decoded_bytes=record.decoded_bytes,
                entries=tuple(entries),
            )
            for offset, record, entries in zip(
                self._offsets, self._records, self._entries, strict=True
            )
        ]
        stored_rest = self._write_rest(rest)
        header = Header(identity=identity, layers=tuple(stored), rest=stored_rest).encoded()
        header_offset = self._end
        self._end += len(header)
        with self._named_errors():
            assert self._descriptor is not None
            self._write(header, header_offset)
            os.fsync(self._descriptor)
            self._write(first_page(header_offset, header), 0)
            os.fsync(self._descriptor)
            self._partial.rename(self._path)
            _flush_names(self._path.parent)
            os.close(self._descriptor)
        self._descriptor = None

    def close(self) -> None:
        """Remove the file, unless it was finished."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._partial.unlink(missing_ok=True)

    def _write_rest(self, rest: Mapping[str, torch.Tensor]) -> StoredRecord:
        record = lay_out([nn.Parameter(t, requires_grad=False) for t in rest.values()])
        start = self._end
        self._end += record.num_bytes
        with self._named_errors():
            assert self._descriptor is not None
            os.posix_fallocate(self._descriptor, 0, self._end)
        entries = tuple(
            self._write_field(name, field, values, record=start)
            for (name, values), field in zip(rest.items(), record.fields, strict=True)
        )
        return StoredRecord(
            offset=start, num_bytes=record.num_bytes, decoded_bytes=0, entries=entries
        )

    def _write_field(self, name: str, field: Field, values: torch.Tensor, *, record: int) -> Entry:
        if field.codec is NATIVE:
            written = values.detach().contiguous().view(-1).view(torch.uint8)
        else:
            written = aligned_empty(field.num_bytes)
            write(name, field, values, written, self._encoding_device)
        content = written.numpy().data
        with self._named_errors():
            self._write(content, record + field.offset)
        return Entry(
            name=name,
            dtype=str(field.dtype).removeprefix("torch."),
            shape=tuple(field.shape),
            codec=field.codec.name,
            offset=field.offset,
            num_bytes=field.num_bytes,
            decoded_offset=field.decoded_offset,
            checksum=zlib.crc32(content),
        )

    def _write(self, content: bytes | memoryview, offset: int) -> None:
        assert self._descriptor is not None
        left = memoryview(content)
        while left:
            num_bytes = os.pwrite(self._descriptor, left, offset)
            left, offset = left[num_bytes:], offset + num_bytes

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise _failed(self._path, error, needed_bytes=self._end) from error


def _flush_names(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failed(path: Path, error: OSError, *, needed_bytes: int) -> TransferError:
    if error.errno not in _DISK_IS_FULL:
        return TransferError(
            f"the store {path} cannot be written: {error.strerror}",
            limit="layers that wait on disk, or encoded, are kept in a file of their own",
            hint="make the directory writable, or name another cache: `XDG_CACHE_HOME=DIR`",
        )
    status = os.statvfs(path.parent)
    free_bytes = status.f_bavail * status.f_frsize
    return TransferError(
        f"the store {path} needs {needed_bytes / GIB:.2f} GiB and {free_bytes / GIB:.2f} GiB is"
        f" free ({error.strerror})",
        limit="layers that wait on disk, or encoded, are kept in a file of their own",
        hint=f"remove old stores from {path.parent}, or use a larger disk: `XDG_CACHE_HOME=DIR`",
    )
