"""What the update of the trained tensors keeps, and what it moves."""

import math
from collections.abc import Sequence
from typing import Literal

from offload.errors import OffloadError
from offload.plan.machine import Machine
from offload.plan.parts import FP32_BYTES
from offload.plan.work import Work

Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor"]
Shape = tuple[int, ...]

MIN_8BIT_ELEMENTS = 4096
MIN_PAGED_ELEMENTS = 100_000
BLOCK_8BIT = 256
# Clipping (3 passes of fp32) and AdamW, unfused (20) or in 8 bit (3 and two bytes of state twice);
# Adafactor (17): three norms, a product, and the update in place.
BYTES_PER_WEIGHT = {"adamw": 92, "adamw_8bit": 28, "paged_adamw_8bit": 28, "adafactor": 80}
OPS = {"adamw": 14, "adamw_8bit": 14, "paged_adamw_8bit": 16, "adafactor": 24}
CUDA_TENSORS_PER_FOREACH = 100


def state_bytes(shapes: Sequence[Shape], optimizer: Optimizer) -> int:
    """Return the optimizer's state on the device for trained tensors of these shapes.

    AdamW keeps two fp32 moments. In 8 bit they are a byte each, with a scale per 256 elements, but
    tensors under 4,096 elements keep fp32; if paged, the moments of tensors from 100,000 elements
    on lie elsewhere. Adafactor keeps a mean for each row and column, of vectors all squares.

    Source: bitsandbytes 0.50 optim/optimizer.py; torch/optim/_adafactor.py.
    """
    return sum(_state_bytes(shape, optimizer) for shape in shapes)


def _state_bytes(shape: Shape, optimizer: Optimizer) -> int:
    size = math.prod(shape)
    if optimizer == "adafactor":
        *others, columns = shape
        sums = math.prod(others) + math.prod(others[:-1]) * columns if others else columns
        return FP32_BYTES * sums
    if optimizer == "adamw" or size < MIN_8BIT_ELEMENTS:
        return 2 * FP32_BYTES * size
    moments = 0 if optimizer == "paged_adamw_8bit" and size >= MIN_PAGED_ELEMENTS else size
    return 2 * (moments + FP32_BYTES * math.ceil(size / BLOCK_8BIT))


def paged_bytes(shapes: Sequence[Shape], optimizer: Optimizer) -> int:
    """Return the state in unified memory, which is the host's while the device is full."""
    if optimizer != "paged_adamw_8bit":
        return 0
    return sum(2 * size for size in map(math.prod, shapes) if size >= MIN_PAGED_ELEMENTS)


def temporary_bytes(shapes: Sequence[Shape], optimizer: Optimizer) -> int:
    """Return what an update takes for itself: Adafactor goes from tensor to tensor."""
    sizes = [FP32_BYTES * math.prod(shape) for shape in shapes]
    return max(sizes, default=0) if optimizer == "adafactor" else sum(sizes)


def update_work(machine: Machine, shapes: Sequence[Shape], optimizer: Optimizer) -> Work:
    """Price clipping and the update; paged states cross the link to the device and back.

    Raises:
        OffloadError: States are to be paged, and there is no device to page them to.
    """
    if optimizer == "paged_adamw_8bit" and machine.device == "cpu":
        raise OffloadError(
            f"train.optimizer: paged_adamw_8bit, but {machine.name} is a CPU",
            limit="states are paged between a CUDA device and the host",
            hint="`train.optimizer: adamw_8bit`",
        )
    num_tensors = len(shapes)
    if machine.device == "cuda" and optimizer == "adamw":
        num_tensors = math.ceil(num_tensors / CUDA_TENSORS_PER_FOREACH)
    num_bytes = BYTES_PER_WEIGHT[optimizer] * sum(map(math.prod, shapes))
    paged = paged_bytes(shapes, optimizer)
    seconds = (
        num_bytes / machine.memory_bytes_per_s.value
        + paged / machine.h2d_bytes_per_s.value
        + paged / machine.d2h_bytes_per_s.value
    )
    return Work(memory_s=seconds, num_ops=OPS[optimizer] * num_tensors)
