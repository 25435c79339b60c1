"""Discrete-event simulation of the same op list that the engine runs."""

from collections.abc import Callable

from offload.plan.schedule.op import Lane, Op
from offload.plan.schedule.schedule import Schedule
from offload.plan.schedule.timeline import Span, Timeline


def simulate(schedule: Schedule, duration_s: Callable[[Op], float]) -> Timeline:
    """Compute start and end of each op.

    An op starts when its lane is free and all ops that it waits for have ended. The list is in
    issue order, so one pass suffices.

    Args:
        schedule: The ops.
        duration_s: Seconds that an op takes on its lane once it has started.
    """
    starts_s, ends_s = _times_s(schedule, duration_s)
    return Timeline(
        spans=tuple(
            Span.of(op, start_s=start_s, end_s=end_s)
            for op, start_s, end_s in zip(schedule.ops, starts_s, ends_s, strict=True)
        )
    )


def simulated_s(schedule: Schedule, duration_s: Callable[[Op], float]) -> float:
    """Compute the end of the last op, as `simulate` does."""
    return max(_times_s(schedule, duration_s)[1], default=0.0)


def _times_s(
    schedule: Schedule, duration_s: Callable[[Op], float]
) -> tuple[list[float], list[float]]:
    lane_free_s = dict.fromkeys(Lane, 0.0)
    starts_s: list[float] = []
    ends_s: list[float] = []
    for op in schedule.ops:
        start_s = lane_free_s[op.lane]
        for other in op.waits:
            start_s = max(start_s, ends_s[other])
        end_s = start_s + duration_s(op)
        lane_free_s[op.lane] = end_s
        starts_s.append(start_s)
        ends_s.append(end_s)
    return starts_s, ends_s
