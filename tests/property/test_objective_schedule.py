"""Properties of the op list of a step whose loss is taken over all its rows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.plan.schedule.op import Kind, Lane, Op
from offload.plan.schedule.schedule import (
    Order,
    Passes,
    Residency,
    Schedule,
    TransferSizes,
    cold_ring,
    forward_schedule,
    numbered,
    step_schedule,
    warm_ring,
)
from offload.plan.schedule.simulate import merged_s, simulate
from tests.property.accesses import check_order
from tests.schedules import training_schedule

SCORED = (Kind.SCORE, Kind.OBJECTIVE, Kind.REFERENCE)
passes_of_steps = st.builds(
    Passes,
    num_trained=st.integers(1, 3),
    num_scored=st.integers(0, 2),
    has_reference=st.booleans(),
)


@st.composite
def both(draw: st.DrawFn) -> tuple[Schedule, Schedule, Passes]:
    """Draw a step with an objective, the same one without it, and its passes."""
    num_layers, num_slots = draw(st.integers(2, 5)), draw(st.integers(2, 5))
    num_slots = min(num_layers, num_slots)
    passes = draw(passes_of_steps)
    sizes = TransferSizes(
        layer_bytes=tuple(draw(st.integers(0, 30)) for _ in range(num_layers)),
        gradient_bytes=(0,) * num_layers,
        decoded_bytes=tuple(draw(st.sampled_from([0, 50])) for _ in range(num_layers)),
        piece_bytes=draw(st.sampled_from([7, 100])),
        num_staging=draw(st.integers(0, 3)),
    )
    residency = Residency(
        num_slots=num_slots,
        num_kept_graphs=draw(st.integers(0, num_layers)),
        num_sent_graphs=draw(st.integers(0, num_layers)),
        num_sent_outputs=draw(st.integers(0, num_layers)),
    )
    num = passes.num_trained
    ring = draw(st.sampled_from([warm_ring(num_slots), cold_ring(num_slots)]))
    trains_front = draw(st.booleans())
    input_bytes: tuple[int, ...] = draw(st.sampled_from([(), (5,) * num]))
    saved = residency.saved(((3,) * num,) * num_layers, ((8,) * num,) * num_layers)
    plain = training_schedule(
        sizes,
        ring=ring,
        num_micro_batches=num,
        order=Order.LAYER_MAJOR,
        trains_front=trains_front,
        input_bytes=input_bytes,
        num_kept_graphs=residency.num_kept_graphs,
        saved=saved,
    )
    scored = step_schedule(
        sizes,
        ring=ring,
        runs=(passes,),
        trains_front=trains_front,
        input_bytes=input_bytes,
        num_kept_graphs=residency.num_kept_graphs,
        saved=saved,
    )
    return scored, plain, passes


@given(both())
def test_no_op_of_a_scored_step_reads_too_early_or_overwrites_what_is_in_use(drawn) -> None:
    check_order(drawn[0])


@given(both())
def test_dropping_any_wait_of_a_scored_step_breaks_the_order(drawn) -> None:
    schedule = drawn[0]
    for number, op in enumerate(schedule.ops):
        for wait in op.waits:
            ops = list(schedule.ops)
            ops[number] = op._replace(waits=tuple(i for i in op.waits if i != wait))
            with pytest.raises(AssertionError):
                check_order(replace(schedule, ops=tuple(ops)))


@given(both())
def test_a_scored_step_moves_what_the_plain_one_moves_in_the_same_order(drawn) -> None:
    scored, plain, _ = drawn
    for lane in (Lane.H2D, Lane.D2H, Lane.HOST):
        moved = [
            [op._replace(waits=()) for op in schedule.ops if op.lane is lane]
            for schedule in (scored, plain)
        ]
        assert moved[0] == moved[1]
    assert scored.ring_after == plain.ring_after


@given(both())
def test_a_scored_step_computes_what_the_plain_one_computes_and_scores_each_pass_once(
    drawn,
) -> None:
    scored, plain, passes = drawn

    def is_further(op: Op) -> bool:
        is_only_scored = op.micro_batch is not None and op.micro_batch >= passes.num_trained
        return op.kind in SCORED or is_only_scored

    computed = [op._replace(waits=()) for op in scored.ops if op.lane is Lane.COMPUTE]
    expected = [op._replace(waits=()) for op in plain.ops if op.lane is Lane.COMPUTE]
    assert [op for op in computed if not is_further(op)] == expected
    further = [op for op in computed if is_further(op)]
    assert not any(op.has_graph or op.has_output or op.carrier is not None for op in further)
    num_layers = 1 + max(op.layer for op in plain.ops if op.layer is not None)
    found = [(op.kind, op.layer, op.micro_batch) for op in further]
    wanted: list[tuple[Kind, int | None, int | None]]
    wanted = [(Kind.SCORE, None, number) for number in passes.all]
    wanted += [(Kind.FRONT, None, number) for number in (*passes.scored, *passes.reference)]
    for layer in range(num_layers):
        wanted += [(Kind.FORWARD, layer, number) for number in passes.scored]
        wanted += [(Kind.REFERENCE, layer, number) for number in passes.reference]
    wanted.append((Kind.OBJECTIVE, None, None))
    assert sorted(map(str, found)) == sorted(map(str, wanted))


@given(both())
def test_a_reference_is_computed_after_the_policy_in_the_same_visit(drawn) -> None:
    schedule, _, passes = drawn
    visits = [op for op in schedule.ops if op.kind in (Kind.FORWARD, Kind.REFERENCE)]
    assert [op.layer for op in visits] == sorted(op.layer_index for op in visits)
    for layer in {op.layer for op in visits}:
        numbers = [op.micro_batch for op in visits if op.layer == layer]
        assert numbers == list(passes.all)
        assert len({op.slot for op in visits if op.layer == layer}) == 1


@given(both())
def test_rows_that_are_evaluated_load_what_a_pass_without_gradients_loads(drawn) -> None:
    schedule, _, passes = drawn
    sizes = TransferSizes.frozen([10] * (1 + max(op.layer or 0 for op in schedule.ops)))
    evaluation = step_schedule(
        sizes,
        ring=schedule.ring_before,
        runs=(replace(passes, num_trained=0, num_scored=2),),
        trains_front=True,
        input_bytes=(),
    )
    check_order(evaluation)
    forward = forward_schedule(sizes, ring=schedule.ring_before, num_micro_batches=2)
    assert evaluation.num_loads == forward.num_loads
    assert evaluation.ring_after == forward.ring_after
    assert not {Kind.TAIL, Kind.BACKWARD} & {op.kind for op in evaluation.ops}


@given(st.integers(2, 6), st.integers(2, 6), st.integers(1, 6), st.floats(0.1, 9.0), st.booleans())
def test_a_step_is_simulated_from_one_micro_batch_of_each_kind(
    num_layers, num_slots, num, load_s, has_reference
) -> None:
    num_slots = min(num_layers, num_slots)
    durations_s = {
        Kind.LOAD: load_s,
        Kind.FORWARD: 1.0,
        Kind.REFERENCE: 0.75,
        Kind.BACKWARD: 3.0,
        Kind.FRONT: 0.1,
        Kind.SCORE: 0.3,
        Kind.TAIL: 0.5,
        Kind.OBJECTIVE: 0.2,
    }

    def schedule(count: int) -> Schedule:
        return step_schedule(
            TransferSizes.frozen([10] * num_layers),
            ring=warm_ring(num_slots),
            runs=(Passes(num_trained=count, num_scored=count, has_reference=has_reference),),
            trains_front=False,
            input_bytes=(),
        )

    whole_s = simulate(schedule(num), lambda op: durations_s[op.kind]).step_s
    one = schedule(1)
    drafted_s = merged_s(one, [durations_s[op.kind] for op in one.ops], num_micro_batches=num)
    assert drafted_s == pytest.approx(whole_s)


# ---------------------------------------------------------------------------------------------
# Runs that share a step


runs_of_steps = st.lists(
    st.builds(
        Passes,
        num_trained=st.integers(1, 3),
        num_scored=st.integers(0, 1),
        has_reference=st.booleans(),
    )
    | st.builds(Passes, num_trained=st.integers(1, 3), has_objective=st.just(value=False)),
    min_size=1,
    max_size=4,
)


@st.composite
def shared(draw: st.DrawFn) -> tuple[Schedule, tuple[Passes, ...]]:
    """Draw a step of several runs, and their passes."""
    num_layers, num_slots = draw(st.integers(2, 4)), draw(st.integers(2, 4))
    runs = draw(runs_of_steps)
    num = sum(run.num_trained for run in runs)
    residency = Residency(
        num_slots=min(num_layers, num_slots),
        num_kept_graphs=draw(st.integers(0, num_layers)),
        num_sent_graphs=draw(st.integers(0, num_layers)),
        num_sent_outputs=draw(st.integers(0, num_layers)),
    )
    schedule = step_schedule(
        TransferSizes.frozen([10] * num_layers, num_staging=draw(st.integers(0, 3))),
        ring=warm_ring(residency.num_slots),
        runs=runs,
        trains_front=draw(st.booleans()),
        input_bytes=draw(st.sampled_from([(), (5,) * num])),
        num_kept_graphs=residency.num_kept_graphs,
        saved=residency.saved(((3,) * num,) * num_layers, ((8,) * num,) * num_layers),
    )
    return schedule, numbered(runs)


@given(shared())
def test_runs_that_share_a_step_neither_read_too_early_nor_overwrite_each_other(drawn) -> None:
    check_order(drawn[0])


@given(shared())
def test_passes_of_runs_are_numbered_once_each_those_that_train_first(drawn) -> None:
    _, runs = drawn
    num = sum(run.num_trained for run in runs)
    assert [m for run in runs for m in run.trained] == list(range(num))
    further = [m for run in runs for m in (*run.scored, *run.reference)]
    assert further == list(range(num, num + len(further)))
    for run in runs:
        numbers = [run.micro_batch(m) for m in run.all]
        assert numbers == [*range(run.num_policy)] * (1 + run.has_reference)


@given(shared())
def test_each_run_computes_in_a_shared_step_what_it_computes_alone(drawn) -> None:
    """The same ops in the same order, but for the numbers of passes; and the loads of any run."""
    schedule, runs = drawn
    num_layers = 1 + max(op.layer for op in schedule.ops if op.layer is not None)
    kinds = {op.kind for op in schedule.ops}
    for number, run in enumerate(runs):
        own = step_schedule(
            TransferSizes.frozen([10] * num_layers),
            ring=schedule.ring_before,
            runs=[replace(run, first_trained=0, first_further=None)],
            trains_front=Kind.FRONT_BACKWARD in kinds,
            input_bytes=(),
        )
        local = {m: index for index, m in enumerate(run.all)}
        ours = [
            (op.kind, op.layer, local.get(op.micro_batch))
            for op in schedule.ops
            if op.lane is Lane.COMPUTE and (op.micro_batch in local or op.run == number)
        ]
        assert ours == [
            (op.kind, op.layer, op.micro_batch) for op in own.ops if op.lane is Lane.COMPUTE
        ]
        assert schedule.num_loads == own.num_loads
