"""What must stay as it was when a model was attached, and hooks that a step could not run.

`attach` decides what trains, what is streamed and where each tensor is. Parameters that are
added, replaced, frozen or unfrozen later would have no gradient, or one that the next load
overwrites; a router loss that is enabled later would be missing from the loss. So each step
compares the model with the one that was attached, by identity. This takes 1 ms for 48 layers with
adapters.

A parameter inside one layer has one backward per micro-batch, as in a plain model. Parameters
outside of the layers have several: the head is computed in chunks, and a tied weight gets one
part from the tail and one from the front. Also, all micro-batches pass through one layer before
the next layer's gradients exist, so the gradients of the whole model are complete only after the
step. So each step looks for hooks on parameters that would receive partial gradients.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from offload.engine.model.layers import LayeredModel, homes_of
from offload.errors import OffloadError

_HINT = "apply it to `.grad` after `forward_backward` returns"
_TRAITS_OF = attrgetter("requires_grad", "dtype", "device")
_Traits = tuple[bool, torch.dtype, torch.device]


class Attached:
    """A model's modules and parameters, their traits that must not change, and their hooks."""

    def __init__(
        self, model: nn.Module, layered: LayeredModel, masters: Mapping[str, nn.Parameter]
    ) -> None:
        """Record them.

        Args:
            model: The model as attached.
            layered: The model inside it; whether its loss has a router term is fixed too.
            masters: Parameters that the optimizer updates in place of the layers', by name.
        """
        modules = list(model.modules())
        self._model = model
        self._children = [module._modules for module in modules]
        self._owned = [module._parameters for module in modules]
        self._modules = _flat(self._children)
        self._parameters = _flat(self._owned)
        self._traits = _traits(self._parameters)
        self._named = _named(model)
        self._config = layered.model.config
        self._asks = _router_logits(self._config)
        self._inside = homes_of(layered.layers, layered.around)
        self._masters = masters

    def require_unchanged(self) -> None:
        """Check that the model is unchanged since it was attached.

        Raises:
            OffloadError: It changed; the error names the changes.
        """
        with torch.DisableTorchFunctionSubclass():
            modules, parameters = _flat(self._children), _flat(self._owned)
            if (
                are_same(modules, self._modules)
                and are_same(parameters, self._parameters)
                and _traits(parameters) == self._traits
                and _router_logits(self._config) == self._asks
            ):
                return
            changes = list(self._changes())
            # peft's wrapper of a module's own parameters puts them back in another order
            if not changes:
                self._modules, self._parameters = modules, parameters
                self._traits = _traits(parameters)
                return
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        raise OffloadError(
            f"{changes[0]} since the model was attached{more}",
            limit="what trains, what is streamed and what the loss is are settled by"
            " `offload.attach`",
            hint="undo the change; or `engine.detach()`, and `offload.attach(model, ...)` again",
        )

    def _changes(self) -> Iterator[str]:
        now = _named(self._model)
        for name, (thing, traits) in now.items():
            if name not in self._named:
                yield f"{name} was added"
                continue
            thing_before, before = self._named[name]
            if thing is not thing_before:
                yield f"{name} was replaced"
            elif traits is not None and before is not None and traits != before:
                yield f"{name} {_change(before, traits)}"
        yield from (f"{name} was removed" for name in self._named if name not in now)
        for name, asks in _router_logits(self._config).items():
            if asks != self._asks.get(name):
                yield f"`{name}` became {asks}"

    def require_exact(self) -> None:
        """Check that no hook would receive partial gradients, or would never run.

        A post-accumulate hook that only accumulates its gradients may declare this by a true
        attribute `takes_partial_gradients`.

        Raises:
            OffloadError: One would.
        """
        with torch.DisableTorchFunctionSubclass():  # parameters are sealed between passes
            problem = next(self._problems(), None)
        if problem is not None:
            what, limit = problem
            raise OffloadError(what, limit=limit, hint=_HINT)

    def _problems(self) -> Iterator[tuple[str, str]]:
        trained = ((name, p) for name, (p, traits) in self._named.items() if traits and traits[0])
        for name, parameter in trained:
            after = parameter._post_accumulate_grad_hooks or {}
            if not all(getattr(hook, "takes_partial_gradients", False) for hook in after.values()):
                yield (
                    f"{name} has a hook of `register_post_accumulate_grad_hook`",
                    "a step adds to `.grad` in parts, layer by layer, and the hook runs at each",
                )
            if parameter._backward_hooks and id(parameter) not in self._inside:
                yield (
                    f"{name} has a hook of `register_hook` and is not in exactly one layer",
                    "its gradient arrives in parts, and the hook runs at each",
                )
        for name, master in self._masters.items():
            if master._backward_hooks or master._post_accumulate_grad_hooks:
                yield (
                    f"{name}, as `engine.trained_parameters` lists it, has a hook",
                    "its gradient is copied from the device, where no hook of it runs",
                )


def _router_logits(config: Any) -> dict[str, bool]:
    """Return by place whether a config requests router logits, and so their loss."""
    places = {"config.output_router_logits": config}
    if (text_config := config.get_text_config()) is not config:
        places["config.get_text_config().output_router_logits"] = text_config
    return {
        name: bool(getattr(place, "output_router_logits", False)) for name, place in places.items()
    }


def _change(before: _Traits, now: _Traits) -> str:
    if before[0] != now[0]:
        return "was unfrozen" if now[0] else "was frozen"
    return f"became {now[1]} on {now[2]} from {before[1]} on {before[2]}"


def _flat(tables: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))


def are_same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(found) == len(expected) and all(map(is_, found, expected))


def _traits(parameters: list[nn.Parameter | None]) -> list[_Traits]:
    return [_TRAITS_OF(p) for p in parameters if p is not None]


def _named(model: nn.Module) -> dict[str, tuple[Any, _Traits | None]]:
    """Return modules and parameters by name, the latter with their traits."""
    named: dict[str, tuple[Any, _Traits | None]] = {
        name: (module, None) for name, module in model.named_modules(remove_duplicate=False)
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named[name] = (parameter, _traits([parameter])[0])
    return named
