"""The time of what a visit of a layer computes once, whatever the number of micro-batches."""

from dataclasses import replace

from offload.plan.facts.facts import LayerFacts, ModelFacts, adapted_linears
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import Machine
from offload.plan.time.adapters import visit_norm
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
    """Return the costs of a micro-batch with its share of the norms of DoRA.

    Upwards and downwards they are computed by the first micro-batch of a layer's visit; a graph
    that is kept has them.
    """
    adapter = workload.adapter
    if not (adapter.is_dora and adapter.are_branches_grouped):
        return costs
    at = Pricer(machine=machine, facts=facts, workload=workload)
    shares_s = {x: _norms_s(at, x) / max(1, num_micro_batches) for x in set(facts.layers)}
    layers = (
        _later(cost, shares_s[layer])
        for cost, layer in zip(costs.layers, facts.layers, strict=True)
    )
    return replace(costs, layers=tuple(layers))


def _norms_s(at: Pricer, layer: LayerFacts) -> float:
    adapted = adapted_linears(layer, at.workload.adapter)
    norms = sum((visit_norm(at, linear) for linear in adapted), start=Work())
    return norms.seconds(at.machine)


def _later(cost: LayerCost, share_s: float) -> LayerCost:
    return replace(
        cost,
        forward_s=cost.forward_s + share_s,
        backward_s=cost.backward_s + share_s,
        recompute_s=cost.recompute_s + share_s,
    )
