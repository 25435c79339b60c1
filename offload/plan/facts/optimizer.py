"""Optimizers by name: the size of their states, and what an update costs."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from offload.errors import OffloadError
from offload.plan.facts.linears import FP32_BYTES
from offload.registry import Clash, Registry
from offload.tensors import Tensor

Shape = tuple[int, ...]
States = Mapping[str, Tensor]

DEFAULT = "adamw"
ROUNDED_BYTES = 2
"""Of a weight that is kept in bf16 and rounded at random."""
ROUNDING_BYTES = 4 + 1 + 4 + 2
"""Of a weight while it is rounded: a random number, whether it is finite, the result twice."""
STATE_BYTES = {"float32": FP32_BYTES, "bfloat16": 2, "uint8": 1}
LARGE = (800, 800)
"""Of a matrix whose states are as many bytes per weight as those of any larger one, or more."""
MEAN, SQUARE = "mean", "square"
BLOCK, SCALE = 256, "_scale"
"""Weights that share an element of a state whose name ends so."""
WEIGHTS, LOW_HALVES = "weights", "low halves of fp32 masters"
HOST_GRADIENTS, HOST_STATES = "gradients in RAM", "optimizer states in RAM"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What an update is made with."""

    number: int  # counted from 1
    lr: float  # learning rate
    weight_decay: float  # decoupled: lr times as much of the weight goes


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """An optimizer of tensors on the device that computes, of weights in RAM, or of both."""

    doc: str  # what it does, in a few words that follow its name in the reference
    # Function of the shape of a tensor to shape and dtype of its states, by name. A state has an
    # element for each of the weight's, or for each block (see `SCALE`).
    states: Callable[[Shape], Mapping[str, tuple[Shape, str]]]
    # Updates a weight in RAM in place, in fp32, and its states; the gradient may be overwritten.
    # None if it updates tensors on the device alone.
    update: Callable[[Tensor, Tensor, States, Step], None] | None = None
    # What a checkpoint of weights in RAM says of it.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Whether a tensor is updated as a whole, and one at a time. Otherwise each element is updated
    # by itself, and a weight in RAM in pieces that fit a cache.
    is_by_tensor: bool = False
    # Seconds that a core computes for a weight in RAM, where that takes longer than its memory, as
    # measured on an AMD EPYC (2026-11-23).
    core_s: float = 0.0
    # The class of torch's optimizer on the device, as `module:name`; None if it updates weights in
    # RAM alone.
    made_by: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of that class
    # Bytes on the device that an update of a weight reads and writes, with three passes of fp32
    # that clip.
    update_bytes: int = 0
    num_ops: int = 0  # operations on the device of an update of a tensor
    is_joint: bool = False  # whether one operation updates many tensors there
    # Names of states -> names in torch's optimizer, if that updates a part of a tensor as it would
    # the whole.
    moments: Mapping[str, str] | None = None
    # Elements from which the driver moves states to the host while the device is full, but for
    # scales.
    min_paged: int | None = None
    instead: str = DEFAULT  # what updates in its place where it cannot
    # Where its states are so small that a refusal names it.
    is_small_in: tuple[Literal["device", "RAM"], ...] = ()
    # Its name and source among the ways that `plan` compares; None for none.
    option: tuple[str, str] | None = None
    aliases: tuple[str, ...] = ()  # what transformers' Trainer calls it
    clashes: tuple[Clash, ...] = ()  # settings of a recipe that it does not go with

    def state_bytes(self, shape: Shape) -> int:
        """Return the bytes of the states of a tensor of this shape."""
        states = self.states(shape).values()
        return sum(STATE_BYTES[dtype] * math.prod(shape) for shape, dtype in states)

    def paged_bytes(self, shape: Shape) -> int:
        """Return how many of them are in host memory while the device is full."""
        if self.min_paged is None or math.prod(shape) < self.min_paged:
            return 0
        return self.state_bytes(shape) - sum(
            STATE_BYTES[dtype] * math.prod(of_state)
            for name, (of_state, dtype) in self.states(shape).items()
            if name.endswith(SCALE)
        )

    @property
    def bytes_per_weight(self) -> float:
        """The bytes of the states of a weight of a large matrix."""
        return self.state_bytes(LARGE) / math.prod(LARGE)


OPTIMIZERS = Registry("optimizers", "offload.optimizers", Optimizer)


def optimizers_that(holds: Callable[[Optimizer], object]) -> list[str]:
    """Return the names of optimizers for which something holds, those with large states first."""
    found = [name for name in OPTIMIZERS if holds(OPTIMIZERS[name])]
    return sorted(found, key=lambda name: -OPTIMIZERS[name].bytes_per_weight)


def on_device(optimizer: str, shapes: Sequence[Shape]) -> Optimizer:
    """Return the optimizer of tensors of these shapes on the device.

    Raises:
        OffloadError: There are some, but it updates weights in RAM alone.
    """
    found = OPTIMIZERS[optimizer]
    if shapes and found.made_by is None:
        raise OffloadError(
            f"train.optimizer: {optimizer}, but what trains is on the device",
            limit="it updates weights of the model, which train in RAM",
            hint=f"`train.optimizer: {found.instead}`, or `train.what: all`",
        )
    return found


def state_bytes(shapes: Sequence[Shape], optimizer: str) -> int:
    """Return the optimizer's state on the device for trained tensors of these shapes.

    Raises:
        OffloadError: See `on_device`.
    """
    kind, numbers = on_device(optimizer, shapes), Counter(shapes)  # those of equal layers are equal
    return sum(n * (kind.state_bytes(s) - kind.paged_bytes(s)) for s, n in numbers.items())


def paged_bytes(shapes: Sequence[Shape], optimizer: str) -> int:
    """Return the state in unified memory, which is host memory while the device is full."""
    return sum(map(OPTIMIZERS[optimizer].paged_bytes, shapes))


def temporary_bytes(shapes: Sequence[Shape], optimizer: str) -> int:
    """Return the temporary memory of an update."""
    sizes = [(FP32_BYTES * math.prod(shape), number) for shape, number in Counter(shapes).items()]
    is_one = OPTIMIZERS[optimizer].is_by_tensor
    return max(sizes, default=(0,))[0] if is_one else sum(size * number for size, number in sizes)


def host_update_bytes(
    dtype_bytes: int, optimizer: str, low_bytes: int | None = None
) -> dict[str, float]:
    """Return the bytes in RAM of one weight that trains there, by what they hold.

    In bf16 the weight is one half of its fp32 master. Its gradient has the weight's type. Small
    tensors, of which there are few, keep more than a state in 8 bits.

    Args:
        dtype_bytes: Of the weight.
        optimizer: What updates it.
        low_bytes: See `WholeWeights`.
    """
    return {
        WEIGHTS: dtype_bytes,
        LOW_HALVES: FP32_BYTES - dtype_bytes if low_bytes is None else low_bytes,
        HOST_GRADIENTS: dtype_bytes,
        HOST_STATES: OPTIMIZERS[optimizer].bytes_per_weight,
    }
