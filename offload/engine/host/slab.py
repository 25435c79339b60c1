"""The host side of the weights: one page-aligned block of memory, one flat record per layer.

A record has the layout of the slot that it is copied to, so a load is one copy. The block is
mapped at its exact size and, for a GPU, page-locked in place: torch's own pinned allocator would
round it up to a power of two. It is an anonymous file (memfd), so that other processes on the same
machine can map it too, and the model is in memory once however many ranks train it.
"""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, repeat

import torch
from torch import nn

from offload.engine.codec import NATIVE, Form
from offload.engine.host.pagelock import Locker, aligned_empty, map_file
from offload.engine.internals import bare, refer
from offload.engine.memory_meter import Arena
from offload.errors import CodecError, OffloadError, TransferError
from offload.plan.facts.codec import aligned
from offload.plan.facts.workload import to_pages
from offload.plan.machine.machine import GIB

# ---------------------------------------------------------------------------------------------
# A layer as one flat record: the offset and the form of each of its parameters.
#
# A record has one layout in storage and on the link. If any of its parameters is encoded, it has a
# second one for compute, in which all parameters are stored decoded, one after the other.


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One parameter's place in its layer's record."""

    parameter: nn.Parameter  # the parameter whose values these are
    offset: int  # first byte in the record
    num_bytes: int  # size in the record
    shape: torch.Size  # shape of the values
    dtype: torch.dtype  # type of the values
    codec: Form  # how they are encoded in the record
    decoded_offset: int  # first byte in the decoded record

    def written(self, record: torch.Tensor) -> torch.Tensor:
        """Return the bytes in a flat uint8 record."""
        return record[self.offset : self.offset + self.num_bytes]

    def view(self, record: torch.Tensor) -> torch.Tensor:
        """Return the tensor inside a flat uint8 record; only if it is not encoded."""
        assert self.codec is NATIVE
        return self.written(record).view(self.dtype).view(self.shape)

    def decoded(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor inside the flat uint8 memory of a decoded record."""
        end = self.decoded_offset + self.shape.numel() * self.dtype.itemsize
        return memory[self.decoded_offset : end].view(self.dtype).view(self.shape)

    def decode(self, record: torch.Tensor, memory: torch.Tensor) -> None:
        """Decode the tensor from a record into the memory of a decoded one, on the same device."""
        self.codec.decode(self.written(record), self.decoded(memory))


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The fields of one layer."""

    fields: tuple[Field, ...]  # one per parameter
    num_bytes: int  # size of the record, whole pages
    decoded_bytes: int = 0  # size of the decoded record, whole pages; 0 if no field is encoded

    @property
    def weight_bytes(self) -> int:
        """Bytes of the fields themselves, without alignment."""
        return sum(field.num_bytes for field in self.fields)


def lay_out(parameters: Sequence[nn.Parameter], codecs: Sequence[Form] | None = None) -> Record:
    """Place the parameters of one layer one after the other; they may be on the meta device.

    Args:
        parameters: In the order of the record.
        codecs: How each is encoded; None encodes none.
    """
    fields = []
    offset = decoded_offset = 0
    for parameter, codec in zip(parameters, codecs or [NATIVE] * len(parameters), strict=True):
        num_bytes = codec.num_bytes(parameter.shape, parameter.dtype)
        fields.append(
            Field(
                parameter=parameter,
                offset=offset,
                num_bytes=num_bytes,
                shape=parameter.shape,
                dtype=parameter.dtype,
                codec=codec,
                decoded_offset=decoded_offset,
            )
        )
        offset += aligned(num_bytes)
        decoded_offset += aligned(parameter.numel() * parameter.element_size())
    is_encoded = any(field.codec is not NATIVE for field in fields)
    return Record(
        fields=tuple(fields),
        num_bytes=to_pages(offset),
        decoded_bytes=to_pages(decoded_offset) if is_encoded else 0,
    )


def stand_in(field: Field) -> torch.Tensor:
    """Return a placeholder for encoded values: all NaN, in the memory of one element."""
    return torch.full((), float("nan"), dtype=field.dtype).expand(field.shape)


def is_stand_in(values: torch.Tensor) -> bool:
    """Return whether a parameter shows a placeholder instead of values."""
    return values.numel() > 1 and not any(values.stride())


def adopt(
    records: Sequence[Record],
    shown: Sequence[Sequence[torch.Tensor]],
    groups: Sequence[Sequence[nn.Parameter]],
) -> tuple[Record, ...]:
    """Return the records of the parameters that alias tensors a backing has returned.

    They are matched by address, so modules that were wrapped around them since do not matter. A
    parameter with other memory is in no record.

    Args:
        records: The layers' layouts.
        shown: By layer and field, the tensors that the backing returned.
        groups: Each layer's parameters.

    Raises:
        OffloadError: None of them aliases any of these tensors.
    """
    adopted = tuple(map(_adopt_layer, records, shown, groups))
    if not any(record.fields for record in adopted):
        raise OffloadError(
            "no parameter of the model is where its layers were loaded to",
            limit="an engine that is closed or detached gives parameters other memory",
            hint="attach without `backing`, or load the model again",
        )
    return adopted


def _adopt_layer(
    record: Record, shown: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]
) -> Record:
    fields = {
        tensor.data_ptr(): field
        for tensor, field in zip(shown, record.fields, strict=True)
        if tensor.numel()
    }
    adopted = []
    for parameter in parameters:
        field = fields.get(parameter.data_ptr()) if parameter.numel() else None
        if field is None or (field.shape, field.dtype) != (parameter.shape, parameter.dtype):
            continue
        if parameter.is_contiguous() or is_stand_in(bare(parameter)):
            adopted.append(replace(field, parameter=parameter))
    return replace(record, fields=tuple(adopted))


def digest(records: Sequence[Record]) -> str:
    """Return a digest of the layout; equal layouts have equal digests."""
    places = [
        [(f.offset, tuple(f.shape), str(f.dtype), f.codec.name) for f in record.fields]
        for record in records
    ]
    return hashlib.sha256(repr(places).encode()).hexdigest()


BeforeTouch = Callable[[int, int], str]
"""Called with the address and size of a new block before its pages exist; returns what it did. Used
for NUMA policies."""


Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies the bytes of its second argument into its first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlabHandle:
    """What another process of this machine needs to map a slab."""

    pid: int
    descriptor: int
    num_bytes: int
    layout: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Mapped memory and its file, or why it has no file."""

    memory: torch.Tensor
    descriptor: int | None
    reason: str


