"""What a loss over the whole step costs: more visits' work, a few bytes, and no load."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import named_machine
from offload.plan.plan import Plan, calibrate, plan
from offload.plan.request import ObjectiveCost, PlanRequest
from offload.plan.schedule.op import Kind
from offload.plan.search import search
from offload.plan.split import draft_step_s
from offload.plan.step import Draft
from offload.plan.what_if import what_if
from tests.builders import qwen3_8b, request, slow_link

FACTS = qwen3_8b()
CARD = named_machine("rtx4060ti")
REQUEST = request(num_slots=4)
DPO, KTO = ObjectiveCost(has_reference=True), ObjectiveCost(has_reference=True, scored_frac=1.0)
OBJECTIVES: Mapping[str, ObjectiveCost] = {
    "no reference": ObjectiveCost(),
    "dpo": DPO,
    "kto": KTO,
    "a few scored": ObjectiveCost(has_reference=True, scored_frac=0.25),
}


def made(objective: ObjectiveCost | None, request: PlanRequest = REQUEST) -> Plan:
    return plan(FACTS, CARD, replace(request, objective=objective))


@pytest.mark.parametrize("num_micro_batches", [1, 4, 8])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_an_objective_adds_work_and_no_load(
    objective: ObjectiveCost, num_micro_batches: int
) -> None:
    request = replace(REQUEST, num_micro_batches=num_micro_batches)
    plain, found = made(None, request), made(objective, request)
    assert found.schedule.num_loads == plain.schedule.num_loads == 2 * (36 - 4)
    assert found.schedule.h2d_bytes == plain.schedule.h2d_bytes
    assert found.costs.without_objective() == plain.costs
    time_frac, num_loads = found.objective_price
    assert num_loads == 0
    assert time_frac == pytest.approx(found.step_s / plain.step_s - 1)
    assert time_frac > 0


def test_work_that_is_hidden_behind_loads_costs_nothing_but_the_head() -> None:
    slow = slow_link()
    request = replace(REQUEST, num_micro_batches=1)
    found = plan(FACTS, slow, replace(request, objective=DPO))
    visits_s = found.predict().busy_s(Kind.REFERENCE)
    added_s = found.step_s - found.step_s / (1 + found.objective_price[0])
    assert 0 < added_s < visits_s / 2


def test_a_reference_takes_a_forward_without_the_adapters_work() -> None:
    found = made(DPO)
    for layer in found.costs.layers:
        assert 0.5 * layer.forward_s < layer.reference_s < layer.forward_s
    spans = found.predict().spans
    of = {kind: [s for s in spans if s.kind is kind] for kind in Kind}
    assert len(of[Kind.REFERENCE]) == len(of[Kind.FORWARD]) == 8 * 36
    assert len(of[Kind.SCORE]) == 16
    assert len(of[Kind.OBJECTIVE]) == 1
    assert all(0 < s.duration_s < found.costs.tail_s for s in of[Kind.SCORE])


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("is_stashed", [False, True])
def test_the_bound_holds_and_the_draft_is_the_whole_step(
    objective: ObjectiveCost, is_stashed: bool
) -> None:
    asked = replace(REQUEST, objective=objective, is_stashed=is_stashed)
    for machine in (CARD, replace(slow_link(), vram_bytes=CARD.vram_bytes)):
        found = plan(FACTS, machine, asked)
        assert found.bound_s <= found.step_s * (1 + 1e-9)
        assert found.bound_s > plan(FACTS, machine, replace(asked, objective=None)).bound_s
        needs = MemoryNeeds.of(FACTS, machine, asked)
        drafted_s = draft_step_s(needs, found.costs, found.residency)
        assert drafted_s == pytest.approx(found.step_s, rel=1e-6)


def scored_bytes(objective: ObjectiveCost) -> int:
    """Return what the passes that only score take, at the instants when they do."""
    asked = replace(REQUEST, objective=objective)
    needs = MemoryNeeds.of(FACTS, CARD, asked).on_device
    (found,) = needs.scored
    assert found.name == "rows that are only scored"
    return found.num_bytes


def test_memory_of_further_passes_is_counted_until_they_are_scored_and_logits_are_not() -> None:
    plain, found, more = made(None), made(DPO), made(KTO)
    terms = {term.name: term.num_bytes for term in found.device_memory}
    typical = REQUEST.typical
    hidden_bytes = typical.num_tokens * FACTS.hidden_size * typical.dtype_bytes
    recorded = {t.name: t.num_bytes for t in plain.device_memory}["recorded arguments"]
    assert scored_bytes(DPO) == 8 * hidden_bytes + recorded
    assert terms["log-probabilities"] == 8 * typical.label_tokens * (12 + 2 * 8)
    assert scored_bytes(KTO) == 3 * scored_bytes(DPO)
    assert plain.peak_bytes < found.peak_bytes <= more.peak_bytes
    added_bytes = scored_bytes(DPO) + terms["log-probabilities"]
    assert found.peak_bytes - plain.peak_bytes < 1.1 * added_bytes


def test_named_tokens_are_counted_with_a_copy_of_the_logits_in_fp32() -> None:
    load = replace(REQUEST.typical, layer_code="fused")
    fused = replace(REQUEST, typical=load, largest=load)
    plain, other = made(None, fused), made(ObjectiveCost(), fused)
    named = made(ObjectiveCost(num_top=20), fused)
    terms = {term.name: term.num_bytes for term in named.device_memory}
    assert terms["log-probabilities"] == 8 * load.label_tokens * (12 + 8 + 20 * 8 + 21 * 12)
    chunks = [
        MemoryNeeds.of(FACTS, CARD, one.request).on_device.instants[0][0].num_bytes
        for one in (plain, other, named)
    ]
    logits = min(load.head_chunk_tokens, load.label_tokens) * FACTS.vocab_size
    assert chunks[0] == chunks[1] < 5 * logits < 12 * logits < chunks[2] < 13 * logits
    assert named.costs.score_s > other.costs.score_s
    assert named.costs.tail_s - named.costs.top_s == pytest.approx(other.costs.tail_s)
    assert named.costs.top_s > 0
    assert named.step_s / (1 + named.objective_price[0]) == pytest.approx(plain.step_s)
    assert named.objective_price[0] > other.objective_price[0] > 0


def test_prices_are_replaced_by_what_a_step_took() -> None:
    found = made(DPO)
    slower = replace(
        found.costs,
        score_s=3 * found.costs.score_s,
        objective_s=1.0,
        layers=tuple(replace(x, reference_s=2 * x.reference_s) for x in found.costs.layers),
    )
    measured = replace(found, costs=slower).predict()
    costs = calibrate(found.costs, measured, optimizer_s=found.costs.optimizer_s, num_kept_graphs=0)
    assert costs.score_s == pytest.approx(slower.score_s)
    assert costs.objective_s == pytest.approx(1.0)
    assert [x.reference_s for x in costs.layers] == pytest.approx(
        [x.reference_s for x in slower.layers]
    )


def test_the_search_and_other_ways_take_an_objective() -> None:
    asked = [
        replace(REQUEST, num_slots=None, num_kept_graphs=None, objective=DPO, is_stashed=stashed)
        for stashed in (False, True)
    ]
    choice = search(FACTS, CARD, asked, rounding=["nf4"])
    assert choice.plan.request.objective == DPO
    assert choice.chosen.least_s == pytest.approx(choice.plan.step_s, rel=1e-6)
    assert what_if(choice.plan, num_cards=2)
    draft = Draft.of(
        FACTS, choice.plan.request, choice.plan.costs, choice.plan.residency, is_staged=False
    )
    assert draft.schedule.num_loads
