"""How one weight is updated by its gradient on the host, and the states of this.

A rule that treats each element by itself is given pieces of a weight that fit a cache. States have
an element for each of the weight's, or for each block of it.

Sources: AdamW arXiv:1711.05101, in 8 bits arXiv:2110.02861; Lion arXiv:2302.06675; Adafactor
arXiv:1804.04235.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
from torch.optim._adafactor import adafactor
from torch.optim.adamw import adamw

from offload.plan.facts.optimizer import BLOCK_8BIT, MIN_8BIT_ELEMENTS, Optimizer

MEAN, SQUARE, MEAN_SCALE, SQUARE_SCALE = "mean", "square", "mean_scale", "square_scale"
SCALES = (MEAN_SCALE, SQUARE_SCALE)  # of a block each
ROWS, COLUMNS = "rows", "columns"
BETAS, EPS = (0.9, 0.999), 1e-8  # as torch.optim.AdamW
LION_BETAS = (0.9, 0.99)
States = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What an update is made with.

    Attributes:
        number: Counted from 1.
        lr: Learning rate.
        weight_decay: Decoupled: lr times as much of the weight goes.
    """

    number: int
    lr: float
    weight_decay: float


class UpdateRule(Protocol):
    """How a weight is updated."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What a checkpoint says of it."""

    @property
    def is_elementwise(self) -> bool:
        """Whether pieces of a weight can be updated one after the other."""

    def states(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        """Return fresh states of a weight, zero, by name."""

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, states: States, step: Step
    ) -> None:
        """Update a weight in place, in fp32; the gradient may be overwritten."""


class AdamW:
    """torch's fused AdamW, with two moments in fp32."""

    settings: ClassVar[Mapping[str, Any]] = {"betas": list(BETAS), "eps": EPS}
    is_elementwise: ClassVar[bool] = True

    def states(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        """See `UpdateRule`."""
        return {MEAN: torch.zeros(shape), SQUARE: torch.zeros(shape)}

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, states: States, step: Step
    ) -> None:
        """See `UpdateRule`."""
        adamw(
            [weight],
            [gradient],
            [states[MEAN]],
            [states[SQUARE]],
            [],
            [torch.full((), step.number - 1.0, device=weight.device)],
            fused=True,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=step.lr,
            weight_decay=step.weight_decay,
            eps=EPS,
            maximize=False,
        )


