"""One step, planned as a value: where data is stored, in which order it moves, how long it takes.

A byte of device memory used as a slot saves two bytes over the link in every step; one that holds a
graph saves its recompute. `offload.plan.split` divides the memory between the two;
`offload.plan.search` chooses all other settings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from offload.plan.facts.facts import ModelFacts
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import ExpertsImplementation, Machine, Network
from offload.plan.memory.memory import MemoryGrade, MemoryTerm, total_bytes
from offload.plan.memory.visit import visit_bytes
from offload.plan.refusal import refusal
from offload.plan.request import PlanRequest, network_of, with_network
from offload.plan.schedule.op import OVER_NETWORK, Kind, Route, Save
from offload.plan.schedule.schedule import NOTHING_SAVED, Residency, Saved, Schedule, numbered
from offload.plan.schedule.simulate import simulate, times_s
from offload.plan.schedule.timeline import Timeline
from offload.plan.split import Split
from offload.plan.step import (
    FREE_FRAC,
    Drafts,
    break_even_tokens,
    duration_of,
    schedule_of,
    stashed_bytes,
)
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import (
    AT_ONCE,
    Costs,
    LayerCost,
    RunCosts,
    Speed,
    head_step_s,
    price,
    shared_costs,
    with_norms,
    with_objective,
    with_updates,
)

LEAST_BYTES_PER_S = 1.0


def hidden_frac(timeline: Timeline) -> float:
    """Return the part of the network's time in which something is computed."""
    return 1 - timeline.exposed_s(*OVER_NETWORK) / timeline.busy_s(*OVER_NETWORK)


def needed_bytes_per_s(schedule: Schedule, costs: Costs) -> float:
    """Return the least rate with which a step takes at most `FREE_FRAC` longer than without bytes.

    It is searched for, to a hundredth.
    """
    network = costs.speed(Route.NETWORK)

    def step_s(bytes_per_s: float) -> float:
        at_rate = costs.at({Route.NETWORK: network._replace(bytes_per_s=bytes_per_s)})
        return max(times_s(schedule, duration_of(at_rate))[1], default=0.0)

    allowed_s = (1 + FREE_FRAC) * step_s(math.inf)
    low, high = LEAST_BYTES_PER_S, schedule.network_bytes / (FREE_FRAC * allowed_s)
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if step_s(middle) <= allowed_s else (middle, high)
    return high


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRank:
    """Another rank of a step."""

    machine: Machine  # where it computes
    num_micro_batches: int  # its share of the step
    num_slots: int  # layers on its device at a time
    num_kept_graphs: int  # how many of its layers are not checkpointed
    step_s: float  # its step, if it waited for no other
    arrivals_s: tuple[float, ...]  # when it comes to each sum of gradients, by its own simulation


