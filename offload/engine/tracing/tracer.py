"""Counts the storages that live while operations run, whether on real tensors or on fake ones.

A `FakeTensorMode` runs a model's own forward and backward on shapes alone. Under it a tracer sees
each storage come and go as it would on a device, in seconds and without a byte of the model.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol
from unittest import mock

import torch
from torch import nn

from offload.engine.host.slab import is_stand_in
from offload.engine.internals import FakeTensorMode, TorchDispatchMode, memory_key, tree_leaves
from offload.engine.model.layers import LayeredModel


class Memory(Protocol):
    """Memory in which a trace's tensors are placed."""

    def allocate(self, num_bytes: int) -> int:
        """Place a tensor; return a handle."""

    def free(self, handle: int) -> None:
        """Let a tensor go."""


class LiveBytes:
    """Counts live bytes, like a device without a caching allocator.

    Attributes:
        live_bytes: The size of the tensors that are there.
        peak_bytes: The most since the last `reset_peak`.
        largest_bytes: The size of the largest tensor that ever was.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.live_bytes = self.peak_bytes = self.largest_bytes = 0
        self._sizes: dict[int, int] = {}
        self._next = 0

    def allocate(self, num_bytes: int) -> int:
        """Count a tensor."""
        self._next += 1
        self._sizes[self._next] = num_bytes
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.largest_bytes = max(self.largest_bytes, num_bytes)
        return self._next

    def free(self, handle: int) -> None:
        """Stop counting a tensor."""
        self.live_bytes -= self._sizes.pop(handle)

    def reset_peak(self) -> None:
        """Forget peaks before now."""
        self.peak_bytes = self.live_bytes


def fake_copy(model: Any, mode: FakeTensorMode) -> Any:
    """Copy a model, on the meta device or with weights, as one on a CPU without weights.

    Tensors that are shared stay shared. Nothing of the model itself is changed or read.
    """
    copies: dict[int, object] = {}
    with torch.no_grad(), mode:
        for tensor in (*model.parameters(), *model.buffers()):
            if is_stand_in(tensor):  # for weights that wait encoded, and compute side by side
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            else:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            copies[id(tensor)] = fake
    return copy.deepcopy(model, copies)


def num_experts(layered: LayeredModel) -> int:
    """Return how many experts a layer has at most, as their modules say."""
    counts = [getattr(m, "num_experts", None) for m in layered.layers.modules()]
    return max((count for count in counts if isinstance(count, int)), default=0)


@contextmanager
def values_are_unasked() -> Iterator[None]:
    """Let transformers take each row for one sequence, and torch parameters of distributions.

    The former looks at the values of the positions for the ends of packed sequences. Fake ones have
    none: it would then write out a mask, which it does not for rows without padding. The latter
    checks, e.g., the normal distribution by which Gemma 3n finds its largest activations.
    """
    check = torch.distributions.Distribution.set_default_validate_args
    with mock.patch("transformers.masking_utils.find_packed_sequence_indices", _find_none):
        check(value=False)
        try:
            yield
        finally:
            check(value=__debug__)


def _find_none(_: torch.Tensor) -> None:
    """Find no packed sequences. A mock would keep the positions, which would then count."""


# Bytes that a kernel takes inside, next to its arguments and results.
Workspaces = Mapping[Any, Callable[[Sequence[Any], Sequence[torch.Tensor]], int]]
_NONE: Workspaces = {}


class Tracer(TorchDispatchMode):
    """Hands each storage to a memory when it is made, and takes it back when it dies."""

    def __init__(self, memory: Memory, workspaces: Workspaces = _NONE) -> None:
        """Trace nothing yet.

        Args:
            memory: Where storages are placed.
            workspaces: Operation -> what its kernel takes inside, given arguments and results.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._memory = memory
        self._workspaces = workspaces
        self._storages: dict[int, weakref.ref[Any]] = {}

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Place tensors that are there already."""
        for tensor in tensors:
            self._place(tensor)

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave tensors out that something else has a place for."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = memory_key(tensor)
            self._storages[key] = weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: int, _: object) -> None:
        del self._storages[key]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and place what it made."""
        if func is torch.ops.prim.device.default:  # every second call
            return func(*args)
        self.ignore([t for t in tree_leaves((args, kwargs)) if self._is_new(t)])
        out = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for result in results:
            self._place(result)
        if func in self._workspaces:
            self._memory.free(self._memory.allocate(self._workspaces[func](args, results)))
        return out

    def _is_new(self, leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) and memory_key(leaf) not in self._storages

    def _place(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = memory_key(tensor), storage.nbytes()
        if key in self._storages or not num_bytes:
            return
        handle = self._memory.allocate(num_bytes)

        def die(_: object) -> None:
            del self._storages[key]
            self._memory.free(handle)

        self._storages[key] = weakref.ref(storage, die)
