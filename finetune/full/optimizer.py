"""The optimizers of weights that train on the host, whose masters are split in two halves.

A bf16 weight has the sign, the exponent and the first 7 bits of the mantissa of an fp32 number. So
a master need not be kept in addition to the bf16 weights that are streamed: 16 more bits make up
the rest.

The high half is the master rounded to the nearest bf16, ties away from zero; the low half is the
master's own last 16 bits. Read as a signed number they are what the rounding took away, so adding
the two undoes it: bit by bit, for each of the 2^32 patterns. Rounding ties to even, as torch does,
cannot be undone: of a tie two masters have the same halves. Truncation can be undone, but it makes
every weight that computes too small.

What is not finite. Masters beyond the largest bf16 number have an infinite high half, as with any
rounding. Of a NaN the high half can be infinite (its mantissa is only in the last 16 bits) or a
zero (all of its first mantissa bits are ones, and rounding carries into the sign). The master is
the same NaN all the same, but a layer may compute without it. So a step whose loss or gradients
are not finite must be refused before its update.

A float16 weight is no half of an fp32 number: it has an exponent of its own, and below 6e-5 fewer
bits. It is the master rounded to the nearest, ties to even, as torch rounds. With it are kept the
32 bits in which the master differs from that, zeros for a weight that was not updated yet.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
from torch.optim._adafactor import adafactor
from torch.optim.adamw import adamw

from offload.plan.facts.optimizer import BLOCK_8BIT, MIN_8BIT_ELEMENTS, Optimizer

_HALF = 1 << 15


def low_type(dtype: torch.dtype) -> torch.dtype | None:
    """Return the type of what makes up the master of a weight; None if it is its own master."""
    return {torch.bfloat16: torch.int16, torch.float16: torch.int32}.get(dtype)


def split_into(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Write an fp32 master (any shape) into two parts of the same shape: a weight and its rest."""
    bits = master.view(torch.int32)
    if high.dtype is torch.float16:
        high.copy_(master)
        torch.bitwise_xor(bits, high.float().view(torch.int32), out=low)
        return
    low.copy_(bits)  # the last 16 bits: conversions of integers wrap
    high.view(torch.int16).copy_((bits + _HALF).bitwise_right_shift_(16))


def joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master of a weight and its rest, of the same shape."""
    if high.dtype is torch.float16:
        return high.float().view(torch.int32).bitwise_xor_(low).view(torch.float32)
    bits = high.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(low).view(torch.float32)


# ---------------------------------------------------------------------------------------------
# How one weight is updated by its gradient on the host, and the states of this.
#
# A rule that treats each element by itself is given pieces of a weight that fit a cache. States
# have an element for each of the weight's, or for each block of it.
#
# Sources: AdamW arXiv:1711.05101, in 8 bits arXiv:2110.02861; Lion arXiv:2302.06675; Adafactor
# arXiv:1804.04235.

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


# ---------------------------------------------------------------------------------------------
# Weights on the host, their optimizer's states, and their update, a piece at a time.
#
# An update reads and writes a weight, its gradient and states, and little arithmetic: it is as fast
# as the host's memory. So everything else that an update does (scaling of gradients, putting split
# masters together and taking them apart) is done on the same piece while it is in the cache.

# For each core, 1 MiB of fp32: its temporaries stay in a cache. Whole blocks of states in 8 bits.
PIECE_ELEMENTS = 2**18
LOW = "low"  # after a colon, in names of a checkpoint's tensors; states have their own names


class HostOptimizer:
    """The states of weights on the host, and their update.

    Weights in 16 bits are parts of fp32 masters: see `finetune.full.optimizer`.

    Attributes:
        num_updates: Steps whose update was begun.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        name: Optimizer,
        weight_decay: float,
    ) -> None:
        """Make states, which are zero, and the rest of weights in 16 bits, as if just rounded.

        Args:
            weights: Name -> contiguous tensor on the host, in fp32, bf16 or fp16.
            name: The optimizer.
            weight_decay: Of tensors of two dimensions or more.
        """
        self._weights, self._name, self._weight_decay = dict(weights), name, weight_decay
        self._rules = {n: rule_of(name, w) for n, w in weights.items()}
        self._states = {n: fresh_states(name, w) for n, w in weights.items()}
        self.num_updates = 0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All that a resume needs except `num_updates`, by name: weights, low halves, states."""
        return {
            **self._weights,
            **{
                f"{name}:{state}": value
                for name, states in self._states.items()
                for state, value in states.items()
            },
        }

    def masters(self) -> dict[str, torch.Tensor]:
        """Return fp32 copies of the weights, put together where they are split."""
        return {
            name: joined(weight, states[LOW]) if LOW in states else weight.clone()
            for (name, weight), states in zip(
                self._weights.items(), self._states.values(), strict=True
            )
        }

    def forget(self) -> None:
        """Set the number of updates and all states to zero."""
        self.num_updates = 0
        for states in self._states.values():
            for state in states.values():
                state.zero_()

    @torch.no_grad()
    def update(
        self,
        gradients: Mapping[str, torch.Tensor],
        *,
        num_updates: int,
        lr: float,
        scale: float,
    ) -> None:
        """Update weights and their states in place by their gradients, which are left unchanged.

        Args:
            gradients: Name -> gradient of a weight.
            num_updates: This one's number, counted from 1.
            lr: Learning rate.
            scale: Factor of the gradients.
        """
        for name, gradient in gradients.items():
            rule = self._rules[name]
            decay = self._weight_decay if gradient.dim() > 1 else 0.0
            step = Step(number=num_updates, lr=lr, weight_decay=decay)
            for weight, piece, of_piece in self._parts(name, gradient):
                low = of_piece.get(LOW)
                master = weight if low is None else joined(weight, low)
                rule.update(master, piece.float() * scale, of_piece, step)
                if low is not None:
                    split_into(master, weight, low)

    def _parts(
        self, name: str, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, States]]:
        """Yield what is updated at a time: pieces, or all of a weight."""
        weight, states = self._weights[name], self._states[name]
        if self._rules[name].is_elementwise:
            yield from _pieces(weight, gradient, states)
        else:
            yield weight, gradient, states

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the settings, in the form of torch's optimizers."""
        settings = {**RULES[self._name].settings, "weight_decay": self._weight_decay}
        return {
            "state": {0: {"step": torch.tensor(float(self.num_updates))}},
            "param_groups": [{"params": [0], **settings}],
        }

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        """Take the number of updates that `state_dict` returned."""
        self.num_updates = int(content["state"][0]["step"])


def fresh_states(name: Optimizer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the states of a weight on the default device, zeros, and the rest of its master."""
    dtype = low_type(weight.dtype)
    low = {} if dtype is None else {LOW: torch.zeros(weight.shape, dtype=dtype)}
    return low | rule_of(name, weight).states(weight.shape)


def _pieces(
    weight: torch.Tensor, gradient: torch.Tensor, states: States
) -> Iterator[tuple[torch.Tensor, torch.Tensor, States]]:
    """Cut a weight, its gradient and its states alike."""
    num_elements = PIECE_ELEMENTS * torch.get_num_threads()
    for first in range(0, weight.numel(), num_elements):
        part = slice(first, first + num_elements)
        blocks = slice(part.start // BLOCK_8BIT, part.stop // BLOCK_8BIT)
        yield (
            weight.view(-1)[part],
            gradient.view(-1)[part],
            {n: s.view(-1)[blocks if n in SCALES else part] for n, s in states.items()},
        )


def total_norm(norms: Iterable[torch.Tensor]) -> float:
    """Return the norm of all gradients from the norm of each."""
    return float(torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms])))