def arrivals_of(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return when a rank comes to each sum of gradients.

    Nothing but later sums waits for a sum, so these times depend on no other rank.
    """
    free = costs.at({Route.NETWORK: AT_ONCE})
    timeline = simulate(schedule, duration_of(free))
    return tuple(span.start_s for span in timeline.spans if span.kind is Kind.REDUCE)


@dataclass(frozen=True, kw_only=True)  # no slots: what is read again and again is kept
class Plan:
    """Everything that configures the engine and that the report compares with.

    Attributes:
        facts: The model.
        machine: The machine that it runs on.
        request: The request.
        residency: What of the layers stays in device memory.
        schedule: The ops of a step that starts from a warm ring, on the rank with the most work.
        costs: The times of the ops, and how they are known.
        device_memory: Terms of the peak in device memory, on each device.
        host_memory: Terms of the peak in host memory.
        others: The other ranks, where ranks are planned one by one.
    """

    facts: ModelFacts
    machine: Machine
    request: PlanRequest
    residency: Residency
    schedule: Schedule
    costs: Costs
    device_memory: tuple[MemoryTerm, ...]
    host_memory: tuple[MemoryTerm, ...]
    others: tuple[OtherRank, ...] = ()

    @property
    def num_slots(self) -> int:
        """Layers on the device at a time."""
        return self.residency.num_slots

    @property
    def num_kept_graphs(self) -> int:
        """How many layers, the last ones, are not checkpointed."""
        return self.residency.num_kept_graphs

    @property
    def saved(self) -> Saved:
        """What checkpointed layers keep and send, with sizes of a typical step."""
        num = self.request.rank_micro_batches
        return self.costs.saved(self.residency, num_micro_batches=num)

    @property
    def memory_grade(self) -> MemoryGrade:
        """How the device's peak is known; terms that last the whole run always use formulas."""
        return "traced" if self.request.traced else "formula"

    @property
    def experts_implementation(self) -> ExpertsImplementation | None:
        """The expert kernels; None if the model has no experts."""
        has_experts = self.facts.has_experts
        return self.machine.experts_implementation.value if has_experts else None

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
        return self.request.tokens_per_step

    def predict(self) -> Timeline:
        """Simulate the step, without the optimizer."""
        return self._timeline

    @cached_property
    def _timeline(self) -> Timeline:
        every = [other.arrivals_s for other in self.others]
        arrivals_s = [max(times) for times in zip(*every, strict=True)]
        return simulate(self.schedule, duration_of(self.costs), arrivals_s=arrivals_s)

    @property
    def step_s(self) -> float:
        """Predicted time of a step, optimizer and waits for the other ranks included."""
        return self.predict().step_s + self.costs.optimizer_s

    @property
    def as_other(self) -> OtherRank:
        """What the other ranks know of this one."""
        return OtherRank(
            machine=self.machine,
            num_micro_batches=self.request.rank_micro_batches,
            num_slots=self.num_slots,
            num_kept_graphs=self.num_kept_graphs,
            step_s=replace(self, others=()).step_s,
            arrivals_s=arrivals_of(self.schedule, self.costs),
        )

    @cached_property
    def objective_price(self) -> tuple[float, int]:
        """What the objective adds to a step with cross-entropy: a fraction of its time, and loads.

        That is nothing without an objective, and of a step that runs share: its price is of all.
        """
        request, is_staged = self.request, self.schedule.is_staged
        if request.objective is None or request.others or request.is_on_features:
            return 0.0, 0
        plain = Drafts(
            facts=self.facts,
            request=replace(request, objective=None),
            costs=self.costs.without_objective(),
            is_staged=is_staged,
        )
        plain_s = plain.step_s(self.residency)
        num_loads = self.schedule.num_loads - plain.schedule(self.residency).num_loads
        own_s = replace(self, others=()).step_s if self.others else self.step_s  # without waits
        return own_s / plain_s - 1, num_loads

    @property
    def network(self) -> Network | None:
        """What connects the ranks; None if nothing is sent over it."""
        return network_of(self.machine, self.request) if self.schedule.network_bytes else None

    @property
    def network_hidden_frac(self) -> float:
        """The part of the time in which gradients are added up, over which others compute."""
        return hidden_frac(self.predict())

    @cached_property
    def network_needed_bytes_per_s(self) -> float:
        """The slowest network that adds next to no time to the step; see `offload.plan.plan`."""
        return needed_bytes_per_s(self.schedule, self.costs)

    @property
    def bound_s(self) -> float:
        """The bound R3 on the step, optimizer included."""
        if self.request.is_on_features:
            return self.step_s
        bound_s = r3_bound_s(
            self.costs,
            num_slots=self.num_slots,
            num_micro_batches=sum(run.round_micro_batches for run in self.request.runs),
            stashed_bytes=stashed_bytes(self.facts, self.request),
            is_staged=self.schedule.is_staged,
            saved=self.saved,
        )
        return self.request.num_rounds * bound_s + self.costs.optimizer_s

    @cached_property
    def break_even_tokens(self) -> int | None:
        """Tokens per step from which streaming is free, in micro-batches of the plan's size.

        None is more than any step should have; see `offload.plan.step.break_even_tokens`. Of a step
        that runs share, the size is that of the first run.
        """
        if self.request.is_on_features:
            return None
        is_staged, request = self.schedule.is_staged, self.request.runs[0]
        costs = self.costs.runs[0].costs if self.costs.runs else self.costs
        drafts = Drafts(facts=self.facts, request=request, costs=costs, is_staged=is_staged)
        return break_even_tokens(drafts, self.residency)


def plan(facts: ModelFacts, machine: Machine, request: PlanRequest) -> Plan:
    """Lay the step out with the requested slots and kept graphs, or with those that fit and pay.

    `offload.plan.search` chooses among requests.

    Raises:
        DoesNotFitError: Device or host memory is too small; the error says which and by how much.
    """
    needs = MemoryNeeds.of(facts, machine, request)
    costs = costs_of(facts, machine, request)
    residency = Split(needs=needs, costs=costs).fastest
    if residency is None:
        raise refusal(needs)
    return laid_out(needs, costs, residency)


def costs_of(facts: ModelFacts, machine: Machine, request: PlanRequest) -> Costs:
    """Price the ops of a request, each of a run with its own adapter."""
    if request.others:
        runs = [
            RunCosts(costs=costs_of(facts, machine, run), passes=run.passes(run.rank_micro_batches))
            for run in request.runs
        ]
        return shared_costs(runs)
    typical, is_masked = request.typical, request.is_masked
    kinds = set(facts.layers) if request.has_sent_graphs else ()
    visits = {x: visit_bytes(facts, machine, x, typical, is_padded=is_masked) for x in kinds}
    costs = price(
        facts,
        machine,
        request.typical,
        is_duplex=request.is_stashed or request.typical.adapter.whole is not None,
        num_disk_readers=request.num_disk_readers,
        graph_bytes={x: one.sent_graph for x, one in visits.items()},
    )
    costs = with_norms(
        costs, facts, machine, request.typical, num_micro_batches=request.round_micro_batches
    )
    costs = with_updates(costs, machine, request.typical)
    costs = with_network(costs, facts, machine, request)
    if request.objective is None:
        return costs
    costs = with_objective(
        costs,
        facts,
        machine,
        request.typical,
        num_scored=request.objective.scored_frac,
        num_references=request.objective.num_references,
        has_top=request.objective.num_top > 0,
    )
    if not request.is_on_features:
        return costs
    num_features = request.typical.label_tokens * request.rank_micro_batches
    head_s = head_step_s(facts, machine, request.typical, num_features=num_features)
    return replace(costs, tail_s=head_s)


def laid_out(needs: MemoryNeeds, costs: Costs, residency: Residency) -> Plan:
    """Return the plan of a request that fits with this residency."""
    costs = costs.given(residency)
    return Plan(
        facts=needs.facts,
        machine=needs.machine,
        request=needs.request,
        residency=residency,
        schedule=schedule_of(
            needs.facts, needs.request, costs, residency, is_staged=needs.is_staged
        ),
        costs=costs,
        device_memory=needs.device(residency),
        host_memory=needs.host(residency),
    )


def calibrate(
    costs: Costs,
    measured: Timeline,
    *,
    optimizer_s: float,
    saved: Saved = NOTHING_SAVED,
) -> Costs:
    """Replace the priced durations by those of a step measured on this machine.

    A recompute takes the measured time of the forward that it repeats, but for what it leaves out.
    Of a shared step each run gets the times of its own visits, and of the update its priced share.

    Args:
        costs: The prices; copies that the measured step did not need keep their priced rate.
        measured: A step of the typical micro-batches.
        optimizer_s: The measured time of the update alone.
        saved: The outputs and graphs that layers of the measured step saved.
    """
    if not measured.busy_s(Kind.FORWARD):  # a step of a head on features
        tail_s = _mean_s(measured, Kind.TAIL, None)
        return replace(costs, grade="calibrated", tail_s=tail_s, optimizer_s=optimizer_s)
    if costs.runs:
        return shared_costs(
            [
                replace(
                    run,
                    costs=calibrate(
                        run.costs,
                        part,
                        optimizer_s=optimizer_s * run.costs.optimizer_s / costs.optimizer_s,
                        saved=saved,
                    ),
                )
                for run, part in zip(costs.runs, _by_run(costs.runs, measured), strict=True)
            ]
        )
    layers = tuple(
        _measured(layer, measured, number, saved.of(number))
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
        score_s=_mean_s(measured, Kind.SCORE, None) if costs.score_s else 0.0,
        objective_s=_mean_s(measured, Kind.OBJECTIVE, None) if costs.score_s else 0.0,
        optimizer_s=optimizer_s,
        speeds={route: _speed(measured, route, speed) for route, speed in costs.speeds.items()},
    )


def _by_run(runs: Sequence[RunCosts], measured: Timeline) -> list[Timeline]:
    """Return what of a shared step each run waits for: its own ops, and those of all.

    If the step has other passes than were planned, each gets all of it: the mean of all runs.
    """
    passes = numbered([run.passes for run in runs])
    found = {span.micro_batch for span in measured.spans} - {None}
    if found != {number for one in passes for number in one.all}:
        return [measured] * len(runs)
    others = [span for span in measured.spans if span.micro_batch is None]
    return [
        Timeline(spans=(*others, *(s for s in measured.spans if s.micro_batch in one.all)))
        for one in passes
    ]


def _measured(layer: LayerCost, measured: Timeline, number: int, save: Save) -> LayerCost:
    forward_s, back_s = (_mean_s(measured, k, number) for k in (Kind.FORWARD, Kind.BACKWARD))
    has_graph = save.what == "graph"
    slowdown = forward_s / layer.forth_s(save)
    pack_s, graph_pack_s = layer.pack_s * slowdown, layer.graph_pack_s * slowdown
    if save.is_sent:
        forward_s -= graph_pack_s if has_graph else pack_s
    again_s = forward_s * layer.recompute_frac
    attention_s = min(layer.attention_s * slowdown, again_s)
    if save.what == "output":
        back_s += attention_s
    # not in the step after an evaluation, which has made the update
    is_updated = any(s.kind is Kind.UPDATE and s.layer == number for s in measured.spans)
    return replace(
        layer,
        forward_s=forward_s,
        backward_s=back_s + again_s if has_graph else back_s,
        recompute_s=again_s if has_graph else min(again_s, back_s),
        attention_s=attention_s if has_graph else min(attention_s, again_s, back_s),
        pack_s=pack_s,
        graph_pack_s=graph_pack_s,
        decode_s=_mean_s(measured, Kind.DECODE, number) if layer.decode_s else 0.0,
        update_s=_mean_s(measured, Kind.UPDATE, number) if is_updated else layer.update_s,
        reference_s=_mean_s(measured, Kind.REFERENCE, number)
        if measured.busy_s(Kind.REFERENCE)
        else layer.reference_s,
    )


def with_costs(plan: Plan, costs: Costs) -> Plan:
    """Return the same plan with other costs."""
    return replace(plan, costs=costs)


def _speed(timeline: Timeline, route: Route, priced: Speed) -> Speed:
    """Return the measured speed of a route; the priced one of what did not run, or has waits."""
    spans = [span for span in timeline.spans if span.kind.route is route]
    num_bytes, busy_s = sum(s.num_bytes for s in spans), sum(s.duration_s for s in spans)
    is_known = num_bytes and busy_s and route is not Route.NETWORK
    return Speed(num_bytes / busy_s) if is_known else priced


def _mean_s(timeline: Timeline, kind: Kind, layer: int | None) -> float:
    durations = [
        span.duration_s for span in timeline.spans if span.kind is kind and span.layer == layer
    ]
    return sum(durations) / len(durations)
