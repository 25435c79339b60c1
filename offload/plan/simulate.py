"""Discrete-event simulation of the very op list that the engine runs."""

from collections.abc import Callable

from offload.plan.op import Lane, Op
from offload.plan.schedule import Schedule
from offload.plan.timeline import Span, Timeline


def simulate(schedule: Schedule, duration_s: Callable[[Op], float]) -> Timeline:
    """Compute start and end of each op.

    An op starts when its lane is free and all that it waits for has ended. The list is in issue
    order, so one pass suffices.

    Args:
        schedule: The ops.
        duration_s: Seconds that an op takes on its lane once it runs.
    """
    lane_free_s = dict.fromkeys(Lane, 0.0)
    spans: list[Span] = []
    for op in schedule.ops:
        start_s = max([lane_free_s[op.lane], *(spans[i].end_s for i in op.waits)])
        end_s = start_s + duration_s(op)
        lane_free_s[op.lane] = end_s
        spans.append(
            Span(
                lane=op.lane,
                kind=op.kind,
                layer=op.layer,
                micro_batch=op.micro_batch,
                num_bytes=op.num_bytes,
                start_s=start_s,
                end_s=end_s,
                waits=op.waits,
            )
        )
    return Timeline(spans=tuple(spans))