class Slab:
    """The records of all layers in one block of host memory.

    Attributes:
        records: The layers' layouts.
        num_bytes: Size of the block.
        is_opened: Whether it belongs to another process, which fills it.
        descriptor: The file of the block, until `close`; None if there is none.
        reason: Why other processes cannot map it; empty if they can.
        policy: What `before_touch` returned; empty if there was none.
    """

    def __init__(
        self,
        records: Sequence[Record],
        *,
        before_touch: BeforeTouch | None = None,
        block: Block | None = None,
        encoding_device: torch.device | None = None,
    ) -> None:
        """Map a new block, whose pages are allocated as they are filled, or use a given one.

        Args:
            records: One per layer.
            before_touch: Called once with the block's address and size, before its first use.
            block: Memory of the right size, as `open` makes it.
            encoding_device: Where values are encoded; None encodes them on their own device.
        """
        self.records = tuple(records)
        offsets = [0, *accumulate(record.num_bytes for record in records)]
        self.num_bytes = offsets[-1]
        self.is_opened = block is not None
        block = new_block(self.num_bytes) if block is None else block
        self._block, self.descriptor, self.reason = block.memory, block.descriptor, block.reason
        self.policy = ""
        if before_touch is not None:
            self.policy = before_touch(self._block.data_ptr(), self.num_bytes)
        self._layers = [self._block[start:end] for start, end in pairwise(offsets)]
        self._layout = digest(records)
        self._laid_out = self.records
        self._encoding_device = encoding_device
        self._shown = [list(map(self._show, r.fields, repeat(i))) for i, r in enumerate(records)]

    @classmethod
    def open(
        cls, handle: SlabHandle, records: Sequence[Record], *, is_writable: bool = False
    ) -> "Slab":
        """Map the slab of another process; this allocates no memory.

        Args:
            handle: The other slab's `handle`.
            records: The same layout, of this process's own parameters.
            is_writable: Whether this process may write to it. If not, a write ends the process.

        Raises:
            OffloadError: The slab is gone, cannot be reached, or holds other layers.
        """
        if digest(records) != handle.layout:
            raise OffloadError(
                f"the slab of process {handle.pid} holds other layers than this process's model",
                limit="ranks share a slab of one model in one dtype",
                hint="start every rank with the same recipe",
            )
        return cls(records, block=open_block(handle, is_writable=is_writable))

    @property
    def handle(self) -> SlabHandle:
        """What `Slab.open` needs in another process; valid until `close`.

        Raises:
            OffloadError: The block cannot be shared, or was closed.
        """
        if self.descriptor is None:
            raise OffloadError(
                f"the slab cannot be shared: {self.reason or 'it was closed'}",
                limit="other processes reach it as an open memfd",
                hint="train in one process, or allow memfd_create in the container",
            )
        return SlabHandle(
            pid=os.getpid(),
            descriptor=self.descriptor,
            num_bytes=self.num_bytes,
            layout=self._layout,
        )

    @property
    def memory(self) -> torch.Tensor:
        """The whole block, uint8 (num_bytes,)."""
        return self._block

    @property
    def address(self) -> int:
        """Start of the block; a layer whose weights all train has no address of its own."""
        return self._block.data_ptr()

    def layer(self, layer: int) -> torch.Tensor:
        """Return a layer's record, uint8 (record.num_bytes,)."""
        return self._layers[layer]

    def deliver(self, layer: int, offset: int, target: torch.Tensor, copy: Copy) -> None:
        """Fill `target`, uint8, with a layer's bytes from `offset` on, on the running lane."""
        copy(target, self._layers[layer][offset : offset + target.numel()])

    def put(self, layer: int, index: int, values: torch.Tensor) -> torch.Tensor:
        """Write a field's values, unless another process fills the slab; return the tensor to show.

        Raises:
            CodecError: The values cannot be encoded in the field's form.
        """
        if not self.is_opened:
            field, name = self.records[layer].fields[index], f"weight {index} of layer {layer}"
            target = field.written(self._layers[layer])
            write(name, field, values, target, self._encoding_device)
        return self._shown[layer][index]

    def take(self, layer: int) -> None:
        """Copy a layer's parameters into its record and let them alias it.

        Their previous memory is free once nothing else references it.

        Raises:
            CodecError: Values cannot be encoded in their field's form.
        """
        for index, field in enumerate(self.records[layer].fields):
            refer(field.parameter, self.put(layer, index, bare(field.parameter)))

    def alias(self, layer: int) -> None:
        """Let a layer's parameters alias its record, which is filled already.

        A parameter that is not encoded shows its values; an encoded one shows a placeholder.
        """
        for shown, field in zip(self._shown[layer], self.records[layer].fields, strict=True):
            refer(field.parameter, shown)

    def adopt(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Make the parameters that already alias the records their fields.

        Args:
            groups: The parameters to look for, per layer; see `adopt`.

        Raises:
            OffloadError: None of them is in this slab.
        """
        self.records = adopt(self._laid_out, self._shown, groups)

    def _show(self, field: Field, layer: int) -> torch.Tensor:
        if field.codec is not NATIVE:
            return stand_in(field)
        return field.view(self._layers[layer])

    def close(self) -> None:
        """Stop sharing. The memory is freed with its last view."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def write(
    name: str,
    field: Field,
    values: torch.Tensor,
    target: torch.Tensor,
    device: torch.device | None,
) -> None:
    """Write a field's values into its bytes on the host, encoded on `device` if that is faster.

    Raises:
        CodecError: They cannot be encoded; the error names the weight and the reason.
    """
    try:
        _write(field, values, target, device)
    except CodecError as error:
        what = f"{name}, {tuple(field.shape)}: {error.what}"
        raise CodecError(what, limit=error.limit, hint=error.hint) from error


