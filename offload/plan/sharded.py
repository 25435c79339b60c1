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

from collections.abc import Iterator, Sequence
from dataclasses import replace

from offload.errors import DoesNotFitError, UnsupportedModelError
from offload.plan.facts.codec import NATIVE
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import OPTIMIZERS
from offload.plan.facts.trainable import (
    EMBEDDING,
    adapter_parameters,
    layer_parameters,
    outer_module_sizes,
    trained_parameters,
)
from offload.plan.facts.workload import Workload
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, MEASURED, Machine
from offload.plan.memory.memory import (
    ADAPTERS,
    ALWAYS,
    FRAGMENTATION,
    FRAGMENTATION_FRAC,
    GRADIENTS,
    IN_PASS,
    KEPT_INPUTS,
    STATES,
    WHOLE,
    DeviceNeeds,
    HostLoad,
    Instant,
    MemoryTerm,
    device_needs,
    host_terms,
    total_bytes,
)
from offload.plan.plan import Plan, costs_of
from offload.plan.request import PlanRequest, network_of
from offload.plan.schedule.op import Route
from offload.plan.schedule.schedule import Residency
from offload.plan.schedule.sharded import ShardedSizes, sharded_schedule
from offload.plan.search import Candidate, Choice
from offload.plan.split import Split
from offload.plan.time.costs import Costs

# Of a collective of tensors, without words between processes; until it is measured.
COLLECTIVE_LATENCY_S = 5e-5
# A layer's gradients of weights come as its activations go: so much of the smaller of both is there
# together with all of the other, by counts of live bytes.
OVERLAP_FRAC = 0.25
SHARDS, GATHERED = "own part of the weights", "gathered layers"
OUTER, OUTER_BUFFER = "embeddings, norm and head", "buffer of embeddings, norm and head"
NEW_GRADIENTS = "gradients before they are added up"
LOGITS, LOSS = "logits of all tokens", "loss of the label tokens"
CHECKPOINT = "a checkpoint on the main rank"


