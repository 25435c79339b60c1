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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from offload.engine.model.recorded_args import Call, Snapshot, look_of


class TouchedError(Exception):
    """The model computes with what a layer returned, or reads the weights of a layer."""


class Between(torch.Tensor):
    """A tensor with a shape and no values, which may be passed on but not computed with.

    Attributes:
        what: Its description for error messages.
    """

    what: str

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
            with torch._C.DisableTorchFunctionSubclass():
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
    """How a layer returns the hidden state.

    Attributes:
        extras: What comes after it in a tuple, True for a value and False for None; None where the
            hidden state is returned alone.
    """

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
    with torch._C.DisableTorchFunctionSubclass(), unset_fake_temporarily():
        if isinstance(hidden, FakeTensor):  # cannot be of another class as well
            hidden = torch.empty_strided(
                hidden.shape, hidden.stride(), dtype=hidden.dtype, device="meta"
            )
        found = hidden.detach().as_subclass(Between)
        found.what = what
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A stand-in's arguments, and the hidden state it returned.

    Attributes:
        layer: Index of the layer it replaces.
        hidden: The hidden state that it received.
        returned: The hidden state that it returned.
        call: The other arguments; one object for layers in a row that are passed the same ones.
        seen: Snapshot of the other arguments at the first of these layers' calls.
        hidden_look: Of the hidden state, at its own call.
        modes: Torch's modes at the call.
    """

    layer: int
    hidden: torch.Tensor
    returned: torch.Tensor
    call: Call
    seen: Snapshot
    hidden_look: object
    modes: tuple[object, ...]

    def alone(self) -> "Note":
        """Return the note with what its layer alone is passed of arguments of all layers."""
        own = self.call.of_layer(self.layer)
        return self if own is self.call else replace(self, call=own)

    def is_as_then(self) -> bool:
        """Return whether no argument was written to since, but for the hidden state."""
        return self.seen == _seen_of(self.call)

    def is_hidden_as_then(self) -> bool:
        """Return whether the hidden state was not written to since."""
        return self.hidden_look == look_of(self.hidden)


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
        if not (note.is_hidden_as_then() and (is_known or note.is_as_then())):
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
