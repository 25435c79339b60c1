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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from offload.engine.model.recorded_args import Call, Snapshot


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
        call: The other arguments.
        seen: Snapshot of all arguments at the call.
        modes: Torch's modes at the call.
    """

    layer: int
    hidden: torch.Tensor
    returned: torch.Tensor
    call: Call
    seen: Snapshot
    modes: tuple[object, ...]

    def alone(self) -> "Note":
        """Return the note with what its layer alone is passed of arguments of all layers."""
        return replace(self, call=self.call.of_layer(self.layer))

    def is_as_then(self) -> bool:
        """Return whether no argument was written to since."""
        return self.seen == Snapshot(self.hidden, self.call.args, self.call.kwargs)


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
        call = Call(args=args[1:], kwargs=kwargs, is_hidden_keyword=is_keyword)
        returned = self._returned(hidden)
        own["notes"].append(
            Note(
                layer=own["index"],
                hidden=hidden,
                returned=returned,
                call=call,
                seen=Snapshot(hidden, call.args, call.kwargs),
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
