"""Properties of the operations of a step, over drawn inputs."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.plan.schedule.op import RECOMPUTE, Kind, Lane, Op
from offload.plan.schedule.schedule import (
    Order,
    Passes,
    Reduced,
    Residency,
    Ring,
    Schedule,
    TransferSizes,
    cold_ring,
    forward_schedule,
    numbered,
    step_schedule,
    warm_ring,
    without_trained,
)
from offload.plan.schedule.simulate import merged_s, simulate
from tests.schedules import training_schedule, with_ops


def ancestors(schedule: Schedule) -> list[set[int]]:
    """Return for each op all ops that have ended when it starts, by waits and lane order."""
    before: list[set[int]] = []
    last_on_lane: dict[Lane, int] = {}
    for number, op in enumerate(schedule.ops):
        direct = [*op.waits, *([last_on_lane[op.lane]] if op.lane in last_on_lane else [])]
        before.append(set().union(*({i} | before[i] for i in direct)))
        last_on_lane[op.lane] = number
    return before


Access = tuple[str, object, object]
"""Whether an op reads, writes, adds to or changes a place, which, and what that then holds.

Of a change, what it holds before and after.
"""


_OUTER: Access = ("add", ("gradients of the rank", -1), "of a step")


class Accesses:
    """What an op does to slots, buffers and kept inputs, from its kind alone."""

    def __init__(self, schedule: Schedule) -> None:
        self._last_layer = max(op.layer for op in schedule.ops if op.layer is not None)
        self._is_stashed = any(op.kind is Kind.STASH for op in schedule.ops)
        self._encoded = {op.layer for op in schedule.ops if op.kind is Kind.DECODE}
        self._trained = {op.layer for op in schedule.ops if op.kind is Kind.GRADIENT}
        self._is_scored = any(op.kind is Kind.OBJECTIVE for op in schedule.ops)
        updates = [op for op in schedule.ops if op.kind is Kind.UPDATE]
        self._updated = {op.layer for op in updates}
        self._head = {op.slot for op in schedule.ops if op.kind is Kind.HEAD}

    def _weights(self, layer: int) -> list[Access]:
        """Return what a load reads of a layer that is updated."""
        return [("read", ("weights", layer), "updated")] if layer in self._updated else []

    def of(self, op: Op) -> list[Access]:
        layer = -1 if op.layer is None else op.layer
        is_visit = op.lane is Lane.COMPUTE
        return (self._visited if is_visit else self._moved)(op, layer, op.micro_batch)

    def _kept(self, mode: str, layer: int, m: int | None) -> Access:
        return mode, ("input", m, layer % 2 if self._is_stashed else layer), layer

    def _carried(self, mode: str, op: Op) -> list[Access]:
        place = ("carried", op.carrier)
        return [] if op.carrier is None else [(mode, place, (op.layer, op.micro_batch))]

    def _updating(self, op: Op, layer: int) -> list[Access]:
        return [("read", ("sink", layer), None), ("write", ("weights", layer), "updated")]

    def _looked_up(self, op: Op, m: int | None) -> list[Access]:
        if op.kind is Kind.LOOK_UP:
            return [("write", ("gathered", op.buffer), m)]
        return [("read", ("gathered", op.buffer), m), ("write", ("rows", op.buffer), m)]

    def _reduced(self, op: Op, layer: int) -> list[Access]:
        layers = [layer] if op.layer is not None else range(-1, self._last_layer + 1)
        return [("read", ("gradients of the rank", i), "of a step") for i in layers]

    def _filled(self, op: Op, layer: int) -> list[Access]:
        if op.kind is Kind.HEAD:
            return [("add", ("slot", op.slot), "head")]
        staged: Access = ("read", ("staging", op.buffer), (layer, op.offset))
        filled: Access = ("add", ("slot", op.slot), layer)
        return [*self._weights(layer), filled] if op.buffer is None else [staged, filled]

    def _moved(self, op: Op, layer: int, m: int | None) -> list[Access]:
        if op.kind is Kind.REDUCE:
            return self._reduced(op, layer)
        if op.kind is Kind.UPDATE:
            return self._updating(op, layer)
        if op.kind in (Kind.LOOK_UP, Kind.ROWS):
            return self._looked_up(op, m)
        if op.kind is Kind.READ:
            staged = ("write", ("staging", op.buffer), (layer, op.offset))
            return [*self._weights(layer), staged]
        if op.kind in (Kind.LOAD, Kind.HEAD):
            return self._filled(op, layer)
        if op.kind is Kind.STASH:
            return [self._kept("read", layer, m), ("write", ("stash", layer, m), None)]
        if op.kind is Kind.FETCH:
            fetched = ("write", ("fetched", op.buffer), (layer, m))
            return [("read", ("stash", layer, m), None), fetched]
        if op.kind is Kind.SEND:
            carried = ("read", ("carried", op.carrier), (layer, m))
            return [carried, ("write", ("sent", layer, m), None)]
        if op.kind is Kind.RETURN:
            carried = ("write", ("carried", op.carrier), (layer, m))
            return [("read", ("sent", layer, m), None), carried]
        assert op.kind is Kind.GRADIENT
        sunk: Access = ("write" if not op.offset else "add", ("sink", layer), "new")
        return [("read", ("gradient", op.buffer), layer), sunk]

    def _visited(self, op: Op, layer: int, m: int | None) -> list[Access]:
        written = ("read", ("slot", op.slot), layer)
        weights = ("read", "decoded", layer) if layer in self._encoded else written
        if op.kind is Kind.DECODE:
            return [written, ("write", "decoded", layer)]
        if op.kind is Kind.FRONT:
            read: list[Access] = [] if op.buffer is None else [("read", ("rows", op.buffer), m)]
            return [*read, self._kept("write", 0, m)]
        if op.kind in (Kind.FORWARD, Kind.REFERENCE):
            graph: list[Access] = [("write", ("graph", layer, m), None)] if op.has_graph else []
            return [
                weights,
                self._kept("read", layer, m),
                self._kept("write", layer + 1, m),
                *graph,
                *self._carried("write", op),
            ]
        head: list[Access] = [("read", ("slot", slot), "head") for slot in self._head]
        if op.kind is Kind.SCORE:
            scored = self._kept("read", self._last_layer + 1, m)
            return [scored, *head, ("add", "scores", "of all")]
        if op.kind is Kind.OBJECTIVE:
            return [("read", "scores", "of all"), ("write", "weights of scores", None)]
        if op.kind is Kind.TAIL:
            worth: list[Access] = [("read", "weights of scores", None)] if self._is_scored else []
            return [self._kept("read", self._last_layer + 1, m), *head, *worth, _OUTER]
        if op.kind is Kind.BACKWARD:
            own: Access = ("read", ("graph", layer, m), None)
            if not op.has_graph:
                fetched: Access = ("read", ("fetched", op.buffer), (layer, m))
                is_fetched = self._is_stashed and layer < self._last_layer
                own = fetched if is_fetched else self._kept("read", layer, m)
            gathered = ("add", ("gradient", layer % 2), layer)
            carried = self._carried("read", op)
            final: Access = ("add", ("gradients of the rank", layer), "of a step")
            return [weights, own, *carried, *([gathered] if layer in self._trained else []), final]
        left: Access = ("write", ("rows", op.buffer), ("gradients", m))
        rows = [] if op.buffer is None else [left]
        return [_OUTER, *rows] if op.kind is Kind.FRONT_BACKWARD else []


def check_order(schedule: Schedule) -> None:
    """Check each access: what it must follow has ended when it starts.

    A read must follow all writes of what it wants; a write of something new must follow all reads
    and writes of what was there.
    """
    before = ancestors(schedule)
    content: dict[object, object] = {
        ("slot", slot): layer for slot, layer in enumerate(schedule.ring_before)
    }
    writers: dict[object, list[int]] = {}
    readers: dict[object, list[int]] = {}
    accesses = Accesses(schedule)
    for number, op in enumerate(schedule.ops):
        for mode, place, wanted in accesses.of(op):
            if mode == "read":
                assert content.get(place) == wanted
                assert before[number].issuperset(writers.get(place, ()))
                readers.setdefault(place, []).append(number)
            elif mode != "add" or content.get(place) != wanted:
                if mode == "change":
                    assert isinstance(wanted, tuple)
                    was, wanted = wanted
                    assert content.get(place) == was
                assert before[number].issuperset(readers.get(place, ()))
                assert before[number].issuperset(writers.get(place, ()))
                content[place], readers[place], writers[place] = wanted, [], [number]
            else:
                writers[place].append(number)
    of_trained = (Kind.GRADIENT, Kind.UPDATE)
    trained = {op.layer for op in schedule.ops if op.kind in of_trained}
    slots = (content[("slot", slot)] for slot in range(len(schedule.ring_before)))
    assert schedule.ring_after == tuple(None if i in trained or i == "head" else i for i in slots)


# ----------------------------------------------------------------------------------------- schedule


sizes = st.tuples(st.integers(2, 12), st.integers(2, 12), st.integers(1, 5)).map(
    lambda s: (s[0], min(s[0], s[1]), s[2])
)
small = st.tuples(st.integers(2, 5), st.integers(2, 5), st.integers(1, 3)).map(
    lambda s: (s[0], min(s[0], s[1]), s[2])
)
orders = st.sampled_from(Order)


def reduced(num_layers: int) -> st.SearchStrategy[Reduced]:
    """Draw what crosses the network: of any layer, and of all else, there may be nothing."""
    num_bytes = st.sampled_from([0, 12])
    layers = st.tuples(*[num_bytes] * num_layers)
    return st.builds(Reduced, layers=layers, rest=num_bytes)


@st.composite
def steps(draw: st.DrawFn) -> Schedule:
    """Draw a step in which anything may travel, over any ring that a pass can leave."""
    num_layers, num_slots, num_micro_batches = draw(small)
    order = draw(orders)
    has_gradients = order is Order.LAYER_MAJOR and draw(st.booleans())
    is_trained = [has_gradients and draw(st.booleans()) for _ in range(num_layers)]
    layer_bytes = tuple(draw(st.integers(0, 30)) for _ in range(num_layers))
    sizes = TransferSizes(
        layer_bytes=layer_bytes,
        gradient_bytes=tuple(9 * is_one for is_one in is_trained),
        decoded_bytes=tuple(draw(st.sampled_from([0, 50])) for _ in range(num_layers)),
        piece_bytes=draw(st.sampled_from([7, 100])),
        num_staging=draw(st.integers(0, 3)),
        reduced=draw(st.sampled_from([(), (draw(reduced(num_layers)),)]))
        if not any(is_trained)
        else (),
        row_bytes=draw(st.sampled_from([(), tuple(range(20, 20 + num_micro_batches))])),
        head_bytes=draw(st.sampled_from([0, 17, 60, 900])) if any(layer_bytes) else 0,
    )
    trains_front = draw(st.booleans())
    ring = draw(st.sampled_from([warm_ring(num_slots), cold_ring(num_slots)]))
    if draw(st.booleans()):
        ring = forward_schedule(sizes, ring=ring, num_micro_batches=1).ring_after
    if draw(st.booleans()):
        updated = frozenset(i for i in range(num_layers) if is_trained[i] and draw(st.booleans()))
        sizes = replace(sizes, updated=updated)
        ring = without_trained(ring, sizes)
    residency = Residency(
        num_slots=num_slots,
        num_kept_graphs=draw(st.integers(0, num_layers)),
        num_sent_graphs=draw(st.integers(0, num_layers)),
        num_kept_outputs=draw(st.integers(0, num_layers)),
        num_sent_outputs=draw(st.integers(0, num_layers)),
    )
    output_bytes = draw(st.sampled_from([(), (3,) * num_micro_batches]))
    num_bytes = [draw(st.sampled_from([(), output_bytes])) for _ in range(num_layers)]
    return training_schedule(
        sizes,
        ring=ring,
        num_micro_batches=num_micro_batches,
        order=order,
        trains_front=trains_front,
        input_bytes=draw(st.sampled_from([(), (5,) * num_micro_batches])),
        saved=residency.saved(tuple(num_bytes), ((8,) * num_micro_batches,) * num_layers),
    )


def step(
    num_layers: int,
    ring: Ring,
    num_micro_batches: int,
    order: Order = Order.LAYER_MAJOR,
    num_kept_graphs: int = 0,
) -> Schedule:
    return training_schedule(
        TransferSizes.frozen([100 + i for i in range(num_layers)]),
        ring=ring,
        num_micro_batches=num_micro_batches,
        order=order,
        trains_front=False,
        input_bytes=(),
        saved=Residency(num_slots=len(ring), num_kept_graphs=num_kept_graphs).saved(
            ((),) * num_layers, ()
        ),
    )


@given(steps())
def test_no_op_reads_too_early_or_overwrites_what_is_in_use(schedule) -> None:
    check_order(schedule)


@given(steps())
def test_dropping_any_wait_breaks_the_order(schedule) -> None:
    for number, op in enumerate(schedule.ops):
        for wait in op.waits:
            ops = list(schedule.ops)
            ops[number] = op._replace(waits=tuple(i for i in op.waits if i != wait))
            with pytest.raises(AssertionError):
                check_order(with_ops(schedule, ops))


@given(small, orders, st.data())
def test_ranks_with_other_micro_batches_add_up_in_the_same_order(shape, order, data) -> None:
    num_layers, num_slots, most = shape
    own = data.draw(st.lists(reduced(num_layers), min_size=1, max_size=2))

    def sums(num: int) -> list[tuple[int | None, int | None, int]]:
        made = step_schedule(
            replace(TransferSizes.frozen([8] * num_layers), reduced=tuple(own)),
            ring=warm_ring(num_slots),
            runs=[Passes(num_trained=num, has_objective=False) for _ in own],
            order=order,
            trains_front=False,
            input_bytes=(),
        )
        return [(op.layer, op.run, op.num_bytes) for op in made.ops if op.kind is Kind.REDUCE]

    expected = [
        (layer, run, one.rest if layer is None else one.layers[layer])
        for layer in (*reversed(range(num_layers)), None)
        for run, one in enumerate(own)
    ]
    assert sums(1) == sums(most) == [one for one in expected if one[2]]


@given(steps())
def test_ops_are_listed_behind_what_they_wait_for_so_no_lane_waits_in_a_circle(schedule) -> None:
    for number, op in enumerate(schedule.ops):
        assert all(wait < number for wait in op.waits)
        assert all(schedule.ops[wait].lane is not op.lane for wait in op.waits)


@given(steps())
def test_few_inputs_are_on_the_device_at_a_time_where_they_are_stashed(schedule) -> None:
    """Counted over a run with one unit per op: 2 on the way up, 2 visits' worth on the way down."""
    group = len({op.micro_batch for op in schedule.ops if op.kind is Kind.FRONT})
    assert schedule.num_fetch_buffers <= 2 * group
    before = ancestors(schedule)
    stashes = [
        (n, op.layer, op.micro_batch) for n, op in enumerate(schedule.ops) if op.kind is Kind.STASH
    ]
    for number, op in enumerate(schedule.ops):
        if op.kind is Kind.FORWARD and op.layer is not None:
            for stash, layer, m in stashes:
                if m == op.micro_batch and layer is not None and layer < op.layer:
                    assert stash in before[number]


