"""The rate of products with experts' matrices, from the time that a layer's experts took."""

from dataclasses import replace

from offload.plan.costs import Pricer, Workload
from offload.plan.facts import ModelFacts, adapted_linears
from offload.plan.machine import ExpertsImplementation, Implementation, Machine, Rate


def with_measured_experts(
    machine: Machine,
    facts: ModelFacts,
    workload: Workload,
    *,
    implementation: ExpertsImplementation,
    seconds: float,
) -> Machine:
    """Return the machine with the rate at which a layer's experts are priced as was measured.

    What is not a product (rows gathered and added up, activations) has a price of its own, which is
    taken off first: otherwise it would count twice. No rate is above that of large products.

    Args:
        machine: With an assumed way and rate.
        facts: A model with experts.
        workload: One micro-batch.
        implementation: The way that was measured.
        seconds: Forward and backward of one layer's experts on that micro-batch.
    """
    machine = replace(
        machine, experts_implementation=Implementation(value=implementation, source="measured")
    )
    at = Pricer(machine=machine, facts=facts, workload=workload)
    layer = next(layer for layer in facts.layers if layer.num_experts)
    experts = [linear for linear in layer.linears if linear.group == "experts"]
    adapted = [x for x in adapted_linears(layer, workload.adapter) if x.group == "experts"]
    branches = [at.adapter(linear) for linear in adapted]
    # a product is run forward and backward, all else counts twice as much backward (`costs.py`)
    flops = 2 * sum(at.experts(linear).flops for linear in experts)
    flops += 3 * sum(branch.flops for branch in branches)
    other_s = 3 * (at.routing(layer).memory_s + sum(branch.memory_s for branch in branches))
    products_s = max(seconds - other_s, flops / machine.gemm_flops_per_s.value)
    rate = Rate(value=flops / products_s, source="measured")
    return replace(machine, expert_gemm_flops_per_s=rate)
