"""What autograd saves of a layer, sent away from its forward visit to its backward visit.

Problem. A layer whose graph is kept is not computed again, but all that autograd saved of it stays
on the device for most of the step. The host has more room, and the link has time.

Idea. Hooks on saved tensors leave a note in the place of each tensor: its shape, strides, type and
which block of memory it views. When the visit ends, each block is copied once to one buffer and let
go of, however many tensors view it. The buffer leaves and comes back as two ops of the schedule;
then the notes are views of the buffer that it came back to. Values, strides and the alignment of
blocks are those of the forward, so the backward runs the same kernels on the same bits, as if the
graph had stayed. Nothing is computed again, so nothing is drawn again.

What stays where it is: weights, which alias slots and are there again for the backward; arguments
that layers are passed, such as masks and rotary tables, which are held for the whole pass; and what
is not plain memory on the compute device (sparse tensors, subclasses, scalars on the host). So does
what a custom function keeps without `save_for_backward`: gradients are right, but the device has
less room than planned.

Autograd notices that a saved tensor was written to, but not where hooks took it. So versions are
compared when the visit ends: a layer that wrote to what it had saved is computed again, and then
autograd raises its own error.

Size. How many bytes a graph takes is known once one was computed. A pass without gradients measures
each layer when a micro-batch is larger than any before it (`GraphSizes`); the schedule then counts
on these bytes. If a graph is larger even so, as experts may save more for other tokens, its layer
is computed again with a warning, and the size is raised for the next step.
"""

from collections.abc import Container
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

_ALIGN_BYTES = 512  # of a block in a buffer, as of any block of torch's CUDA allocator

Shape = tuple[int, ...]
"""Sizes of a micro-batch, with each of which a graph grows."""


@dataclass(frozen=True, slots=True)
class _Note:
    """A saved tensor: the number of its block, and how it views it."""

    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class SavedTensors:
    """What autograd saved in one visit: first in memory of its own, then in a buffer."""

    def __init__(self, *, staying: Container[int], torch_device: torch.device) -> None:
        """Save nothing yet.

        Args:
            staying: Addresses of the blocks of memory that stay where they are.
            torch_device: Where layers compute.
        """
        self._staying, self._torch_device = staying, torch_device
        self._held: list[tuple[torch.Tensor, int]] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._starts = [0]
        self._buffer: torch.Tensor | None = None

    def hooked(self) -> AbstractContextManager[None]:
        """Return a context in which autograd hands over what it saves."""
        hooks: AbstractContextManager[None] = saved_tensors_hooks(self.pack, self.unpack)
        return hooks

    @property
    def num_bytes(self) -> int:
        """Size of a buffer for all blocks."""
        return self._starts[-1]

    @property
    def num_blocks(self) -> int:
        """Blocks of memory that leave."""
        return len(self._numbers)

    @property
    def is_unwritten(self) -> bool:
        """Whether the tensors are as they were when they were saved."""
        return all(x._version == version for x, version in self._held)

    def pack(self, x: torch.Tensor) -> object:
        """Leave a note in the place of a tensor that autograd saves, unless it stays."""
        if not self._leaves(x):
            return x
        self._held.append((x, x._version))
        block = x.untyped_storage()
        number = self._numbers.setdefault((block.data_ptr(), block.nbytes()), self.num_blocks)
        if number == len(self._starts) - 1:
            size = -(-block.nbytes() // _ALIGN_BYTES) * _ALIGN_BYTES
            self._starts.append(self._starts[-1] + size)
        return _Note(number, x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))

    def unpack(self, saved: object) -> torch.Tensor:
        """Return a tensor that the backward needs, in the buffer that it came back to.

        A layer that differentiates while it computes gets the tensor where it still is.
        """
        if isinstance(saved, torch.Tensor):
            return saved
        assert isinstance(saved, _Note)
        if self._buffer is None:
            memory = next(x for x, _ in self._held if self._number(x) == saved.block)
            start = 0
        else:
            memory = self._buffer
            start = int(memory.storage_offset()) + self._starts[saved.block]
        place = start // saved.dtype.itemsize + saved.offset
        view = torch.empty(0, dtype=saved.dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), place, saved.shape, saved.strides)

    @torch.no_grad()
    def move_to(self, buffer: torch.Tensor) -> None:
        """Copy each block to a uint8 buffer, and let go of it."""
        blocks = {self._number(x): x.untyped_storage() for x, _ in self._held}
        for number, block in blocks.items():
            source = torch.empty(0, dtype=torch.uint8, device=self._torch_device).set_(block)
            start = self._starts[number]
            buffer[start : start + source.numel()].copy_(source)
        self._held.clear()

    def is_in(self, buffer: torch.Tensor) -> None:
        """Note the buffer that all blocks came back to."""
        self._buffer = buffer

    def _number(self, x: torch.Tensor) -> int:
        block = x.untyped_storage()
        return self._numbers[block.data_ptr(), block.nbytes()]

    def _leaves(self, x: torch.Tensor) -> bool:
        is_plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided
        if not is_plain or x.device != self._torch_device or x.is_conj() or x.is_neg():
            return False
        address = x.untyped_storage().data_ptr()
        return bool(address) and address not in self._staying


class GraphSizes:
    """What autograd saves of each layer, by the shape of a micro-batch."""

    def __init__(self) -> None:
        """Know none."""
        self._sizes: dict[object, dict[Shape, int]] = {}

    def of(self, layer: object, shape: Shape) -> int | None:
        """Return the bytes of a shape, or those of the next larger one; None if all are smaller."""
        sizes = self._sizes.get(layer, {})
        if shape in sizes:
            return sizes[shape]
        larger = (
            size
            for known, size in sizes.items()
            if all(a <= b for a, b in zip(shape, known, strict=True))
        )
        return min(larger, default=None)

    def add(self, layer: object, shape: Shape, num_bytes: int) -> None:
        """Note what a visit took."""
        sizes = self._sizes.setdefault(layer, {})
        sizes[shape] = max(num_bytes, sizes.get(shape, 0))
