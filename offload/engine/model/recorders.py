"""Stand-ins for the layers, while the model's own forward runs without them.

Problem. Between its layers a model may do more than pass the hidden state on: pass the second
output of one layer to the next, keep the hidden states of several layers for a mixture, add to
them. Layer by layer that would give the right loss and wrong gradients, or a wrong loss.

Idea. A stand-in returns a `Between`: it has the shape of a hidden state, and any computation with
it raises. So the model can pass it on and read its shape, and nothing else. Anything more is
detected at the first forward, without comparing values.

A layer may return the hidden state alone or first in a tuple, which is not visible from outside.
`FORMS` lists the possibilities; the first that the model's forward accepts is used.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn

from offload.engine.internals import FakeTensor, num_writes, unset_fake_temporarily

# ---------------------------------------------------------------------------------------------
# The arguments that a model passes to a layer besides the hidden state, and which are allowed.
#
# A layer is visited twice, alone, so its arguments must be all it sees of the rest of the model.
# Constants and tensors are harmless. A container could carry state from layer to layer: it is
# allowed, and each visit is checked not to have changed it. Tensors that require grad (per-layer
# embeddings, if those train) are replaced by leaves, whose gradients go back through the front.
#
# A module inside the model may give the front more arguments (`FrontArguments`), and among them one
# that has a part for each layer (`ByLayer`), such as keys and values that train.

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
        return None if value.is_inference() else num_writes(value)
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


class TouchedError(Exception):
    """The model computes with what a layer returned, or reads the weights of a layer."""


class Between(torch.Tensor):
    """A tensor with a shape and no values, which may be passed on but not computed with."""

    what: str  # its description for error messages

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        """Answer queries of shape, dtype and device; refuse the rest."""
        if func in _LOOKS:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        what = next((arg.what for arg in args if isinstance(arg, Between)), _HIDDEN)
        raise TouchedError(f"computes with {what} (`{name}`)")


_HIDDEN = "the hidden state between its layers"
_EXTRA = "what a layer returns besides the hidden state, between its layers"


_LOOKS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.is_inference,
    *(
        getattr(torch.Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "device",
            "ndim",
            "requires_grad",
            "is_cuda",
            "layout",
            "_version",
        )
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a layer returns the hidden state."""

    # What comes after it in a tuple, True for a value and False for None; None where the hidden
    # state is returned alone.
    extras: tuple[bool, ...] | None

    @classmethod
    def of(cls, output: object) -> "Form":
        """Return the form of what a layer returned."""
        if not isinstance(output, tuple | list):
            return cls(extras=None)
        return cls(extras=tuple(value is not None for value in output[1:]))

    def wrap(self, hidden: torch.Tensor) -> object:
        """Return the hidden state in this form; the extra values may not be used."""
        if self.extras is None:
            return hidden
        extras = (between(hidden, _EXTRA) if is_value else None for is_value in self.extras)
        return (hidden, *extras)


FORMS = (
    Form(extras=None),
    *(Form(extras=(True,) * n) for n in range(4)),
    *(Form(extras=(False,) * n) for n in range(1, 4)),
)


def between(hidden: torch.Tensor, what: str = _HIDDEN) -> Between:
    """Return a tensor that looks like `hidden` and takes no memory of its own."""
    with torch.DisableTorchFunctionSubclass(), unset_fake_temporarily():
        if isinstance(hidden, FakeTensor):  # cannot be of another class as well
            hidden = torch.empty_strided(
                hidden.shape, hidden.stride(), dtype=hidden.dtype, device="meta"
            )
        found = hidden.detach().as_subclass(Between)
        found.what = what
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """The arguments that a stand-in was given, and the hidden state that it returned."""

    layer: int  # index of the layer it replaces
    hidden: torch.Tensor  # the hidden state that it received
    returned: torch.Tensor  # the hidden state that it returned
    call: Call  # the other arguments; one object for layers in a row that are passed the same ones
    seen: Snapshot  # snapshot of the other arguments at the first of these layers' calls
    hidden_look: object  # version of the hidden state at its own call, as `look_of` returns it
    modes: tuple[object, ...]  # torch's modes at the call

    def alone(self) -> "Note":
        """Return the note with what its layer alone is passed of arguments of all layers."""
        own = self.call.of_layer(self.layer)
        return self if own is self.call else replace(self, call=own)

    def is_as_then(self) -> bool:
        """Return whether no argument was written to since, but for the hidden state."""
        return self.seen == _seen_of(self.call)


def _seen_of(call: Call) -> Snapshot:
    """Return the state of a call's arguments; the mapping of the named ones is its own."""
    return Snapshot(call.args, *call.kwargs.values())


