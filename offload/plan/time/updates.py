"""The time of the updates of a layer's own weights, on the host or on the device."""

import math
from dataclasses import replace

from offload.plan.facts.facts import LayerFacts, ModelFacts
from offload.plan.facts.optimizer import DEVICE_PIECE_ELEMENTS, brought_bytes
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import Machine
from offload.plan.time.costs import Costs
from offload.plan.time.optimizer import DEVICE_OPS, device_bytes_per_weight, host_update_s
from offload.plan.time.work import Work


def with_updates(costs: Costs, facts: ModelFacts, machine: Machine, workload: Workload) -> Costs:
    """Return the costs of a step with the updates of weights that train in its layers, if any do.

    A device reads and writes what it updates as often as the code says, at the rate of its memory.
    On a CPU both places are the same memory.
    """
    whole, b = workload.adapter.whole, workload.dtype_bytes
    if whole is None:
        return costs
    optimizer, on_device = workload.optimizer, workload.updates == "device"
    layers = []
    for cost, layer, number in zip(costs.layers, facts.layers, whole.layers, strict=True):
        update_s = host_update_s(machine, number, dtype_bytes=b, optimizer=optimizer)
        if on_device and machine.device == "cuda":
            update_s = _device_update(machine, layer, number, workload).seconds(machine)
        brought = math.ceil(number * brought_bytes(b, optimizer)) if on_device else 0
        layers.append(replace(cost, update_s=update_s, brought_bytes=brought))
    return replace(costs, layers=tuple(layers))


def _device_update(machine: Machine, layer: LayerFacts, number: int, workload: Workload) -> Work:
    """Passes over memory, in pieces of each tensor."""
    num_tensors = len(layer.linears) + len(layer.norms)
    num_pieces = num_tensors + number // DEVICE_PIECE_ELEMENTS
    num_bytes = number * device_bytes_per_weight(workload.dtype_bytes, workload.optimizer)
    return Work(
        memory_s=num_bytes / machine.memory_bytes_per_s.value, num_ops=DEVICE_OPS * num_pieces
    )
