"""The host side of the weights: one page-aligned block of memory, one flat record per layer.

A record has the layout of the slot that it is copied to, so a load is one copy. The block is
mapped at its exact size and, for a GPU, page-locked in place: torch's own pinned allocator would
round it up to a power of two. It is a file without a name (memfd), so that other processes of the
same machine can map it too and a model lies in memory once, however many ranks train it.
"""

import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from offload.engine.host.mapping import map_file, to_pages
from offload.errors import OffloadError
from offload.plan.machine import GIB

_ALIGN_BYTES = 256

BeforeTouch = Callable[[int, int], str]
"""Is given the address and size of a new block before its pages exist, and says what it did: NUMA
policies go here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One parameter's place in its layer's record."""

    parameter: nn.Parameter
    offset: int
    num_bytes: int
    shape: torch.Size
    dtype: torch.dtype

    def view(self, record: torch.Tensor) -> torch.Tensor:
        """Return this parameter's tensor inside a flat uint8 record."""
        flat = record[self.offset : self.offset + self.num_bytes]
        return flat.view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The fields of one layer and their total size, whole pages."""

    fields: tuple[Field, ...]
    num_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters themselves, without alignment."""
        return sum(field.num_bytes for field in self.fields)


def lay_out(parameters: Sequence[nn.Parameter]) -> Record:
    """Place the parameters of one layer one behind the other; they may be on the meta device."""
    fields = []
    offset = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        fields.append(
            Field(
                parameter=parameter,
                offset=offset,
                num_bytes=num_bytes,
                shape=parameter.shape,
                dtype=parameter.dtype,
            )
        )
        offset += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return Record(fields=tuple(fields), num_bytes=to_pages(offset))


def adopt(
    layers: Sequence[torch.Tensor], groups: Sequence[Sequence[nn.Parameter]]
) -> tuple[Record, ...]:
    """Return the records of layers whose parameters lie in their memory already.

    They are told by address, so it does not matter what has been wrapped around them since. A
    parameter that lies elsewhere is in no record.

    Args:
        layers: Each layer's record, uint8.
        groups: Each layer's parameters.

    Raises:
        OffloadError: None of them lies there.
    """
    records = tuple(map(_adopt_layer, layers, groups))
    if not any(record.fields for record in records):
        raise OffloadError(
            "no parameter of the model lies where its layers were loaded to",
            limit="an engine that is closed or detached gives parameters other memory",
            hint="attach without `cargo`, or load the model again",
        )
    return records


def _adopt_layer(memory: torch.Tensor, parameters: Sequence[nn.Parameter]) -> Record:
    fields = []
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        offset = parameter.data_ptr() - memory.data_ptr()
        is_inside = num_bytes > 0 and 0 <= offset <= memory.numel() - num_bytes
        if is_inside and parameter.is_contiguous():
            fields.append(
                Field(
                    parameter=parameter,
                    offset=offset,
                    num_bytes=num_bytes,
                    shape=parameter.shape,
                    dtype=parameter.dtype,
                )
            )
    return Record(fields=tuple(fields), num_bytes=memory.numel())


