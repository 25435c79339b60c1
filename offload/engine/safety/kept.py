"""State that a layer keeps between two calls outside its tensors: numbers, flags and objects.

A layer that counts its calls in an attribute, a global or a closure variable may compute something
else each time. Computed layer by layer, it is called more often and in another order. So its state
is read before and after a call, wherever Python code can keep it: attributes of its modules and of
their classes, globals and closures that their methods and hooks name, and the functions and objects
that these name in turn.
"""

import functools
import itertools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn

_OWN_TO_TORCH = frozenset(vars(nn.Module()))
_VALUES = (bool, int, float, complex, str)
_CONTAINERS = (Mapping, list, tuple, deque, Set)
_HOLDERS = (*_CONTAINERS, ContextVar, functools.partial, types.GeneratorType)
_MAX_ITEMS = 256  # of a container that is looked into
_MAX_DEPTH = 4  # of containers, and of functions and objects that hold others
# Packages whose functions keep nothing for a layer, and whose objects count for themselves.
_FOREIGN = ("torch", "transformers", "peft", "numpy", "logging", "functools", "typing", "enum")


def kept_by(layer: nn.Module, *, hooks: Iterable[Any] = ()) -> dict[str, object]:
    """Return all state that is found, by name.

    Args:
        layer: The layer.
        hooks: Those of its hooks that change what it computes.
    """
    found = _Found()
    for path, module in layer.named_modules():
        place = f"{path}." if path else ""
        for name, value in vars(module).items():
            if name not in _OWN_TO_TORCH:
                found.note(f"{place}{name}", value, 0)
        found.note_class(place, type(module))
    for hook in hooks:
        found.note("a hook", hook, 0)
    return found.values


def changed_in(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names of values that changed."""
    names = [*before, *(name for name in after if name not in before)]
    return [name for name in names if before.get(name) != after.get(name)]


class _Found:
    """Values by name, and the ids of all that was looked into."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self._seen: dict[int, object] = {}  # kept, or another could have its id

    def note_class(self, place: str, kind: type) -> None:
        """Record attributes of a class, and what `forward` and the methods it calls name."""
        for cls in kind.__mro__:
            if cls is nn.Module:
                return
            if self._is_seen(cls):
                continue
            for name, value in vars(cls).items():
                if not callable(value) and not name.startswith("__"):
                    self.note(f"{place}{name} (of {cls.__name__})", value, 0)
            self.note(f"{place}forward", vars(cls).get("forward"), 0, of=kind)

    def note(self, name: str, value: Any, depth: int, *, of: type | None = None) -> None:
        """Record a value if it is plain, and search it if it is a holder of others.

        Args:
            name: Its path.
            value: The value.
            depth: Of its holder.
            of: The class whose method it is.
        """
        if isinstance(value, _VALUES):
            self.values[name] = repr(value)  # not a number equals itself
            return
        if depth > _MAX_DEPTH or value is None or self._is_seen(value):
            return
        depth += 1
        state = _state_of(value)
        if state is not None:
            self.values[f"{name}{state[0]}"] = state[1]
        if isinstance(value, types.FunctionType):
            self._note_function(name, value, depth, of)
        elif isinstance(value, types.MethodType):
            self.note(name, value.__self__, depth)
            self.note(name, value.__func__, depth, of=type(value.__self__))
        elif _is_any(value, _HOLDERS):
            for part_name, part in _parts_of(name, value):
                self.note(part_name, part, depth)
        elif state is None:
            self._note_object(name, value, depth)

    def _note_function(self, name: str, function: Any, depth: int, of: type | None) -> None:
        """Record what a function's code names: closure variables, globals, and methods."""
        code = function.__code__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self.note(f"{variable} (in {name})", _content(cell), depth)
        for variable in code.co_names:
            held = function.__globals__.get(variable)
            is_code = isinstance(held, type | types.ModuleType | types.BuiltinFunctionType)
            if not is_code and not _is_foreign(held):
                self.note(f"{variable} (in {name})", held, depth)
            method = getattr(of, variable, None) if of is not None else None
            if isinstance(method, types.FunctionType) and not _is_foreign(method):
                self.note(f"{variable} (in {name})", method, depth, of=of)

    def _note_object(self, name: str, value: Any, depth: int) -> None:
        """Record the attributes of an object of a user class, and what its `__call__` names."""
        kind = type(value)
        is_config = hasattr(value, "model_type")  # which layers read
        is_code = isinstance(value, type | types.ModuleType | torch.Tensor | nn.Module)
        if is_code or (_is_foreign(kind) and not is_config):
            return
        for attribute, part in list(getattr(value, "__dict__", {}).items())[:_MAX_ITEMS]:
            self.note(f"{attribute} (in {name})", part, depth)
        call = next(
            (vars(cls)["__call__"] for cls in kind.__mro__ if "__call__" in vars(cls)), None
        )
        if isinstance(call, types.FunctionType):
            self.note(f"__call__ (in {name})", call, depth, of=kind)

    def _is_seen(self, value: object) -> bool:
        is_seen = id(value) in self._seen
        self._seen[id(value)] = value
        return is_seen


def _is_any(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return what `isinstance` does, which takes a microsecond for each abstract class."""
    kind = type(value)
    if _is_subclass(kind, kinds):  # type: ignore[arg-type]  # classes are hashable
        return True
    return value.__class__ is not kind and isinstance(value, kinds)


@functools.lru_cache(maxsize=1024)
def _is_subclass(kind: type, kinds: tuple[type, ...]) -> bool:
    return issubclass(kind, kinds)


def _is_foreign(value: Any) -> bool:
    package = (getattr(value, "__module__", None) or "").partition(".")[0]
    return package in _FOREIGN


def _state_of(value: Any) -> tuple[str, object] | None:
    """Return the state of a value that changes with use, with a name for it."""
    if _is_any(value, _CONTAINERS):
        return " (length)", len(value)
    if isinstance(value, np.ndarray | np.generic):
        return "", (value.shape, value.tobytes())
    if isinstance(value, torch.Generator):
        return "", value.get_state().numpy().tobytes()
    if isinstance(value, itertools.count):
        return "", repr(value)
    if isinstance(value, types.GeneratorType):
        return "", None if value.gi_frame is None else value.gi_frame.f_lasti
    return None


def _parts_of(name: str, value: Any) -> Iterator[tuple[str, object]]:
    """Yield the named contents of a container or another holder."""
    if isinstance(value, ContextVar):
        yield name, value.get(None)
    elif isinstance(value, functools.partial):
        yield from ((name, part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, types.GeneratorType):
        yield name, {} if value.gi_frame is None else dict(value.gi_frame.f_locals)
    elif len(value) <= _MAX_ITEMS and not isinstance(value, Set):
        pairs = list(value.items()) if isinstance(value, Mapping) else enumerate(value)
        yield from ((f"{name}[{key!r}]", part) for key, part in pairs if isinstance(key, _VALUES))


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