@given(steps())
def test_an_output_is_recorded_once_and_given_once_and_few_are_on_the_device(schedule) -> None:
    group = len({op.micro_batch for op in schedule.ops if op.kind is Kind.FRONT})
    assert schedule.num_carriers <= 2 * group
    of = {
        kind: [(op.layer, op.micro_batch) for op in schedule.ops if op.kind is kind and is_one(op)]
        for kind, is_one in (
            (Kind.FORWARD, lambda op: op.save.what == "output"),
            (Kind.BACKWARD, lambda op: op.save.what == "output"),
            (Kind.SEND, lambda op: op.num_bytes == 3),
            (Kind.RETURN, lambda op: op.num_bytes == 3),
        )
    }
    assert sorted(of[Kind.FORWARD]) == sorted(of[Kind.BACKWARD])
    assert sorted(of[Kind.SEND]) == sorted(of[Kind.RETURN])
    assert set(of[Kind.SEND]) <= set(of[Kind.FORWARD])


@given(steps())
def test_all_pieces_of_a_layer_arrive_in_order_and_make_it_up(schedule) -> None:
    arrived: dict[int | None, int] = {}
    for op in schedule.ops:
        if op.kind is Kind.LOAD:
            start = 0 if op.offset == 0 else arrived[op.layer]
            assert op.offset == start
            arrived[op.layer] = start + op.num_bytes


