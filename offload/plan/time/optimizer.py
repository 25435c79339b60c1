"""The time of clipping and of the update of the trained tensors."""

import math
from collections.abc import Sequence

from offload.errors import OffloadError
from offload.plan.facts.facts import AdapterSpec, ModelFacts, WholeWeights
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import (
    HOST_GRADIENTS,
    Optimizer,
    Shape,
    host_update_bytes,
    paged_bytes,
    refuse_host_only,
)
from offload.plan.facts.trainable import rounded_tensor_sizes
from offload.plan.machine.machine import Machine
from offload.plan.time.roofline import Work

# Clipping (3 passes of fp32) and AdamW, unfused (20) or in 8 bit (3 and two bytes of state twice);
# Adafactor (17): three norms, a product, and the update in place. Lion (5) is one kernel. SGD (5).
BYTES_PER_WEIGHT = {
    "adamw": 92,
    "adamw_8bit": 28,
    "paged_adamw_8bit": 28,
    "adafactor": 80,
    "lion": 32,
    "sgd": 32,
}
OPS = {
    "adamw": 14,
    "adamw_8bit": 14,
    "paged_adamw_8bit": 16,
    "adafactor": 24,
    "lion": 14,
    "sgd": 5,
}
CUDA_TENSORS_PER_FOREACH = 100

# What a weight in bf16 adds: its fp32 copy, a random number, and what is made of the two. A CPU
# takes as long as for so many bytes, mostly to draw (29 copies of an fp32 tensor, on one core).
ROUNDING_BYTES_PER_WEIGHT = {"cuda": 58, "cpu": 232}
ROUNDING_OPS = 10

# Seconds that a core computes for a weight in RAM where that takes longer than its memory: states
# to and from 8 bits, Adafactor's passes over a whole tensor. Measured on an AMD EPYC (2026-11-23).
# Means in bf16 take 1.6 times what AdamW's (2.05) and Lion's (2.29) in fp32 do there.
CORE_S_PER_WEIGHT = {
    "adamw_bf16": 3.3e-9,
    "adamw_8bit": 23e-9,
    "adafactor": 21e-9,
    "lion_bf16": 3.7e-9,
}
NUM_CORES = 8  # of a workstation, where nothing is measured


def host_bytes_per_weight(
    dtype_bytes: int, optimizer: Optimizer, low_bytes: int | None = None
) -> float:
    """Return what an update of a weight in RAM reads and writes: all of it, gradients only once."""
    sizes = host_update_bytes(dtype_bytes, optimizer, low_bytes)
    return 2 * sum(sizes.values()) - sizes[HOST_GRADIENTS]


def host_update_s(
    machine: Machine,
    num_weights: int,
    *,
    dtype_bytes: int,
    optimizer: Optimizer,
    low_bytes: int | None,
) -> float:
    """Return the seconds of an update of weights in RAM: as fast as that memory, or the cores."""
    is_cpu = machine.device == "cpu"
    rate = machine.memory_bytes_per_s if is_cpu else machine.host_memory_bytes_per_s
    memory_s = host_bytes_per_weight(dtype_bytes, optimizer, low_bytes) / rate.value
    return num_weights * max(memory_s, CORE_S_PER_WEIGHT.get(optimizer, 0.0) / NUM_CORES)


def outer_update_s(
    machine: Machine,
    whole: WholeWeights,
    *,
    dtype_bytes: int,
    optimizer: Optimizer,
) -> float:
    """Return the seconds of the update of weights around the layers, which nothing overlaps with.

    On CUDA their gradients cross the link in fp32, and the weights cross it back.

    Args:
        machine: Its rates.
        whole: What trains.
        dtype_bytes: Of a weight.
        optimizer: What updates them.
    """
    num_weights = whole.num_outer
    update_s = host_update_s(
        machine,
        num_weights,
        dtype_bytes=dtype_bytes,
        optimizer=optimizer,
        low_bytes=whole.low_bytes,
    )
    if machine.device == "cpu":
        return update_s
    sent_s = num_weights * FP32_BYTES / machine.d2h_bytes_per_s.value
    return sent_s + update_s + num_weights * dtype_bytes / machine.h2d_bytes_per_s.value


def update_work(machine: Machine, shapes: Sequence[Shape], optimizer: Optimizer) -> Work:
    """Price clipping and the update; paged states cross the link to the device and back.

    Raises:
        OffloadError: The optimizer is paged, but there is no device to page to; or it is one of
            weights in RAM.
    """
    refuse_host_only(shapes, optimizer)
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


def rounding_work(machine: Machine, facts: ModelFacts, spec: AdapterSpec) -> Work:
    """Price the rounding of an adapter's weights in bf16, if that is where they are kept."""
    sizes = rounded_tensor_sizes(facts, spec)
    num_bytes = ROUNDING_BYTES_PER_WEIGHT[machine.device] * sum(sizes)
    seconds = num_bytes / machine.memory_bytes_per_s.value
    return Work(memory_s=seconds, num_ops=ROUNDING_OPS * len(sizes))
