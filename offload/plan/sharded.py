"""The plan of a step whose ranks each hold a part of the model (FSDP), and nothing is streamed.

It is a `Plan` as any other: its ops are those of `offload.plan.schedule.sharded`, its costs those
of the same visits, and its memory is counted here. A rank holds 1/N of the weights, of what trains,
its gradients and its optimizer's states; of layers, those that are gathered; of activations, those
of one micro-batch, each layer of which is computed again in its backward.

An all-gather and a reduce-scatter among N ranks each send (N - 1) / N of the data through a rank's
link, as a ring does. Weights are gathered in the type that they compute in, gradients are added up
in fp32.

Source: arXiv:2304.11277; torch/distributed/fsdp/_fully_shard (torch 2.13).
"""

from collections.abc import Sequence
from dataclasses import replace

from offload.errors import DoesNotFitError
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import HOST_STATE_BYTES
from offload.plan.facts.trainable import (
    adapter_parameters,
    layer_parameters,
    outer_module_sizes,
    trained_parameters,
)
from offload.plan.facts.workload import Workload
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, MEASURED, Machine
from offload.plan.memory.host import HostLoad, host_terms
from offload.plan.memory.memory import (
    ADAPTERS,
    FRAGMENTATION,
    FRAGMENTATION_FRAC,
    GRADIENTS,
    LAYER_GRADIENTS,
    SLOTS,
    STATES,
    UPDATE,
    MemoryTerm,
    device_terms,
    total_bytes,
)
from offload.plan.plan import Plan, costs_of
from offload.plan.reduction import network_of
from offload.plan.request import PlanRequest
from offload.plan.schedule.residency import Residency
from offload.plan.schedule.sharded import ShardedSizes, sharded_schedule
from offload.plan.search import Candidate, Choice
from offload.plan.time.costs import Costs
from offload.plan.time.optimizer import BYTES_PER_WEIGHT

# Of a collective of tensors, without words between processes; until it is measured.
COLLECTIVE_LATENCY_S = 5e-5
NUM_GATHERED = 3  # layers: one computes, one is there, and a buffer that it has arrived in
SHARDS, GATHERED = "own part of the weights", "gathered layers"
NEW_GRADIENTS = "gradients before they are added up"
LOGITS = "logits of all tokens"
CHECKPOINT = "a checkpoint on the main rank"


def as_sharded(request: PlanRequest) -> PlanRequest:
    """Return the same step with the model sharded: layers are native, and computed plainly."""

    def plain(one: Workload) -> Workload:
        return replace(
            one,
            codec="native",
            layer_code="plain",
            leaves_out=False,
            mlp_chunk_tokens=None,
            embeddings="device",
            head_chunk_tokens=max(1, one.label_tokens),
        )

    return replace(
        request,
        typical=plain(request.typical),
        largest=plain(request.largest),
        num_slots=None,
        num_kept_graphs=0,
        is_stashed=False,
        is_on_disk=False,
        has_outputs=False,
        has_sent_graphs=False,
        traced=None,
        is_sharded=True,
    )


def sharded_choice(facts: ModelFacts, machine: Machine, requests: Sequence[PlanRequest]) -> Choice:
    """Return the fastest of some sharded plans that fits; they differ in their micro-batches.

    Raises:
        DoesNotFitError: None fits.
    """
    plans = [sharded_plan(facts, machine, request) for request in requests]
    fitting = [one for one in plans if not shortages(one)]
    if not fitting:
        raise _refusal(min(plans, key=lambda one: one.peak_bytes))
    best = min(fitting, key=lambda one: one.step_s)
    chosen = Candidate(
        needs=MemoryNeeds.of(facts, machine, best.request),
        costs=best.costs,
        residency=best.residency,
        shortages=(),
        bound_s=best.bound_s,
        step_s=best.step_s,
    )
    return Choice(plan=best, chosen=chosen, rejected=(), candidates=(), rounding=())


def sharded_plan(facts: ModelFacts, machine: Machine, request: PlanRequest) -> Plan:
    """Lay a sharded step out, whether or not it fits.

    Args:
        facts: The model.
        machine: Of each rank.
        request: As `as_sharded` returns it, of two ranks or more.
    """
    assert request.is_sharded
    assert request.num_ranks > 1
    residency = Residency(num_slots=facts.num_layers)
    device = _device_terms(facts, machine, request)
    typical = request.typical
    return Plan(
        facts=facts,
        machine=machine,
        request=request,
        residency=residency,
        schedule=sharded_schedule(
            sharded_sizes(facts, typical, num_ranks=request.num_ranks),
            num_micro_batches=request.rank_micro_batches,
            trains_front=bool(outer_module_sizes(facts, typical.adapter)),
            is_ahead=machine.device == "cuda",
        ),
        costs=_costs(facts, machine, request).given(residency),
        device_memory=device,
        host_memory=_host_terms(facts, machine, request, device_bytes=total_bytes(device)),
    )


def shortages(plan: Plan) -> list[str]:
    """Return each memory that is too small, in words; on a CPU there is only one."""
    machine, budget_bytes = plan.machine, plan.request.vram_budget_bytes
    is_cpu = machine.device == "cpu"
    ram_bytes = plan.host_bytes + (plan.peak_bytes if is_cpu else 0)
    limit_bytes = min(machine.vram_bytes, budget_bytes or machine.vram_bytes)
    found = []
    if plan.peak_bytes > limit_bytes:
        kind = "of memory for computing" if is_cpu else "of device memory"
        found.append(f"{_gib(plan.peak_bytes)} {kind} on each rank, of {_gib(limit_bytes)}")
    if ram_bytes > machine.ram_bytes:
        found.append(f"{_gib(ram_bytes)} of RAM, of {_gib(machine.ram_bytes)}")
    return found


