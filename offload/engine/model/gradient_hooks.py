"""Hooks on what trains: those that would be given parts of a gradient are found before a step.

A parameter inside one layer has one backward per micro-batch, as in a plain model. What is outside
of the layers has several: the head goes in chunks, and a tied weight has a part from the tail and
one from the front. And all micro-batches pass through one layer before the next layer's gradients
are there, so `.grad` is that of a whole model only when the step is over.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from offload.engine.model.layers import LayeredModel
from offload.errors import OffloadError

_HINT = "apply it to `.grad` after `forward_backward` returns"


class GradientHooks:
    """The parameters that train, and which of their hooks a step runs as a plain model does."""

    def __init__(
        self, model: nn.Module, layered: LayeredModel, masters: Mapping[str, nn.Parameter]
    ) -> None:
        """Note them.

        Args:
            model: What was attached.
            layered: The model inside of it.
            masters: What an optimizer updates in place of parameters of the layers, by name.
        """
        inside = _inside_one_layer(layered)
        self._masters = masters
        self._trained = [
            (name, parameter, id(parameter) in inside)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def require_exact(self) -> None:
        """Check that no hook would be given parts of a gradient, or would never run.

        A post-accumulate hook that only adds up what it is given may say so, by an attribute
        `takes_partial_gradients` that is true.

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


def _inside_one_layer(layered: LayeredModel) -> set[int]:
    """Return the ids of the parameters that one layer has, and nothing else."""
    counts = Counter(id(p) for layer in layered.layers for p in layer.parameters())
    outside = {id(p) for module in layered.around for p in module.parameters(recurse=False)}
    return {key for key, count in counts.items() if count == 1} - outside
