"""Weights on the host, their optimizer's states, and their update, a piece at a time.

An update reads and writes a weight, its gradient and states, and little arithmetic: it is as fast
as the host's memory. So everything else that an update does (scaling of gradients, putting split
masters together and taking them apart) is done on the same piece while it is in the cache.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from finetune.full.split_master import joined, low_type, split_into
from finetune.full.update_rules import RULES, SCALES, States, Step, rule_of
from offload.plan.facts.optimizer import BLOCK_8BIT, Optimizer

# For each core, 1 MiB of fp32: its temporaries stay in a cache. Whole blocks of states in 8 bits.
PIECE_ELEMENTS = 2**18
LOW = "low"  # after a colon, in names of a checkpoint's tensors; states have their own names


class HostOptimizer:
    """The states of weights on the host, and their update.

    Weights in 16 bits are parts of fp32 masters: see `finetune.full.split_master`.

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
