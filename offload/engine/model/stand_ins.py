"""What stands in the layers' places while the model's own forward runs without them.

Problem. Around its layers a model may do more than pass the hidden state on: hand the second
output of one layer to the next, keep the hidden states of several layers for a mixture, add to
them. Layer by layer that would give the right loss and wrong gradients, or a wrong loss.

Idea. What a stand-in returns is a `Between`: it has the shape of a hidden state, and any
computation with it raises. So the model can pass it on and look at its size, and no more; whatever
else it does is found at the first forward, without looking at values.

A layer may return the hidden state alone or first in a tuple, which cannot be told from outside.
`FORMS` lists the ways; the first that the model's forward understands is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from offload.engine.model.calls import Call


class TouchedError(Exception):
    """The model computes with what a layer returned, or reads the weights of a layer."""


class Between(torch.Tensor):
    """A hidden state between two layers, which nothing but a layer may compute with."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        """Answer what the tensor looks like; refuse the rest."""
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        raise TouchedError(f"computes with the hidden state between its layers (`{name}`)")


_LOOKS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a stand-in returns the hidden state.

    Attributes:
        num_extras: Elements behind it in a tuple; None where it is returned alone.
        is_none: Whether those are None rather than something that must not be used.
    """

    num_extras: int | None
    is_none: bool = False

    def wrap(self, hidden: torch.Tensor) -> object:
        """Return the hidden state as the layers do."""
        if self.num_extras is None:
            return hidden
        extras = [None if self.is_none else between(hidden) for _ in range(self.num_extras)]
        return (hidden, *extras)


FORMS = (
    Form(num_extras=None),
    *(Form(num_extras=n) for n in range(4)),
    *(Form(num_extras=n, is_none=True) for n in range(1, 4)),
)


def between(hidden: torch.Tensor) -> Between:
    """Return a tensor that looks like `hidden` and takes no memory of its own."""
    with torch._C.DisableTorchFunctionSubclass(), unset_fake_temporarily():
        if isinstance(hidden, FakeTensor):  # cannot be of another class as well
            hidden = torch.empty_strided(
                hidden.shape, hidden.stride(), dtype=hidden.dtype, device="meta"
            )
        return hidden.detach().as_subclass(Between)


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What a recorder was called with, and what it returned."""

    layer: int
    hidden: torch.Tensor
    returned: Between
    call: Call


class AllRecordedError(Exception):
    """The last layer was reached; the rest of the model's forward is not needed."""


class _StandIn(nn.Module):
    """Takes a layer's place; the model reads the layer's attributes through it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["stood_in_for"] = layer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["stood_in_for"], name)
        if isinstance(found, nn.Parameter) or (
            isinstance(found, nn.Module) and next(found.parameters(), None) is not None
        ):
            raise TouchedError(f"reads `{name}` of a layer from outside, where it has no weights")
        return found


class Recorder(_StandIn):
    """Notes its arguments; the last one stops the forward."""

    def __init__(
        self, layer: nn.Module, index: int, *, notes: list[Note], form: Form, is_last: bool
    ) -> None:
        """Stand in for the layer at `index`; what it is called with is added to `notes`."""
        super().__init__(layer)
        self.__dict__.update(index=index, notes=notes, form=form, is_last=is_last)

    def forward(self, *args: Any, **kwargs: Any) -> object:
        """Note the arguments and return a hidden state that nobody may touch."""
        is_keyword = not args
        hidden = kwargs.pop("hidden_states", None) if is_keyword else args[0]
        if not isinstance(hidden, torch.Tensor):
            raise TouchedError(f"passes a {type(hidden).__name__} to a layer as hidden state")
        own = self.__dict__
        returned = between(hidden)
        call = Call(args=args[1:], kwargs=kwargs, is_hidden_keyword=is_keyword)
        own["notes"].append(Note(layer=own["index"], hidden=hidden, returned=returned, call=call))
        if own["is_last"]:
            raise AllRecordedError
        return cast("Form", own["form"]).wrap(returned)


class Injector(_StandIn):
    """Returns a given hidden state, whatever comes in."""

    def __init__(self, layer: nn.Module, hidden: torch.Tensor, *, form: Form) -> None:
        """Stand in for `layer`."""
        super().__init__(layer)
        self.__dict__.update(hidden=hidden, form=form)

    def forward(self, *_args: Any, **_kwargs: Any) -> object:
        """Return the hidden state that was given."""
        return cast("Form", self.__dict__["form"]).wrap(self.__dict__["hidden"])