def _write(
    field: Field, values: torch.Tensor, target: torch.Tensor, device: torch.device | None
) -> None:
    values = values.detach().contiguous()
    if field.codec is NATIVE or device is None or device.type == "cpu":
        field.codec.encode(values, target)
        return
    encoded = torch.empty(target.numel(), dtype=torch.uint8, device=device)
    field.codec.encode(values.to(device), encoded)
    target.copy_(encoded)


def give_back(record: Record, memory: torch.Tensor, torch_device: torch.device) -> None:
    """Give a layer's parameters memory of their own, on `torch_device`.

    Args:
        record: Its layout.
        memory: The record, uint8 on the host.
        torch_device: Where the parameters are to be.
    """
    for field in record.fields:
        values = torch.empty(field.shape, dtype=field.dtype)
        field.codec.decode(field.written(memory), values)
        refer(field.parameter, values.to(torch_device))


def new_block(num_bytes: int) -> Block:
    """Return memory whose pages are allocated as they are filled, with a file if one can be had."""
    descriptor, reason = _new_file(num_bytes)
    if descriptor is None:
        memory = torch.frombuffer(mmap.mmap(-1, max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]
    else:
        memory = map_file(descriptor, num_bytes, is_writable=True)
    return Block(memory=memory, descriptor=descriptor, reason=reason)


def _new_file(num_bytes: int) -> tuple[int | None, str]:
    """Return a new memfd of a size; or None and the reason."""
    if not hasattr(os, "memfd_create"):
        return None, "this system has no memfd_create"
    try:
        descriptor = os.memfd_create("sluice-slab")
    except OSError as error:
        return None, f"memfd_create: {error.strerror}"
    try:
        os.ftruncate(descriptor, max(1, num_bytes))
    except OSError as error:
        os.close(descriptor)
        return None, f"a memfd of {num_bytes / GIB:.2f} GiB: {error.strerror}"
    return descriptor, ""


def open_block(handle: SlabHandle, *, is_writable: bool) -> Block:
    """Map the memory of another process.

    Raises:
        OffloadError: It is gone, or cannot be reached.
    """
    path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDWR if is_writable else os.O_RDONLY)
    except OSError as error:
        raise OffloadError(
            f"the slab of process {handle.pid} cannot be opened: {error.strerror} ({path})",
            limit="ranks that share a slab run on one machine as one user, and while it lives",
            hint="start all ranks with one `accelerate launch`",
        ) from error
    memory = map_file(descriptor, handle.num_bytes, is_writable=is_writable)
    return Block(memory=memory, descriptor=descriptor, reason="")


