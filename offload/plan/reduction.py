"""What of a request's gradients its ranks send each other, and over what."""

from dataclasses import replace

from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.trainable import layer_parameters, trained_parameters
from offload.plan.machine.machine import Machine, Network, Rate
from offload.plan.request import PlanRequest
from offload.plan.schedule.reduced import Reduced
from offload.plan.time.costs import Costs

# Until a launch measures them. Between machines 1 Gb/s Ethernet, of which TCP leaves 0.94.
ETHERNET = Rate(value=0.94e9 / 8, source="assumed: 1 Gb/s Ethernet")
NETWORK_LATENCY = Rate(value=1e-3, source="assumed")


def reduced_of(facts: ModelFacts, request: PlanRequest) -> tuple[Reduced, ...]:
    """Return what of each run's gradients is added up over ranks; nothing with a single rank.

    Weights that train in parts are summed part by part; see `offload.plan.sharded`.
    """
    is_in_parts = request.is_sharded and request.typical.adapter.whole is not None
    if request.num_ranks == 1 or is_in_parts:
        return ()
    return tuple(_reduced(facts, run) for run in request.runs)


def _reduced(facts: ModelFacts, run: PlanRequest) -> Reduced:
    spec = run.typical.adapter
    layers = layer_parameters(facts, spec)
    return Reduced.of(
        layers,
        trained_parameters(facts, spec) - sum(layers),
        element_bytes=run.reduction.element_bytes,
        num_ranks=run.num_ranks,
    )


def network_of(machine: Machine, request: PlanRequest) -> Network:
    """Return what connects the ranks: as measured, or assumed.

    On one machine they exchange through host memory, at the rate of its copies to a device.
    """
    if machine.network is not None:
        return machine.network
    is_one_machine = request.local_ranks == request.num_ranks
    copies = machine.h2d_duplex_bytes_per_s
    return Network(
        num_ranks=request.num_ranks,
        latency_s=NETWORK_LATENCY,
        bytes_per_s=replace(copies, source=f"assumed: a copy, {copies.source}")
        if is_one_machine
        else ETHERNET,
    )


def with_network(costs: Costs, facts: ModelFacts, machine: Machine, request: PlanRequest) -> Costs:
    """Return the costs of a step whose ranks add up their gradients.

    An update that is sent to all is part of the update's time: nothing is computed meanwhile.
    Weights that train on the host are updated there, whatever the cards, and not sent.
    """
    if request.num_ranks == 1:
        return costs
    sends_update = request.reduction.sends_update and request.typical.adapter.whole is None
    network = network_of(machine, request)
    latency_s, bytes_per_s = network.latency_s.value, network.bytes_per_s.value
    return replace(
        costs,
        network_latency_s=latency_s,
        network_bytes_per_s=bytes_per_s,
        optimizer_s=costs.optimizer_s
        + (latency_s + update_bytes(facts, request) / bytes_per_s) * sends_update,
    )


def update_bytes(facts: ModelFacts, request: PlanRequest) -> int:
    """Return what the main rank sends of an update, in as many rounds as reach all ranks."""
    num_rounds = (request.num_ranks - 1).bit_length()
    return num_rounds * FP32_BYTES * trained_parameters(facts, request.typical.adapter)
