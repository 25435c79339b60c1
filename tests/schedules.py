"""Schedules as most tests want them."""

from collections.abc import Sequence
from dataclasses import replace

from offload.plan.schedule.op import Op
from offload.plan.schedule.schedule import (
    NOTHING_SAVED,
    Order,
    Passes,
    Ring,
    Saved,
    Schedule,
    TransferSizes,
    step_schedule,
)


def with_ops(schedule: Schedule, ops: Sequence[Op]) -> Schedule:
    """Return a schedule with other ops than its program gives."""
    changed = replace(schedule)
    vars(changed)["ops"] = tuple(ops)
    return changed


def training_schedule(
    sizes: TransferSizes,
    *,
    ring: Ring,
    num_micro_batches: int,
    order: Order,
    trains_front: bool,
    input_bytes: tuple[int, ...],
    saved: Saved = NOTHING_SAVED,
) -> Schedule:
    """List the ops of one optimizer step of one run without an objective; see `step_schedule`.

    Returns:
        The schedule; from a warm ring in layer-major order it has 2 * (L - C) loads.
    """
    return step_schedule(
        sizes,
        ring=ring,
        runs=(Passes(num_trained=num_micro_batches, has_objective=False),),
        order=order,
        trains_front=trains_front,
        input_bytes=input_bytes,
        saved=saved,
    )