Allocate = Callable[[int], torch.Tensor]


def by_place(
    layers: Iterable[int], sizes_of: Callable[[int], Sequence[int]]
) -> dict[tuple[int, int], int]:
    """Return sizes by layer and micro-batch from those of each layer by micro-batch."""
    return {(layer, m): size for layer in layers for m, size in enumerate(sizes_of(layer))}


class Stash:
    """A host block with a place per layer and micro-batch, and buffers on the device.

    Both grow to the largest step seen and are kept, so that later steps do not allocate.
    """

    def __init__(
        self,
        name: str,
        *,
        allocate_host: Allocate,
        free_host: Callable[[torch.Tensor], None],
        torch_device: torch.device,
    ) -> None:
        """Allocate nothing yet.

        Args:
            name: The plan's term for the host block.
            allocate_host: Returns uint8 host memory of a size, for copies to and from the device.
            free_host: Frees it after the copies that still use it.
            torch_device: Where layers compute.
        """
        self._name = name
        self._allocate_host, self._free_host = allocate_host, free_host
        self._torch_device = torch_device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._buffers: list[torch.Tensor] = []
        self._places: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def host_bytes(self) -> int:
        """Host memory allocated."""
        return self._host.numel()

    @property
    def arena(self) -> Arena:
        """The host block; the plan counts the device buffers with what is on the device."""
        return Arena(name=self._name, blocks=[self._host])

    def prepare(self, sizes: Mapping[tuple[int, int], int], *, num_buffers: int) -> None:
        """Make room for a step; must not be called while one runs.

        Args:
            sizes: Bytes by layer and micro-batch.
            num_buffers: Device buffers that the schedule uses.
        """
        ends = [0, *accumulate(sizes.values())]
        self._places = dict(zip(sizes, pairwise(ends), strict=True))
        if ends[-1] > self._host.numel():
            self._free_host(self._host)  # free the old one before allocating the new one
            self._host = torch.empty(0, dtype=torch.uint8)
            self._host = self._allocate_host(ends[-1])
        largest = max(sizes.values(), default=0)
        if len(self._buffers) < num_buffers or any(x.numel() < largest for x in self._buffers):
            self._buffers = []
            self._buffers = [
                torch.empty(largest, dtype=torch.uint8, device=self._torch_device)
                for _ in range(num_buffers)
            ]

    def place(self, layer: int, micro_batch: int) -> torch.Tensor:
        """Return the host memory of one tensor, uint8."""
        start, stop = self._places[layer, micro_batch]
        return self._host[start:stop]

    def buffer(self, number: int, num_bytes: int) -> torch.Tensor:
        """Return the device memory that a tensor leaves from or comes back to, uint8."""
        return self._buffers[number][:num_bytes]