def sharded_sizes(facts: ModelFacts, workload: Workload, *, num_ranks: int) -> ShardedSizes:
    """Return what a rank sends: (N - 1) / N of what is gathered or added up."""
    spec, b = workload.adapter, workload.dtype_bytes
    trained = layer_parameters(facts, spec)
    rest_trained = trained_parameters(facts, spec) - sum(trained)
    added = trained if spec.whole is None else (0,) * facts.num_layers  # adapters, in fp32

    def sent(num_bytes: int) -> int:
        return num_bytes * (num_ranks - 1) // num_ranks

    return ShardedSizes(
        layers=tuple(
            sent(layer.num_parameters * b + extra * FP32_BYTES)
            for layer, extra in zip(facts.layers, added, strict=True)
        ),
        rest=sent(facts.outer_parameters * b),
        gradients=tuple(sent(number * FP32_BYTES) for number in trained),
        rest_gradients=sent(rest_trained * FP32_BYTES),
    )


def _costs(facts: ModelFacts, machine: Machine, request: PlanRequest) -> Costs:
    """Price the visits; each rank updates its own part of what trains, where it computes."""
    costs, spec = costs_of(facts, machine, request), request.typical.adapter
    update_s = costs.optimizer_s
    if spec.whole is not None:
        num_bytes = BYTES_PER_WEIGHT[request.typical.optimizer] * spec.whole.num_parameters
        update_s = num_bytes / machine.memory_bytes_per_s.value
    latency = network_of(machine, request).latency_s
    return replace(
        costs,
        optimizer_s=update_s / request.num_ranks,
        network_latency_s=latency.value if latency.source == MEASURED else COLLECTIVE_LATENCY_S,
    )


def _device_terms(
    facts: ModelFacts, machine: Machine, request: PlanRequest
) -> tuple[MemoryTerm, ...]:
    """List what each rank has at the worst instant of a step."""
    workload, num = request.largest, request.num_ranks
    spec, b = workload.adapter, workload.dtype_bytes
    num_gathered = min(NUM_GATHERED, facts.num_layers)
    terms = device_terms(
        facts,
        machine,
        workload,
        num_slots=1,
        num_micro_batches=1,
        num_ranks=1,
        is_padded=request.is_masked,
        is_stashed=False,
    )
    trained = layer_parameters(facts, spec)
    all_trained = trained_parameters(facts, spec)
    weights, gradient_bytes = facts.num_parameters * b, FP32_BYTES
    parts = {
        ADAPTERS: FP32_BYTES * adapter_parameters(facts, spec),
        GRADIENTS: FP32_BYTES * all_trained,
        STATES: sum(term.num_bytes for term in terms if term.name == STATES),
        UPDATE: sum(term.num_bytes for term in terms if term.name == UPDATE),
    }
    if spec.whole is not None:
        weights += all_trained * (FP32_BYTES - b)  # fp32 masters, of which b bytes are gathered
        parts[STATES] = int(HOST_STATE_BYTES[workload.optimizer] * all_trained)
        gradient_bytes = b
    parts[SHARDS] = weights
    largest = max(layer.num_parameters for layer in facts.layers)
    one_layer = largest * b + (FP32_BYTES * max(trained) if spec.whole is None else 0)
    rest_trained = all_trained - sum(trained)
    new = max(trained) * (gradient_bytes + FP32_BYTES) + rest_trained * gradient_bytes
    own = {
        GATHERED: num_gathered * one_layer,
        NEW_GRADIENTS: new,
        LOGITS: 2 * workload.num_tokens * facts.num_outputs * b,  # and their gradient
        **{name: -(-num_bytes // num) for name, num_bytes in parts.items()},
    }
    replaced = (SLOTS, LAYER_GRADIENTS, FRAGMENTATION, *parts)
    others = {term.name: term.num_bytes for term in terms if term.name not in replaced}
    used = own | others
    used[FRAGMENTATION] = int(FRAGMENTATION_FRAC * sum(used.values()))
    return tuple(MemoryTerm(name=name, num_bytes=size) for name, size in used.items() if size)


def _host_terms(
    facts: ModelFacts, machine: Machine, request: PlanRequest, *, device_bytes: int
) -> tuple[MemoryTerm, ...]:
    """List what a machine has in RAM: while it is loaded, the whole model is there."""
    spec = replace(request.largest.adapter, whole=None, targets=(), experts=False, modules=())
    workload = replace(request.largest, adapter=spec)
    load = HostLoad(workload=workload, num_workers=request.num_workers, num_stashed=0)
    terms = host_terms(
        facts,
        replace(machine, pinned_bytes=machine.ram_bytes),  # nothing is page-locked
        [load],
        num_ranks=request.local_ranks,
        num_slabs=request.num_slabs,
        rank_device_bytes=device_bytes,
    )
    whole = request.largest.adapter.whole
    if whole is None:
        return terms
    # the main rank gathers masters and states to write them; in bf16 it then splits the masters
    each = HOST_STATE_BYTES[workload.optimizer] + FP32_BYTES
    each += FP32_BYTES if workload.dtype_bytes < FP32_BYTES else 0
    num_bytes = int(each * whole.num_parameters)
    return (*terms, MemoryTerm(name=CHECKPOINT, num_bytes=num_bytes))


def _refusal(nearest: Plan) -> DoesNotFitError:
    return DoesNotFitError(
        f"sharded over {nearest.request.num_ranks} ranks the plan needs"
        f" {' and '.join(shortages(nearest))}",
        limit=f"each rank of {nearest.machine.name} holds its part of the model, the layer that"
        " computes, and its micro-batch",
        hint="`train.parallel: stream`, more processes, a smaller `train.micro_batch_size` or a"
        " shorter `train.seq_len`",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
