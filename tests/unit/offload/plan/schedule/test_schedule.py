import json

import pytest

from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.schedule import (
    Order,
    TransferSizes,
    cold_ring,
    warm_ring,
)
from offload.plan.schedule.simulate import simulate
from offload.plan.schedule.timeline import Timeline, perfetto_trace
from offload.plan.step import duration_of
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import Costs, LayerCost
from tests.schedules import training_schedule


def schedule(*, num_slots: int, num_micro_batches: int, order: Order = Order.LAYER_MAJOR):
    return training_schedule(
        TransferSizes.frozen([10] * 8),
        ring=warm_ring(num_slots),
        num_micro_batches=num_micro_batches,
        order=order,
        trains_front=False,
        input_bytes=(),
    )


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 8])
def test_eight_layers_over_three_slots_load_ten_times(num_micro_batches: int) -> None:
    assert schedule(num_slots=3, num_micro_batches=num_micro_batches).num_loads == 10


@pytest.mark.parametrize(("num_micro_batches", "num_loads"), [(1, 10), (2, 20), (4, 40), (8, 80)])
def test_the_usual_order_loads_ten_times_per_micro_batch(num_micro_batches, num_loads) -> None:
    usual = schedule(
        num_slots=3, num_micro_batches=num_micro_batches, order=Order.MICRO_BATCH_MAJOR
    )
    assert usual.num_loads == num_loads


def test_resident_layers_are_never_loaded() -> None:
    resident = schedule(num_slots=8, num_micro_batches=4)
    assert resident.num_loads == 0
    assert resident.h2d_bytes == 0


def test_loads_of_a_cold_ring_are_issued_before_any_compute() -> None:
    cold = training_schedule(
        TransferSizes.frozen([10] * 8),
        ring=cold_ring(3),
        num_micro_batches=2,
        order=Order.LAYER_MAJOR,
        trains_front=False,
        input_bytes=(),
    )
    assert [op.kind for op in cold.ops[:4]] == [Kind.LOAD, Kind.LOAD, Kind.LOAD, Kind.FRONT]


@pytest.mark.parametrize(
    ("visit_s", "load_s", "expected_s"),
    [
        # compute bound: 8 forward visits of 2 x 1 s, 8 backward visits of 2 x 2 s, nothing else
        (1.0, 0.5, 48.0),
        # link bound: each sweep waits for visit 0, then 5 loads, then one visit
        (0.1, 10.0, (50 + 2 * 0.2) + (50 + 2 * 0.4)),
    ],
)
def test_a_simulated_step_reaches_the_bound_r3(visit_s, load_s, expected_s) -> None:
    def duration_s(op) -> float:
        if op.kind is Kind.LOAD:
            return load_s
        return {Kind.FORWARD: visit_s, Kind.BACKWARD: 2 * visit_s}.get(op.kind, 0.0)

    timeline = simulate(schedule(num_slots=3, num_micro_batches=2), duration_s)
    assert timeline.step_s == pytest.approx(expected_s)


@pytest.mark.parametrize(("visit_s", "load_s", "tail_s"), [(1.0, 0.1, 0.5), (0.1, 10.0, 0.5)])
@pytest.mark.parametrize("num_slots", [3, 7, 8])
def test_a_simulated_step_of_encoded_layers_reaches_r3(visit_s, load_s, tail_s, num_slots) -> None:
    num_micro_batches, decode_s = 2, 0.3
    layer = LayerCost(
        forward_s=visit_s,
        backward_s=2 * visit_s,
        recompute_s=0.0,
        decode_s=decode_s,
        weight_bytes=10,
        bound="compute",
    )
    costs = Costs(
        grade="spec",
        layers=(layer,) * 8,
        front_s=0.0,
        tail_s=tail_s,
        optimizer_s=0.0,
        h2d_bytes_per_s=10 / load_s,
        h2d_latency_s=0.0,
        d2h_bytes_per_s=1.0,
        fetch_bytes_per_s=1.0,
        read_bytes_per_s=1.0,
    )
    encoded = training_schedule(
        TransferSizes.frozen([10] * 8, decoded_bytes=[40] * 8),
        ring=warm_ring(num_slots),
        num_micro_batches=num_micro_batches,
        order=Order.LAYER_MAJOR,
        trains_front=False,
        input_bytes=(),
    )
    step_s = simulate(encoded, duration_of(costs)).step_s
    bound_s = r3_bound_s(costs, num_slots=num_slots, num_micro_batches=num_micro_batches)
    assert step_s == pytest.approx(bound_s, rel=1e-6)


def test_phases_of_the_compute_lane_add_up_to_the_step() -> None:
    timeline = simulate(schedule(num_slots=3, num_micro_batches=2), lambda op: 1.0)
    phases = timeline.phases()
    parts = ("forward", "decode", "head and loss", "backward", "stall")
    assert phases["step"] == pytest.approx(sum(phases[name] for name in parts))


def test_a_timeline_is_read_back_as_written() -> None:
    timeline = simulate(schedule(num_slots=3, num_micro_batches=2), lambda op: 0.25)
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_a_trace_has_one_track_per_timeline_and_lane() -> None:
    timeline = simulate(schedule(num_slots=3, num_micro_batches=1), lambda op: 0.25)
    events = json.loads(perfetto_trace({"predicted": timeline, "measured": timeline}))
    spans = [e for e in events["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 2 * len(timeline.spans)
    assert {(e["pid"], e["tid"]) for e in spans} == {
        (process, list(Lane).index(lane))
        for process in range(2)
        for lane in (Lane.COMPUTE, Lane.H2D)
    }