class HostBlocks:
    """Page-aligned memory at its exact size, page-locked for a GPU."""

    def __init__(
        self, *, locker: Locker | None, before_touch: BeforeTouch, is_anywhere: bool
    ) -> None:
        """Allocate nothing yet.

        Args:
            locker: What page-locks; None if no device needs it.
            before_touch: Called with address and size of each block, before its first use.
            is_anywhere: Whether memory is as good wherever it is on this machine.
        """
        self._locker = locker
        self._before_touch = before_touch
        self._is_anywhere = is_anywhere
        self._locked: set[int] = set()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return a new block, uint8.

        Raises:
            TransferError: The system refuses to page-lock it.
        """
        block = aligned_empty(num_bytes)
        if not num_bytes:
            return block
        self._before_touch(block.data_ptr(), num_bytes)
        if self._locker is not None:
            refusal = self._locker.register(block.data_ptr(), num_bytes)
            if refusal is not None:
                raise TransferError(
                    f"page-locking {num_bytes / GIB:.2f} GiB of host memory failed: {refusal}",
                    limit="what the device copies to must be page-locked",
                    hint="raise the limit (`ulimit -l unlimited`; on WSL2 Windows sets it), or keep"
                    ' what it copies there: `stash="device"`, `sent_graphs=0`, `sent_outputs=0`,'
                    ' `embeddings="device"`, `head="device"`',
                )
            self._locked.add(block.data_ptr())
        return block

    def hold(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a contiguous tensor where they are, or a copy of them, uint8.

        They stay where they are if nothing else is in their memory, it may be anywhere, and the
        system page-locks it. So a large tensor is not there twice for a moment.

        Raises:
            TransferError: The system refuses to page-lock the copy.
        """
        own = values.view(-1).view(torch.uint8)
        is_alone = values.untyped_storage().nbytes() <= to_pages(values.nbytes)
        is_alone &= values.storage_offset() == 0  # torch asks whether that place is locked
        if values.device.type == "cpu" and is_alone and self._is_anywhere and self._locks(own):
            return own
        return self.allocate(values.nbytes).copy_(own)

    def _locks(self, block: torch.Tensor) -> bool:
        """Page-lock memory that is in use already, if it has to be; return whether it is fit."""
        address = block.data_ptr()
        if self._locker is None or not block.nbytes:
            return True
        if self._locker.register(address, block.nbytes) is not None:
            return False
        self._locked.add(address)
        return True

    def free(self, block: torch.Tensor) -> None:
        """Unlock a block that no copy uses; its memory is freed with its last view.

        Blocks must be freed through this call: otherwise CUDA would treat memory that is mapped
        at the same address later as locked.
        """
        self._unlock(block.data_ptr())

    def close(self) -> None:
        """Unlock all blocks. The memory of each is freed with its last view."""
        for address in tuple(self._locked):
            self._unlock(address)

    def _unlock(self, address: int) -> None:
        if self._locker is not None and address in self._locked:
            self._locked.remove(address)
            self._locker.unregister(address)
