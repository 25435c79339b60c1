"""The parts of a step add up to it, and name what held it up.

Durations are whole numbers of 1/1024 s, so that sums of them are exact.
"""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.report.explain import misses
from offload.plan.schedule.op import Kind, Lane, Op
from offload.plan.schedule.schedule import (
    Order,
    Schedule,
    TransferSizes,
    cold_ring,
    warm_ring,
)
from offload.plan.schedule.simulate import simulate
from offload.plan.schedule.timeline import (
    IDLE,
    OPTIMIZER,
    Part,
    Timeline,
    by_name,
    difference,
    layers_of,
    mean_parts,
    parts_from_json,
    parts_json,
    parts_of,
    term_of,
)
from tests.schedules import training_schedule

TICK_S = 1 / 1024
ticks = st.integers(0, 40).map(lambda n: n * TICK_S)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    num_layers, num_micro_batches = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    num_slots = draw(st.integers(2, num_layers))
    is_trained = draw(st.booleans())
    return training_schedule(
        TransferSizes(
            layer_bytes=(30,) * num_layers,
            gradient_bytes=(9 * is_trained,) * num_layers,
            decoded_bytes=(draw(st.sampled_from([0, 50])),) * num_layers,
            piece_bytes=draw(st.sampled_from([7, 100])),
            num_staging=draw(st.integers(0, 2)),
        ),
        ring=draw(st.sampled_from([warm_ring(num_slots), cold_ring(num_slots)])),
        num_micro_batches=num_micro_batches,
        order=Order.LAYER_MAJOR,
        trains_front=draw(st.booleans()),
        input_bytes=draw(st.sampled_from([(), (5,) * num_micro_batches])),
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Timeline, Timeline]:
    """Draw a step, predicted and as it may have been: each op late and long by some ticks."""
    schedule = draw(schedules())
    count = len(schedule.ops)
    first, second, late = (
        draw(st.lists(ticks, min_size=count, max_size=count)) for _ in ("took", "takes", "late")
    )

    def timed(seconds: list[float]) -> Callable[[Op], float]:
        turn = iter(seconds)
        return lambda op: next(turn)

    predicted = simulate(schedule, timed(first))
    measured = simulate(schedule, timed([a + b for a, b in zip(second, late, strict=True)]))
    spans = tuple(
        span._replace(start_s=span.start_s + min(gap, span.duration_s))
        for span, gap in zip(measured.spans, late, strict=True)
    )
    return predicted, Timeline(spans=spans)


@settings(max_examples=60)
@given(pairs(), ticks)
def test_the_parts_of_a_step_add_up_to_it_and_those_of_two_to_their_difference(
    pair: tuple[Timeline, Timeline], optimizer_s: float
) -> None:
    predicted, measured = (timeline.with_optimizer(optimizer_s) for timeline in pair)
    before, after = parts_of(predicted), parts_of(measured)
    assert sum(before.values()) == predicted.step_s
    assert sum(after.values()) == measured.step_s
    assert all(seconds > 0 for seconds in after.values() if seconds)
    apart_s = measured.step_s - predicted.step_s
    assert sum(difference(before, after).values()) == apart_s
    assert sum(miss.difference_s for miss in misses(before, after)) == apart_s
    busy = {kind.value: measured.busy_s(kind) for kind in Kind}
    computed = {s.kind.value for s in measured.spans if s.lane is Lane.COMPUTE}
    assert all(by_name(after).get(name, 0.0) == busy[name] for name in computed)
    waited = [s for name, s in by_name(after).items() if term_of(name) in ("copy", "stall")]
    assert sum(waited) == pair[1].stall_s


@settings(max_examples=40)
@given(pairs())
def test_parts_are_read_back_as_written(pair: tuple[Timeline, Timeline]) -> None:
    parts = {part: seconds for part, seconds in parts_of(pair[1]).items() if seconds}
    read = parts_from_json(parts_json(parts))
    assert read.keys() == parts.keys()
    assert all(abs(read[part] - parts[part]) <= 1e-9 for part in parts)


