"""One step, planned as a value: what lies where, in which order it moves, and how long it takes.

The number of slots is the one free choice so far. A byte of device memory used as a slot saves two
bytes over the link in every step, so the plan takes as many slots as fit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from offload.errors import DoesNotFitError
from offload.plan.bounds import break_even_tokens, r3_bound_s
from offload.plan.costs import Costs, Workload, price
from offload.plan.facts import ModelFacts
from offload.plan.machine import GIB, Machine
from offload.plan.memory import (
    SLAB,
    STASH,
    MemoryTerm,
    device_terms,
    host_terms,
    input_bytes,
    layer_weight_bytes,
    total_bytes,
)
from offload.plan.op import Kind, Lane, Op
from offload.plan.schedule import (
    MIN_SLOTS,
    NUM_STAGING,
    Freight,
    Order,
    Schedule,
    training_schedule,
    warm_ring,
)
from offload.plan.simulate import simulate
from offload.plan.timeline import Timeline
from offload.plan.trained import outer_module_sizes

HEAD_CHUNK_TOKENS = 1024  # logits of a 151,936 vocabulary in fp32: 0.6 GB at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a run asks of the plan.

    Attributes:
        typical: The micro-batch that time is predicted for.
        largest: The largest micro-batch of the run, which must fit.
        num_micro_batches: Micro-batches per step.
        num_slots: Layers on the device at a time; None takes as many as fit.
        vram_budget_bytes: Device memory the plan may use; None takes what the machine has.
        num_workers: Processes that prepare data, for each rank.
        is_stashed: Whether layer inputs wait in host memory for the backward.
        is_on_disk: Whether the layers wait in a file; the disk's rate is not in the plan.
        num_ranks: Processes that share the step, on one machine and each with its own device.
        is_slab_shared: Whether they share one slab; otherwise each has one.
    """

    typical: Workload
    largest: Workload
    num_micro_batches: int
    num_slots: int | None
    vram_budget_bytes: int | None
    num_workers: int
    is_stashed: bool
    is_on_disk: bool
    num_ranks: int
    is_slab_shared: bool

    @property
    def num_slabs(self) -> int:
        """Slabs in the machine's memory."""
        if self.is_on_disk:
            return 0
        return 1 if self.is_slab_shared else self.num_ranks

    @property
    def rank_micro_batches(self) -> int:
        """Micro-batches of the rank that has most of them."""
        return -(-self.num_micro_batches // self.num_ranks)

    @property
    def num_stashed(self) -> int:
        """Micro-batches whose layer inputs a rank has in host memory."""
        return self.rank_micro_batches if self.is_stashed else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that the engine is told and the report compares with.

    Attributes:
        facts: The model.
        machine: Where it is to run.
        request: What was asked for.
        num_slots: Layers on the device at a time.
        schedule: The ops of a step that starts from a warm ring, on the rank with most of it.
        costs: What the ops cost, and by which grade of knowledge.
        device_memory: Terms of the peak in device memory, on each device.
        host_memory: Terms of the peak in host memory.
    """

    facts: ModelFacts
    machine: Machine
    request: PlanRequest
    num_slots: int
    schedule: Schedule
    costs: Costs
    device_memory: tuple[MemoryTerm, ...]
    host_memory: tuple[MemoryTerm, ...]

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of device memory."""
        return total_bytes(self.device_memory)

    @property
    def host_bytes(self) -> int:
        """Predicted peak of host memory."""
        return total_bytes(self.host_memory)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a typical step, padding included."""
        return self.request.typical.num_tokens * self.request.num_micro_batches

    def predict(self) -> Timeline:
        """Simulate the step, without the optimizer."""
        return simulate(self.schedule, duration_of(self.costs))

    @property
    def step_s(self) -> float:
        """Predicted time of a step, optimizer included."""
        return self.predict().step_s + self.costs.optimizer_s

    @property
    def bound_s(self) -> float:
        """The bound R3 on the step, optimizer included."""
        bound_s = r3_bound_s(
            self.costs,
            num_slots=self.num_slots,
            num_micro_batches=self.request.rank_micro_batches,
            stashed_bytes=input_bytes(self.facts, self.request.typical)
            if self.request.is_stashed
            else 0,
        )
        return bound_s + self.costs.optimizer_s

    @property
    def break_even_tokens(self) -> float:
        """Tokens per step above which streaming hides behind computing."""
        dtype_bytes = self.request.typical.dtype_bytes
        decoded = layer_weight_bytes(self.facts, dtype_bytes=dtype_bytes)
        return break_even_tokens(
            self.facts,
            self.machine,
            codec_ratio=sum(layer.weight_bytes for layer in self.costs.layers) / sum(decoded),
            num_slots=self.num_slots,
            dtype_bytes=dtype_bytes,
        )


def plan(facts: ModelFacts, machine: Machine, request: PlanRequest) -> Plan:
    """Choose the number of slots and lay the step out.

    Raises:
        DoesNotFitError: Device or host memory is too small; what is short and by how much.
    """
    num_slots = _choose_slots(facts, machine, request)
    costs = price(facts, machine, request.typical, is_duplex=request.is_stashed)
    decoded = layer_weight_bytes(facts, dtype_bytes=request.typical.dtype_bytes)
    schedule = training_schedule(
        Freight.frozen(
            [layer.weight_bytes for layer in costs.layers],
            decoded_bytes=decoded if request.typical.is_encoded else None,
            num_staging=NUM_STAGING if _is_staged(facts, machine, request) else 0,
        ),
        ring=warm_ring(num_slots),
        num_micro_batches=request.rank_micro_batches,
        order=Order.LAYER_MAJOR,
        trains_front=bool(outer_module_sizes(facts, request.typical.adapter)),
        input_bytes=(input_bytes(facts, request.typical),) * request.num_stashed,
    )
    return Plan(
        facts=facts,
        machine=machine,
        request=request,
        num_slots=num_slots,
        schedule=schedule,
        costs=costs,
        device_memory=_device_terms(facts, machine, request, num_slots),
        host_memory=_host_terms(facts, machine, request, num_slots),
    )


def duration_of(costs: Costs) -> Callable[[Op], float]:
    """Return what an op costs."""

    def duration_s(op: Op) -> float:
        if op.lane is Lane.H2D:
            return costs.h2d_latency_s + op.num_bytes / costs.h2d_bytes_per_s
        if op.lane is Lane.HOST:
            return op.num_bytes / costs.read_bytes_per_s
        if op.lane is Lane.D2H:
            return costs.h2d_latency_s + op.num_bytes / costs.d2h_bytes_per_s
        if op.kind is Kind.FRONT:
            return costs.front_s
        if op.kind is Kind.FRONT_BACKWARD:
            return costs.front_backward_s
        if op.kind is Kind.TAIL:
            return costs.tail_s
        assert op.layer is not None
        layer = costs.layers[op.layer]
        if op.kind is Kind.DECODE:
            return layer.decode_s
        return layer.forward_s if op.kind is Kind.FORWARD else layer.backward_s

    return duration_s


def calibrate(costs: Costs, measured: Timeline, *, optimizer_s: float) -> Costs:
    """Replace the priced durations by those of a step that was run on this machine.

    Args:
        costs: As priced; loads that the measured step did not need keep their priced rate.
        measured: A step of the typical micro-batches.
        optimizer_s: The update's own time, as measured.
    """
    load_s = measured.busy_s(Kind.LOAD)
    loaded_bytes = sum(span.num_bytes for span in measured.spans if span.kind is Kind.LOAD)
    layers = tuple(
        replace(
            layer,
            forward_s=_mean_s(measured, Kind.FORWARD, number),
            backward_s=_mean_s(measured, Kind.BACKWARD, number),
            decode_s=_mean_s(measured, Kind.DECODE, number) if layer.decode_s else 0.0,
        )
        for number, layer in enumerate(costs.layers)
    )
    return replace(
        costs,
        grade="calibrated",
        layers=layers,
        front_s=_mean_s(measured, Kind.FRONT, None),
        front_backward_s=_mean_s(measured, Kind.FRONT_BACKWARD, None)
        if measured.busy_s(Kind.FRONT_BACKWARD)
        else 0.0,
        tail_s=_mean_s(measured, Kind.TAIL, None),
        optimizer_s=optimizer_s,
        h2d_bytes_per_s=loaded_bytes / load_s if load_s else costs.h2d_bytes_per_s,
        h2d_latency_s=0.0 if load_s else costs.h2d_latency_s,
    )


def with_costs(plan: Plan, costs: Costs) -> Plan:
    """Return the same plan at other prices."""
    return replace(plan, costs=costs)


# ------------------------------------------------------------------------------------------ memory


def _choose_slots(facts: ModelFacts, machine: Machine, request: PlanRequest) -> int:
    """Return the number of slots, the largest that fits where it is free."""
    if request.num_slots is not None:
        wanted = min(request.num_slots, facts.num_layers)
        _require_fit(facts, machine, request, wanted)
        return wanted
    for num_slots in range(facts.num_layers, MIN_SLOTS, -1):
        if not _shortages(facts, machine, request, num_slots):
            return num_slots
    fewest = min(MIN_SLOTS, facts.num_layers)
    _require_fit(facts, machine, request, fewest)
    return fewest


def _require_fit(facts: ModelFacts, machine: Machine, request: PlanRequest, num_slots: int) -> None:
    shortages = _shortages(facts, machine, request, num_slots)
    if not shortages:
        return
    raise DoesNotFitError(
        f"with {num_slots} slots of {facts.num_layers} layers the plan needs "
        + " and ".join(need for need, _ in shortages),
        limit=" and ".join(limit for _, limit in shortages) + f" on {machine.name}",
        hint=_nearest_fit(facts, machine, request, num_slots),
    )


def _shortages(
    facts: ModelFacts, machine: Machine, request: PlanRequest, num_slots: int
) -> list[tuple[str, str]]:
    """Return (need, limit) of each memory that is too small; on a CPU there is only one memory."""
    device_bytes = total_bytes(_device_terms(facts, machine, request, num_slots))
    host = _host_terms(facts, machine, request, num_slots)
    host_bytes = total_bytes(host)
    device_limit = min(machine.vram_bytes, request.vram_budget_bytes or machine.vram_bytes)
    shortages = []
    if device_bytes > device_limit:
        what = "device memory" if machine.device == "cuda" else "memory for computing"
        shortages.append((f"{_gib(device_bytes)} of {what}", f"{_gib(device_limit)} may be used"))
    stash_bytes = request.num_ranks * _size(host, STASH)
    if machine.device == "cpu":
        host_bytes += device_bytes
    elif stash_bytes > machine.pinned_bytes:
        shortages.append(
            (
                f"{_gib(stash_bytes)} of page-locked memory for layer inputs",
                f"{_gib(machine.pinned_bytes)} may be page-locked",
            )
        )
    if host_bytes > machine.ram_bytes:
        shortages.append(
            (f"{_gib(host_bytes)} of RAM", f"{_gib(machine.ram_bytes)} of RAM is there")
        )
    return shortages


def _nearest_fit(facts: ModelFacts, machine: Machine, request: PlanRequest, num_slots: int) -> str:
    """Name the nearest change that fits: fewer slots, inputs on the host, shorter sequences."""
    for fewer in range(num_slots - 1, MIN_SLOTS - 1, -1):
        if not _shortages(facts, machine, request, fewer):
            return f"`offload.num_slots: {fewer}`"
    stashed = replace(request, is_stashed=True)
    for num in range(num_slots, MIN_SLOTS - 1, -1):
        if not _shortages(facts, machine, stashed, num):
            return f"`offload.stash: host` with `offload.num_slots: {num}`"
    seq_len = request.largest.seq_len
    while seq_len >= 256:
        seq_len //= 2
        shorter = replace(request, largest=replace(request.largest, seq_len=seq_len))
        if not _shortages(facts, machine, shorter, min(MIN_SLOTS, facts.num_layers)):
            return f"`train.seq_len: {seq_len}` with `offload.num_slots: {MIN_SLOTS}`"
    for num_ranks in range(request.num_ranks - 1, 0, -1):
        if not _shortages(facts, machine, replace(request, num_ranks=num_ranks), num_slots):
            return f"`--num_processes {num_ranks}`"
    return "a machine with more memory, a smaller model, or cargo in fewer bits"


def _device_terms(
    facts: ModelFacts, machine: Machine, request: PlanRequest, num_slots: int
) -> tuple[MemoryTerm, ...]:
    return device_terms(
        facts,
        machine,
        request.largest,
        num_slots=num_slots,
        num_micro_batches=request.rank_micro_batches,
        num_ranks=request.num_ranks,
        is_padded=request.largest.micro_batch_size > 1,
        is_stashed=request.is_stashed,
    )


def _host_terms(
    facts: ModelFacts, machine: Machine, request: PlanRequest, num_slots: int
) -> tuple[MemoryTerm, ...]:
    return host_terms(
        facts,
        machine,
        request.largest,
        num_workers=request.num_workers,
        num_stashed=request.num_stashed,
        num_ranks=request.num_ranks,
        num_slabs=request.num_slabs,
        rank_device_bytes=total_bytes(_device_terms(facts, machine, request, num_slots)),
    )


def _is_staged(facts: ModelFacts, machine: Machine, request: PlanRequest) -> bool:
    """Tell whether loads pass a ring of page-locked buffers: not all of the slab can be locked."""
    host = _host_terms(facts, machine, request, MIN_SLOTS)
    locked_bytes = request.num_slabs * _size(host, SLAB) + request.num_ranks * _size(host, STASH)
    is_short = request.is_on_disk or locked_bytes > machine.pinned_bytes
    return machine.device == "cuda" and is_short


def _size(terms: tuple[MemoryTerm, ...], name: str) -> int:
    return sum(term.num_bytes for term in terms if term.name == name)


def _mean_s(timeline: Timeline, kind: Kind, layer: int | None) -> float:
    durations = [
        span.duration_s for span in timeline.spans if span.kind is kind and span.layer == layer
    ]
    return sum(durations) / len(durations)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
