"""The ops of ranks that each hold a part of the model, timed by hand."""

import pytest

from offload.plan.schedule.op import Kind, Lane, Op
from offload.plan.schedule.sharded import ShardedSizes, sharded_schedule
from offload.plan.schedule.simulate import simulate

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
