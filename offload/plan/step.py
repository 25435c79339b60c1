"""The ops of a step, their durations, and from how many tokens streaming is free."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.trainable import outer_module_sizes
from offload.plan.facts.workload import (
    Workload,
    head_bytes,
    most_rows_bytes,
)
from offload.plan.memory.memory import input_bytes, layer_weight_bytes
from offload.plan.request import PlanRequest, reduced_of
from offload.plan.schedule.op import Kind, Lane, Line, Op, Route
from offload.plan.schedule.schedule import (
    NUM_STAGING,
    PIECE_BYTES,
    Passes,
    Residency,
    Saved,
    Schedule,
    TransferSizes,
    head_schedule,
    numbered,
    step_schedule,
    warm_ring,
    without_trained,
)
from offload.plan.schedule.simulate import Pieces, merged_s, simulate
from offload.plan.time.costs import Costs, LayerCost

FREE_FRAC = 0.01  # of a step: streaming that adds less is free
# The largest batch that Llama 3 405B was pretrained with (arXiv:2407.21783, section 3.4.1): a step
# of more tokens is not a way to make streaming free.
MOST_TOKENS = 16 * 2**20


def schedule_of(
    facts: ModelFacts, request: PlanRequest, costs: Costs, residency: Residency, *, is_staged: bool
) -> Schedule:
    """Return the ops of a step from a warm ring.

    Args:
        facts: The model.
        request: The request.
        costs: For the sizes of layers.
        residency: What of the layers stays in device memory.
        is_staged: Whether loads pass through page-locked buffers.
    """
    if request.is_on_features:
        return head_schedule(warm_ring(residency.num_slots))
    return _Step.of(facts, request, costs, is_staged=is_staged).schedule(residency)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """What the schedules of a request share, whatever stays on the device."""

    request: PlanRequest
    sizes: TransferSizes  # what crosses the link
    runs: tuple[Passes, ...]  # the passes of each run
    input_bytes: tuple[int, ...]  # stashed inputs, by micro-batch
    trains_front: bool
    saved: Callable[[Residency], Saved]

    @classmethod
    def of(
        cls,
        facts: ModelFacts,
        request: PlanRequest,
        costs: Costs,
        *,
        is_staged: bool,
        is_draft: bool = False,
    ) -> "_Step":
        """Return it for all micro-batches, or of a draft for one, with each load as one copy."""
        assert not (is_draft and request.others), "a draft has one run"
        typical, runs = request.typical, request.runs
        numbers = [1 if is_draft else run.rank_micro_batches for run in runs]
        passes = [run.passes(number) for run, number in zip(runs, numbers, strict=True)]
        sizes = load_sizes(facts, typical, costs, is_staged=is_staged and not is_draft)
        whole = typical.adapter.whole
        trained = sizes.gradient_bytes if whole is None else whole.layers
        gradients = tuple([typical.dtype_bytes * number for number in trained])
        stashed = zip(runs, numbers, strict=True) if request.is_stashed else ()
        return cls(
            request=request,
            sizes=replace(
                sizes,
                gradient_bytes=gradients,
                updated=frozenset([layer for layer, number in enumerate(trained) if number]),
                piece_bytes=max(sizes.layer_bytes) if is_draft else PIECE_BYTES,
                reduced=reduced_of(facts, request),
                row_bytes=_row_bytes(facts, request, passes),
                head_bytes=head_bytes(facts, typical),
            ),
            runs=tuple(passes),
            input_bytes=tuple(
                [input_bytes(facts, run.typical) for run, number in stashed for _ in range(number)]
            ),
            trains_front=any(outer_module_sizes(facts, run.typical.adapter) for run in runs),
            saved=costs.saver(num_micro_batches=numbers[0]),
        )

    def schedule(self, residency: Residency) -> Schedule:
        """Return the step from a warm ring."""
        return step_schedule(
            self.sizes,
            ring=without_trained(warm_ring(residency.num_slots), self.sizes),
            runs=self.runs,
            order=self.request.order,
            trains_front=self.trains_front,
            input_bytes=self.input_bytes,
            saved=self.saved(residency),
        )


def load_sizes(
    facts: ModelFacts, workload: Workload, costs: Costs, *, is_staged: bool = False
) -> TransferSizes:
    """Return the sizes of frozen layers as they are loaded, and decoded if they are encoded."""
    decoded = layer_weight_bytes(facts, dtype_bytes=workload.dtype_bytes)
    return TransferSizes.frozen(
        [layer.weight_bytes for layer in costs.layers],
        decoded_bytes=decoded if workload.is_encoded else None,
        num_staging=NUM_STAGING if is_staged else 0,
    )


def _row_bytes(
    facts: ModelFacts, request: PlanRequest, passes: Sequence[Passes]
) -> tuple[int, ...]:
    """Return what each pass brings of the input embedding at most; nothing if the device has it."""
    if request.typical.embeddings == "device":
        return ()
    each = zip(request.runs, numbered(passes), strict=True)
    sizes = {n: most_rows_bytes(facts, run.typical) for run, one in each for n in one.all}
    return tuple(sizes[number] for number in range(len(sizes)))


def stashed_bytes(facts: ModelFacts, request: PlanRequest) -> int:
    """Return the size of a typical layer input that is stashed, the mean of all; 0 if none is."""
    if not request.is_stashed:
        return 0
    num_bytes = sum(
        run.rank_micro_batches * input_bytes(facts, run.typical) for run in request.runs
    )
    return num_bytes // sum(run.rank_micro_batches for run in request.runs)


def duration_of(costs: Costs) -> Callable[[Op], float]:
    """Return the function that gives an op's duration: a visit's by the run that it is of."""
    if not costs.runs:
        return _duration_of(costs)
    shared_s, runs_s = _duration_of(costs), [_duration_of(run.costs) for run in costs.runs]
    passes = numbered([run.passes for run in costs.runs])
    of_pass = {
        number: run_s for run_s, one in zip(runs_s, passes, strict=True) for number in one.all
    }

    def duration_s(op: Op) -> float:
        if op.lane is not Lane.COMPUTE or op.kind is Kind.DECODE:
            return shared_s(op)
        run_s = runs_s[op.run_index] if op.micro_batch is None else of_pass[op.micro_batch]
        return run_s(op)

    return duration_s


def _duration_of(costs: Costs) -> Callable[[Op], float]:
    outside_s = {
        Kind.FRONT: costs.front_s,
        Kind.SCORE: costs.score_s,
        Kind.OBJECTIVE: costs.objective_s,
        Kind.TAIL: costs.tail_s,
        Kind.FRONT_BACKWARD: costs.front_backward_s,
    }

    def duration_s(op: Op) -> float:
        if op.kind.route is not None:
            return costs.speed(op.kind.route).seconds(op.num_bytes)
        if op.layer is None:
            return outside_s[op.kind]
        return _of_layer_s(costs.layers[op.layer_index], op)

    return duration_s


def _of_layer_s(layer: LayerCost, op: Op) -> float:
    if op.kind is Kind.UPDATE:
        return layer.update_s
    if op.kind is Kind.DECODE:
        return layer.decode_s
    if op.kind is Kind.REFERENCE:
        return layer.reference_s
    if op.kind is Kind.FORWARD:
        return layer.forth_s(op.save)
    return layer.back_s(op.save)


@dataclass(frozen=True, kw_only=True)  # no slots: what steps share is computed once
class Drafts:
    """The times of a request's steps, by what stays on the device, without all of their ops.

    A step of one run is simulated from the program of one micro-batch, in the time of the whole; of
    several, whose micro-batches differ, from the whole program.
    """

    facts: ModelFacts
    request: PlanRequest
    costs: Costs  # the prices of the ops
    is_staged: bool  # whether loads pass through page-locked buffers

    def step_s(
        self, residency: Residency, *, num: int | None = None, has_free_loads: bool = False
    ) -> float:
        """Return the predicted time of a step, optimizer included.

        Args:
            residency: What of the layers stays in device memory.
            num: Micro-batches of the rank that pass the layers together, in place of the request's.
            has_free_loads: Whether loads of layers and of the head take no time.
        """
        times = self._sending if residency.sends else self._plain
        request, schedule = self.request, self.schedule(residency)
        if request.others:
            return simulate(schedule, times.duration_s).step_s + self.costs.optimizer_s
        free = (Kind.LOAD, Kind.HEAD) if has_free_loads else ()
        one_s = merged_s(
            schedule,
            times.of_lines(schedule.lines, free=free),
            num_micro_batches=request.round_micro_batches if num is None else num,
        )
        return request.num_rounds * one_s + self.costs.optimizer_s

    def schedule(self, residency: Residency) -> Schedule:
        """Return the step of one micro-batch, of which each load is one copy without its read."""
        return self._step.schedule(residency)

    @cached_property
    def _step(self) -> _Step:
        is_draft = not self.request.others
        return _Step.of(
            self.facts, self.request, self.costs, is_staged=self.is_staged, is_draft=is_draft
        )

    @cached_property
    def _plain(self) -> "_Durations":
        return _Durations(request=self.request, costs=self.costs, is_staged=self.is_staged)

    @cached_property
    def _sending(self) -> "_Durations":
        return replace(self._plain, costs=self.costs.while_sending(), known={})


@dataclass(frozen=True, kw_only=True)
class _Durations:
    """The durations of a draft's lines, each computed once."""

    request: PlanRequest
    costs: Costs
    is_staged: bool
    known: dict[tuple[object, ...], float | Pieces] = field(default_factory=dict)

    @cached_property
    def duration_s(self) -> Callable[[Op], float]:
        """The duration of an op."""
        return duration_of(self.costs)

    def of_lines(
        self, lines: Sequence[Line], *, free: Sequence[Kind] = ()
    ) -> Sequence[float | Pieces]:
        """Return the durations of lines, of loads those of their pieces."""
        found, known = [], self.known
        for line in lines:
            op, last = line.ops[0], line.ops[-1]
            key: tuple[object, ...] = (op.kind, op.num_bytes)
            if op.kind is not Kind.LOAD:
                key += (op.layer, op.micro_batch, op.run, op.save)
                key += (last.offset, last.num_bytes)
            if key not in known:
                known[key] = self._line_s(line)
            found.append(0.0 if op.kind in free else known[key])
        return found

    def _line_s(self, line: Line) -> float | Pieces:
        op, costs = line.ops[0], self.costs
        if op.kind is Kind.LOAD:
            pieces = [one.num_bytes for one in op.pieces(op.num_bytes, PIECE_BYTES)]
            copies = list(map(costs.speed(Route.LOAD).seconds, pieces))
            if not self.is_staged:
                return sum(copies)
            reads = map(costs.speed(Route.READ).seconds, pieces)
            return tuple(zip(reads, copies, strict=True))
        seconds, objective = sum(map(self.duration_s, line.ops)), self.request.objective
        if objective is None or not objective.scored_frac or op.micro_batch is None:
            return seconds
        passes = objective.passes(1)  # rows that are only scored count by their share
        is_own = passes.micro_batch(op.micro_batch) == 0
        return seconds if is_own else seconds * objective.scored_frac / passes.num_scored