@given(sizes)
def test_a_warm_step_loads_each_streamed_layer_twice_whatever_the_micro_batches(size) -> None:
    num_layers, num_slots, num_micro_batches = size
    schedule = step(num_layers, warm_ring(num_slots), num_micro_batches)
    assert schedule.num_loads == 2 * (num_layers - num_slots)
    assert schedule.ring_after == warm_ring(num_slots)


@given(steps())
def test_the_last_layers_keep_their_graphs_and_then_none_of_their_inputs_moves(schedule) -> None:
    num_micro_batches = sum(op.kind is Kind.TAIL for op in schedule.ops)
    kept = {op.layer for op in schedule.ops if op.has_graph and op.carrier is None}
    last_layer = max(op.layer for op in schedule.ops if op.layer is not None)
    assert kept == set(range(last_layer + 1 - len(kept), last_layer + 1))
    for kind, sign in ((Kind.FORWARD, 1), (Kind.BACKWARD, 1), (Kind.STASH, 0), (Kind.FETCH, 0)):
        ops = [op for op in schedule.ops if op.kind is kind and op.layer in kept]
        assert len(ops) == sign * len(kept) * num_micro_batches
        assert all(op.has_graph for op in ops)


@given(steps())
def test_a_graph_leaves_once_and_comes_back_once_and_its_layer_stashes_no_input(schedule) -> None:
    sent = {op.layer for op in schedule.ops if op.has_graph and op.carrier is not None}
    num_micro_batches = sum(op.kind is Kind.TAIL for op in schedule.ops)
    for layer in sent:
        ops = [op for op in schedule.ops if op.layer == layer]
        for kind in (Kind.SEND, Kind.RETURN):
            assert [op.num_bytes for op in ops if op.kind is kind] == [8] * num_micro_batches
        visits = [op for op in ops if op.kind in (Kind.FORWARD, Kind.BACKWARD)]
        assert all(op.has_graph for op in visits)
        assert not {Kind.STASH, Kind.FETCH} & {op.kind for op in ops}


