"""One step, planned as a value: what lies where, in which order it moves, and how long it takes.

A byte of device memory used as a slot saves two bytes over the link in every step, and one that
holds a graph saves computing it again: `offload.plan.split` shares memory out between the two. What
else may be chosen, `offload.plan.search` does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from offload.plan.bounds import break_even_tokens, r3_bound_s
from offload.plan.costs import Costs, LayerCost, Workload, price
from offload.plan.facts import ModelFacts
from offload.plan.fit import Needs, refusal
from offload.plan.machine import Machine
from offload.plan.memory import MemoryTerm, input_bytes, layer_weight_bytes, total_bytes
from offload.plan.op import Kind, Lane, Op
from offload.plan.schedule import (
    NUM_STAGING,
    PIECE_BYTES,
    Freight,
    Order,
    Schedule,
    training_schedule,
    warm_ring,
)
from offload.plan.simulate import simulate, simulated_s
from offload.plan.split import shared_out
from offload.plan.timeline import Timeline
from offload.plan.traced import MemoryGrade, TracedBytes
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
        num_kept_graphs: Layers, the last ones, that keep their graph from the forward to the
            backward; None takes as many as fit and pay.
        vram_budget_bytes: Device memory the plan may use; None takes what the machine has.
        num_workers: Processes that prepare data, for each rank.
        is_stashed: Whether layer inputs wait in host memory for the backward.
        is_on_disk: Whether the layers wait in a file.
        num_ranks: Processes that share the step, on one machine and each with its own device.
        is_slab_shared: Whether they share one slab; otherwise each has one.
        traced: What a trace of `largest` found that it takes; None counts it by formulas.
        is_masked: Whether the model is told which tokens are padding, and writes masks out.
        may_be_on_disk: Whether the layers could wait in a file, which random ones cannot.
    """

    typical: Workload
    largest: Workload
    num_micro_batches: int
    num_slots: int | None
    num_kept_graphs: int | None
    vram_budget_bytes: int | None
    num_workers: int
    is_stashed: bool
    is_on_disk: bool
    num_ranks: int
    is_slab_shared: bool
    traced: TracedBytes | None = None
    is_masked: bool = False
    may_be_on_disk: bool = False

    @property
    def num_slabs(self) -> int:
        """Slabs in the machine's memory."""
        if self.is_on_disk:
            return 0
        return 1 if self.is_slab_shared else self.num_ranks

    @property
    def num_disk_readers(self) -> int:
        """Processes that read the layers from disk."""
        return self.num_ranks if self.is_on_disk else 0

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
        num_kept_graphs: Layers, the last ones, that are not computed again in the backward.
        schedule: The ops of a step that starts from a warm ring, on the rank with most of it.
        costs: What the ops cost, and by which grade of knowledge.
        device_memory: Terms of the peak in device memory, on each device.
        host_memory: Terms of the peak in host memory.
    """

    facts: ModelFacts
    machine: Machine
    request: PlanRequest
    num_slots: int
    num_kept_graphs: int
    schedule: Schedule
    costs: Costs
    device_memory: tuple[MemoryTerm, ...]
    host_memory: tuple[MemoryTerm, ...]

    @property
    def memory_grade(self) -> MemoryGrade:
        """How the device's memory is known; what stands there throughout is counted either way."""
        return "traced" if self.request.traced else "formula"

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
            is_staged=self.schedule.is_staged,
            num_kept_graphs=self.num_kept_graphs,
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
            num_disk_readers=self.request.num_disk_readers,
        )


def plan(facts: ModelFacts, machine: Machine, request: PlanRequest) -> Plan:
    """Lay the step out with the slots and kept graphs that were asked for, or that fit and pay.

    `offload.plan.search` chooses among requests.

    Raises:
        DoesNotFitError: Device or host memory is too small; what is short and by how much.
    """
    needs = Needs.of(facts, machine, request)
    costs = costs_of(facts, machine, request)
    shares = shared_out(needs, costs)
    if shares is None:
        raise refusal(needs)
    num_slots, num_kept_graphs = shares
    return laid_out(needs, costs, num_slots=num_slots, num_kept_graphs=num_kept_graphs)


def costs_of(facts: ModelFacts, machine: Machine, request: PlanRequest) -> Costs:
    """Price the ops of a request."""
    return price(
        facts,
        machine,
        request.typical,
        is_duplex=request.is_stashed,
        num_disk_readers=request.num_disk_readers,
    )


def laid_out(needs: Needs, costs: Costs, *, num_slots: int, num_kept_graphs: int) -> Plan:
    """Return the plan of a request that fits with so many slots and kept graphs."""
    return Plan(
        facts=needs.facts,
        machine=needs.machine,
        request=needs.request,
        num_slots=num_slots,
        num_kept_graphs=num_kept_graphs,
        schedule=schedule_of(
            needs, costs, num_slots=num_slots, num_kept_graphs=num_kept_graphs, is_draft=False
        ),
        costs=costs,
        device_memory=needs.device(num_slots, num_kept_graphs),
        host_memory=needs.host(num_slots, num_kept_graphs),
    )