def as_sharded(request: PlanRequest) -> PlanRequest:
    """Return the same step with the model sharded: layers are native, and computed plainly."""

    def plain(one: Workload) -> Workload:
        return replace(
            one,
            codec=NATIVE,
            layer_code="plain",
            leaves_out=False,
            mlp_chunk_tokens=None,
            embeddings="device",
            head="device",
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
        UnsupportedModelError: Layers read what others have computed.
        DoesNotFitError: None fits.
    """
    if facts.carried_features or facts.num_carried_indices:
        raise UnsupportedModelError(
            f"layers of a {facts.model_type} model read what others have computed",
            limit="a model that is cut among ranks has layers that read their input alone",
            hint="`train.parallel: stream`",
        )
    plans = [sharded_plan(facts, machine, request) for request in requests]
    fitting = [one for one in plans if not shortages(one)]
    if not fitting:
        raise _refusal(min(plans, key=lambda one: one.peak_bytes))
    best = min(fitting, key=lambda one: one.step_s)
    chosen = Candidate(
        split=Split(needs=MemoryNeeds.of(facts, machine, best.request), costs=best.costs),
        residency=best.residency,
        shortages=(),
        bound_s=best.bound_s,
        step_s=best.step_s,
    )
    return Choice(plan=best, chosen=chosen, candidates=(), rounding=())


def sharded_plan(facts: ModelFacts, machine: Machine, request: PlanRequest) -> Plan:
    """Lay a sharded step out, whether or not it fits.

    Args:
        facts: The model.
        machine: Of each rank.
        request: As `as_sharded` returns it, of two ranks or more.
    """
    assert request.is_sharded
    assert request.has_other_ranks
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
        num_bytes = OPTIMIZERS[request.typical.optimizer].update_bytes * spec.whole.num_parameters
        update_s = num_bytes / machine.memory_bytes_per_s.value
    latency = network_of(machine, request).latency_s
    latency_s = latency.value if latency.source == MEASURED else COLLECTIVE_LATENCY_S
    network = costs.speed(Route.NETWORK)._replace(latency_s=latency_s)
    return replace(costs.at({Route.NETWORK: network}), optimizer_s=update_s / request.num_ranks)


def _device_terms(
    facts: ModelFacts, machine: Machine, request: PlanRequest
) -> tuple[MemoryTerm, ...]:
    """List what each rank has at the worst instant of a step."""
    workload, num = request.largest, request.num_ranks
    spec, b = workload.adapter, workload.dtype_bytes
    needs = device_needs(
        facts,
        machine,
        workload,
        num_micro_batches=1,
        is_reduced=False,
        is_padded=request.is_masked,
        is_stashed=False,
        traced=None,
    )
    all_trained = trained_parameters(facts, spec)
    weights = facts.num_parameters * b
    sizes = {term.name: term.num_bytes for term in needs.live(ALWAYS)}
    states = sizes[STATES]
    if spec.whole is not None:
        weights += all_trained * (FP32_BYTES - b)  # fp32 masters, of which b bytes are gathered
        states = int(OPTIMIZERS[workload.optimizer].bytes_per_weight * all_trained)
    parts = {
        SHARDS: weights,
        ADAPTERS: FP32_BYTES * adapter_parameters(facts, spec),
        GRADIENTS: FP32_BYTES * all_trained,
        STATES: states,
    }
    own = [MemoryTerm(name=name, num_bytes=-(-size // num)) for name, size in parts.items()]
    (update,) = needs.live({Instant.UPDATE})
    update = replace(update, num_bytes=-(-update.num_bytes // num))
    worst = max((*_instants(facts, workload, needs), (update,)), key=total_bytes)
    used = [*own, *worst, *(MemoryTerm(name=one, num_bytes=sizes[one]) for one in sorted(WHOLE))]
    fragmentation = int(FRAGMENTATION_FRAC * total_bytes(used))
    used.append(MemoryTerm(name=FRAGMENTATION, num_bytes=fragmentation))
    return tuple(term for term in used if term.num_bytes)


def _instants(
    facts: ModelFacts, workload: Workload, needs: DeviceNeeds
) -> Iterator[tuple[MemoryTerm, ...]]:
    """Yield what is live besides a rank's own part at each instant that may be the worst.

    A gather receives a flat buffer, which is then copied to the layer's tensors. In the forward
    `fully_shard` holds the buffer of the gather before until this copy is made; in the backward it
    lets go of it, and has the next layer's buffer while one computes. A layer's new gradients are
    copied to a flat fp32 buffer, which is held until the next layer's are. What is around the
    layers is gathered first, and is let go of before its own gradients are added up.

    Source: `wait_for_unshard` (a local name holds the buffer before), `_backward_prefetch`,
    `post_backward` and `foreach_reduce` in torch/distributed/fsdp/_fully_shard (torch 2.13).
    """
    spec, b = workload.adapter, workload.dtype_bytes
    trained, is_adapter = layer_parameters(facts, spec), spec.whole is None
    layer_bytes = max(one.num_parameters for one in facts.layers) * b
    layer_bytes += FP32_BYTES * max(trained) if is_adapter else 0
    has_next = facts.num_layers > 1
    outer_sizes, outer_bytes = outer_module_sizes(facts, spec), facts.outer_parameters * b
    outer = MemoryTerm(name=OUTER, num_bytes=outer_bytes)
    kept, visit = needs.live(IN_PASS), needs.live({Instant.RECOMPUTE})

    def gathered(num: int) -> MemoryTerm:
        return MemoryTerm(name=GATHERED, num_bytes=num * layer_bytes)

    def new_gradients(num_bytes: int) -> MemoryTerm:
        return MemoryTerm(name=NEW_GRADIENTS, num_bytes=num_bytes)

    # the first gather: the buffer of what is around the layers is still there
    before = tuple(term for term in kept if term.name != KEPT_INPUTS)
    yield (outer, MemoryTerm(name=OUTER_BUFFER, num_bytes=outer_bytes), gathered(2), *before)

    # the last gather of the forward
    yield (outer, gathered(3 if has_next else 2), *kept)

    # the loss: all logits, those with a label, a copy in fp32 and the log-softmax
    label_bytes = 2 * FP32_BYTES if b == FP32_BYTES else b + 2 * FP32_BYTES
    yield (
        outer,
        *kept,
        MemoryTerm(name=LOGITS, num_bytes=workload.num_tokens * facts.num_outputs * b),
        MemoryTerm(name=LOSS, num_bytes=workload.label_tokens * facts.num_outputs * label_bytes),
    )

    # the backward of a layer: those of the head and of the layer after it wait
    late = 0 if facts.tie_word_embeddings else outer_sizes.get(EMBEDDING, 0)
    waiting = (sum(outer_sizes.values()) - late) * b
    waiting += FP32_BYTES * max(trained) if has_next else 0
    new = max(trained) * (FP32_BYTES if is_adapter else b)
    is_wide = total_bytes(visit) >= new
    frac = 1.0 if is_wide else OVERLAP_FRAC
    yield (
        *(outer, gathered(2 if has_next else 1), *kept),
        *(replace(term, num_bytes=int(frac * term.num_bytes)) for term in visit),
        new_gradients(waiting + int((OVERLAP_FRAC if is_wide else 1.0) * new)),
    )

    # the end of the backward: gradients of what is around the layers, and a copy of one on its way
    largest = max(outer_sizes.values(), default=0)
    yield (new_gradients(sum(outer_sizes.values()) * (b + FP32_BYTES) + largest * b),)


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
        local_ranks=request.local_ranks,
        num_slabs=request.num_slabs,
        rank_device_bytes=device_bytes,
    )
    whole = request.largest.adapter.whole
    if whole is None:
        return terms
    # the main rank gathers masters and states to write them; in bf16 it then splits the masters
    each = OPTIMIZERS[workload.optimizer].bytes_per_weight + FP32_BYTES
    each += FP32_BYTES if workload.dtype_bytes < FP32_BYTES else 0
    num_bytes = int(each * whole.num_parameters)
    return (*terms, MemoryTerm(name=CHECKPOINT, num_bytes=num_bytes))


def _refusal(nearest: Plan) -> DoesNotFitError:
    is_full = nearest.request.typical.adapter.whole is not None
    return DoesNotFitError(
        f"sharded over {nearest.request.num_ranks} ranks the plan needs"
        f" {' and '.join(shortages(nearest))}",
        limit=f"each rank of {nearest.machine.name} holds its part of the model, the layer that"
        " computes, and its micro-batch",
        hint=f"`train.parallel: stream`{' with one process' if is_full else ''}, more processes, a"
        " smaller `train.micro_batch_size` or a shorter `train.seq_len`",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
