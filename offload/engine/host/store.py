"""The layers' weights in a file: read by the disk tier, and by a second start instead of loading.

Layout. One page with the magic, the format's version and where the header is; then one record per
layer, laid out as in the slab; then the record of everything else (embeddings, norm, head,
buffers); then the header, JSON. Every part is whole pages, so O_DIRECT reads a record straight into
a slot.

Trust. A file is written under another name, flushed, and renamed when it is complete, so a kill
leaves no partial store; damage comes from disks, copies and other programs. Checks:

- at `open`: the first page and the header by checksum, the exact size of the file, the identity of
  the source weights, and the record of everything else by checksum, since it is read anyway. This
  takes as long as reading the embeddings, whatever the model's size.
- at the first read of each layer: each of its tensors by checksum, on the reading threads. The
  first sweep of the first step reads every layer, so damage is found before any update.
"""

import errno
import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from offload.engine.codec import NATIVE, form_named
from offload.engine.host.pagelock import aligned_empty, map_file
from offload.engine.host.slab import Copy, Field, Record, Slab, adopt, lay_out, stand_in, write
from offload.engine.internals import bare
from offload.errors import OffloadError, StoreError, TransferError
from offload.plan.facts.workload import PAGE_BYTES, to_pages
from offload.plan.machine.machine import GIB

# ---------------------------------------------------------------------------------------------
# Reads of a file that bypass the page cache, several in flight.
#
# A model larger than memory is read from end to end twice per step, so the page cache only costs:
# it would copy each byte once more and evict useful pages. O_DIRECT moves disk blocks straight to
# their destination. It needs whole blocks and aligned addresses. One read at a time leaves an NVMe
# drive mostly idle, so a read is split into pieces that a few threads request in parallel. File
# systems without O_DIRECT are read through the page cache, whose pages are dropped after each
# piece.

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


FORMAT = 3
MAGIC = b"sluice store\n"

