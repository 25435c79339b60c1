"""The rate of products with experts' matrices, from the measured time of a layer's experts."""

from dataclasses import replace

from offload.plan.facts.facts import ModelFacts, adapted_linears
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import ExpertsImplementation, Implementation, Machine, Rate
from offload.plan.time.adapters import expert_branch
from offload.plan.time.costs import routing_work
from offload.plan.time.pricer import Pricer


def with_measured_experts(
    machine: Machine,
    facts: ModelFacts,
    workload: Workload,
    *,
    implementation: ExpertsImplementation,
    seconds: float,
) -> Machine:
    """Return the machine with the rate that makes the price of a layer's experts the measured time.

    Work outside the products (gathering and adding up rows, activations) is priced separately and
    is subtracted first, otherwise it would count twice. The rate is at most that of large products.

    Args:
        machine: With assumed expert kernels and rate.
        facts: A model with experts.
        workload: One micro-batch.
        implementation: The expert kernels that were measured.
        seconds: Forward and backward of one layer's experts on that micro-batch.
    """
    machine = replace(
        machine, experts_implementation=Implementation(value=implementation, source="measured")
    )
    at = Pricer(machine=machine, facts=facts, workload=workload)
    layer = next(layer for layer in facts.layers if layer.num_experts)
    experts = [linear for linear in layer.linears if linear.group == "experts"]
    adapted = [x for x in adapted_linears(layer, workload.adapter) if x.group == "experts"]
    routing = routing_work(at, layer)
    others = [routing.recompute, routing.backward]  # the measured forward has a graph
    for branch in (expert_branch(at, linear) for linear in adapted):
        others += [branch.recompute, branch.backward]
    rows = workload.num_tokens * layer.experts_per_token
    tiled_frac = at.tiled(rows, layer.num_experts) / rows
    flops = 2 * tiled_frac * sum(at.experts(linear).flops for linear in experts)
    flops += sum(work.flops for work in others)
    other_s = sum(work.memory_s for work in others)
    products_s = max(seconds - other_s, flops / machine.gemm_flops_per_s.value)
    rate = Rate(value=flops / products_s, source="measured")
    return replace(machine, expert_gemm_flops_per_s=rate)