def schedule_of(
    needs: Needs, costs: Costs, *, num_slots: int, num_kept_graphs: int, is_draft: bool
) -> Schedule:
    """Return the ops of a step from a warm ring.

    Args:
        needs: The request, and where it is to run.
        costs: For the sizes of layers.
        num_slots: Layers on the device at a time.
        num_kept_graphs: Layers that are not computed again.
        is_draft: Whether ops that follow each other on their lane for certain become one: the
            pieces of a load, and a visit's micro-batches where none of them waits for inputs.
            `draft_step_s` takes such a schedule for as long as the whole one.
    """
    facts, request = needs.facts, needs.request
    typical = request.typical
    is_encoded, dtype_bytes = typical.is_encoded, typical.dtype_bytes
    freight = Freight.frozen(
        [layer.weight_bytes for layer in costs.layers],
        decoded_bytes=layer_weight_bytes(facts, dtype_bytes=dtype_bytes) if is_encoded else None,
        num_staging=NUM_STAGING if needs.is_staged else 0,
    )
    if is_draft and not needs.is_staged:
        freight = replace(freight, piece_bytes=max(freight.layer_bytes))
    is_merged = is_draft and not request.is_stashed
    return training_schedule(
        freight,
        ring=warm_ring(num_slots),
        num_micro_batches=1 if is_merged else request.rank_micro_batches,
        order=Order.LAYER_MAJOR,
        trains_front=bool(outer_module_sizes(facts, request.typical.adapter)),
        input_bytes=(input_bytes(facts, request.typical),) * request.num_stashed,
        num_kept_graphs=num_kept_graphs,
    )


def draft_step_s(needs: Needs, costs: Costs, *, num_slots: int, num_kept_graphs: int) -> float:
    """Return the predicted time of a step, optimizer included, by the fewest ops that give it."""
    one_s, request = duration_of(costs), needs.request
    is_whole, num_merged = needs.is_staged, 1 if request.is_stashed else request.rank_micro_batches

    def duration_s(op: Op) -> float:
        if op.kind is Kind.LOAD and not is_whole:
            return one_s(op) + (-(-op.num_bytes // PIECE_BYTES) - 1) * costs.h2d_latency_s
        is_visit = op.lane is Lane.COMPUTE and op.kind is not Kind.DECODE
        return one_s(op) * (num_merged if is_visit else 1)

    draft = schedule_of(
        needs, costs, num_slots=num_slots, num_kept_graphs=num_kept_graphs, is_draft=True
    )
    return simulated_s(draft, duration_s) + costs.optimizer_s


def duration_of(costs: Costs) -> Callable[[Op], float]:
    """Return what an op costs."""

    def duration_s(op: Op) -> float:
        if op.kind is Kind.FETCH:
            return costs.h2d_latency_s + op.num_bytes / costs.fetch_bytes_per_s
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
        return layer.forward_s if op.kind is Kind.FORWARD else layer.back_s(has_graph=op.has_graph)

    return duration_s


def calibrate(
    costs: Costs, measured: Timeline, *, optimizer_s: float, num_kept_graphs: int
) -> Costs:
    """Replace the priced durations by those of a step that was run on this machine.

    A recompute was measured as the forward that it repeats.

    Args:
        costs: As priced; copies that the measured step did not need keep their priced rate.
        measured: A step of the typical micro-batches.
        optimizer_s: The update's own time, as measured.
        num_kept_graphs: Layers of the measured step that were not computed again.
    """
    first_graph = len(costs.layers) - num_kept_graphs
    load_s = measured.busy_s(Kind.LOAD)
    layers = tuple(
        _measured(layer, measured, number, has_graph=number >= first_graph)
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
        h2d_bytes_per_s=_rate(measured, Kind.LOAD, costs.h2d_bytes_per_s),
        h2d_latency_s=0.0 if load_s else costs.h2d_latency_s,
        fetch_bytes_per_s=_rate(measured, Kind.FETCH, costs.fetch_bytes_per_s),
        read_bytes_per_s=_rate(measured, Kind.READ, costs.read_bytes_per_s),
    )


def _measured(layer: LayerCost, measured: Timeline, number: int, *, has_graph: bool) -> LayerCost:
    forward_s, back_s = (_mean_s(measured, k, number) for k in (Kind.FORWARD, Kind.BACKWARD))
    return replace(
        layer,
        forward_s=forward_s,
        backward_s=back_s + forward_s if has_graph else back_s,
        recompute_s=forward_s if has_graph else min(forward_s, back_s),
        decode_s=_mean_s(measured, Kind.DECODE, number) if layer.decode_s else 0.0,
    )


def with_costs(plan: Plan, costs: Costs) -> Plan:
    """Return the same plan at other prices."""
    return replace(plan, costs=costs)


def _rate(timeline: Timeline, kind: Kind, priced_bytes_per_s: float) -> float:
    num_bytes = sum(span.num_bytes for span in timeline.spans if span.kind is kind)
    busy_s = timeline.busy_s(kind)
    return num_bytes / busy_s if busy_s else priced_bytes_per_s


def _mean_s(timeline: Timeline, kind: Kind, layer: int | None) -> float:
    durations = [
        span.duration_s for span in timeline.spans if span.kind is kind and span.layer == layer
    ]
    return sum(durations) / len(durations)
