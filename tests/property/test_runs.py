"""The step of drawn runs against a simulation of its own, op by op from the runs' visits."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import named_machine
from offload.plan.plan import Plan, costs_of, plan
from offload.plan.request import ObjectiveCost, PlanRequest, sharing
from offload.plan.schedule.schedule import Passes
from offload.plan.split import draft_step_s
from tests.builders import lora, qwen3_8b, request, slow_link, workload

FACTS = qwen3_8b(num_hidden_layers=6)
NUM_SLOTS = 3
CARD = named_machine("rtx4060ti")

runs_of_steps = st.lists(
    st.builds(
        lambda rank, seq_len, number, objective: request(
            workload(seq_len=seq_len, adapter=lora(rank=rank)),
            num_micro_batches=number,
            objective=objective,
            num_slots=NUM_SLOTS,
        ),
        st.sampled_from([2, 16, 128]),
        st.sampled_from([64, 256, 1024]),
        st.integers(1, 3),
        st.sampled_from(
            [None, ObjectiveCost(), ObjectiveCost(has_reference=True, scored_frac=1.0)]
        ),
    ),
    min_size=1,
    max_size=4,
)


def passes_of(one: Plan) -> Passes:
    return one.request.passes(one.request.num_micro_batches)


def forth_s(one: Plan, layer: int) -> float:
    passes, cost = passes_of(one), one.costs.layers[layer]
    num_scored = passes.num_policy * passes.has_reference
    return passes.num_policy * cost.forward_s + num_scored * cost.reference_s


def back_s(one: Plan, layer: int) -> float:
    return one.request.num_micro_batches * one.costs.layers[layer].backward_s


def front_s(one: Plan) -> float:
    passes = passes_of(one)
    return (passes.num_trained + passes.num_further) * one.costs.front_s


def tail_s(one: Plan) -> float:
    passes, costs = passes_of(one), one.costs
    score_s = (passes.num_trained + passes.num_further) * costs.score_s
    losses_s = score_s + costs.objective_s if passes.has_objective else 0.0
    return passes.num_trained * costs.tail_s + losses_s


def walked_s(alone: Sequence[Plan]) -> float:
    """Follow a step visit by visit, from the times of each run alone.

    Nothing is stashed, kept or sent, and layers compute in their slots. The first layers are there.
    A load waits for the load before it, and for the last visit that read its slot.
    """
    costs, num_layers = alone[0].costs, FACTS.num_layers
    visits = [*range(num_layers), *reversed(range(num_layers))]
    held = list(range(NUM_SLOTS))
    done_s, link_s, now_s = [0.0] * NUM_SLOTS, 0.0, sum(map(front_s, alone))
    for place, layer in enumerate(visits):
        slot, num_bytes = layer % NUM_SLOTS, costs.layers[layer].weight_bytes
        if held[slot] != layer:
            num_pieces = -(-num_bytes // 2**26)
            load_s = num_pieces * costs.h2d_latency_s + num_bytes / costs.h2d_bytes_per_s
            link_s = max(link_s, done_s[slot]) + load_s
            held[slot] = layer
            now_s = max(now_s, link_s)
        if place == num_layers:
            now_s += sum(map(tail_s, alone))
        visit_s = forth_s if place < num_layers else back_s
        now_s += sum(visit_s(one, layer) for one in alone)
        done_s[slot] = now_s
    return now_s


@given(runs=runs_of_steps, is_slow=st.booleans())
def test_a_step_is_that_of_its_visits_one_after_the_other(
    runs: list[PlanRequest], *, is_slow: bool
) -> None:
    machine = slow_link() if is_slow else CARD
    machine = replace(machine, vram_bytes=2**38, ram_bytes=2**40, pinned_bytes=2**40)
    found = plan(FACTS, machine, sharing(runs))
    alone = [plan(FACTS, machine, run) for run in runs]
    assert found.predict().step_s == pytest.approx(walked_s(alone), rel=1e-9)
    assert found.bound_s <= found.step_s * (1 + 1e-9)
    assert found.schedule.num_loads == alone[0].schedule.num_loads == 6


@pytest.mark.thorough
@given(runs=runs_of_steps, is_stashed=st.booleans(), num_kept_graphs=st.integers(0, 6))
def test_a_search_prices_the_step_that_is_laid_out(
    runs: list[PlanRequest], *, is_stashed: bool, num_kept_graphs: int
) -> None:
    asked = replace(sharing(runs), is_stashed=is_stashed, num_kept_graphs=num_kept_graphs)
    machine = replace(CARD, vram_bytes=2**38, ram_bytes=2**40, pinned_bytes=2**40)
    found = plan(FACTS, machine, asked)
    needs = MemoryNeeds.of(FACTS, machine, asked)
    drafted = draft_step_s(needs, costs_of(FACTS, machine, asked), found.residency)
    assert drafted == pytest.approx(found.step_s, rel=1e-9)
    alone = [plan(FACTS, machine, run) for run in asked.runs]
    assert found.peak_bytes >= max(one.peak_bytes for one in alone)
    assert found.step_s <= sum(one.step_s for one in alone) * (1 + 1e-9)