@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 30))
def test_layers_that_send_are_evenly_apart_from_the_first_on(num_layers, kept, sent) -> None:
    residency = Residency(num_slots=2, num_kept_graphs=min(kept, num_layers), num_sent_graphs=sent)
    found = sorted(residency.sent_graphs(num_layers))
    below = num_layers - residency.num_kept_graphs
    assert len(found) == min(sent, below)
    if found:
        assert found[0] == 0
        steps = [b - a for a, b in itertools.pairwise([*found, below])]
        assert max(steps) - min(steps) <= 1


@given(sizes, st.integers(0, 12))
def test_kept_graphs_move_no_weights_that_would_not_move_without_them(size, kept) -> None:
    num_layers, num_slots, num_micro_batches = size
    ring = warm_ring(num_slots)
    plain = step(num_layers, ring, num_micro_batches)
    schedule = step(num_layers, ring, num_micro_batches, num_kept_graphs=min(kept, num_layers))
    assert [op._replace(save=RECOMPUTE) for op in schedule.ops] == list(plain.ops)


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


@given(sizes)
def test_encoded_layers_are_decoded_once_per_visit_and_at_the_turn_not_again(size) -> None:
    num_layers, num_slots, num_micro_batches = size
    encoded = TransferSizes.frozen([100] * num_layers, decoded_bytes=[400] * num_layers)
    for order in Order:
        schedule = training_schedule(
            encoded,
            ring=warm_ring(num_slots),
            num_micro_batches=num_micro_batches,
            order=order,
            trains_front=False,
            input_bytes=(),
        )
        plain = step(num_layers, warm_ring(num_slots), num_micro_batches, order)
        num_sweeps = 1 if order is Order.LAYER_MAJOR else num_micro_batches
        decoded = [op.layer for op in schedule.ops if op.kind is Kind.DECODE]
        turn = [*range(num_layers), *reversed(range(num_layers - 1))]
        assert decoded == turn * num_sweeps
        assert schedule.num_loads == plain.num_loads


