"""The host side of the weights: one page-aligned block of memory, one flat record per layer.

A record has the layout of the slot that it is copied to, so a load is one copy. The block is
mapped at its exact size and, for a GPU, page-locked in place: torch's own pinned allocator would
round it up to a power of two. It is an anonymous file (memfd), so that other processes on the same
machine can map it too, and the model is in memory once however many ranks train it.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat

import torch
from torch import nn

from offload.engine.codecs.codec import NATIVE
from offload.engine.host.layer_layout import Field, Record, adopt, digest, stand_in
from offload.engine.host.mapping import map_file
from offload.errors import CodecError, OffloadError
from offload.plan.machine.machine import GIB

BeforeTouch = Callable[[int, int], str]
"""Called with the address and size of a new block before its pages exist; returns what it did. Used
for NUMA policies."""


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
            field.parameter.data = self.put(layer, index, field.parameter.data)

    def alias(self, layer: int) -> None:
        """Let a layer's parameters alias its record, which is filled already.

        A parameter that is not encoded shows its values; an encoded one shows a placeholder.
        """
        for shown, field in zip(self._shown[layer], self.records[layer].fields, strict=True):
            field.parameter.data = shown

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
        field.parameter.data = values.to(torch_device)


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
