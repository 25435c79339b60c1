"""The time of clipping and of the update of the trained tensors."""

import math
from collections.abc import Sequence

from offload.errors import OffloadError
from offload.plan.facts.optimizer import Optimizer, Shape, paged_bytes
from offload.plan.machine.machine import Machine
from offload.plan.time.work import Work

# Clipping (3 passes of fp32) and AdamW, unfused (20) or in 8 bit (3 and two bytes of state twice);
# Adafactor (17): three norms, a product, and the update in place.
BYTES_PER_WEIGHT = {"adamw": 92, "adamw_8bit": 28, "paged_adamw_8bit": 28, "adafactor": 80}
OPS = {"adamw": 14, "adamw_8bit": 14, "paged_adamw_8bit": 16, "adafactor": 24}
CUDA_TENSORS_PER_FOREACH = 100


def update_work(machine: Machine, shapes: Sequence[Shape], optimizer: Optimizer) -> Work:
    """Price clipping and the update; paged states cross the link to the device and back.

    Raises:
        OffloadError: The optimizer is paged, but there is no device to page to.
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
