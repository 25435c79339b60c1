"""Detects reads and writes of tensors that do not belong to a part of a model.

Problem. A layer can leave a tensor in a global, an attribute or a closure, where another layer, or
the part after the layers, can read it. No argument shows this. Layer by layer the value would be
that of another micro-batch, and its gradient would be lost.

Idea. Every computation goes through torch's dispatcher. There a watch records which part allocated
which memory. A part may read its arguments, tensors it made itself, and tensors that existed before
all parts: constants and weights. Tensors it writes to must not outlive its call. Only memory that
outlives a part is recorded, and only while it lives. A weight may be clamped in place if it is
known to be within the bounds: then nothing is written.
"""

import dis
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from offload.engine.internals import HOOKS, TorchDispatchMode, memory_key, tree_leaves
from offload.engine.model.recorders import look_of

_Key = int


class FollowsMemory(TorchDispatchMode):
    """Knows something of memory, while it lives."""

    def __init__(self) -> None:
        """Know nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._known: dict[_Key, Any] = {}
        self._alive: dict[_Key, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip the wrapper per operation that disables dynamo: what is followed runs eagerly."""
        return False

    def _know(self, tensor: torch.Tensor, known: Any) -> None:
        key, storage = _storage(tensor)
        self._known[key] = known
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: _Key, _: object) -> None:
        self._known.pop(key, None)
        self._alive.pop(key, None)


class Watch(FollowsMemory):
    """Records reads and writes, part by part, while it is active.

    Attributes:
        problem: The first forbidden action of a part; empty if there was none.
        culprit: The part that is at fault.
    """

    def __init__(self, homes: Mapping[int, int]) -> None:
        """Watch nothing yet.

        Args:
            homes: Layer of each parameter, by id, that belongs to one layer alone.
        """
        super().__init__()
        self._homes = homes
        self._written: dict[_Key, weakref.ref[Any]] = {}
        self.problem = self.culprit = ""
        self.begin("", layer=None, given=())

    def begin(
        self,
        part: str,
        *,
        layer: int | None,
        given: Iterable[torch.Tensor],
        clamped: Iterable[torch.Tensor] = (),
    ) -> None:
        """Let another part begin.

        Args:
            part: Its description; two calls of one layer are two parts.
            layer: The layer whose weights it may read.
            given: Its arguments.
            clamped: Its weights that it clamps, which are within the bounds.
        """
        self._part, self._layer = part, layer
        self._given, self._clamped = set(_keys(given)), set(_keys(clamped))
        self._written = {}

    def made_by(self, part: str, tensors: Iterable[torch.Tensor]) -> None:
        """Record tensors as made by a part."""
        for tensor in tensors:
            self._know(tensor, part)

    def end(self, returned: Iterable[torch.Tensor] = ()) -> None:
        """Let the current part end.

        Args:
            returned: What it returns, which may live on.
        """
        allowed = {*_keys(returned), *self._given}
        if any(ref() is not None for key, ref in self._written.items() if key not in allowed):
            self._object("writes to a tensor that it did not make and that outlives its call")
        self._written = {}

    def mark(self) -> tuple[str, str, dict[_Key, weakref.ref[Any]]]:
        """Return the state so far, for `return_to`."""
        return self.problem, self.culprit, dict(self._written)

    def return_to(self, mark: tuple[str, str, dict[_Key, weakref.ref[Any]]]) -> None:
        """Restore the state of a mark, but keep which part made which memory."""
        self.problem, self.culprit, self._written = mark

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and record what it read, wrote and made."""
        kwargs = kwargs or {}
        read = _tensors_in(args) + _tensors_in(kwargs)
        before = {self._read(tensor) for tensor in read}
        is_mutable = func._schema.is_mutable
        if is_mutable and not self._is_within(func, args, kwargs):
            for tensor in _written_by(func, args, kwargs):
                key, storage = _storage(tensor)
                if self._known.get(key) != self._part:
                    self._written[key] = weakref.ref(storage)
        out = func(*args, **kwargs)
        if func in _LIFTS:
            before = set()
        elif is_mutable:
            before = set(_keys(read))  # it may have given one of them other memory
        for tensor in _tensors_in(out):
            if _storage(tensor)[0] not in before:
                self._know(tensor, self._part)
        return out

    def _is_within(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operation clamps a weight that is within the bounds."""
        return (
            func is torch.ops.aten.clamp_.default
            and _storage(args[0])[0] in self._clamped
            and torch.equal(args[0], torch.ops.aten.clamp.default(*args, **kwargs))
        )

    def _read(self, tensor: torch.Tensor) -> _Key:
        home = self._homes.get(id(tensor), self._layer)
        if home != self._layer:
            self._object(f"reads weights of layer {home}")
        key = _storage(tensor)[0]
        maker = self._known.get(key, self._part)
        if maker != self._part and key not in self._given:
            self._object(f"reads a tensor that {maker} made, and that it was not handed")
        return key

    def _object(self, problem: str) -> None:
        if not self.problem:
            self.problem, self.culprit = problem, self._part


