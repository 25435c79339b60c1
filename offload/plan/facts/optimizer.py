"""The size of an optimizer's state."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from offload.errors import OffloadError
from offload.plan.facts.linears import FP32_BYTES

Optimizer = Literal[
    "adamw",
    "adamw_bf16",
    "adamw_8bit",
    "paged_adamw_8bit",
    "adafactor",
    "lion",
    "lion_bf16",
    "sgd",
]
Shape = tuple[int, ...]

HOST_ONLY: tuple[Optimizer, ...] = ("adamw_bf16", "lion_bf16")
"""Optimizers of weights of the model alone, which train in RAM."""

BF16_BYTES = 2
ROUNDED_BYTES = BF16_BYTES
"""Of a weight that is kept in bf16 and rounded at random."""
ROUNDING_BYTES = 4 + 1 + 4 + 2
"""Of a weight while it is rounded: a random number, whether it is finite, the result twice."""
MIN_8BIT_ELEMENTS = 4096
MIN_PAGED_ELEMENTS = 100_000
BLOCK_8BIT = 256

# What a weight that trains in RAM takes there, and its optimizer's states. Adafactor's are at most
# so large, for matrices of 800 rows and columns or more.
HOST_STATE_BYTES: dict[str, float] = {
    "adamw": 2 * FP32_BYTES,
    "adamw_bf16": BF16_BYTES + FP32_BYTES,
    "adamw_8bit": 2 * (1 + FP32_BYTES / BLOCK_8BIT),
    "adafactor": 0.01,
    "lion": FP32_BYTES,
    "lion_bf16": BF16_BYTES,
    "sgd": 0,
}
WEIGHTS, LOW_HALVES = "weights", "low halves of fp32 masters"
HOST_GRADIENTS, HOST_STATES = "gradients in RAM", "optimizer states in RAM"


def state_bytes(shapes: Sequence[Shape], optimizer: Optimizer) -> int:
    """Return the optimizer's state on the device for trained tensors of these shapes.

    AdamW keeps two fp32 moments. In 8 bit they are a byte each, with a scale per 256 elements, but
    tensors under 4,096 elements keep fp32. If paged, the moments of tensors of 100,000 elements or
    more are not on the device. Adafactor keeps a mean of squares for each row and column, and all
    squares of a vector. Lion keeps one fp32 moment, SGD nothing.

    Raises:
        OffloadError: See `refuse_host_only`.

    Source: bitsandbytes 0.50 optim/optimizer.py; torch/optim/_adafactor.py.
    """
    refuse_host_only(shapes, optimizer)
    numbers = Counter(shapes)  # those of equal layers are equal
    return sum(number * _state_bytes(shape, optimizer) for shape, number in numbers.items())


def refuse_host_only(shapes: Sequence[Shape], optimizer: Optimizer) -> None:
    """Refuse tensors on the device that an optimizer of weights in RAM should update.

    Raises:
        OffloadError: There are some.
    """
    if shapes and optimizer in HOST_ONLY:
        raise OffloadError(
            f"train.optimizer: {optimizer}, but what trains is on the device",
            limit="it updates weights of the model, which train in RAM",
            hint="`train.optimizer: adamw`, or `train.what: all`",
        )


def _state_bytes(shape: Shape, optimizer: Optimizer) -> int:
    size = math.prod(shape)
    if optimizer in ("lion", "sgd"):
        return FP32_BYTES * size if optimizer == "lion" else 0
    if optimizer == "adafactor":
        *others, columns = shape
        sums = math.prod(others) + math.prod(others[:-1]) * columns if others else columns
        return FP32_BYTES * sums
    if optimizer == "adamw" or size < MIN_8BIT_ELEMENTS:
        return 2 * FP32_BYTES * size
    moments = 0 if optimizer == "paged_adamw_8bit" and size >= MIN_PAGED_ELEMENTS else size
    return 2 * (moments + FP32_BYTES * math.ceil(size / BLOCK_8BIT))


def paged_bytes(shapes: Sequence[Shape], optimizer: Optimizer) -> int:
    """Return the state in unified memory, which is host memory while the device is full."""
    if optimizer != "paged_adamw_8bit":
        return 0
    return sum(2 * size for size in map(math.prod, shapes) if size >= MIN_PAGED_ELEMENTS)


def temporary_bytes(shapes: Sequence[Shape], optimizer: Optimizer) -> int:
    """Return the temporary memory of an update: Adafactor updates one tensor at a time."""
    sizes = {shape: FP32_BYTES * math.prod(shape) for shape in shapes}
    if optimizer == "adafactor":
        return max(sizes.values(), default=0)
    return sum(number * sizes[shape] for shape, number in Counter(shapes).items())


def host_update_bytes(
    dtype_bytes: int, optimizer: Optimizer, low_bytes: int | None = None
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
        HOST_STATES: HOST_STATE_BYTES[optimizer],
    }
