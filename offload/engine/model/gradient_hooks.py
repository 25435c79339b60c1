"""Hooks on trained parameters: finds those that would receive partial gradients, before a step.

A parameter inside one layer has one backward per micro-batch, as in a plain model. Parameters
outside of the layers have several: the head is computed in chunks, and a tied weight gets one part
from the tail and one from the front. Also, all micro-batches pass through one layer before the next
layer's gradients exist, so the gradients of the whole model are complete only after the step.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from offload.engine.model.find_layers import homes_of
from offload.engine.model.layers import LayeredModel
from offload.errors import OffloadError

_HINT = "apply it to `.grad` after `forward_backward` returns"


class GradientHooks:
    """The trained parameters, and which of their hooks a step runs like a plain model."""

    def __init__(
        self, model: nn.Module, layered: LayeredModel, masters: Mapping[str, nn.Parameter]
    ) -> None:
        """Record them.

        Args:
            model: The model as attached.
            layered: The model inside it.
            masters: Parameters that the optimizer updates in place of the layers', by name.
        """
        inside = homes_of(layered.layers, layered.around)
        self._masters = masters
        self._trained = [
            (name, parameter, id(parameter) in inside)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def require_exact(self) -> None:
        """Check that no hook would receive partial gradients, or would never run.

        A post-accumulate hook that only accumulates its gradients may declare this by a true
        attribute `takes_partial_gradients`.

        Raises:
            OffloadError: One would.
        """
        with torch._C.DisableTorchFunctionSubclass():  # parameters are sealed between passes
            problem = next(self._problems(), None)
        if problem is not None:
            what, limit = problem
            raise OffloadError(what, limit=limit, hint=_HINT)

    def _problems(self) -> Iterator[tuple[str, str]]:
        for name, parameter, is_inside in self._trained:
            after = parameter._post_accumulate_grad_hooks or {}
            if not all(getattr(hook, "takes_partial_gradients", False) for hook in after.values()):
                yield (
                    f"{name} has a hook of `register_post_accumulate_grad_hook`",
                    "a step adds to `.grad` in parts, layer by layer, and the hook runs at each",
                )
            if parameter._backward_hooks and not is_inside:
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
