"""The auxiliary loss that keeps a mixture's router balanced, over all layers at once.

Problem. The loss is a product of means over all layers (the share of tokens routed to an expert
times its mean probability), so it is known only after the last layer, when the layers' graphs are
gone, and its gradient enters each layer at its router.

Idea. Over a whole step, the loss is the model's own function of the tokens of all micro-batches, as
if they were one. The function is E * sum_e(c_e / n * p_e / n): choices and probabilities of each
expert e, added up over n tokens and layers. A forward visit leaves these sums, 2 E + 1 numbers.
After the last layer they are added up, over the processes that share the step too. Choices have no
gradient, so each router's is that of its probabilities times coefficient * E * c_e / n^2. A
backward visit computes the router again and passes this gradient in together with that of the
layer's output. No logits wait, and it does not matter how rows are cut into micro-batches.

Transformers takes the loss over each micro-batch by itself, which is the same for a step of one.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import nn

from offload.engine.batch import LabelledBatch
from offload.errors import OffloadError, UnsupportedModelError
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import Schedule

_FUNCTION = "load_balancing_loss_func"
_SIGNATURE = ["gate_logits", "num_experts", "top_k", "attention_mask"]
_SIZES = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
Logits = Sequence[torch.Tensor]


def alone(sums: torch.Tensor) -> torch.Tensor:
    """Return the sums of the one process that computes a step."""
    return sums


class RouterLoss:
    """A model's router loss; built only where its config asks for one."""

    def __init__(self, model: nn.Module, decoder: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Find the function, its coefficient and each layer's routers.

        Raises:
            UnsupportedModelError: The model's router loss is not of the supported kind.
        """
        self._function: Any = getattr(sys.modules[type(model).__module__], _FUNCTION, None)
        if self._function is None:
            _refuse(model, f"has no `{_FUNCTION}` in its module")
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
        if not self._is_of_sums():
            _refuse(model, f"has a `{_FUNCTION}` that is not that of sums over tokens")

    @contextmanager
    def listen(self, layer: int) -> Iterator[list[torch.Tensor]]:
        """Collect the router logits (tokens, experts) of a layer while it is visited."""
        heard: list[torch.Tensor] = []
        hooks = [
            module.register_forward_hook(
                lambda _module, _inputs, output, index=index: heard.append(
                    output[index] if isinstance(output, tuple) else output
                )
            )
            for module, index in self._routers[layer]
        ]
        try:
            yield heard
        finally:
            for hook in hooks:
                hook.remove()

    def hears(self, layer: int) -> bool:
        """Return whether a layer has routers."""
        return bool(self._routers[layer])

    def balance(
        self, batches: Sequence[LabelledBatch], add_up: Callable[[torch.Tensor], torch.Tensor]
    ) -> "Balance":
        """Return the loss of a step that begins.

        Args:
            batches: The micro-batches; padding is not counted.
            add_up: As of `RunStep`.
        """
        return Balance(self, add_up, [batch.inputs.get("attention_mask") for batch in batches])

    def sums(self, logits: Logits, mask: torch.Tensor | None) -> torch.Tensor:
        """Return choices and probabilities of each expert and the number of tokens, (2 E + 1,).

        Args:
            logits: Router logits (tokens, experts), of as many calls as there were.
            mask: Of the tokens of each; None counts all.
        """
        total = torch.zeros(2 * self._num_experts + 1, dtype=torch.float64, device=logits[0].device)
        choices, probabilities, num = total.split([self._num_experts, self._num_experts, 1])
        for said in logits:
            p_NE = torch.softmax(said.detach(), dim=-1)
            chosen_NK = torch.topk(p_NE, self._top_k, dim=-1).indices
            counted_N = total.new_ones(len(said)) if mask is None else mask.reshape(-1).to(total)
            choices.scatter_add_(0, chosen_NK.reshape(-1), counted_N.repeat_interleave(self._top_k))
            probabilities += _counted(p_NE, mask)
            num += counted_N.sum()
        return total

    def slopes(self, total: torch.Tensor) -> torch.Tensor:
        """Return the loss's gradient by the sum of each expert's probabilities, (E,).

        Args:
            total: Of a step, as `sums` returns it.
        """
        choices, _, num = total.split([self._num_experts, self._num_experts, 1])
        slopes_E: torch.Tensor = self._coefficient * self._num_experts * choices / num**2
        return slopes_E

    def probabilities(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sum of each expert's probabilities, of what `sums` returned."""
        return sums[self._num_experts : 2 * self._num_experts]

    def _is_of_sums(self) -> bool:
        """Return whether the model's own function is that of `sums` and `slopes`, on examples."""
        generator = torch.Generator().manual_seed(0)
        logits = (*torch.randn((2, 6, self._num_experts), generator=generator),)
        masks = (None, torch.tensor([[1, 1, 0], [1, 0, 0]]))
        found = [self.sums(logits, mask) for mask in masks]
        ours = torch.stack([self.slopes(t) @ self.probabilities(t) for t in found])
        sizes = (self._num_experts, self._top_k)
        own = torch.stack([self._function(logits, *sizes, mask) for mask in masks])
        return torch.allclose(self._coefficient * own.double(), ours, rtol=1e-4, atol=0.0)


class Balance:
    """The router loss of one step, over all its micro-batches and the processes that share it."""

    def __init__(
        self,
        router_loss: RouterLoss,
        add_up: Callable[[torch.Tensor], torch.Tensor],
        masks: Sequence[torch.Tensor | None],
    ) -> None:
        self._router_loss, self._add_up, self._masks = router_loss, add_up, masks
        self._sums: dict[tuple[int, int], torch.Tensor] = {}
        self._slopes: torch.Tensor | None = None

    def hear(self, layer: int, m: int, logits: Logits) -> None:
        """Note the router logits (tokens, experts) of a forward visit."""
        self._sums[m, layer] = self._router_loss.sums(logits, self._masks[m])

    def loss(self, m: int) -> torch.Tensor:
        """Return a micro-batch's part of the loss, after all forward visits of the step."""
        own = [self._sums[at] for at in sorted(self._sums) if at[0] == m]
        if self._slopes is None:  # added up in the order of the numbers, whatever that of visits
            every = [self._sums[at] for at in sorted(self._sums)]
            self._slopes = self._router_loss.slopes(self._add_up(torch.stack(every).sum(0)))
        of_experts = self._router_loss.probabilities(torch.stack(own).sum(0))
        return (of_experts @ self._slopes).float()

    def gradients(self, layer: int, m: int, logits: Logits) -> list[torch.Tensor]:
        """Return the loss's gradients by the router logits of a backward visit, after `loss`."""
        assert self._slopes is not None, "tails are before backwards"
        leaves = [said.detach().requires_grad_() for said in logits]
        with torch.enable_grad():
            sums = [_counted(torch.softmax(leaf, dim=-1), self._masks[m]) for leaf in leaves]
        slopes = [self._slopes.to(one.dtype) for one in sums]
        return list(torch.autograd.grad(sums, leaves, slopes)) if leaves else []


def _counted(p_NE: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Add up the probabilities of tokens that count, in at least float32 as transformers does."""
    p_NE = p_NE.to(torch.promote_types(p_NE.dtype, torch.float32))
    if mask is not None:
        p_NE = p_NE * mask.reshape(-1, 1).to(p_NE)
    return p_NE.sum(0)


def require_whole_step(schedule: Schedule) -> None:
    """Check that a router loss is known before its first backward visit.

    Raises:
        OffloadError: Its micro-batches pass the layers one after another.
    """
    kinds = [op.kind for op in schedule.ops if op.kind in (Kind.TAIL, Kind.BACKWARD)]
    if Kind.TAIL in kinds[kinds.index(Kind.BACKWARD) :]:
        raise OffloadError(
            "the router loss is taken over the step, and order is micro_batch_major",
            limit="it is known once all micro-batches have passed all layers",
            hint="`order=Order.LAYER_MAJOR`",
        )


def _routers_of(layer: nn.Module, recorder: Any) -> list[tuple[nn.Module, int]]:
    """Return a layer's router modules, each with the index of the logits in its output."""
    part = f".{recorder.layer_name.strip('.')}." if recorder.layer_name else "."
    return [
        (module, recorder.index)
        for name, module in layer.named_modules()
        if isinstance(module, recorder.target_class) and part in f".{name}."
    ]


def _refuse(model: nn.Module, what: str) -> NoReturn:
    raise UnsupportedModelError(
        f"the router loss is on, and {type(model).__name__} {what}",
        limit="only the usual load-balancing loss over all layers can be taken apart",
        hint="`train.router_loss_coef: 0`, or `model.config.output_router_logits = False`",
    )
