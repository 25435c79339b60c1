"""The time of the updates of a layer's own weights, on the host."""

from dataclasses import replace

from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import Machine
from offload.plan.time.costs import Costs
from offload.plan.time.optimizer import host_update_s


def with_updates(costs: Costs, machine: Machine, workload: Workload) -> Costs:
    """Return the costs of a step with the updates of weights of its layers, if any train."""
    whole = workload.adapter.whole
    if whole is None:
        return costs
    layers = (
        replace(
            cost,
            update_s=host_update_s(
                machine,
                number,
                dtype_bytes=workload.dtype_bytes,
                optimizer=workload.optimizer,
                low_bytes=whole.low_bytes,
            ),
        )
        for cost, number in zip(costs.layers, whole.layers, strict=True)
    )
    return replace(costs, layers=tuple(layers))
