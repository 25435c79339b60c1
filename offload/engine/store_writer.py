"""Writes a store: layer by layer under another name, then renamed in one step.

Only one layer is in memory at a time. The room is reserved before the first layer is converted, so
that a full disk is found at once and not after an hour; whatever fails, no partial file is left.
"""

import errno
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from offload.engine.mapping import PAGE_BYTES, aligned_empty
from offload.engine.slab import Record, lay_out
from offload.engine.store import (
    Entry,
    Header,
    Identity,
    StoredRecord,
    checksums,
    first_page,
)
from offload.errors import OffloadError, TransferError
from offload.plan.machine import GIB

_UNTOUCHED = float("nan")
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def sole_builder(path: Path) -> Iterator[None]:
    """Wait until no other process builds this store, and keep others from it.

    Who waited should look again: the store may be there now. The lock ends with the process that
    holds it, so a kill leaves none behind.

    Raises:
        TransferError: The directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise _failed(path, error, needed_bytes=0) from error
    with lock:
        yield


class StoreWriter:
    """A store in the making; call `finish`, or `close` to leave nothing behind."""

    def __init__(
        self, path: Path, *, records: Sequence[Record], names: Sequence[Sequence[str]]
    ) -> None:
        """Create the file and reserve the room for the layers.

        Args:
            path: What the store will be called. Hold `sole_builder` of it.
            records: The layers' layouts.
            names: The name of each of their fields.

        Raises:
            TransferError: The disk is full, or cannot be written.
        """
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._records, self._names = tuple(records), names
        self._offset = PAGE_BYTES
        self._needed_bytes = PAGE_BYTES + sum(record.num_bytes for record in records)
        self._staged: dict[int, torch.Tensor] = {}
        self._entries: list[list[Entry]] = [[] for _ in records]
        self._written: dict[int, StoredRecord] = {}
        self._stand_ins: dict[str, torch.Tensor] = {}
        self._descriptor: int | None = None
        with self._named_errors():
            self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            os.posix_fallocate(self._descriptor, 0, self._needed_bytes)

    @property
    def names(self) -> set[str]:
        """Names of the tensors that were put."""
        return {entry.name for entries in self._entries for entry in entries}

    def put(self, layer: int, index: int, values: torch.Tensor) -> torch.Tensor:
        """Copy a field's values; the layer is written with the last of its fields.

        Returns:
            A stand-in of the same shape that takes no memory. Who writes to it, to initialise what
            the weights lack, is found out by `finish`.

        Raises:
            TransferError: The disk is full, or cannot be written.
        """
        record = self._records[layer]
        field = record.fields[index]
        assert values.is_floating_point()
        if layer not in self._staged:
            self._staged[layer] = aligned_empty(record.num_bytes)
        field.view(self._staged[layer]).copy_(values)
        name = self._names[layer][index]
        self._entries[layer].append(_entry(name, values, field.offset))
        self._stand_ins[name] = torch.full((), _UNTOUCHED, dtype=values.dtype)
        if len(self._entries[layer]) == len(record.fields):
            self._flush_layer(layer)
        return self._stand_ins[name].expand(values.shape)

    def finish(self, rest: Mapping[str, torch.Tensor], identity: Identity) -> None:
        """Write everything else and the header, flush, and give the store its name.

        Args:
            rest: What the model consists of besides what was put.
            identity: What the weights were made from.

        Raises:
            TransferError: The disk is full, or cannot be written.
            OffloadError: A tensor was given other values after it was put.
        """
        self._require_untouched()
        for layer in sorted(self._staged):
            self._flush_layer(layer)
        for layer in range(len(self._records)):
            assert layer in self._written, f"nothing of layer {layer} was put"
        header = Header(
            identity=identity,
            layers=tuple(self._written[layer] for layer in range(len(self._records))),
            rest=self._write_rest(rest),
        ).encoded()
        header_offset = self._offset
        self._append(header)
        assert self._descriptor is not None
        with self._named_errors():
            os.fsync(self._descriptor)
            self._write(first_page(header_offset, header), 0)
            os.fsync(self._descriptor)
            self._partial.rename(self._path)
            _flush_names(self._path.parent)
        os.close(self._descriptor)
        self._descriptor = None

    def close(self) -> None:
        """Remove what was written, unless it was finished."""
        self._staged.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._partial.unlink(missing_ok=True)

    def _require_untouched(self) -> None:
        for name, stand_in in self._stand_ins.items():
            if not stand_in.isnan():
                raise OffloadError(
                    f"{name} was initialised while loading: the weights lack it",
                    limit="a store holds published weights and nothing made up",
                    hint="`offload.tier: ram`, or weights that have every tensor",
                )

    def _flush_layer(self, layer: int) -> None:
        self._written[layer] = self._append_record(
            self._staged.pop(layer), tuple(self._entries[layer])
        )

    def _write_rest(self, rest: Mapping[str, torch.Tensor]) -> StoredRecord:
        record = lay_out([torch.nn.Parameter(t, requires_grad=False) for t in rest.values()])
        memory = aligned_empty(record.num_bytes)
        entries = []
        for (name, values), field in zip(rest.items(), record.fields, strict=True):
            field.view(memory).copy_(values)
            entries.append(_entry(name, values, field.offset))
        return self._append_record(memory, tuple(entries))

    def _append_record(self, memory: torch.Tensor, entries: tuple[Entry, ...]) -> StoredRecord:
        offset = self._offset
        self._append(memory.numpy().data)
        return StoredRecord(
            offset=offset,
            num_bytes=memory.numel(),
            entries=entries,
            checksums=checksums(memory),
        )

    def _append(self, content: bytes | memoryview) -> None:
        self._needed_bytes = max(self._needed_bytes, self._offset + len(content))
        with self._named_errors():
            self._write(content, self._offset)
        self._offset += len(content)

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
            raise _failed(self._path, error, needed_bytes=self._needed_bytes) from error


def _entry(name: str, values: torch.Tensor, offset: int) -> Entry:
    return Entry(
        name=name,
        dtype=str(values.dtype).removeprefix("torch."),
        shape=tuple(values.shape),
        offset=offset,
        num_bytes=values.numel() * values.element_size(),
    )


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
            limit="the disk tier keeps the weights in a file of its own",
            hint="make the directory writable, or name another cache: `XDG_CACHE_HOME=DIR`",
        )
    status = os.statvfs(path.parent)
    free_bytes = status.f_bavail * status.f_frsize
    return TransferError(
        f"the store {path} needs {needed_bytes / GIB:.2f} GiB and {free_bytes / GIB:.2f} GiB is"
        f" free ({error.strerror})",
        limit="the disk tier keeps the weights in a file of its own",
        hint=f"remove old stores from {path.parent}, or use a larger disk: `XDG_CACHE_HOME=DIR`",
    )
