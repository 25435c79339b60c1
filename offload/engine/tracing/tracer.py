"""Counts the storages that live while operations run, whether on real tensors or on fake ones.

A `FakeTensorMode` runs a model's own forward and backward on shapes alone. Under it a tracer sees
each storage come and go as it would on a device, in seconds and without a byte of the model.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.engine.tracing.allocator import Memory

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

    def backing(self, tensors: Sequence[torch.Tensor]) -> None:
        """Place tensors that are there already."""
        for tensor in tensors:
            self._place(tensor)

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave tensors out that something else has a place for."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
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
        return (
            isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._storages
        )

    def _place(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._storages or not num_bytes:
            return
        handle = self._memory.allocate(num_bytes)

        def die(_: object) -> None:
            del self._storages[key]
            self._memory.free(handle)

        self._storages[key] = weakref.ref(storage, die)
