"""The bound R3 against the simulation: never above it, and equal where layers are alike."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.plan.schedule.schedule import (
    NUM_STAGING,
    PIECE_BYTES,
    Order,
    Residency,
    Ring,
    Saved,
    TransferSizes,
    cold_ring,
    forward_schedule,
    warm_ring,
    without_trained,
)
from offload.plan.schedule.simulate import simulate
from offload.plan.step import duration_of
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import Costs, LayerCost
from tests.schedules import training_schedule

seconds = st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0, 3.0, 10.0])
INPUT_BYTES = 10


@dataclass(frozen=True, kw_only=True)
class Step:
    """A priced step; with `is_stashed`, inputs of 10 bytes travel."""

    costs: Costs
    num_slots: int
    num_micro_batches: int
    is_stashed: bool
    is_encoded: bool
    is_staged: bool
    num_kept_graphs: int
    num_sent_graphs: int
    num_kept_outputs: int
    num_sent_outputs: int

    @property
    def saved(self) -> Saved:
        residency = Residency(
            num_slots=self.num_slots,
            num_kept_graphs=self.num_kept_graphs,
            num_sent_graphs=self.num_sent_graphs,
            num_kept_outputs=self.num_kept_outputs,
            num_sent_outputs=self.num_sent_outputs,
        )
        return self.costs.saved(residency, num_micro_batches=self.num_micro_batches)

    @property
    def sizes(self) -> TransferSizes:
        sizes = [layer.weight_bytes for layer in self.costs.layers]
        frozen = TransferSizes.frozen(
            sizes,
            decoded_bytes=[99] * len(sizes) if self.is_encoded else None,
            num_staging=NUM_STAGING if self.is_staged else 0,
        )
        updated = {number for number, layer in enumerate(self.costs.layers) if layer.update_s}
        return replace(
            frozen,
            head_bytes=self.costs.head_bytes,
            gradient_bytes=tuple(INPUT_BYTES * (number in updated) for number in range(len(sizes))),
            updated=frozenset(updated),
        )

    def simulated_s(self, ring: Ring | None = None) -> float:
        schedule = training_schedule(
            self.sizes,
            ring=without_trained(warm_ring(self.num_slots) if ring is None else ring, self.sizes),
            num_micro_batches=self.num_micro_batches,
            order=Order.LAYER_MAJOR,
            trains_front=self.costs.front_backward_s > 0,
            input_bytes=(INPUT_BYTES,) * self.num_micro_batches if self.is_stashed else (),
            num_kept_graphs=self.num_kept_graphs,
            saved=self.saved,
        )
        return simulate(schedule, duration_of(self.costs)).step_s

    def bound_s(self, ring: Ring | None = None) -> float:
        return r3_bound_s(
            self.costs,
            num_slots=self.num_slots,
            num_micro_batches=self.num_micro_batches,
            stashed_bytes=INPUT_BYTES if self.is_stashed else 0,
            num_kept_graphs=self.num_kept_graphs,
            saved=self.saved,
            ring=ring,
            is_staged=self.is_staged,
        )

    def ring_after_evaluation(self, ring: Ring) -> Ring:
        return forward_schedule(self.sizes, ring=ring, num_micro_batches=2).ring_after


def on_device(costs: Costs) -> Costs:
    """Return the costs with the head on the device."""
    return replace(costs, head_bytes=0)


@st.composite
def layer_costs(draw: st.DrawFn, *, is_encoded: bool) -> LayerCost:
    backward_s = draw(seconds)
    recompute_s = backward_s * draw(st.sampled_from([0.0, 0.3, 0.9]))
    output_bytes = draw(st.sampled_from([0, 1, 20]))
    return LayerCost(
        forward_s=draw(seconds),
        backward_s=backward_s,
        recompute_s=recompute_s,
        attention_s=recompute_s * draw(st.sampled_from([0.1, 1.0])) if output_bytes else 0.0,
        pack_s=draw(st.sampled_from([0.0, 0.05])),
        output_bytes=output_bytes,
        graph_bytes=draw(st.sampled_from([1, 60])),
        graph_pack_s=draw(st.sampled_from([0.0, 0.1])),
        decode_s=draw(seconds) if is_encoded else 0.0,
        weight_bytes=draw(st.sampled_from([1, 10, 40, PIECE_BYTES + 1, 3 * PIECE_BYTES])),
        bound="compute",
    )


@st.composite
def steps(
    draw: st.DrawFn,
    *,
    are_alike: bool = False,
    is_stashed: bool | None = None,
    is_staged: bool | None = None,
    may_send: bool = True,
) -> Step:
    num_layers = draw(st.integers(1, 9))
    num_slots = min(num_layers, draw(st.integers(2, 9)))
    is_encoded = draw(st.booleans())
    layers = [draw(layer_costs(is_encoded=is_encoded)) for _ in range(num_layers)]
    costs = Costs(
        grade="spec",
        layers=tuple(layers[:1] * num_layers if are_alike else layers),
        front_s=draw(seconds),
        tail_s=draw(seconds),
        optimizer_s=0.0,
        h2d_bytes_per_s=draw(st.sampled_from([1.0, 10.0, 100.0, 1e8])),
        h2d_latency_s=draw(st.sampled_from([0.0, 0.2])),
        d2h_bytes_per_s=draw(st.sampled_from([1.0, 100.0])),
        fetch_bytes_per_s=draw(st.sampled_from([1.0, 10.0, 100.0])),
        read_bytes_per_s=draw(st.sampled_from([1.0, 10.0, 1e8])),
        front_backward_s=draw(st.sampled_from([0.0, 0.3])),
        head_bytes=draw(st.sampled_from([0, 0, 1, 25, 90, 2 * PIECE_BYTES])),
    )
    return Step(
        costs=costs,
        num_slots=num_slots,
        num_micro_batches=draw(st.integers(1, 4)),
        is_stashed=draw(st.booleans()) if is_stashed is None else is_stashed,
        is_encoded=is_encoded,
        is_staged=draw(st.booleans()) if is_staged is None else is_staged,
        num_kept_graphs=draw(st.integers(0, num_layers)),
        num_sent_graphs=draw(st.integers(0, num_layers)) if may_send else 0,
        num_kept_outputs=draw(st.integers(0, num_layers)),
        num_sent_outputs=draw(st.integers(0, num_layers)) if may_send else 0,
    )


@settings(max_examples=60)
@given(steps())
def test_no_step_is_simulated_below_r3(step: Step) -> None:
    assert step.simulated_s() >= step.bound_s() * (1 - 1e-9)


@settings(max_examples=60)
@given(steps(are_alike=True, is_stashed=False, is_staged=False, may_send=False))
def test_a_warm_step_of_equal_layers_takes_exactly_r3(step: Step) -> None:
    assert step.simulated_s() == pytest.approx(step.bound_s(), rel=1e-9)


@settings(max_examples=60)
@given(steps())
def test_a_cold_ring_is_not_below_its_bound_which_is_above_the_warm_one(step: Step) -> None:
    cold = cold_ring(step.num_slots)
    assert step.simulated_s(cold) >= step.bound_s(cold) * (1 - 1e-9)
    assert step.simulated_s(cold) >= step.simulated_s() * (1 - 1e-9)
    assert step.bound_s(cold) >= step.bound_s() * (1 - 1e-9)


@settings(max_examples=60)
@given(steps(), st.booleans())
def test_a_step_behind_an_evaluation_is_not_below_its_bound(step: Step, is_cold: bool) -> None:
    before = cold_ring(step.num_slots) if is_cold else warm_ring(step.num_slots)
    ring = step.ring_after_evaluation(before)
    assert step.simulated_s(ring) >= step.bound_s(ring) * (1 - 1e-9)


@settings(max_examples=60)
@given(steps(are_alike=True, is_stashed=False, is_staged=False, may_send=False))
def test_a_cold_step_of_equal_layers_on_a_slow_link_takes_exactly_its_bound(step: Step) -> None:
    """All layers are loaded on the way up, one after the other; the head is on the device."""
    slow = replace(step, costs=replace(on_device(step.costs), h2d_bytes_per_s=1e-4))
    cold = cold_ring(step.num_slots)
    assert slow.simulated_s(cold) == pytest.approx(slow.bound_s(cold), rel=1e-9)


@settings(max_examples=60)
@given(steps())
def test_one_more_slot_never_makes_a_step_slower(step: Step) -> None:
    """With the head on the device: one more slot may be one more that the head waits for."""
    step = replace(step, costs=on_device(step.costs))
    more = replace(step, num_slots=min(step.num_slots + 1, len(step.costs.layers)))
    assert more.simulated_s() <= step.simulated_s() * (1 + 1e-9)
    assert more.bound_s() <= step.bound_s() * (1 + 1e-9)


@settings(max_examples=60)
@given(steps())
def test_a_faster_link_never_makes_a_step_slower(step: Step) -> None:
    costs = replace(
        step.costs,
        h2d_bytes_per_s=2 * step.costs.h2d_bytes_per_s,
        d2h_bytes_per_s=2 * step.costs.d2h_bytes_per_s,
        fetch_bytes_per_s=2 * step.costs.fetch_bytes_per_s,
        read_bytes_per_s=2 * step.costs.read_bytes_per_s,
    )
    assert replace(step, costs=costs).simulated_s() <= step.simulated_s() * (1 + 1e-9)
