"""Both lanes truly asynchronous, as on a GPU: the whole list is issued before anything has run."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import cast

import pytest
import torch

from offload.engine.engine import Engine
from offload.engine.executor import with_labels
from offload.engine.streams import CpuDevice, Event, _Job, _ThreadEvent
from offload.plan.schedule import Kind, Lane, Order, Schedule, cold_ring, training_schedule
from tests.parity.test_streamed_step import (
    assert_equal,
    gradients,
    micro_batches,
    streamed,
    tiny,
)

NUM_SLOTS = 2


class TwoWorkerDevice(CpuDevice):
    """A CPU whose compute lane is a slow worker too, held back until all ops are issued."""

    def __init__(self) -> None:
        super().__init__()
        self._issued = threading.Event()
        self._compute_queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._compute_worker = threading.Thread(target=self._compute, daemon=True)
        self._compute_worker.start()

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        if lane is not Lane.COMPUTE:
            return super().submit(lane, waits, body)
        job = _Job(body=body, waits=cast("Sequence[_ThreadEvent]", waits))
        self._compute_queue.put(job)
        return job.event

    def finish(self) -> None:
        self._issued.set()
        self._compute_queue.put(None)
        self._compute_worker.join(timeout=60)
        assert not self._compute_worker.is_alive(), "the lanes wait for each other"
        super().finish()

    def _compute(self) -> None:
        self._issued.wait()
        while (job := self._compute_queue.get()) is not None:
            time.sleep(0.002)  # loads that do not wait run ahead
            self._run(job, self._wait_here)


def run(change: Callable[[Schedule], Schedule]) -> tuple[float, dict[str, torch.Tensor]]:
    """Run one step on two workers, with a changed schedule."""
    model = tiny("qwen3")
    device = TwoWorkerDevice()
    engine = Engine(model, num_slots=NUM_SLOTS, device=device, head_chunk_tokens=7)
    schedule = training_schedule(
        layer_bytes=engine.layer_bytes,
        ring=cold_ring(NUM_SLOTS),
        num_micro_batches=3,
        order=Order.LAYER_MAJOR,
        trains_front=False,
    )
    batches = [with_labels(batch, device.torch_device) for batch in micro_batches()]
    num_label_tokens = sum(batch.num_label_tokens for batch in batches)
    state, _ = engine._executor.train(
        change(schedule), batches, num_label_tokens=num_label_tokens, seed=0
    )
    device.finish()
    engine.close()
    return float(torch.stack(state.losses).sum()), gradients(model)


def without_waits(schedule: Schedule, *kinds: Kind) -> Schedule:
    ops = (replace(op, waits=()) if op.kind in kinds else op for op in schedule.ops)
    return replace(schedule, ops=tuple(ops))


def test_move_a_step_issued_at_once_equals_the_resident_step_to_the_bit() -> None:
    assert_equal(run(lambda schedule: schedule), streamed(tiny("qwen3"), num_slots=6))


def test_loads_that_do_not_wait_for_their_slot_give_other_gradients() -> None:
    with pytest.raises(AssertionError):
        assert_equal(
            run(lambda schedule: without_waits(schedule, Kind.LOAD)),
            streamed(tiny("qwen3"), num_slots=6),
        )
