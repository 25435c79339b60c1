"""The time of what a visit of a layer, or a pass, computes once for all micro-batches."""

from collections.abc import Callable
from dataclasses import replace

from offload.plan.facts.facts import LayerFacts, ModelFacts, adapted_linears
from offload.plan.facts.linears import Linear
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import Machine
from offload.plan.time.adapters import visit_norm, visit_scale
from offload.plan.time.costs import Costs, LayerCost
from offload.plan.time.pricer import Pricer
from offload.plan.time.work import Work


def with_norms(
    costs: Costs,
    facts: ModelFacts,
    machine: Machine,
    workload: Workload,
    *,
    num_micro_batches: int,
) -> Costs:
    """Return the costs of a micro-batch with its share of the norms and the scales of DoRA.

    The first micro-batch of a layer's visit computes scales; upwards it computes the norms as well.
    A graph that is kept has both.
    """
    adapter = workload.adapter
    if not (adapter.is_dora and adapter.are_branches_grouped):
        return costs
    at = Pricer(machine=machine, facts=facts, workload=workload)
    num, kinds = max(1, num_micro_batches), set(facts.layers)
    norms_s = {layer: _seconds(at, layer, visit_norm) / num for layer in kinds}
    scales_s = {layer: _seconds(at, layer, visit_scale) / num for layer in kinds}
    layers = (
        _later(cost, norm_s=norms_s[layer], scale_s=scales_s[layer])
        for cost, layer in zip(costs.layers, facts.layers, strict=True)
    )
    return replace(costs, layers=tuple(layers))


def _seconds(at: Pricer, layer: LayerFacts, work: Callable[[Pricer, Linear], Work]) -> float:
    adapted = adapted_linears(layer, at.workload.adapter)
    return sum((work(at, linear) for linear in adapted), start=Work()).seconds(at.machine)


def _later(cost: LayerCost, *, norm_s: float, scale_s: float) -> LayerCost:
    return replace(
        cost,
        forward_s=cost.forward_s + norm_s + scale_s,
        backward_s=cost.backward_s + scale_s,
        recompute_s=cost.recompute_s + scale_s,
    )