Identity = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor's place in a record, like `Field`, with its name and a checksum."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    offset: int
    num_bytes: int
    decoded_offset: int
    checksum: int

    def field(self) -> Field:
        """Return the place as a field whose parameter is not known yet."""
        shape, dtype = torch.Size(self.shape), getattr(torch, self.dtype)
        unknown = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
        return Field(
            parameter=unknown,
            offset=self.offset,
            num_bytes=self.num_bytes,
            shape=shape,
            dtype=dtype,
            codec=form_named(self.codec),
            decoded_offset=self.decoded_offset,
        )

    def is_whole(self, record: memoryview) -> bool:
        """Return whether the tensor in a record is intact."""
        return zlib.crc32(record[self.offset : self.offset + self.num_bytes]) == self.checksum


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRecord:
    """A record's place in the file, and its tensors."""

    offset: int
    num_bytes: int
    decoded_bytes: int
    entries: tuple[Entry, ...]

    def record(self) -> Record:
        """Return the layout as a record whose parameters are not known yet."""
        return Record(
            fields=tuple(entry.field() for entry in self.entries),
            num_bytes=self.num_bytes,
            decoded_bytes=self.decoded_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a store holds: which weights, and where."""

    identity: Identity
    layers: tuple[StoredRecord, ...]
    rest: StoredRecord

    def encoded(self) -> bytes:
        """Return the header as it is written, whole pages."""
        text = json.dumps(asdict(self)).encode()
        return text.ljust(to_pages(len(text)))


def first_page(header_offset: int, header: bytes) -> bytes:
    """Return the page that a store begins with."""
    values = json.dumps(
        {
            "format": FORMAT,
            "header_offset": header_offset,
            "header_bytes": len(header),
            "header_checksum": zlib.crc32(header),
        }
    )
    line = f"{values} {zlib.crc32(values.encode()):08x}\n".encode()
    return (MAGIC + line).ljust(PAGE_BYTES, b"\0")


class Store:
    """An open store. Its layers can be mapped, or read bypassing the page cache.

    Attributes:
        records: Size of each layer's record, and its parameters once `adopt` was called.
        mode: How `read_into` reads, `direct` or `buffered`.
        reason: Why it is not `direct`; empty if it is.
        num_bytes: Total size of the layers' records.
    """

    def __init__(
        self,
        path: Path,
        *,
        identity: Identity,
        queue_depth: int = QUEUE_DEPTH,
        piece_bytes: int = READ_BYTES,
    ) -> None:
        """Open a store and check everything that does not need a full read.

        Args:
            path: The file.
            identity: The source of the weights; must equal the one in the file.
            queue_depth: Reads in flight.
            piece_bytes: Size of a read, whole pages.

        Raises:
            StoreError: The file is absent, damaged, or of other weights.
        """
        self.path = path
        try:
            self._header = _read_header(path)
            _require_identity(path, self._header.identity, identity)
            _require_forms(path, self._header.layers)
            self._mapped = _map(path)
            self._reader = FileReader(path, queue_depth=queue_depth, piece_bytes=piece_bytes)
        except OSError as error:
            raise unusable(path, str(error.strerror)) from error
        self.mode, self.reason = self._reader.mode, self._reader.reason
        self.num_bytes = sum(layer.num_bytes for layer in self._header.layers)
        self._unchecked = set(range(len(self._header.layers)))
        self._sums: dict[int, dict[str, int]] = {}
        self._layers = [self._at(layer) for layer in self._header.layers]
        self._laid_out = tuple(layer.record() for layer in self._header.layers)
        self.records = tuple(replace(record, fields=()) for record in self._laid_out)
        self._shown = [
            [
                bare(field.view(memory)) if field.codec is NATIVE else stand_in(field)
                for field in record.fields
            ]
            for record, memory in zip(self._laid_out, self._layers, strict=True)
        ]
        try:
            self._rest = self._read_rest()
        except BaseException:
            self.close()
            raise

    def layer(self, layer: int) -> torch.Tensor:
        """Return a layer's record in the mapped file, uint8, without allocating memory.

        Its contents are not checked; a write to it ends the process.
        """
        return self._layers[layer]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name: those of layers mapped, all others in memory.

        Encoded tensors show a placeholder. Each is `bare` because views of one block
        also share its version counter: autograd would treat a change of one as a change of all.
        """
        rest = self._header.rest.entries
        named = {entry.name: bare(entry.field().view(self._rest)) for entry in rest}
        for stored, shown in zip(self._header.layers, self._shown, strict=True):
            named |= {e.name: tensor for e, tensor in zip(stored.entries, shown, strict=True)}
        return named

    def adopt(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Make the parameters that alias the records their fields.

        What is around the layers is kept no longer: the model has it, here or on its device.

        Args:
            groups: The parameters to look for, per layer; see `layer_layout.adopt`.

        Raises:
            OffloadError: None of them aliases a record of this store.
        """
        self.records = adopt(self._laid_out, self._shown, groups)
        self._rest = torch.empty(0, dtype=torch.uint8)

    def layer_tensors(self, layer: int) -> list[torch.Tensor]:
        """Return a layer's tensors as `tensors` does, in the order they were written."""
        return self._shown[layer]

    def deliver(self, layer: int, offset: int, target: torch.Tensor, copy: Copy) -> None:
        """Read a piece of a layer's record, with several reads in flight; `copy` is not used.

        The first complete read of a layer checks it.

        Args:
            layer: Which layer.
            offset: Where in the record the piece starts, whole pages.
            target: uint8 on the host, page-aligned (`aligned_empty`), whole pages.
            copy: How a layer in memory would be copied.

        Raises:
            TransferError: The disk fails, or the record is damaged; the file is then removed, so
                that the next start builds it again.
        """
        self._reader.read_into(self._header.layers[layer].offset + offset, target)
        if layer in self._unchecked:
            self._check(layer, offset, target)

    def read_into(self, layer: int, target: torch.Tensor) -> None:
        """Read a layer's whole record, like `deliver`."""
        self.deliver(layer, 0, target, _no_copy)

    def move_to(self, slab: Slab) -> None:
        """Fill a slab of the same layout, unless another process does; let parameters alias it.

        Raises:
            TransferError: Like `deliver`.
        """
        for layer in range(len(self.records)):
            if not slab.is_opened:
                self.read_into(layer, slab.layer(layer))
            slab.alias(layer)

    def close(self) -> None:
        """Join the reading threads. The mapping lives as long as any view of it."""
        self._reader.close()

    def _check(self, layer: int, offset: int, piece: torch.Tensor) -> None:
        """Update the checksums of a layer's tensors by a piece; compare them after the last one.

        Raises:
            TransferError: The record is damaged.
        """
        stored, end = self._header.layers[layer], offset + piece.numel()
        if offset == 0:
            self._sums[layer] = {entry.name: 0 for entry in stored.entries}
        sums, buffer = self._sums[layer], piece.numpy().data

        def add(entry: Entry) -> None:
            first = max(entry.offset, offset) - offset
            behind = min(entry.offset + entry.num_bytes, end) - offset
            if first < behind:
                sums[entry.name] = zlib.crc32(buffer[first:behind], sums[entry.name])

        self._reader.each(add, stored.entries)
        if end < stored.num_bytes:
            return
        if any(sums[entry.name] != entry.checksum for entry in stored.entries):
            self.path.unlink(missing_ok=True)
            raise TransferError(
                f"layer {layer} in {self.path} is not what was written there",
                limit="a store is whole when it is written, so the disk or a program changed it",
                hint="start again: the file was removed and will be built anew",
            )
        self._unchecked.discard(layer)
        del self._sums[layer]

    def _read_rest(self) -> torch.Tensor:
        rest = aligned_empty(self._header.rest.num_bytes)
        self._reader.read_into(self._header.rest.offset, rest)
        if not self._is_whole(self._header.rest, rest):
            raise unusable(self.path, "the weights outside the layers are not what was written")
        return rest

    def _is_whole(self, stored: StoredRecord, record: torch.Tensor) -> bool:
        buffer = record.numpy().data
        return all(self._reader.each(lambda entry: entry.is_whole(buffer), stored.entries))

    def _at(self, stored: StoredRecord) -> torch.Tensor:
        return self._mapped[stored.offset : stored.offset + stored.num_bytes]


Backing = Slab | Store
"""Where the layers' weights of a loaded model are stored: in memory, or in a file."""


def _no_copy(_target: torch.Tensor, _source: torch.Tensor) -> None:
    """Do nothing: a file is read, not copied."""


def require_store(path: Path) -> None:
    """Check that a file is a store of this version, whatever its source.

    Raises:
        StoreError: It is absent, damaged or of another version.
    """
    try:
        _read_header(path)
    except OSError as error:
        raise unusable(path, str(error.strerror)) from error


def unusable(path: Path, why: str) -> StoreError:
    """Return the error that a store has to be built again, and why."""
    return StoreError(
        f"the store {path} cannot be used: {why}",
        limit="it must be whole and made from the weights that are asked for",
        hint="it is built again by the next start",
    )


def _read_header(path: Path) -> Header:
    with path.open("rb") as file:
        magic, _, line = file.read(PAGE_BYTES).partition(b"\n")
        values, _, checksum = line.split(b"\n")[0].rpartition(b" ")
        if magic + b"\n" != MAGIC or f"{zlib.crc32(values):08x}".encode() != checksum:
            raise unusable(path, "its first page is not that of a store")
        place = json.loads(values)
        if place["format"] != FORMAT:
            raise unusable(path, f"its format is {place['format']}, this version's is {FORMAT}")
        num_bytes = os.fstat(file.fileno()).st_size
        whole_bytes = place["header_offset"] + place["header_bytes"]
        if num_bytes != whole_bytes:
            raise unusable(path, f"it has {num_bytes:,} bytes of {whole_bytes:,}")
        file.seek(place["header_offset"])
        text = file.read(place["header_bytes"])
    if zlib.crc32(text) != place["header_checksum"]:
        raise unusable(path, "its header is damaged")
    fields = json.loads(text)
    return Header(
        identity=fields["identity"],
        layers=tuple(map(_stored_record, fields["layers"])),
        rest=_stored_record(fields["rest"]),
    )


def _stored_record(fields: Mapping[str, Any]) -> StoredRecord:
    entries = tuple(Entry(**e | {"shape": tuple(e["shape"])}) for e in fields["entries"])
    return StoredRecord(**dict(fields) | {"entries": entries})


def _require_identity(path: Path, found: Identity, wanted: Identity) -> None:
    wanted = json.loads(json.dumps(wanted))
    differing = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
    if differing:
        raise unusable(path, f"it was made from other {' and '.join(differing)}")


def _require_forms(path: Path, layers: Sequence[StoredRecord]) -> None:
    """Refuse layers of an earlier codec version; a change that keeps sizes must raise `FORMAT`."""
    for field in (field for layer in layers for field in layer.record().fields):
        if field.num_bytes != field.codec.num_bytes(field.shape, field.dtype):
            raise unusable(path, f"its {field.codec.name} is not this version's")


def _map(path: Path) -> torch.Tensor:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return map_file(descriptor, os.fstat(descriptor).st_size, is_writable=False)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------
# Writes a store: tensor by tensor under another name, then renamed in one step.
#
# Nothing is kept in memory. Disk space is reserved before the first layer is converted, so that a
# full disk is found at once and not after an hour. No failure leaves a partial file.

_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def sole_builder(path: Path) -> Iterator[None]:
    """Wait until no other process builds this store, and lock others out.

    After a wait, look again: the store may exist now. The lock ends with the process that holds it,
    so a kill leaves no lock.

    Args:
        path: Path of the store.

    Raises:
        TransferError: The directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise _write_failed(path, error, needed_bytes=0) from error
    with lock:
        yield


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
            raise _write_failed(self._path, error, needed_bytes=self._end) from error


def _flush_names(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_failed(path: Path, error: OSError, *, needed_bytes: int) -> TransferError:
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
