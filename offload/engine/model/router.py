"""The auxiliary loss that keeps a mixture's router balanced, over all layers at once.

Problem. The loss is a product of means over all layers (the share of tokens routed to an expert
times its mean probability), so it is known only after the last layer, when the layers' graphs are
gone, and its gradient enters each layer at its router.

Idea. A forward visit keeps the router logits of each token, without their graph: tokens x experts
numbers. After the last layer the model's own function runs on these logits as leaves, which gives
the loss and its gradient by each of them, whatever the formula. A backward visit recomputes the
router and passes this gradient in together with that of the layer's output.

A model defines the loss for one batch only. Here the loss of a step is the mean of the model's own
losses of its micro-batches, weighted by their label tokens: micro-batch m counts n_m / N, as in the
rest of the loss.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import nn

from offload.errors import UnsupportedModelError

_FUNCTION = "load_balancing_loss_func"
_SIGNATURE = ["gate_logits", "num_experts", "top_k", "attention_mask"]
_SIZES = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Router:
    """A router module, and the index of the logits in its output."""

    module: nn.Module
    index: int


class RouterLoss:
    """A model's router loss; built only where its config asks for one."""

    def __init__(self, model: nn.Module, decoder: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Find the function, its coefficient and each layer's routers.

        Raises:
            UnsupportedModelError: The model's router loss is not of the supported kind.
        """
        self._function: Any = getattr(sys.modules[type(model).__module__], _FUNCTION, None)
        if self._function is None:
            _refuse(model, f"has no `{_FUNCTION}` beside it")
        if list(inspect.signature(self._function).parameters) != _SIGNATURE:
            _refuse(model, f"has a `{_FUNCTION}` that takes other arguments than {_SIGNATURE}")
        missing = [name for name in _SIZES if not hasattr(model, name)]
        if missing:
            _refuse(model, f"has no `{missing[0]}`")
        self._num_experts, self._top_k, self._coefficient = (getattr(model, n) for n in _SIZES)
        recorder = cast("Any", decoder)._can_record_outputs.get("router_logits")
        if not hasattr(recorder, "target_class"):
            _refuse(model, "does not say in one place where its router logits come from")
        self._routers = [_routers_of(layer, recorder) for layer in layers]
        if not any(self._routers):
            _refuse(model, f"has no {recorder.target_class.__name__} in its layers")

    @contextmanager
    def listen(self, layer: int) -> Iterator[list[torch.Tensor]]:
        """Collect the router logits (tokens, experts) of a layer while it is visited."""
        heard: list[torch.Tensor] = []
        hooks = [
            router.module.register_forward_hook(
                lambda _module, _inputs, output, index=router.index: heard.append(
                    output[index] if isinstance(output, tuple) else output
                )
            )
            for router in self._routers[layer]
        ]
        try:
            yield heard
        finally:
            for hook in hooks:
                hook.remove()

    def loss(
        self,
        logits: Mapping[int, Sequence[torch.Tensor]],
        attention_mask: torch.Tensor | None,
        share: float,
    ) -> tuple[torch.Tensor, dict[int, list[torch.Tensor]]]:
        """Return a micro-batch's part of the step's loss, and its gradients by the logits.

        Args:
            logits: Router logits by layer.
            attention_mask: Of the micro-batch; padding is not counted.
            share: The micro-batch's share of the step's label tokens.
        """
        leaves = {
            layer: [said.detach().requires_grad_() for said in logits[layer]]
            for layer in sorted(logits)
        }
        together = tuple(leaf for layer in leaves.values() for leaf in layer)
        with torch.enable_grad():
            balance = self._function(together, self._num_experts, self._top_k, attention_mask)
            loss = balance * self._coefficient * share
        gradients = iter(torch.autograd.grad(loss, together))
        return loss.detach(), {
            layer: [next(gradients) for _ in said] for layer, said in leaves.items()
        }


def _routers_of(layer: nn.Module, recorder: Any) -> list[_Router]:
    part = f".{recorder.layer_name.strip('.')}." if recorder.layer_name else "."
    return [
        _Router(module=module, index=recorder.index)
        for name, module in layer.named_modules()
        if isinstance(module, recorder.target_class) and part in f".{name}."
    ]


def _refuse(model: nn.Module, what: str) -> NoReturn:
    raise UnsupportedModelError(
        f"the router loss is on, and {type(model).__name__} {what}",
        limit="only the usual load-balancing loss over all layers can be taken apart",
        hint="`train.router_loss_coef: 0`, or `model.config.output_router_logits = False`",
    )
