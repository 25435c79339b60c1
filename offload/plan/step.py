"""The ops of a step, their durations, and from how many tokens streaming is free."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.trainable import outer_module_sizes
from offload.plan.facts.workload import (
    Workload,
    head_bytes,
    most_rows_bytes,
)
from offload.plan.memory.memory import input_bytes, layer_weight_bytes
from offload.plan.request import PlanRequest, reduced_of
from offload.plan.schedule.op import Kind, Lane, Op
from offload.plan.schedule.schedule import (
    NUM_STAGING,
    PIECE_BYTES,
    Passes,
    Residency,
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
    facts: ModelFacts,
    request: PlanRequest,
    costs: Costs,
    residency: Residency,
    *,
    is_staged: bool,
    is_draft: bool = False,
) -> Schedule:
    """Return the ops of a step from a warm ring.

    Args:
        facts: The model.
        request: The request.
        costs: For the sizes of layers.
        residency: What of the layers stays in device memory.
        is_staged: Whether loads pass through page-locked buffers.
        is_draft: Whether to list one micro-batch only, and each load as one copy; see `Draft`.
    """
    if request.is_on_features and not is_draft:
        return head_schedule(warm_ring(residency.num_slots))
    assert not (is_draft and request.others), "a draft has one run"
    typical, runs = request.typical, request.runs
    numbers = [1 if is_draft else run.rank_micro_batches for run in runs]
    passes = [run.passes(number) for run, number in zip(runs, numbers, strict=True)]
    sizes = load_sizes(facts, typical, costs, is_staged=is_staged and not is_draft)
    whole = typical.adapter.whole
    trained = sizes.gradient_bytes if whole is None else whole.layers
    sizes = replace(
        sizes,
        gradient_bytes=tuple(typical.dtype_bytes * number for number in trained),
        updated=frozenset(layer for layer, number in enumerate(trained) if number),
        piece_bytes=max(sizes.layer_bytes) if is_draft else PIECE_BYTES,
        reduced=reduced_of(facts, request),
        row_bytes=_row_bytes(facts, request, passes),
        head_bytes=head_bytes(facts, typical),
    )
    stashed = zip(runs, numbers, strict=True) if request.is_stashed else ()
    return step_schedule(
        sizes,
        ring=without_trained(warm_ring(residency.num_slots), sizes),
        runs=passes,
        order=request.order,
        trains_front=any(outer_module_sizes(facts, run.typical.adapter) for run in runs),
        input_bytes=tuple(
            input_bytes(facts, run.typical) for run, number in stashed for _ in range(number)
        ),
        num_kept_graphs=residency.num_kept_graphs,
        saved=costs.saved(residency, num_micro_batches=numbers[0]),
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
        if op.kind is Kind.UPDATE:
            return costs.layers[op.layer_index].update_s
        if op.kind in (Kind.HEAD, Kind.FETCH, Kind.RETURN):
            return costs.h2d_latency_s + op.num_bytes / costs.fetch_bytes_per_s
        if op.lane is Lane.H2D:
            return costs.h2d_latency_s + op.num_bytes / costs.h2d_bytes_per_s
        if op.lane is Lane.NETWORK:
            return costs.network_latency_s + op.num_bytes / costs.network_bytes_per_s
        if op.lane is Lane.HOST:
            is_row = op.kind is Kind.LOOK_UP
            return op.num_bytes / (costs.look_up_bytes_per_s if is_row else costs.read_bytes_per_s)
        if op.lane is Lane.D2H:
            return costs.h2d_latency_s + op.num_bytes / costs.d2h_bytes_per_s
        if op.layer is None:
            return outside_s[op.kind]
        return _of_layer_s(costs.layers[op.layer_index], op)

    return duration_s


def _of_layer_s(layer: LayerCost, op: Op) -> float:
    if op.kind is Kind.DECODE:
        return layer.decode_s
    if op.kind is Kind.REFERENCE:
        return layer.reference_s
    if op.kind is Kind.FORWARD:
        return layer.forth_s(is_sent=op.carrier is not None, has_graph=op.has_graph)
    return layer.back_s(has_graph=op.has_graph, has_output=op.has_output)


def _draft_durations(request: PlanRequest, costs: Costs) -> Callable[[Op], float]:
    """Return the durations of a draft's ops: those of rows that are only scored by their share."""
    one_s, objective = duration_of(costs), request.objective
    if objective is None or not objective.scored_frac:
        return one_s
    passes = objective.passes(1)

    def drafted_s(op: Op) -> float:
        if op.micro_batch is None or passes.micro_batch(op.micro_batch) == 0:
            return one_s(op)
        return one_s(op) * objective.scored_frac / passes.num_scored

    return drafted_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The ops of one micro-batch, from which a step of any number of them is simulated.

    Its time is that of the whole schedule, at the cost of one micro-batch's.
    """

    schedule: Schedule  # the ops; each load is one copy, without its read
    # Their durations, or those of the pieces of a staged load.
    durations_s: tuple[float | Pieces, ...]

    @classmethod
    def of(
        cls,
        facts: ModelFacts,
        request: PlanRequest,
        costs: Costs,
        residency: Residency,
        *,
        is_staged: bool,
    ) -> "Draft":
        """Draft the step of a request; arguments as of `schedule_of`."""
        schedule = schedule_of(facts, request, costs, residency, is_staged=is_staged, is_draft=True)
        one_s = _draft_durations(request, costs)

        def load_s(num_bytes: int) -> float | Pieces:
            sizes = [
                min(PIECE_BYTES, num_bytes - at) for at in range(0, max(1, num_bytes), PIECE_BYTES)
            ]
            copies = [costs.h2d_latency_s + size / costs.h2d_bytes_per_s for size in sizes]
            if not is_staged:
                return sum(copies)
            reads = (size / costs.read_bytes_per_s for size in sizes)
            return tuple(zip(reads, copies, strict=True))

        loads = {op.num_bytes for op in schedule.ops if op.kind is Kind.LOAD}
        of_loads = {num_bytes: load_s(num_bytes) for num_bytes in loads}
        return cls(
            schedule=schedule,
            durations_s=tuple(
                of_loads[op.num_bytes] if op.kind is Kind.LOAD else one_s(op) for op in schedule.ops
            ),
        )

    def step_s(self, num_micro_batches: int) -> float:
        """Return the predicted time of a step, without the optimizer."""
        return merged_s(self.schedule, self.durations_s, num_micro_batches=num_micro_batches)

    def with_free_loads(self) -> "Draft":
        """Return the same step where loads of layers and of the head take no time."""
        ops = zip(self.schedule.ops, self.durations_s, strict=True)
        free = Kind.LOAD, Kind.HEAD
        return replace(
            self, durations_s=tuple(0.0 if op.kind in free else one_s for op, one_s in ops)
        )


def pass_s(
    facts: ModelFacts,
    request: PlanRequest,
    costs: Costs,
    residency: Residency,
    *,
    is_staged: bool,
) -> float:
    """Return the predicted time of a step, without the optimizers.

    That of one run is simulated from a draft; of several, whose micro-batches differ, from the
    whole schedule. Arguments are as of `schedule_of`.
    """
    if not request.others:
        draft = Draft.of(facts, request, costs, residency, is_staged=is_staged)
        return request.num_rounds * draft.step_s(request.round_micro_batches)
    schedule = schedule_of(facts, request, costs, residency, is_staged=is_staged)
    return simulate(schedule, duration_of(costs)).step_s


def break_even_tokens(draft: Draft, request: PlanRequest) -> int | None:
    """Return N*, the tokens per step from which streaming is free, in whole micro-batches.

    That is the fewest micro-batches of each rank with which the simulated step takes at most
    `FREE_FRAC` longer than with loads that take no time, with the slots and kept graphs of the
    draft. A larger step has no more loads, so their share falls, and a binary search finds it; but
    where each micro-batch passes all layers by itself, their share is that of one micro-batch.

    Returns:
        Tokens, padding included; 0 if nothing is loaded, None if they are more than `MOST_TOKENS`.
    """
    if not draft.schedule.num_loads:
        return 0
    free = draft.with_free_loads()

    def is_free(num_micro_batches: int) -> bool:
        return draft.step_s(num_micro_batches) <= (1 + FREE_FRAC) * free.step_s(num_micro_batches)

    tokens = request.tokens_per_rank_micro_batch
    most = MOST_TOKENS // tokens if request.num_rounds == 1 else 1
    numbers = range(1, most + 1)
    fewer = bisect_left(numbers, 1, key=lambda number: int(is_free(number)))
    return tokens * numbers[fewer] if fewer < len(numbers) else None