@settings(max_examples=20)
@given(st.lists(pairs(), min_size=1, max_size=3))
def test_the_parts_of_a_mean_add_up_to_the_mean_of_the_steps(
    steps: list[tuple[Timeline, Timeline]],
) -> None:
    timelines = [measured for _, measured in steps]
    mean = mean_parts([parts_of(timeline) for timeline in timelines])
    wanted_s = sum(timeline.step_s for timeline in timelines) / len(timelines)
    assert abs(sum(mean.values()) - wanted_s) <= 1e-12


# ------------------------------------------------------------------------------- what is blamed


def step(
    slow: Callable[[Op], bool] = lambda op: False, *, num_slots: int = 4, load_s: float = 1.0
) -> Timeline:
    """Simulate 8 layers and 2 micro-batches: a visit takes 8 s, of a slow op 16 more."""
    schedule = training_schedule(
        TransferSizes.frozen([10] * 8),
        ring=warm_ring(num_slots),
        num_micro_batches=2,
        order=Order.LAYER_MAJOR,
        trains_front=False,
        input_bytes=(),
    )
    return simulate(schedule, lambda op: (load_s if op.lane is Lane.H2D else 4.0) + 16 * slow(op))


def missed(measured: Timeline, predicted: Timeline) -> dict[Part, float]:
    apart = difference(parts_of(predicted), parts_of(measured))
    return {part: seconds for part, seconds in apart.items() if seconds}


def test_a_slow_layer_is_named_with_its_seconds() -> None:
    slow = step(lambda op: op.kind is Kind.BACKWARD and op.layer in (2, 5))
    apart = missed(slow, step())
    assert apart == {("backward", 2): 32.0, ("backward", 5): 32.0}
    assert layers_of(apart, "backward") == (2, 5)


def test_a_slow_copy_is_blamed_only_for_what_compute_waited() -> None:
    slow = step(lambda op: op.kind is Kind.LOAD and op.layer == 6, num_slots=2)
    apart = missed(slow, step(num_slots=2))
    waits = {part: s for part, s in apart.items() if part[0] == "wait for load"}
    assert waits
    assert apart == waits
    assert term_of("wait for load") == "copy"
    assert sum(apart.values()) == slow.step_s - step(num_slots=2).step_s < 2 * 16
    hidden = step(lambda op: op.kind is Kind.LOAD and op.layer == 6 and op.slot == 2)
    assert missed(hidden, step()) == {}  # with 4 slots there is time for it


def test_a_pause_with_nothing_to_wait_for_is_no_copy_s_fault() -> None:
    whole = step(num_slots=2)
    late = next(i for i, s in enumerate(whole.spans) if s.kind is Kind.FORWARD and s.layer == 3)
    spans = tuple(
        s._replace(start_s=s.start_s + 2, end_s=s.end_s + 2) if i >= late else s
        for i, s in enumerate(whole.spans)
    )
    apart = missed(Timeline(spans=spans), whole)
    assert apart == {(IDLE, None): 2.0}
    assert term_of(IDLE) == "stall"


def test_what_drains_behind_the_last_op_belongs_to_the_step() -> None:
    schedule = training_schedule(
        replace(TransferSizes.frozen([10] * 3), gradient_bytes=(9, 9, 9)),
        ring=cold_ring(3),
        num_micro_batches=1,
        order=Order.LAYER_MAJOR,
        trains_front=False,
        input_bytes=(),
    )
    timeline = simulate(schedule, lambda op: 1.0)
    assert parts_of(timeline)["wait for gradient", 0] == 1.0


def test_layers_that_make_up_most_of_a_miss_are_as_few_as_possible() -> None:
    apart: dict[Part, float] = {("forward", i): s for i, s in enumerate([1.0, -9.0, 30.0, 60.0])}
    assert layers_of(apart, "forward") == (2, 3)
    assert layers_of(apart, "forward", share=0.5) == (3,)
    assert layers_of({(OPTIMIZER, None): 1.0}, OPTIMIZER) == ()
    assert layers_of({("forward", 0): -1.0, ("forward", 1): 0.5}, "forward") == (0,)