class AdamW8bit:
    """torch's fused AdamW on moments that bitsandbytes keeps in 8 bits, a scale for each block."""

    settings: ClassVar[Mapping[str, Any]] = {**AdamW.settings, "block": BLOCK_8BIT}
    is_elementwise: ClassVar[bool] = True

    def states(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        """See `UpdateRule`; a scale of zero makes any code a zero."""
        num_blocks = -(-shape.numel() // BLOCK_8BIT)
        return {
            MEAN: torch.zeros(shape, dtype=torch.uint8),
            MEAN_SCALE: torch.zeros(num_blocks),
            SQUARE: torch.zeros(shape, dtype=torch.uint8),
            SQUARE_SCALE: torch.zeros(num_blocks),
        }

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, states: States, step: Step
    ) -> None:
        """See `UpdateRule`."""
        from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

        names = ((MEAN, MEAN_SCALE), (SQUARE, SQUARE_SCALE))
        moments = {
            name: dequantize_blockwise(
                states[name],
                absmax=states[scale],
                code=_codes(weight.device)[name],
                blocksize=BLOCK_8BIT,
            )
            for name, scale in names
        }
        AdamW().update(weight, gradient, moments, step)
        for name, scale in names:
            codes, found = quantize_blockwise(
                moments[name], code=_codes(weight.device)[name], blocksize=BLOCK_8BIT
            )
            states[name].copy_(codes)
            states[scale].copy_(found.absmax)


class Lion:
    """The sign of a mean of gradients; one moment in fp32."""

    settings: ClassVar[Mapping[str, Any]] = {"betas": list(LION_BETAS)}
    is_elementwise: ClassVar[bool] = True

    def states(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        """See `UpdateRule`."""
        return {MEAN: torch.zeros(shape)}

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, states: States, step: Step
    ) -> None:
        """See `UpdateRule`."""
        mean, (beta1, beta2) = states[MEAN], LION_BETAS
        direction = mean.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        weight.mul_(1 - step.lr * step.weight_decay).add_(direction, alpha=-step.lr)
        mean.mul_(beta2).add_(gradient, alpha=1 - beta2)


class Sgd:
    """Plain gradient descent: no state, and no scale of its own."""

    settings: ClassVar[Mapping[str, Any]] = {}
    is_elementwise: ClassVar[bool] = True

    def states(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        """See `UpdateRule`."""
        return {}

    def update(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: States,
        step: Step,
    ) -> None:
        """See `UpdateRule`."""
        weight.mul_(1 - step.lr * step.weight_decay).add_(gradient, alpha=-step.lr)


class Adafactor:
    """torch's Adafactor: means of squares of rows and columns; a vector keeps all its squares.

    torch makes steps relative to the size of a weight, but here at least to 1: so the learning rate
    is about the root mean square of a step, as in AdamW.
    """

    settings: ClassVar[Mapping[str, Any]] = {"eps": [None, 1.0], "beta2_decay": -0.8, "d": 1.0}
    is_elementwise: ClassVar[bool] = False

    def states(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        """See `UpdateRule`."""
        if len(shape) <= 1:
            return {SQUARE: torch.zeros(shape)}
        *others, rows, columns = shape
        return {ROWS: torch.zeros(*others, rows, 1), COLUMNS: torch.zeros(*others, 1, columns)}

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, states: States, step: Step
    ) -> None:
        """See `UpdateRule`."""
        adafactor(
            [weight],
            [gradient],
            [states.get(ROWS)],
            [states.get(COLUMNS)],
            [states.get(SQUARE)],
            [torch.tensor(step.number - 1.0)],
            lr=step.lr,
            weight_decay=step.weight_decay,
            d=1.0,
            beta2_decay=-0.8,
            eps1=None,  # type: ignore[arg-type]
            eps2=1.0,
            maximize=False,
        )


class MeanInBf16:
    """Another rule, whose mean of gradients is rounded to the nearest bf16 after each update.

    Where gradients vanish, a mean over 10 (AdamW) or 100 (Lion) of them falls by a tenth or a
    hundredth per step, and half the distance to the next bf16 number is at most a part in 256. A
    mean of squares over 1,000 would not fall at all, so it is never kept so.
    """

    is_elementwise: ClassVar[bool] = True

    def __init__(self, rule: UpdateRule) -> None:
        """Take the rule that computes, in fp32."""
        self._rule = rule
        self.settings = {**rule.settings, "mean": "bfloat16"}

    def states(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        """See `UpdateRule`."""
        return self._rule.states(shape) | {MEAN: torch.zeros(shape, dtype=torch.bfloat16)}

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, states: States, step: Step
    ) -> None:
        """See `UpdateRule`."""
        mean = states[MEAN].float()
        self._rule.update(weight, gradient, {**states, MEAN: mean}, step)
        states[MEAN].copy_(mean)


RULES: Mapping[str, UpdateRule] = {
    "adamw": AdamW(),
    "adamw_bf16": MeanInBf16(AdamW()),
    "adamw_8bit": AdamW8bit(),
    "adafactor": Adafactor(),
    "lion": Lion(),
    "lion_bf16": MeanInBf16(Lion()),
    "sgd": Sgd(),
}


def rule_of(optimizer: Optimizer, weight: torch.Tensor) -> UpdateRule:
    """Return how an optimizer updates a weight; small ones keep fp32 states, as in bitsandbytes."""
    is_small = optimizer == "adamw_8bit" and weight.numel() < MIN_8BIT_ELEMENTS
    return RULES["adamw" if is_small else optimizer]


@cache
def _codes(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the 256 values that a byte of a moment can have, for a scale of 1."""
    from bitsandbytes.functional import create_dynamic_map

    signs = {MEAN: True, SQUARE: False}
    return {name: create_dynamic_map(signed=one).to(device) for name, one in signs.items()}
