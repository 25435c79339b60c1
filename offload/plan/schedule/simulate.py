"""Discrete-event simulation of the same op list that the engine runs."""

from collections import deque
from collections.abc import Callable, Sequence

from offload.plan.schedule.op import Kind, Lane, Op
from offload.plan.schedule.schedule import NUM_ROW_BUFFERS, NUM_STAGING, Schedule
from offload.plan.schedule.timeline import Span, Timeline


def simulate(
    schedule: Schedule, duration_s: Callable[[Op], float], *, arrivals_s: Sequence[float] = ()
) -> Timeline:
    """Compute start and end of each op.

    An op starts when its lane is free and all ops that it waits for have ended. The list is in
    issue order, so one pass suffices. A sum over ranks takes its time once all of them are there.

    Args:
        schedule: The ops.
        duration_s: Seconds that an op takes on its lane once it has started.
        arrivals_s: When the last of the other ranks comes to each sum; empty if none is late.
    """
    times = zip(schedule.ops, *times_s(schedule, duration_s, arrivals_s=arrivals_s), strict=True)
    return Timeline(spans=tuple([Span.of(op, start_s, end_s) for op, start_s, end_s in times]))


def times_s(
    schedule: Schedule, duration_s: Callable[[Op], float], *, arrivals_s: Sequence[float] = ()
) -> tuple[Sequence[float], Sequence[float]]:
    """Return the starts and the ends of a schedule's ops; arguments as of `simulate`."""
    lane_free_s = dict.fromkeys(Lane, 0.0)
    arrivals = iter(arrivals_s)
    starts_s: list[float] = []
    ends_s: list[float] = []
    for op in schedule.ops:
        start_s = lane_free_s[op.lane]
        for other in op.waits:
            if ends_s[other] > start_s:
                start_s = ends_s[other]
        end_s = start_s + duration_s(op)
        if op.kind is Kind.REDUCE:
            end_s = max(end_s, next(arrivals, 0.0) + duration_s(op))
        lane_free_s[op.lane] = end_s
        starts_s.append(start_s)
        ends_s.append(end_s)
    return starts_s, ends_s


Pieces = tuple[tuple[float, float], ...]
"""Of each piece of a staged load: seconds of the read into a staging buffer, and of the copy."""


def merged_s(
    schedule: Schedule,
    durations_s: Sequence[float | Pieces],
    *,
    num_micro_batches: int,
) -> float:
    """Compute the end of the last op of a step, from the schedule of one of its micro-batches.

    An op of a micro-batch represents as many equal ops, one after the other on their lane. The
    m-th of them waits for the m-th of another micro-batch's op, and for the last of any other op.
    If the ends of all that they wait for are convex in m, so are their own: a wait delays the m-th
    op most if it is the first or the m-th one. So the ends of the first and the last op of each
    group are enough, and the time is that of the schedule with all micro-batches and pieces. Rows
    of the embedding go through buffers that the next but one needs again: they are simulated one by
    one.

    Args:
        schedule: The ops of one micro-batch; each copy is one op, without its read.
        durations_s: Of each op for one micro-batch, or of the pieces of a staged load.
        num_micro_batches: Equal micro-batches of the step.
    """
    lane_free_s = dict.fromkeys(Lane, 0.0)
    buffers_s = deque([0.0] * NUM_STAGING)  # when each is free, the next one first
    firsts_s: list[float] = []
    lasts_s: list[float] = []
    fronts_s = _looked_up_s(schedule, durations_s, num_micro_batches)
    for number, (op, one_s) in enumerate(zip(schedule.ops, durations_s, strict=True)):
        first_s = last_s = lane_free_s[op.lane]
        is_group = op.micro_batch is not None
        for other in op.waits:
            is_paired = is_group and schedule.ops[other].micro_batch is not None
            first_s = max(first_s, firsts_s[other] if is_paired else lasts_s[other])
            last_s = max(last_s, lasts_s[other])
        if number in fronts_s:
            first_s, last_s = fronts_s[number]
        elif isinstance(one_s, tuple):
            read_s = lane_free_s[Lane.HOST]
            for read, copy in one_s:
                read_s = max(read_s, buffers_s.popleft()) + read
                first_s = max(first_s, read_s) + copy
                buffers_s.append(first_s)
            lane_free_s[Lane.HOST], last_s = read_s, first_s
        else:
            first_s += one_s
            others_s = (num_micro_batches - 1) * one_s if is_group else 0.0
            last_s = max(first_s + others_s, last_s + one_s)
        lane_free_s[op.lane] = last_s
        firsts_s.append(first_s)
        lasts_s.append(last_s)
    return max(lasts_s, default=0.0)


def _looked_up_s(
    schedule: Schedule, durations_s: Sequence[float | Pieces], num_micro_batches: int
) -> dict[int, tuple[float, float]]:
    """Return the ends of the first and the last micro-batch of fronts whose rows are brought.

    They are the first ops of their lanes, each of which hands rows to the next, the first two
    through two buffers each: one of the first kind is free once the second lane is done with it,
    and one of the other once the third is. Keys are positions in the schedule.
    """
    found: dict[int, dict[Kind, int]] = {}
    for number, op in enumerate(schedule.ops):
        if op.kind in (Kind.LOOK_UP, Kind.ROWS, Kind.FRONT) and op.buffer is not None:
            found.setdefault(op.micro_batch_index, {})[op.kind] = number
    ends_s: dict[int, tuple[float, float]] = {}
    free_s = deque([(0.0, 0.0)] * NUM_ROW_BUFFERS)
    first_s = second_s = third_s = 0.0
    for _, ops in sorted(found.items()):
        numbers = ops[Kind.LOOK_UP], ops[Kind.ROWS], ops[Kind.FRONT]
        each_s = [s for s in (durations_s[n] for n in numbers) if not isinstance(s, tuple)]
        passes_s = []
        for _ in range(num_micro_batches):
            for_first_s, for_second_s = free_s.popleft()
            first_s = max(first_s, for_first_s) + each_s[0]
            second_s = max(second_s, first_s, for_second_s) + each_s[1]
            third_s = max(third_s, second_s) + each_s[2]
            free_s.append((second_s, third_s))
            passes_s.append((first_s, second_s, third_s))
        ends_s |= dict(zip(numbers, zip(passes_s[0], passes_s[-1], strict=True), strict=True))
    return ends_s
