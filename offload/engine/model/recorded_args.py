"""The arguments that a model passes to a layer besides the hidden state, and which are allowed.

A layer is visited twice, alone, so its arguments must be all it sees of the rest of the model.
Constants and tensors are harmless. A container could carry state from layer to layer: it is
allowed, and each visit is checked not to have changed it. Tensors that require grad (per-layer
embeddings, if those train) are replaced by leaves, whose gradients go back through the front.

A module inside the model may give the front more arguments (`FrontArguments`), and among them one
that has a part for each layer (`ByLayer`), such as keys and values that train.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)
_WITHOUT_PARTS = (torch.Tensor, type(None), *_CONSTANTS)
_FIXED = frozenset((*_WITHOUT_PARTS, tuple))
_PLAIN = frozenset(_WITHOUT_PARTS)  # asked first, by type: a front asks for each row and layer


class FrontArguments(nn.Module, ABC):
    """A child of a model that changes the arguments of its forward, where a front is recorded."""

    @abstractmethod
    def forward(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments by name that the model's forward is called with.

        Args:
            given: Those that it would be called with.
        """


class ByLayer(ABC):
    """An argument with a part for each layer, which is passed that part in its place."""

    @abstractmethod
    def of_layer(self, layer: int) -> Any:
        """Return the part of one layer: a constant, a tensor, or a container of them."""


def front_arguments(model: nn.Module) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return the child of a model that changes the arguments of its forward; `dict` if none."""
    found = (module for module in model.children() if isinstance(module, FrontArguments))
    return next(found, dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One layer's arguments; `is_hidden_keyword`: whether the hidden state is a keyword."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_hidden_keyword: bool = False

    def parts(self) -> Sequence[object]:
        """Return all arguments and, recursively, the contents of containers."""
        return _walk((self.args, self.kwargs))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors among the parts."""
        yield from (part for part in self.parts() if isinstance(part, torch.Tensor))

    def is_given(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_hidden_keyword: bool
    ) -> bool:
        """Return whether these arguments are the same objects."""
        return (
            self.is_hidden_keyword == is_hidden_keyword
            and len(self.args) == len(args)
            and self.kwargs.keys() == kwargs.keys()
            and all(map(operator.is_, self.args, args))
            and all(value is kwargs[name] for name, value in self.kwargs.items())
        )

    def problems(self, *, shared: object = None) -> Iterator[tuple[str, str]]:
        """Yield the name of each argument that may not be passed, and why.

        Args:
            shared: An object that layers may share.
        """
        named = [*((f"argument {i + 1}", v) for i, v in enumerate(self.args)), *self.kwargs.items()]
        for name, value in named:
            for part in _walk(value):
                if type(part) in _PLAIN or part is shared:
                    continue
                if not isinstance(part, _HARMLESS):
                    yield name, f"a {type(part).__name__} that layers could share state through"

    def is_same(self, other: "Call") -> bool:
        """Return whether another call passes the same values; None equals an absent argument."""
        ours, theirs = self._given(), other._given()
        return (
            self.is_hidden_keyword == other.is_hidden_keyword
            and ours.keys() == theirs.keys()
            and all(_is_same(ours[key], theirs[key]) for key in ours)
        )

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Call":
        """Return the call with other tensors."""
        return replace(
            self,
            args=_changed(self.args, change),
            kwargs={name: _changed(value, change) for name, value in self.kwargs.items()},
        )

    def of_layer(self, layer: int) -> "Call":
        """Return the call with the parts of one layer in place of arguments with all of them."""

        def own(value: Any) -> Any:
            return value.of_layer(layer) if _is_by_layer(value) else value

        if not any(map(_is_by_layer, (*self.args, *self.kwargs.values()))):
            return self
        return replace(
            self,
            args=tuple(map(own, self.args)),
            kwargs={name: own(value) for name, value in self.kwargs.items()},
        )

    def without(self, value: torch.Tensor | None) -> "Call":
        """Return the call without the named arguments that are this same object."""
        return replace(self, kwargs={n: v for n, v in self.kwargs.items() if v is not value})

    def with_more(self, named: Mapping[str, Any]) -> "Call":
        """Return the call with more named arguments."""
        return replace(self, kwargs={**self.kwargs, **named}) if named else self

    def _given(self) -> dict[object, object]:
        named: dict[object, object] = {**dict(enumerate(self.args))}
        named.update(self.kwargs)
        return {key: value for key, value in named.items() if value is not None}


