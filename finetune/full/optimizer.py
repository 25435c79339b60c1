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
from typing import Any

import torch

from offload.plan.facts.optimizer import BLOCK, OPTIMIZERS, SCALE, States, Step

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
        name: str,
        weight_decay: float,
    ) -> None:
        """Make states, which are zero, and the rest of weights in 16 bits, as if just rounded.

        Args:
            weights: Name -> contiguous tensor on the host, in fp32, bf16 or fp16.
            name: The optimizer.
            weight_decay: Of tensors of two dimensions or more.
        """
        self._weights, self._weight_decay = dict(weights), weight_decay
        self._rule = OPTIMIZERS[name]
        self._states = {n: self._fresh_states(w) for n, w in weights.items()}
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

    def _fresh_states(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a weight's states on the default device, zeros, and the rest of its master."""
        dtype = low_type(weight.dtype)
        low = {} if dtype is None else {LOW: torch.zeros(weight.shape, dtype=dtype)}
        states = self._rule.states(tuple(weight.shape)).items()
        return low | {
            name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in states
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
        update = self._rule.update
        assert update is not None, "a rule of recipes"
        for name, gradient in gradients.items():
            decay = self._weight_decay if gradient.dim() > 1 else 0.0
            step = Step(number=num_updates, lr=lr, weight_decay=decay)
            for weight, piece, of_piece in self._parts(name, gradient):
                low = of_piece.get(LOW)
                master = weight if low is None else joined(weight, low)
                update(master, piece.float() * scale, of_piece, step)
                if low is not None:
                    split_into(master, weight, low)

    def _parts(
        self, name: str, gradient: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, States]]:
        """Yield what is updated at a time: pieces, or all of a weight."""
        weight, states = self._weights[name], self._states[name]
        if self._rule.is_by_tensor:
            yield weight, gradient, states
        else:
            yield from _pieces(weight, gradient, states)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the settings, in the form of torch's optimizers."""
        settings = {**self._rule.settings, "weight_decay": self._weight_decay}
        return {
            "state": {0: {"step": torch.tensor(float(self.num_updates))}},
            "param_groups": [{"params": [0], **settings}],
        }

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        """Take the number of updates that `state_dict` returned."""
        self.num_updates = int(content["state"][0]["step"])


def _pieces(
    weight: torch.Tensor, gradient: torch.Tensor, states: States
) -> Iterator[tuple[torch.Tensor, torch.Tensor, States]]:
    """Cut a weight, its gradient and its states alike."""
    num_elements = PIECE_ELEMENTS * torch.get_num_threads()
    for first in range(0, weight.numel(), num_elements):
        part = slice(first, first + num_elements)
        blocks = slice(part.start // BLOCK, part.stop // BLOCK)
        yield (
            weight.view(-1)[part],
            gradient.view(-1)[part],
            {n: s.view(-1)[blocks if n.endswith(SCALE) else part] for n, s in states.items()},
        )


def total_norm(norms: Iterable[torch.Tensor]) -> float:
    """Return the norm of all gradients from the norm of each."""
    return float(torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms])))