@given(sizes, orders, st.lists(st.floats(0.001, 5.0), min_size=len(Kind), max_size=len(Kind)))
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


@given(steps())
def test_the_head_is_copied_whole_before_what_reads_it_and_once_where_layers_are_loaded_once(
    schedule,
) -> None:
    pieces = [op for op in schedule.ops if op.kind is Kind.HEAD]
    slots = {op.slot for op in pieces}
    starts = [op for op in pieces if op.offset == 0]
    num_bytes = max((op.offset + op.num_bytes for op in pieces), default=0)
    assert sum(op.num_bytes for op in pieces) == num_bytes * len(starts)
    assert len(starts) <= sum(op.kind is Kind.TAIL for op in schedule.ops)
    if any(op.kind is Kind.GRADIENT for op in schedule.ops):  # layer by layer
        assert len(starts) <= 1
    assert not slots or sorted(slots) == list(range(min(slots), max(slots) + 1))


@given(sizes, st.integers(1, 400))
def test_a_head_costs_a_load_of_each_layer_that_it_covers_and_of_those_that_wait_longest(
    size, head_bytes
) -> None:
    """Every choice of slots next to each other is tried: none leaves newer layers in place."""
    num_layers, num_slots, num_micro_batches = size
    plain = TransferSizes.frozen([30] * num_layers)
    made = training_schedule(
        replace(plain, head_bytes=head_bytes),
        ring=warm_ring(num_slots),
        num_micro_batches=num_micro_batches,
        order=Order.LAYER_MAJOR,
        trains_front=False,
        input_bytes=(),
    )
    num_covered = min(num_slots, math.ceil(head_bytes / 30))
    assert made.num_loads == 2 * (num_layers - num_slots) + num_covered
    assert made.ring_after == warm_ring(num_slots)
    covered = {op.slot for op in made.ops if op.kind is Kind.HEAD}
    assert len(covered) == num_covered
    held = {layer % num_slots: layer for layer in range(num_layers)}

    def newest(slots: Iterable[int | None]) -> int:
        return max(held[slot] for slot in slots if slot is not None)

    starts = range(num_slots - num_covered + 1)
    assert newest(covered) == min(newest(range(i, i + num_covered)) for i in starts)


