"""Discrete-event simulation of the same op list that the engine runs."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat

from offload.plan.schedule.op import Kind, Lane, Op, Resource
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
        start_s = lane_free_s[op.kind.lane]
        for other in op.waits:
            if ends_s[other] > start_s:
                start_s = ends_s[other]
        end_s = start_s + duration_s(op)
        if op.kind is Kind.REDUCE:
            end_s = max(end_s, next(arrivals, 0.0) + duration_s(op))
        lane_free_s[op.kind.lane] = end_s
        starts_s.append(start_s)
        ends_s.append(end_s)
    return starts_s, ends_s


_AT_ONCE = (0.0, 0.0)
Pieces = tuple[tuple[float, float], ...]
"""Of each piece of a staged load: seconds of the read into a staging buffer, and of the copy."""


def merged_s(
    schedule: Schedule,
    durations_s: Sequence[float | Pieces],
    *,
    num_micro_batches: int,
) -> float:
    """Compute the end of the last op of a step, from the program of one of its micro-batches.

    A line of a micro-batch represents as many equal ops, one after the other on their lane. The
    m-th of them waits for the m-th of another micro-batch's line, and for the last of any other.
    If the ends of all that they wait for are convex in m, so are their own: a wait delays the m-th
    op most if it is the first or the m-th one. So the ends of the first and the last op of each
    group are enough, and the time is that of the schedule with all micro-batches and pieces. Rows
    of the embedding go through buffers that the next but one needs again: they are simulated one by
    one.

    Lines wait for whatever they contend for, so that no waits have to be derived.

    Args:
        schedule: The step of one micro-batch; a load is one op, without its read.
        durations_s: Seconds of each line for one micro-batch, or of a staged load's pieces.
        num_micro_batches: Equal micro-batches of the step.
    """
    lane_free_s = dict.fromkeys(Lane, 0.0)
    buffers_s = deque([0.0] * NUM_STAGING)  # when each is free, the next one first
    # when what was written, and read since, is done with: for the first op of a group, and for all
    written_s: dict[Resource, tuple[float, float]] = {}
    read_s: dict[Resource, tuple[float, float]] = {}
    fronts_s = _looked_up_s(schedule, durations_s, num_micro_batches)
    more, end_s = num_micro_batches - 1, 0.0
    for number, ((ops, reads, writes), one_s) in enumerate(
        zip(schedule.lines, durations_s, strict=True)
    ):
        lane, is_group = ops[0].kind.lane, ops[0].micro_batch is not None
        first_s = last_s = lane_free_s[lane]
        busy = [
            *map(written_s.get, (*reads, *writes), repeat(_AT_ONCE)),
            *map(read_s.pop, writes, repeat(_AT_ONCE)),
        ]
        for paired_s, other_s in busy:
            first_s, last_s = max(first_s, paired_s), max(last_s, other_s)
        first_s = first_s if is_group else last_s
        if number in fronts_s:
            first_s, last_s = fronts_s[number]
        elif isinstance(one_s, tuple):
            lane_free_s[Lane.HOST], last_s = _staged_s(
                one_s, lane_free_s[Lane.HOST], first_s, buffers_s
            )
            first_s = last_s
        else:
            first_s += one_s
            last_s = max(first_s + more * one_s if is_group else first_s, last_s + one_s)
        lane_free_s[lane] = last_s
        done_s = (first_s if is_group else last_s, last_s)
        for resource in reads:
            before_s = read_s.get(resource, done_s)
            read_s[resource] = (max(before_s[0], done_s[0]), max(before_s[1], done_s[1]))
        for resource in writes:
            written_s[resource] = done_s
        end_s = max(end_s, last_s)
    return end_s


def _staged_s(
    pieces: Pieces, host_s: float, link_s: float, buffers_s: deque[float]
) -> tuple[float, float]:
    """Return when the host has read a load's pieces, and when the last is copied.

    Args:
        pieces: Seconds of the load's pieces.
        host_s: When the host is free.
        link_s: When the link and the slot are.
        buffers_s: When each staging buffer is, the next one first; moved on.
    """
    for read_s, copy_s in pieces:
        host_s = max(host_s, buffers_s.popleft()) + read_s
        link_s = max(link_s, host_s) + copy_s
        buffers_s.append(link_s)
    return host_s, link_s


def _looked_up_s(
    schedule: Schedule, durations_s: Sequence[float | Pieces], num_micro_batches: int
) -> dict[int, tuple[float, float]]:
    """Return the ends of the first and the last micro-batch of fronts whose rows are brought.

    They are the first ops of their lanes, each of which hands rows to the next, the first two
    through two buffers each: one of the first kind is free once the second lane is done with it,
    and one of the other once the third is. Keys are positions in the program.
    """
    found: dict[int, dict[Kind, int]] = {}
    for number, line in enumerate(schedule.lines):
        op = line.ops[0]
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
