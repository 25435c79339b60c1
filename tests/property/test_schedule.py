from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.plan.schedule import (
    Kind,
    Lane,
    Order,
    Ring,
    Schedule,
    cold_ring,
    forward_schedule,
    training_schedule,
    warm_ring,
)
from offload.plan.simulate import simulate

sizes = st.tuples(st.integers(2, 12), st.integers(2, 12), st.integers(1, 5)).map(
    lambda s: (s[0], min(s[0], s[1]), s[2])
)
orders = st.sampled_from(Order)


def step(
    num_layers: int, ring: Ring, num_micro_batches: int, order: Order = Order.LAYER_MAJOR
) -> Schedule:
    return training_schedule(
        layer_bytes=[100 + i for i in range(num_layers)],
        ring=ring,
        num_micro_batches=num_micro_batches,
        order=order,
        trains_front=False,
    )


def ancestors(schedule: Schedule) -> list[set[int]]:
    """Return for each op all ops that have ended when it starts, by waits and lane order."""
    before: list[set[int]] = []
    last_on_lane: dict[Lane, int] = {}
    for number, op in enumerate(schedule.ops):
        direct = [*op.waits, *([last_on_lane[op.lane]] if op.lane in last_on_lane else [])]
        before.append(set().union(*({i} | before[i] for i in direct)))
        last_on_lane[op.lane] = number
    return before


def check_order(schedule: Schedule) -> None:
    """Check that each visit finds its layer in its slot, and that no load overwrites one in use."""
    before = ancestors(schedule)
    slots = dict(enumerate(schedule.ring_before))
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for number, op in enumerate(schedule.ops):
        if op.kind is Kind.LOAD:
            assert op.slot is not None
            assert all(reader in before[number] for reader in readers.get(op.slot, []))
            slots[op.slot], writer[op.slot], readers[op.slot] = op.layer, number, []
        elif op.layer is not None:
            assert op.slot is not None
            assert slots[op.slot] == op.layer
            if op.slot in writer:
                assert writer[op.slot] in before[number]
            readers.setdefault(op.slot, []).append(number)
    assert tuple(slots.values()) == schedule.ring_after


@given(sizes, orders, st.booleans())
def test_every_visit_follows_its_load_and_precedes_the_next_one(size, order, is_warm) -> None:
    num_layers, num_slots, num_micro_batches = size
    ring = warm_ring(num_slots) if is_warm else cold_ring(num_slots)
    check_order(step(num_layers, ring, num_micro_batches, order))


@given(sizes)
def test_a_step_after_an_evaluation_is_in_order_too(size) -> None:
    num_layers, num_slots, num_micro_batches = size
    evaluation = forward_schedule(
        layer_bytes=[1] * num_layers, ring=warm_ring(num_slots), num_micro_batches=1
    )
    check_order(evaluation)
    check_order(step(num_layers, evaluation.ring_after, num_micro_batches))


@given(sizes)
def test_dropping_any_wait_breaks_the_order(size) -> None:
    num_layers, num_slots, num_micro_batches = size
    schedule = step(num_layers, cold_ring(num_slots), num_micro_batches)
    for number, op in enumerate(schedule.ops):
        for wait in op.waits:
            ops = list(schedule.ops)
            ops[number] = replace(op, waits=tuple(i for i in op.waits if i != wait))
            with pytest.raises(AssertionError):
                check_order(replace(schedule, ops=tuple(ops)))


@given(sizes)
def test_a_warm_step_loads_each_streamed_layer_twice_whatever_the_micro_batches(size) -> None:
    num_layers, num_slots, num_micro_batches = size
    schedule = step(num_layers, warm_ring(num_slots), num_micro_batches)
    assert schedule.num_loads == 2 * (num_layers - num_slots)
    assert schedule.ring_after == warm_ring(num_slots)


@given(sizes)
def test_a_cold_step_loads_the_ring_once_more(size) -> None:
    num_layers, num_slots, num_micro_batches = size
    schedule = step(num_layers, cold_ring(num_slots), num_micro_batches)
    assert schedule.num_loads == 2 * num_layers - num_slots


@given(sizes)
def test_the_usual_order_loads_once_per_micro_batch(size) -> None:
    num_layers, num_slots, num_micro_batches = size
    schedule = step(num_layers, warm_ring(num_slots), num_micro_batches, Order.MICRO_BATCH_MAJOR)
    assert schedule.num_loads == 2 * num_micro_batches * (num_layers - num_slots)


@given(sizes, orders)
def test_every_layer_sees_every_micro_batch_in_both_directions(size, order) -> None:
    num_layers, num_slots, num_micro_batches = size
    schedule = step(num_layers, warm_ring(num_slots), num_micro_batches, order)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        visits = [(op.layer, op.micro_batch) for op in schedule.ops if op.kind is kind]
        assert sorted(visits) == [
            (i, m) for i in range(num_layers) for m in range(num_micro_batches)
        ]


@given(sizes, orders, st.lists(st.floats(0.001, 5.0), min_size=8, max_size=8))
def test_simulated_ops_keep_lanes_waits_and_durations(size, order, seconds) -> None:
    num_layers, num_slots, num_micro_batches = size
    schedule = step(num_layers, cold_ring(num_slots), num_micro_batches, order)
    kinds = list(Kind)
    timeline = simulate(schedule, lambda op: seconds[kinds.index(op.kind)])
    lane_end_s = dict.fromkeys(Lane, 0.0)
    for op, span in zip(schedule.ops, timeline.spans, strict=True):
        earliest_s = max([lane_end_s[op.lane], *(timeline.spans[i].end_s for i in op.waits)])
        assert span.start_s == earliest_s
        lane_end_s[op.lane] = span.end_s
    assert timeline.step_s == max(lane_end_s.values())