@given(
    small,
    st.integers(1, 500),
    st.integers(1, 900),
    st.sampled_from([70, 1000]),
    *(st.booleans() for _ in range(3)),
    st.sampled_from([0, 2]),
)
def test_no_layer_is_in_memory_where_a_head_computes(
    size,
    layer_bytes,
    head_bytes,
    piece_bytes,
    has_objective,
    is_warm,
    is_stashed,
    num_staging,
) -> None:
    """Places are counted in bytes here."""
    num_layers, num_slots, num_micro_batches = size
    sizes = TransferSizes(
        layer_bytes=(layer_bytes,) * num_layers,
        gradient_bytes=(9,) * num_layers,
        decoded_bytes=(0,) * num_layers,
        piece_bytes=piece_bytes,
        num_staging=num_staging,
        head_bytes=head_bytes,
    )
    made = step_schedule(
        sizes,
        ring=warm_ring(num_slots) if is_warm else cold_ring(num_slots),
        runs=[Passes(num_trained=num_micro_batches, has_objective=has_objective)],
        trains_front=False,
        input_bytes=(10,) * num_micro_batches * is_stashed,
    )
    ops, before = made.ops, ancestors(made)
    numbers = {kind: [i for i, op in enumerate(ops) if op.kind is kind] for kind in Kind}
    start = layer_bytes * min(ops[i].slot_index for i in numbers[Kind.HEAD])
    end = start + head_bytes
    assert end <= max(num_slots * layer_bytes, head_bytes)
    tails, computing = numbers[Kind.TAIL], [*numbers[Kind.SCORE], *numbers[Kind.TAIL]]
    assert all(before[tail].issuperset(numbers[Kind.HEAD]) for tail in computing)
    visits = [*numbers[Kind.FORWARD], *numbers[Kind.BACKWARD]]
    for slot in range(num_slots):
        in_slot = {i for i in numbers[Kind.LOAD] if ops[i].slot == slot}
        early = {i for i in in_slot if tails[0] not in before[i]}
        if slot * layer_bytes < end and start < (slot + 1) * layer_bytes:
            # what computes there ends before, and what was loaded before is loaded again
            up = [i for i in numbers[Kind.FORWARD] if ops[i].slot == slot]
            assert all(before[tail].issuperset([*up, *early]) for tail in tails)
            down = [i for i in numbers[Kind.BACKWARD] if ops[i].slot == slot]
            assert all((before[i] & in_slot) - early for i in down)
            assert all(before[i].issuperset(computing) for i in in_slot - early)
    assert len(visits) == 2 * num_layers * num_micro_batches


# ------------------------------------------------------------------------------- objective schedule


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
        saved=saved,
    )
    scored = step_schedule(
        sizes,
        ring=ring,
        runs=(passes,),
        trains_front=trains_front,
        input_bytes=input_bytes,
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
                check_order(with_ops(schedule, ops))


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
    assert not any(op.save.what != "nothing" or op.carrier is not None for op in further)
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
    each_s = [durations_s[line.ops[0].kind] for line in one.lines]
    drafted_s = merged_s(one, each_s, num_micro_batches=num)
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
