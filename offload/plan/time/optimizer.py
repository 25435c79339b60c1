"""The time of clipping and of the update of the trained tensors."""

import math
from collections.abc import Sequence

from offload.errors import OffloadError
from offload.plan.facts.facts import AdapterSpec, ModelFacts, WholeWeights
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import (
    HOST_GRADIENTS,
    OPTIMIZERS,
    Shape,
    host_update_bytes,
    on_device,
    paged_bytes,
)
from offload.plan.facts.trainable import rounded_tensor_sizes
from offload.plan.machine.machine import Machine
from offload.plan.time.roofline import Work

CUDA_TENSORS_PER_FOREACH = 100

# What a weight in bf16 adds: its fp32 copy, a random number, and what is made of the two. A CPU
# takes as long as for so many bytes, mostly to draw (29 copies of an fp32 tensor, on one core).
ROUNDING_BYTES_PER_WEIGHT = {"cuda": 58, "cpu": 232}
ROUNDING_OPS = 10

NUM_CORES = 8  # of a workstation, where nothing is measured


def host_update_s(
    machine: Machine,
    num_weights: int,
    *,
    dtype_bytes: int,
    optimizer: str,
    low_bytes: int | None,
) -> float:
    """Return the seconds of an update of weights in RAM: as fast as that memory, or the cores."""
    is_cpu = machine.device == "cpu"
    rate = machine.memory_bytes_per_s if is_cpu else machine.host_memory_bytes_per_s
    sizes = host_update_bytes(dtype_bytes, optimizer, low_bytes)
    # all of it is read and written, but gradients are only read
    memory_s = (2 * sum(sizes.values()) - sizes[HOST_GRADIENTS]) / rate.value
    return num_weights * max(memory_s, OPTIMIZERS[optimizer].core_s / NUM_CORES)


def outer_update_s(
    machine: Machine,
    whole: WholeWeights,
    *,
    dtype_bytes: int,
    optimizer: str,
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


def update_work(machine: Machine, shapes: Sequence[Shape], optimizer: str) -> Work:
    """Price clipping and the update; paged states cross the link to the device and back.

    Raises:
        OffloadError: The optimizer is paged, but there is no device to page to; or it is one of
            weights in RAM.
    """
    kind, num_tensors = on_device(optimizer, shapes), len(shapes)
    if kind.min_paged is not None and machine.device == "cpu":
        raise OffloadError(
            f"train.optimizer: {optimizer}, but {machine.name} is a CPU",
            limit="states are paged between a CUDA device and the host",
            hint=f"`train.optimizer: {kind.instead}`",
        )
    if machine.device == "cuda" and kind.is_joint:
        num_tensors = math.ceil(num_tensors / CUDA_TENSORS_PER_FOREACH)
    num_bytes = kind.update_bytes * sum(map(math.prod, shapes))
    paged = paged_bytes(shapes, optimizer)
    seconds = (
        num_bytes / machine.memory_bytes_per_s.value
        + paged / machine.h2d_bytes_per_s.value
        + paged / machine.d2h_bytes_per_s.value
    )
    return Work(memory_s=seconds, num_ops=kind.num_ops * num_tensors)


def rounding_work(machine: Machine, facts: ModelFacts, spec: AdapterSpec) -> Work:
    """Price the rounding of an adapter's weights in bf16, if that is where they are kept."""
    sizes = rounded_tensor_sizes(facts, spec)
    num_bytes = ROUNDING_BYTES_PER_WEIGHT[machine.device] * sum(sizes)
    seconds = num_bytes / machine.memory_bytes_per_s.value
    return Work(memory_s=seconds, num_ops=ROUNDING_OPS * len(sizes))