def break_even_tokens(drafts: Drafts, residency: Residency) -> int | None:
    """Return N*, the tokens per step from which streaming is free, in whole micro-batches.

    That is the fewest micro-batches of each rank with which the simulated step takes at most
    `FREE_FRAC` longer than with loads that take no time, with what is on the device then. A larger
    step has no more loads, so their share falls, and a binary search finds it; but where each
    micro-batch passes all layers by itself, their share is that of one micro-batch.

    Returns:
        Tokens, padding included; 0 if nothing is loaded, None if they are more than `MOST_TOKENS`.
    """
    if not drafts.schedule(residency).num_loads:
        return 0
    request = drafts.request
    drafts = replace(drafts, costs=replace(drafts.costs, optimizer_s=0.0))

    def is_free(num: int) -> bool:
        free_s = drafts.step_s(residency, num=num, has_free_loads=True)
        return drafts.step_s(residency, num=num) <= (1 + FREE_FRAC) * free_s

    tokens = request.tokens_per_rank_micro_batch
    most = MOST_TOKENS // tokens if request.num_rounds == 1 else 1
    numbers = range(1, most + 1)
    fewer = bisect_left(numbers, 1, key=lambda number: int(is_free(number)))
    return tokens * numbers[fewer] if fewer < len(numbers) else None