_HARMLESS = (*_WITHOUT_PARTS, tuple, list, Mapping)


class Snapshot:
    """The state of values and their contents, to detect writes to them.

    It keeps references to what it saw, so that no new object can reuse the id of a replaced one.
    """

    def __init__(self, *values: object) -> None:
        """Record values and, recursively, the contents of containers."""
        self._seen = [(part, look_of(part)) for value in values for part in _walk(value)]

    @property
    def is_fixed(self) -> bool:
        """Whether no write to them can be undone: tensors count writes, lists and dicts do not."""
        return all(type(part) in _FIXED for part, _ in self._seen)

    def __eq__(self, other: object) -> bool:
        """Return whether the same objects were seen, without a write to them in between."""
        return (
            isinstance(other, Snapshot)
            and len(self._seen) == len(other._seen)
            and all(
                look == other_look and (part is other_part or _is_same_constant(part, other_part))
                for (part, look), (other_part, other_look) in zip(
                    self._seen, other._seen, strict=True
                )
            )
        )

    __hash__ = None  # type: ignore[assignment]  # it compares by what it saw


@dataclass(kw_only=True)
class Leaves:
    """The tensors that require grad among the arguments of one pass, each with its leaf.

    A layer's backward visit adds to the leaf's `.grad`, however many layers share the tensor.
    """

    sources: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def cut(self, call: Call) -> Call:
        """Return the call with leaves in place of tensors that require grad."""
        if not any(tensor.requires_grad for tensor in call.tensors()):
            return call
        return Call(
            args=tuple(self._cut(value) for value in call.args),
            kwargs={name: self._cut(value) for name, value in call.kwargs.items()},
            is_hidden_keyword=call.is_hidden_keyword,
        )

    def gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that got a gradient, and those gradients."""
        got = [(s, leaf.grad) for s, leaf in self.sources.values() if leaf.grad is not None]
        return [source for source, _ in got], [grad for _, grad in got]

    def _cut(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            leaf = value.detach().requires_grad_()
            return self.sources.setdefault(id(value), (value, leaf))[1]
        if not any(isinstance(part, torch.Tensor) and part.requires_grad for part in _walk(value)):
            return value  # the same object, which layers may share
        if isinstance(value, Mapping):
            return {name: self._cut(part) for name, part in value.items()}
        return type(value)(map(self._cut, value))


def _walk(value: object) -> list[object]:
    """Return a value and, if it is a container, its contents."""
    found: list[object] = []
    _collect(value, found)
    return found


def _collect(value: object, found: list[object]) -> None:
    found.append(value)
    if type(value) in _PLAIN or isinstance(value, _WITHOUT_PARTS):
        return
    if isinstance(value, tuple | list):
        for part in value:
            _collect(part, found)
    elif isinstance(value, Mapping):
        for part in value.values():
            _collect(part, found)


def _is_by_layer(value: object) -> bool:
    return type(value) not in _PLAIN and isinstance(value, ByLayer)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _changed(part, change) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_changed(part, change) for part in value)
    return value


def look_of(value: object) -> object:
    """Return a version or size that changes when a value is written to."""
    if isinstance(value, torch.Tensor):  # torch does not count for inference tensors
        return None if value.is_inference() else value._version
    if type(value) in _PLAIN or isinstance(value, _WITHOUT_PARTS):
        return None
    if isinstance(value, tuple | list):
        return len(value)
    if isinstance(value, Mapping):
        return tuple(value)
    if isinstance(value, Sequence):
        return len(value)
    return None


def _is_same_constant(one: object, other: object) -> bool:
    return type(one) is type(other) and isinstance(one, _CONSTANTS) and one == other


def _is_same(one: object, other: object) -> bool:
    ours, theirs = list(_walk(one)), list(_walk(other))
    return len(ours) == len(theirs) and all(map(_is_same_part, ours, theirs))


def _is_same_part(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, Mapping | tuple | list):
        return type(one) is type(other) and look_of(one) == look_of(other)
    return one is other or _is_same_constant(one, other)
