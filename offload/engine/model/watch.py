"""Which tensors a part of a model reads and writes that are not its own.

Problem. A layer can leave a tensor in a global, an attribute or a closure, and another layer, or
what follows the layers, can read it there. No argument shows it, and layer by layer the value would
be that of another micro-batch and its gradient would be lost.

Idea. Every computation passes torch's dispatcher. A watch notes there which part made which memory.
What a part reads must have been handed to it, be made by itself, or have been there before all
parts: constants and weights. What it writes to must not outlive its call. Only what outlives a part
is kept in mind, and only for as long as it lives.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_Key = int


class Watch(TorchDispatchMode):
    """Notes what is read and written while it is switched on, part by part.

    Attributes:
        problem: The first thing that a part did and may not do; empty if there was none.
        culprit: That part.
    """

    def __init__(self, homes: Mapping[int, int]) -> None:
        """Watch nothing yet.

        Args:
            homes: The layer that a parameter, by id, is a part of, and no other is.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._homes = homes
        self._makers: dict[_Key, str] = {}
        self._alive: dict[_Key, weakref.ref[Any]] = {}
        self._written: dict[_Key, weakref.ref[Any]] = {}
        self.problem = self.culprit = ""
        self.begin("", layer=None, given=())

    def begin(self, part: str, *, layer: int | None, given: Iterable[torch.Tensor]) -> None:
        """Let another part begin.

        Args:
            part: It, in words; two calls of one layer are two parts.
            layer: Which layer it is, whose weights it may read.
            given: What it is handed.
        """
        self._part, self._layer = part, layer
        self._given = set(_keys(given))
        self._written = {}

    def made_by(self, part: str, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors as made by a part."""
        for tensor in tensors:
            self._made(tensor, part)

    def end(self, returned: Iterable[torch.Tensor] = ()) -> None:
        """Let the current part end.

        Args:
            returned: What it returns, which may live on.
        """
        allowed = {*_keys(returned), *self._given}
        if any(ref() is not None for key, ref in self._written.items() if key not in allowed):
            self._object("writes to a tensor that it did not make and that outlives its call")
        self._written = {}

    @contextmanager
    def aside(self) -> Iterator["Aside"]:
        """Take nothing amiss meanwhile, unless it is asked to be kept."""
        before = self.problem, self.culprit, dict(self._written)
        notes = Aside()
        yield notes
        if not notes.are_kept:
            self.problem, self.culprit, self._written = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and note what it read, wrote and made."""
        kwargs = kwargs or {}
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in read:
            self._read(tensor)
        if func._schema.is_mutable:
            for tensor in _written_by(func, args, kwargs):
                key, storage = _storage(tensor)
                if self._makers.get(key) != self._part:
                    self._written[key] = weakref.ref(storage)
        out = func(*args, **kwargs)
        before = set() if func in _LIFTS else set(_keys(read))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and _storage(leaf)[0] not in before:
                self._made(leaf, self._part)
        return out

    def _read(self, tensor: torch.Tensor) -> None:
        home = self._homes.get(id(tensor), self._layer)
        if home != self._layer:
            self._object(f"reads weights of layer {home}")
        key = _storage(tensor)[0]
        maker = self._makers.get(key, self._part)
        if maker != self._part and key not in self._given:
            self._object(f"reads a tensor that {maker} made, and that it was not handed")

    def _made(self, tensor: torch.Tensor, part: str) -> None:
        key, storage = _storage(tensor)
        self._makers[key] = part
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: _Key, _: object) -> None:
        self._makers.pop(key, None)
        self._alive.pop(key, None)

    def _object(self, problem: str) -> None:
        if not self.problem:
            self.problem, self.culprit = problem, self._part


class Aside:
    """What a watch saw for a while.

    Attributes:
        are_kept: Whether it counts.
    """

    are_kept = False

    def keep(self) -> None:
        """Let it count."""
        self.are_kept = True


# They give a tensor that Python has just made to the dispatcher.
_LIFTS = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default}


def _storage(tensor: torch.Tensor) -> tuple[_Key, Any]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage


def _keys(tensors: Iterable[torch.Tensor]) -> list[_Key]:
    return [_storage(tensor)[0] for tensor in tensors]


def _written_by(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operation writes to."""
    if func is torch.ops.aten.set_.source_Tensor and args[0] is args[1]:
        return  # as `nn.utils.parametrize` does; nothing is written
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def homes_of(layers: nn.ModuleList, outside: Iterable[nn.Module]) -> dict[int, int]:
    """Return for each parameter that one layer has for itself, by id, which layer that is."""
    shared = {id(p) for module in outside for p in module.parameters(recurse=False)}
    homes: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if homes.setdefault(id(parameter), index) != index:
                shared.add(id(parameter))
    return {key: home for key, home in homes.items() if key not in shared}