@dataclass(frozen=True, kw_only=True, slots=True)
class SlabHandle:
    """What another process of this machine needs to map a slab; it can be pickled and sent."""

    pid: int
    descriptor: int
    num_bytes: int
    layout: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Mapped memory, the file behind it, and why there is none."""

    memory: torch.Tensor
    descriptor: int | None
    reason: str


class Slab:
    """The records of all layers in one block of host memory.

    Attributes:
        records: The layers' layouts.
        num_bytes: Size of the block.
        descriptor: The file behind it, until `close`; None where there is none.
        reason: Why other processes cannot map it; empty where they can.
        policy: What `before_touch` said; empty where there was none.
    """

    def __init__(
        self,
        records: Sequence[Record],
        *,
        before_touch: BeforeTouch | None = None,
        block: Block | None = None,
    ) -> None:
        """Map a new block, whose pages take memory as they are filled, or use one that is there.

        Args:
            records: One per layer.
            before_touch: Called once with the block's address and size, before its first use.
            block: Memory of the right size, as `open` makes it.
        """
        self.records = tuple(records)
        offsets = [0, *accumulate(record.num_bytes for record in records)]
        self.num_bytes = offsets[-1]
        self._is_opened = block is not None
        block = _new_block(self.num_bytes) if block is None else block
        self._block, self.descriptor, self.reason = block.memory, block.descriptor, block.reason
        self.policy = ""
        if before_touch is not None:
            self.policy = before_touch(self._block.data_ptr(), self.num_bytes)
        self._layers = [self._block[start:end] for start, end in pairwise(offsets)]
        self._layout = _digest(records)

    @classmethod
    def open(
        cls, handle: SlabHandle, records: Sequence[Record], *, is_writable: bool = False
    ) -> "Slab":
        """Map the slab of another process; no memory is taken.

        Args:
            handle: The other slab's `handle`.
            records: The same layout, of this process's own parameters.
            is_writable: Whether this process may write to it. A write ends it otherwise.

        Raises:
            OffloadError: The slab is gone, cannot be reached, or holds other layers.
        """
        if _digest(records) != handle.layout:
            raise OffloadError(
                f"the slab of process {handle.pid} holds other layers than this process's model",
                limit="ranks share a slab of one model in one dtype",
                hint="start every rank with the same recipe",
            )
        return cls(records, block=_open_block(handle, is_writable=is_writable))

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
    def address(self) -> int:
        """Where the block starts; a layer's own address is none where all of its weights train."""
        return self._block.data_ptr()

    def layer(self, layer: int) -> torch.Tensor:
        """Return a layer's record, uint8 (record.num_bytes,)."""
        return self._layers[layer]

    def put(self, layer: int, index: int, values: torch.Tensor) -> torch.Tensor:
        """Copy a field's values in and return its view; a slab of another process is filled."""
        view = self.records[layer].fields[index].view(self._layers[layer])
        if not self._is_opened:
            view.copy_(values)
        return view

    def take(self, layer: int) -> None:
        """Copy a layer's parameters in from where they are and let them alias the record.

        The memory that they had before is free once nobody else holds it.
        """
        for field in self.records[layer].fields:
            view = field.view(self._layers[layer])
            view.copy_(field.parameter.data)
        self.alias(layer)

    def alias(self, layer: int) -> None:
        """Let a layer's parameters alias its record, which is filled already."""
        for field in self.records[layer].fields:
            field.parameter.data = field.view(self._layers[layer])

    def adopt(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Make those parameters the fields of the records that lie in them already.

        Args:
            groups: The parameters to look for, per layer; see `adopt`.

        Raises:
            OffloadError: None of them lies there.
        """
        self.records = adopt(self._layers, groups)

    def give_back(self, layer: int, torch_device: torch.device) -> None:
        """Give a layer's parameters memory of their own again, on `torch_device`."""
        for field in self.records[layer].fields:
            view = field.view(self._layers[layer])
            field.parameter.data = view.clone().to(torch_device)

    def close(self) -> None:
        """Stop sharing. The memory is freed with the last view of it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _new_block(num_bytes: int) -> Block:
    descriptor, reason = _new_file(num_bytes)
    if descriptor is None:
        memory = torch.frombuffer(mmap.mmap(-1, max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]
    else:
        memory = map_file(descriptor, num_bytes, is_writable=True)
    return Block(memory=memory, descriptor=descriptor, reason=reason)


def _new_file(num_bytes: int) -> tuple[int | None, str]:
    """Return a new memfd of a size; or None and the reason why there is none."""
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


def _open_block(handle: SlabHandle, *, is_writable: bool) -> Block:
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


def _digest(records: Sequence[Record]) -> str:
    places = [[(f.offset, tuple(f.shape), str(f.dtype)) for f in r.fields] for r in records]
    return hashlib.sha256(repr(places).encode()).hexdigest()
