"""The time of the updates of a layer's own weights, on the host or on the device."""

import math
from dataclasses import replace

from offload.plan.facts.facts import LayerFacts, ModelFacts
from offload.plan.facts.matrices import MatrixKind, layer_matrices
from offload.plan.facts.optimizer import (
    BF16_BYTES,
    DEVICE_PIECE_ELEMENTS,
    brought_bytes,
)
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import Machine
from offload.plan.time.costs import Costs
from offload.plan.time.optimizer import DEVICE_OPS, device_bytes_per_weight, host_update_s
from offload.plan.time.roofline import gemm
from offload.plan.time.work import Work

NS_STEPS = 5  # as torch.optim.Muon


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
        update_s = host_update_s(
            machine, number, dtype_bytes=b, optimizer=optimizer, low_bytes=whole.low_bytes
        )
        if on_device and (machine.device == "cuda" or optimizer == "muon"):
            update_s = _device_update(machine, layer, number, workload).seconds(machine)
        each = brought_bytes(b, optimizer, whole.low_bytes) if on_device else 0
        brought = math.ceil(number * each)
        layers.append(replace(cost, update_s=update_s, brought_bytes=brought))
    return replace(costs, layers=tuple(layers))


def _device_update(machine: Machine, layer: LayerFacts, number: int, workload: Workload) -> Work:
    """Passes over memory, in pieces of each tensor."""
    num_pieces = len(layer.linears) + len(layer.norms) + number // DEVICE_PIECE_ELEMENTS
    products = Work()
    if workload.optimizer == "muon":
        kinds = layer_matrices(layer)
        num_pieces = len(layer.norms) + sum(kind.number for kind in kinds)
        all_products = sum((_newton_schulz(machine, kind) for kind in kinds), start=products)
        products = all_products.times(number / layer.num_parameters)
    num_bytes = number * device_bytes_per_weight(workload.dtype_bytes, workload.optimizer)
    passes_s = num_bytes / machine.memory_bytes_per_s.value
    return products + Work(memory_s=passes_s, num_ops=DEVICE_OPS * num_pieces)


def _newton_schulz(machine: Machine, kind: MatrixKind) -> Work:
    """Five iterations of three products: X X', its square, and that times X, with sums fused in.

    They are in bf16 whatever the model computes in, and priced at its rate.
    """
    m, n = sorted((kind.rows, kind.columns))
    work = Work()
    for k, columns in ((n, m), (m, m), (m, n)):
        roof = gemm(machine, m=m, k=k, n=columns, dtype_bytes=BF16_BYTES)
        is_compute = roof.compute_s >= roof.memory_s
        work = work + Work(
            compute_s=roof.compute_s if is_compute else 0.0,
            memory_s=0.0 if is_compute else roof.memory_s,
            flops=2.0 * m * k * columns,
            num_ops=1,
        )
    return work.times(NS_STEPS * kind.number)