def require_in_order(notes: Sequence[Note], num_layers: int) -> None:
    """Check that each layer was called once and in order, with arguments that may be kept.

    Raises:
        TouchedError: It was not.
    """
    visited = [note.layer for note in notes]
    if visited != list(range(num_layers)):
        raise TouchedError(f"visits its layers in the order {visited}, not each once")
    for before, note in pairwise(notes):
        if note.hidden is not before.returned:
            raise TouchedError(
                f"changes the hidden state between layers {before.layer} and {note.layer}"
            )
        is_known = note.call is before.call
        if not is_known and any(isinstance(part, Between) for part in note.call.parts()):
            raise TouchedError(f"hands more than a hidden state on to layer {note.layer}")
    modes = modes_of_torch(notes[0].hidden.device)
    for note, is_known in _with_known(notes):
        if note.modes != modes:
            raise TouchedError(
                f"calls layer {note.layer} in a mode of torch's of its own (autocast, no_grad)"
            )
        if not (note.hidden_look == look_of(note.hidden) and (is_known or note.is_as_then())):
            raise TouchedError(
                f"changes what it has passed to layer {note.layer} before it calls another"
            )


def problems(notes: Sequence[Note], shared: object) -> Iterator[tuple[int, str, str]]:
    """Yield the layer and name of each argument that may not be passed, and why.

    Args:
        notes: Of all layers.
        shared: An object that layers may share.
    """
    for note, is_known in _with_known(notes):
        if not is_known:
            for name, problem in note.call.problems(shared=shared):
                yield note.layer, name, problem


def _with_known(notes: Sequence[Note]) -> Iterator[tuple[Note, bool]]:
    """Yield notes, each with whether its call is the one before it."""
    yield notes[0], False
    for before, note in pairwise(notes):
        yield note, note.call is before.call


def modes_of_torch(device: torch.device) -> tuple[object, ...]:
    """Return whether gradients are recorded, and in which precision torch computes on a device."""
    is_cast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if is_cast else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype


class AllRecordedError(Exception):
    """The last layer was reached; the rest of the model's forward is not needed."""


class StandIn(nn.Module):
    """Replaces a layer and records its arguments.

    The model can read the layer's attributes through it, except weights.
    """

    def __init__(self, layer: nn.Module, index: int, *, notes: list[Note], form: Form) -> None:
        """Replace the layer at `index`; its arguments are added to `notes`."""
        super().__init__()
        self.__dict__.update(stood_in_for=layer, index=index, notes=notes, form=form)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TouchedError(f"sets `{name}` of a layer from outside")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["stood_in_for"], name)
        if isinstance(found, nn.Parameter) or (
            isinstance(found, nn.Module) and next(found.parameters(), None) is not None
        ):
            raise TouchedError(f"reads `{name}` of a layer from outside, where it has no weights")
        return found

    def forward(self, *args: Any, **kwargs: Any) -> object:
        """Record the arguments and return a hidden state in the layer's form."""
        is_keyword = not args
        hidden = kwargs.pop("hidden_states", None) if is_keyword else args[0]
        if not isinstance(hidden, torch.Tensor):
            raise TouchedError(f"passes a {type(hidden).__name__} to a layer as hidden state")
        own = self.__dict__
        notes: list[Note] = own["notes"]
        if (
            notes
            and notes[-1].call.is_given(args[1:], kwargs, is_hidden_keyword=is_keyword)
            and (notes[-1].seen.is_fixed or notes[-1].is_as_then())
        ):
            call, seen = notes[-1].call, notes[-1].seen
        else:
            call = Call(args=args[1:], kwargs=kwargs, is_hidden_keyword=is_keyword)
            seen = _seen_of(call)
        returned = self._returned(hidden)
        notes.append(
            Note(
                layer=own["index"],
                hidden=hidden,
                returned=returned,
                call=call,
                seen=seen,
                hidden_look=look_of(hidden),
                modes=modes_of_torch(hidden.device),
            )
        )
        return self._answer(cast("Form", own["form"]), returned)

    def _returned(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a hidden state that may not be computed with."""
        return between(hidden)

    def _answer(self, form: Form, returned: torch.Tensor) -> object:
        return form.wrap(returned)


class Last(StandIn):
    """Stops the forward."""

    def _answer(self, form: Form, returned: torch.Tensor) -> object:
        raise AllRecordedError


class Injector(StandIn):
    """Returns a given hidden state, whatever its input."""

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        *,
        notes: list[Note],
        form: Form,
        hidden: torch.Tensor,
        on_call: Callable[[], None] = lambda: None,
    ) -> None:
        """Replace a layer.

        Args:
            layer: The layer.
            index: Its number.
            notes: Where to record its arguments.
            form: How it returns the hidden state.
            hidden: That hidden state.
            on_call: Called before it is returned.
        """
        super().__init__(layer, index, notes=notes, form=form)
        self.__dict__.update(hidden=hidden, on_call=on_call)

    def _returned(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self.__dict__
        own["on_call"]()
        return cast("torch.Tensor", own["hidden"])


class Closed(StandIn):
    """Also refuses searches for modules or parameters inside the layer."""

    def named_modules(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse to be searched."""
        raise TouchedError("reads the modules or parameters of a layer from outside")


class ClosedInjector(Closed, Injector):
    """Returns a given hidden state, and refuses searches inside the layer."""