# They register a tensor that Python has just made with the dispatcher.
_LIFTS = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default}


def _storage(tensor: torch.Tensor) -> tuple[_Key, Any]:
    storage = tensor.untyped_storage()
    return memory_key(tensor), storage


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
        yield from _tensors_in(value)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors among an operation's arguments or results; they hold no other classes."""
    found: list[torch.Tensor] = []
    _add_tensors(value, found)
    return found


def _add_tensors(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _add_tensors(part, found)
    elif isinstance(value, dict):
        for part in value.values():
            _add_tensors(part, found)


# ---------------------------------------------------------------------------------------------
# Separates hooks that change what a layer computes from those that only record.
#
# A hook that returns nothing may count and keep tensors freely. One that returns a value on any
# path through its code, or writes to its arguments, is part of the layer: what it returns may
# depend on its state.

_KINDS = HOOKS[:2]


class JudgedHooks:
    """Classifies the hooks of layers as they are called.

    Attributes:
        acting: Hooks that changed something.
    """

    def __init__(self, watch: Watch) -> None:
        """Classify nothing yet.

        Args:
            watch: It must ignore what recording hooks read and write.
        """
        self._watch = watch
        self.acting: list[Any] = []

    @contextmanager
    def judged(self, layer: nn.Module) -> Iterator[None]:
        """Classify the hooks of a layer's modules, and global module hooks, while it is called."""
        tables = [vars(module)[kind] for module in layer.modules() for kind in _KINDS]
        tables += [getattr(torch_module, f"_global{kind}") for kind in _KINDS]
        before = [(table, key, hook) for table in tables for key, hook in table.items()]
        for table, key, hook in before:
            table[key] = partial(self._call, hook)
        try:
            yield
        finally:
            for table, key, hook in before:
                if key in table:  # it may have removed itself
                    table[key] = hook

    def _call(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        given = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, torch.Tensor)]
        versions = [look_of(tensor) for tensor in given]
        mark = self._watch.mark()
        result = hook(*args, **kwargs)
        has_written = versions != [look_of(tensor) for tensor in given]
        if not (has_written or result is not None or _may_return_more(hook)):
            self._watch.return_to(mark)
        elif not any(hook is other for other in self.acting):
            self.acting.append(hook)
        return result


def _may_return_more(hook: Any) -> bool:
    """Return whether a hook that has returned nothing has another return path."""
    while isinstance(hook, partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    function = function if hasattr(function, "__code__") else type(hook).__call__
    code = getattr(function, "__code__", None)
    steps = list(dis.get_instructions(code)) if code else []
    ends = [i for i, step in enumerate(steps) if step.opname.startswith("RETURN_")]
    has_one = len(ends) == 1 and not steps[ends[0]].is_jump_target
    return not has_one and not all(_returns_none(steps[i - 1], steps[i]) for i in ends)


def _returns_none(before: dis.Instruction, step: dis.Instruction) -> bool:
    if step.opname == "RETURN_CONST":
        return step.argval is None
    is_none = before.opname == "LOAD_CONST" and before.argval is None
    return step.opname == "RETURN_VALUE" and is_none and not step.is_jump_target


def all_hooks(model: nn.Module, outside: Iterable[nn.Module]) -> list[Any]:
    """Return the functions that a model runs: hooks, `forward`s, and attributes such as its loss.

    Args:
        model: The model.
        outside: Its modules outside the layers, whose attributes are searched.
    """
    found = [hook for kind in _KINDS for hook in getattr(torch_module, f"_global{kind}").values()]
    for module in model.modules():
        own = vars(module)
        found.append(own.get("forward", type(module).forward))
        for kind in _KINDS:
            found.extend(own[kind].values())
    for module in outside:
        found.extend(value for value in vars(module).values() if callable(value))
    return found
