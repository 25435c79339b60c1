"""What the update of the trained tensors keeps, and what it moves."""

import math
from collections.abc import Sequence
from typing import Literal

from offload.plan.machine import Machine
from offload.plan.parts import FP32_BYTES
from offload.plan.work import Work

Optimizer = Literal["adamw", "adamw_8bit"]
Shape = tuple[int, ...]

MIN_8BIT_ELEMENTS = 4096
BLOCK_8BIT = 256
# Clipping (3 passes of fp32) and AdamW, unfused (20) or in 8 bit (3 and two bytes of state twice).
BYTES_PER_WEIGHT = {"adamw": 92, "adamw_8bit": 28}
OPS = 14
CUDA_TENSORS_PER_FOREACH = 100


def state_bytes(shapes: Sequence[Shape], optimizer: Optimizer) -> int:
    """Return the optimizer's state for trained tensors of these shapes.

    AdamW keeps two fp32 moments. In 8 bit they are a byte each, with a scale per 256 elements, but
    tensors under 4,096 elements keep fp32.
    """
    total = 0
    for size in map(math.prod, shapes):
        if optimizer == "adamw" or size < MIN_8BIT_ELEMENTS:
            total += 2 * FP32_BYTES * size
        else:
            total += 2 * (size + FP32_BYTES * math.ceil(size / BLOCK_8BIT))
    return total


def update_work(machine: Machine, shapes: Sequence[Shape], optimizer: Optimizer) -> Work:
    """Price clipping and the update."""
    num_tensors = len(shapes)
    if machine.device == "cuda" and optimizer == "adamw":
        num_tensors = math.ceil(num_tensors / CUDA_TENSORS_PER_FOREACH)
    num_bytes = BYTES_PER_WEIGHT[optimizer] * sum(map(math.prod, shapes))
    seconds = num_bytes / machine.memory_bytes_per_s.value
    return Work(memory_s=seconds, num_ops=OPS * num_tensors)
