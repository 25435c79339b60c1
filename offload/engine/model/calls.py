"""What a model passes to one layer besides the hidden state, and what may be among it.

A layer is visited twice, alone, so its arguments must be all that it sees of the rest of the model.
Constants and tensors are harmless. A container could carry state from layer to layer: it is let
through, and each visit is checked not to have changed it. Tensors that require grad (per-layer
embeddings where those train) are replaced by leaves, whose gradients go back through the front.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One layer's arguments; `is_hidden_keyword` tells how the hidden state is passed."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_hidden_keyword: bool = False

    def fingerprint(self) -> tuple[object, ...]:
        """Return what changes when something is written into an argument."""
        return tuple(map(_mark, self.parts()))

    def parts(self) -> Iterator[object]:
        """Yield all that is passed, down to what is in containers."""
        yield from _walk((self.args, self.kwargs))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each argument that may not be passed, and why."""
        named = [*((f"argument {i + 1}", v) for i, v in enumerate(self.args)), *self.kwargs.items()]
        for name, value in named:
            for part in _walk(value):
                if not isinstance(part, _HARMLESS):
                    yield name, f"a {type(part).__name__} that layers could share state through"


_HARMLESS = (
    torch.Tensor,
    tuple,
    list,
    Mapping,
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    type(None),
)


@dataclass(kw_only=True)
class Leaves:
    """The tensors that require grad among the arguments of one pass, each with its stand-in leaf.

    A layer's backward visit adds to the leaf's `.grad`, however many layers share the tensor.
    """

    sources: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def cut(self, call: Call) -> Call:
        """Return the call with leaves in place of tensors that require grad."""
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
            return value  # the very object, which layers may share
        if isinstance(value, Mapping):
            return {name: self._cut(part) for name, part in value.items()}
        return type(value)(map(self._cut, value))


def version_of(tensor: torch.Tensor) -> int | None:
    """Return what counts up when a tensor is written to; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def _walk(value: object) -> Iterator[object]:
    """Yield a value and, if it is a container, all that is in it."""
    yield value
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _walk(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _walk(part)


def _mark(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    if isinstance(value, Mapping):
        return tuple(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return len(value)
    return id(value)
