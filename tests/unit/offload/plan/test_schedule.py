"""The operations of a step, their order, and their trace."""

import json

import pytest

from offload.plan.schedule.op import Kind, Lane, Op, Route
from offload.plan.schedule.schedule import (
    Order,
    TransferSizes,
    cold_ring,
    warm_ring,
)
from offload.plan.schedule.sharded import ShardedSizes, sharded_schedule
from offload.plan.schedule.simulate import simulate
from offload.plan.schedule.timeline import Timeline, perfetto_trace
from offload.plan.step import duration_of
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import Costs, LayerCost, Speed
from tests.builders import simulated
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
        speeds={Route.LOAD: Speed(10 / load_s)},
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


# ------------------------------------------------------------------------------------------ sharded


SIZES = ShardedSizes(layers=(10, 20), rest=5, gradients=(3, 4), rest_gradients=0)


def seconds(op: Op) -> float:
    return 2.0 if op.kind is Kind.BACKWARD else 1.0


@pytest.mark.parametrize(
    ("is_ahead", "step_s"),
    [
        # rest 0-1, front 1-2, gather 0 1-2, forward 0 2-3, gather 1 2-3, forward 1 3-4, tail 4-5,
        # gather 1 5-6, gather 0 6-7, backward 1 6-8, sum 1 8-9, backward 0 8-10, sum 0 10-11
        (True, 11.0),
        # gather 0 2-3, forward 0 3-4, gather 1 4-5, forward 1 5-6, tail 6-7, and so on
        (False, 13.0),
    ],
)
def test_a_step_takes_what_it_takes_by_hand(is_ahead, step_s) -> None:
    made = sharded_schedule(SIZES, num_micro_batches=1, trains_front=False, is_ahead=is_ahead)
    assert simulate(made, seconds).step_s == step_s


def test_each_micro_batch_gathers_each_layer_twice_and_what_is_around_once() -> None:
    made = sharded_schedule(SIZES, num_micro_batches=3, trains_front=True, is_ahead=True)
    sent = [(op.kind, op.layer, op.num_bytes) for op in made.ops if op.lane is Lane.NETWORK]
    one = [
        (Kind.GATHER, None, 5),
        (Kind.GATHER, 0, 10),
        (Kind.GATHER, 1, 20),
        (Kind.GATHER, 1, 20),
        (Kind.GATHER, 0, 10),
        (Kind.REDUCE, 1, 4),
        (Kind.REDUCE, 0, 3),
    ]
    assert sent == 3 * one
    assert made.network_bytes == 3 * 72
    assert made.num_loads == made.h2d_bytes == 0
    kinds = [op.kind for op in made.ops if op.lane is Lane.COMPUTE]
    up = [Kind.FRONT, Kind.FORWARD, Kind.FORWARD, Kind.TAIL]
    assert kinds == 3 * [*up, Kind.BACKWARD, Kind.BACKWARD, Kind.FRONT_BACKWARD]


def test_no_more_than_two_layers_are_gathered_ahead_of_those_that_have_computed() -> None:
    sizes = ShardedSizes(layers=(10,) * 6, rest=5, gradients=(1,) * 6, rest_gradients=2)
    made = sharded_schedule(sizes, num_micro_batches=2, trains_front=False, is_ahead=True)
    for op in made.ops:
        assert all(other < made.ops.index(op) for other in op.waits)
    ended = simulate(made, lambda op: 0.0 if op.lane is Lane.NETWORK else 1.0).spans
    for span in ended:
        if span.kind is Kind.GATHER and span.layer is not None:
            computing = [s for s in ended if s.lane is Lane.COMPUTE and s.layer is not None]
            before = [s for s in computing if s.end_s <= span.start_s]
            gathered = [
                s
                for s in ended
                if s.kind is Kind.GATHER and s.layer is not None and s.end_s <= span.end_s
            ]
            assert len(gathered) - len(before) <= 2


# ----------------------------------------------------------------------------------------- perfetto


def test_the_arrows_of_a_trace_lead_from_what_was_waited_for() -> None:
    timeline = simulated(4, 1)
    events = json.loads(perfetto_trace({"predicted": timeline}))["traceEvents"]
    ends: dict[str, dict[str, dict]] = {}
    for event in events:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], {})[event["ph"]] = event
    lanes = list(Lane)
    spans = {(lanes.index(s.lane), s.start_s * 1e6): s for s in timeline.spans}
    arrows = [
        tuple(spans[end["tid"], end["ts"]] for end in (pair["s"], pair["f"]))
        for pair in ends.values()
    ]
    assert len(arrows) == len(list(timeline.crossings())) > 0
    assert all(source.end_s <= target.start_s for source, target in arrows)
    loads = [
        (s.layer, t.layer) for s, t in arrows if s.kind is Kind.LOAD and t.lane is Lane.COMPUTE
    ]
    assert loads
    assert all(loaded == visited for loaded, visited in loads)
    assert {e["cat"] for e in events if e["ph"] == "X"} >= {"load", "decode", "optimizer"}
