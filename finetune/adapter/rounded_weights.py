"""Weights of an adapter held in bf16, which are rounded at random after each update.

Problem. A step at a usual learning rate is less than half of a bf16 weight's last digit, so
rounding to nearest would undo it, step after step.

Idea. The update is computed in fp32, on copies that exist only meanwhile. Each result is rounded to
one of the two bf16 numbers around it, the nearer the likelier: its mean is the result itself, so
small steps add up. Of an fp32 number bf16 keeps the upper 16 bits; a random number of 16 bits is
added to the lower ones, and what it carries over is the rounding.

Random numbers depend on the recipe's seed, the number of the update and the tensor's name alone. So
all ranks round alike, and so does a resumed run, whose checkpoint has the seed and the number.

Source: arXiv:2010.06192.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

LOW_BITS = 16
_KEPT = -(1 << LOW_BITS)  # as a mask
_STATE = "rounding"


def round_at_random(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return fp32 numbers rounded up or down to bf16, each with a mean of itself.

    What bf16 has stays as it is, and so do infinities and NaN.
    """
    bits = torch.randint(
        1 << LOW_BITS, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    bits.add_(x.view(torch.int32)).bitwise_and_(_KEPT)
    return torch.where(x.isfinite(), bits.view(torch.float32), x).bfloat16()


class RoundedWeights:
    """Tensors in bf16, and what an optimizer updates in their place.

    Attributes:
        held: The tensors, by name.
        copies: Their fp32 copies, which have gradients but no values outside of `updated`.
        num_updates: How many were made.
    """

    def __init__(self, held: Mapping[str, nn.Parameter], *, seed: int) -> None:
        """Take tensors in bf16, on the device that computes; none may be a view of another."""
        self.held = dict(held)
        self.copies: dict[str, nn.Parameter] = {}
        self.num_updates = 0
        self._seed = seed
        for name, tensor in held.items():
            self.copies[name] = nn.Parameter(torch.empty_like(tensor, dtype=torch.float32))
            _empty(self.copies[name])

    @property
    def state(self) -> dict[str, int]:
        """What the next update's random numbers depend on, in addition to the tensors' names."""
        return {"seed": self._seed, "num_updates": self.num_updates}

    @state.setter
    def state(self, state: Mapping[str, int]) -> None:
        self._seed, self.num_updates = state["seed"], state["num_updates"]

    @contextmanager
    def updated(self) -> Iterator[None]:
        """Give the copies the tensors' values in a context, and round what they are after it."""
        for name, copy in self.copies.items():
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
            copy.data.copy_(self.held[name])
        yield
        for name, copy in self.copies.items():
            generator = torch.Generator(copy.device).manual_seed(self._seed_of(name))
            self.held[name].data.copy_(round_at_random(copy.data, generator))
            _empty(copy)
        self.num_updates += 1

    def _seed_of(self, name: str) -> int:
        text = f"{self._seed} {self.num_updates} {name}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1  # torch's generators take 63 bits


class RoundedOptimizer:
    """An optimizer of such copies as a checkpoint has it: with what their rounding depends on."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: RoundedWeights) -> None:
        """Take both."""
        self._optimizer, self._weights = optimizer, weights

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's states and settings, and those of the rounding."""
        return {**self._optimizer.state_dict(), _STATE: self._weights.state}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Take what `state_dict` returned."""
        self._optimizer.load_state_dict({k: v for k, v in content.items() if k != _STATE})
        self._weights.state = content[_STATE]


def _empty(tensor: torch.Tensor) -> None:
    """Free a tensor's memory; its shape stays."""
    tensor.untyped_storage().resize_(0)
