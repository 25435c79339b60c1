"""Plans of runs that share steps, of scoring and of losses over a whole step."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import DoesNotFitError, OffloadError
from offload.plan.facts.facts import AdapterSpec
from offload.plan.facts.trainable import adapter_parameters, all_weights, trained_parameters
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, MEASURED, Machine, Network, Rate, named_machine
from offload.plan.memory.memory import FRAGMENTATION, Instant, MemoryTerm
from offload.plan.plan import Plan, calibrate, costs_of, laid_out, plan, with_costs
from offload.plan.request import (
    ETHERNET,
    ObjectiveCost,
    PlanRequest,
    Reduction,
    network_of,
    sharing,
    with_workload,
)
from offload.plan.runs import RunsPlan, plan_runs, wave_s
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.schedule import (
    Passes,
    Residency,
    TransferSizes,
    step_schedule,
    warm_ring,
)
from offload.plan.scoring import ScorePlan, ScoreRequest, cut_rows, plan_scoring
from offload.plan.search import search
from offload.plan.split import Split
from offload.plan.step import Drafts
from offload.plan.what_if import what_if
from tests.builders import lora, qwen3_8b, request, slow_link, workload
from tests.tiers import mostly_slow

FACTS = qwen3_8b()
CARD = named_machine("rtx4060ti")
SMALL = request(workload(seq_len=256), num_micro_batches=1, num_slots=4)


def adapted(**changes: object) -> PlanRequest:
    return request(workload(seq_len=256, adapter=lora(**changes)), num_micro_batches=1, num_slots=4)


def together(*runs: PlanRequest) -> Plan:
    return plan(FACTS, CARD, sharing(runs))


def sizes(terms: Sequence[MemoryTerm]) -> dict[str, int]:
    return {term.name: term.num_bytes for term in terms}


# ---------------------------------------------------------------------------------------------
# One step


def test_one_run_is_planned_as_if_there_were_no_others() -> None:
    assert sharing([SMALL]) == SMALL
    assert together(SMALL) == plan(FACTS, CARD, SMALL)


@pytest.mark.parametrize("num_runs", [1, 2, 8])
def test_a_step_has_the_same_loads_and_ops_as_the_engine_lists(num_runs: int) -> None:
    found = together(*[SMALL] * num_runs)
    assert found.schedule.num_loads == 2 * (36 - 4)
    layer_bytes = [layer.weight_bytes for layer in found.costs.layers]
    listed = step_schedule(
        TransferSizes.frozen(layer_bytes),
        ring=warm_ring(4),
        runs=[Passes(num_trained=1, has_objective=False)] * num_runs,
        trains_front=False,
        input_bytes=(),
    )
    assert found.schedule == listed


@pytest.mark.parametrize("is_stashed", [False, True])
@pytest.mark.parametrize("codec", ["native", "nf4"])
@pytest.mark.parametrize("objective", [None, ObjectiveCost(has_reference=True)])
def test_equal_runs_take_as_long_as_one_with_all_their_micro_batches(
    codec: str, objective: ObjectiveCost | None, *, is_stashed: bool
) -> None:
    one = replace(with_workload(SMALL, codec=codec), is_stashed=is_stashed, objective=objective)
    many = plan(FACTS, CARD, replace(one, num_micro_batches=3))
    shared = plan(FACTS, CARD, sharing([one] * 3))
    objectives_s = 2 * many.costs.objective_s
    assert shared.predict().step_s == pytest.approx(many.predict().step_s + objectives_s, rel=1e-9)
    assert shared.bound_s == pytest.approx(
        many.bound_s + objectives_s + 2 * many.costs.optimizer_s, rel=1e-9
    )
    assert shared.costs.optimizer_s == pytest.approx(3 * many.costs.optimizer_s)


def test_each_visit_takes_as_long_as_with_its_own_adapter() -> None:
    runs = [adapted(rank=4), adapted(rank=64, is_dora=True), SMALL]
    runs[2] = replace(runs[2], objective=ObjectiveCost(has_reference=True), num_micro_batches=2)
    found, alone = together(*runs), [together(run) for run in runs]
    of = {0: alone[0], 1: alone[1], 2: alone[2], 3: alone[2]}
    spans = found.predict().spans
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        visits = [span for span in spans if span.kind is kind]
        assert len(visits) == 4 * 36
        for span in visits:
            layer = of[span.micro_batch or 0].costs.layers[span.layer or 0]
            one_s = layer.forward_s if kind is Kind.FORWARD else layer.backward_s
            assert span.duration_s == pytest.approx(one_s, rel=1e-9)
    assert sum(span.kind is Kind.REFERENCE for span in spans) == 2 * 36
    assert sum(span.kind is Kind.OBJECTIVE for span in spans) == 1
    updates_s = sum(one.costs.optimizer_s for one in alone)
    assert found.costs.optimizer_s == pytest.approx(updates_s)
    assert found.bound_s <= found.step_s * (1 + 1e-9)
    assert found.tokens_per_step == sum(one.tokens_per_step for one in alone) == 4 * 256


def test_further_runs_cost_little_while_loads_decide() -> None:
    slow = replace(slow_link(), vram_bytes=CARD.vram_bytes)
    alone = plan(FACTS, slow, SMALL)
    shared = plan(FACTS, slow, sharing([SMALL] * 4))
    assert shared.step_s < 1.1 * alone.step_s


@pytest.mark.parametrize(
    "residency",
    [
        Residency(num_slots=4, num_kept_outputs=3, num_sent_outputs=5),
        Residency(num_slots=4, num_kept_graphs=2, num_sent_graphs=6),
    ],
)
def test_what_equal_runs_keep_and_send_is_that_of_one_with_all_their_micro_batches(
    residency: Residency,
) -> None:
    one = replace(SMALL, has_outputs=True, has_sent_graphs=True)
    made = []
    for asked in (replace(one, num_micro_batches=3), sharing([one] * 3)):
        needs = MemoryNeeds.of(FACTS, CARD, asked)
        made.append(laid_out(needs, costs_of(FACTS, CARD, asked), residency))
    many, shared = made
    assert shared.schedule == many.schedule
    assert any(op.kind is Kind.SEND for op in shared.schedule.ops)
    assert shared.predict().step_s == pytest.approx(many.predict().step_s, rel=1e-9)
    for name in ("kept graphs", "kept attention outputs", "buffers of sent activations"):
        assert sizes(shared.device_memory).get(name) == sizes(many.device_memory).get(name), name
    sent = [sizes(one.host_memory)["sent activations"] for one in made]
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize("objective", [None, ObjectiveCost(has_reference=True)])
def test_a_measured_step_replaces_the_prices_of_each_run_by_its_own_times(
    objective: ObjectiveCost | None,
) -> None:
    runs = [adapted(rank=4), replace(adapted(rank=64), num_micro_batches=2, objective=objective)]
    found = together(*runs)
    slower = replace(CARD, gemm_flops_per_s=replace(CARD.gemm_flops_per_s, value=1e13))
    measured = plan(FACTS, slower, sharing(runs))
    step = measured.predict()
    costs = calibrate(found.costs, step, optimizer_s=2 * found.costs.optimizer_s)
    again = with_costs(found, costs)
    assert again.predict().step_s == pytest.approx(step.step_s, rel=1e-6)
    assert again.predict().step_s > 1.1 * found.predict().step_s
    assert costs.optimizer_s == pytest.approx(2 * found.costs.optimizer_s)
    one, two = costs.runs
    assert one.costs.layers[0].forward_s == pytest.approx(
        measured.costs.runs[0].costs.layers[0].forward_s
    )
    assert two.costs.layers[0].forward_s > one.costs.layers[0].forward_s


# ---------------------------------------------------------------------------------------------
# Memory


def test_each_run_has_its_own_adapter_states_and_inputs_and_the_largest_visit_counts() -> None:
    runs = [adapted(rank=4), adapted(rank=64, is_dora=True), replace(SMALL, num_micro_batches=3)]
    runs = [with_workload(run, head_chunk_tokens=64) for run in runs]
    found, alone = together(*runs), [together(run) for run in runs]
    each = [sizes(one.device_memory) for one in alone]
    joint = sizes(found.device_memory)
    weights = [adapter_parameters(FACTS, run.typical.adapter) for run in runs]
    assert joint["adapters"] == joint["gradients"] == 4 * sum(weights)
    for name in ("optimizer states", "kept layer inputs", "recorded arguments"):
        assert joint[name] == sum(one[name] for one in each), name
    for name in ("slots", "embeddings, norm and head", "context", "cuBLAS workspaces"):
        assert joint[name] == each[0][name], name
    visits = [sum(n for name, n in one.items() if name.startswith("one visit")) for one in each]
    visit = sum(n for name, n in joint.items() if name.startswith("one visit"))
    assert visit == max(visits) > 0
    assert found.peak_bytes == sum(joint.values())
    used = found.peak_bytes - sum(joint[x] for x in (FRAGMENTATION, "context", "cuBLAS workspaces"))
    assert joint[FRAGMENTATION] == int(0.03 * used)


def test_stashed_inputs_and_data_workers_of_all_runs_are_in_host_memory() -> None:
    one = replace(SMALL, is_stashed=True, num_workers=2)
    two = replace(one, num_micro_batches=5, num_workers=1)
    joint, *each = (sizes(together(*runs).host_memory) for runs in ((one, two), (one,), (two,)))
    for name in ("stashed layer inputs", "data workers"):
        assert joint[name] == sum(terms[name] for terms in each) > 0
    for name in ("slab", "process", "loading"):
        assert joint[name] == each[0][name]


def test_kept_graphs_of_all_runs_are_there() -> None:
    one = replace(SMALL, num_kept_graphs=3)
    two = replace(one, num_micro_batches=2)
    joint, *each = (sizes(together(*runs).device_memory) for runs in ((one, two), (one,), (two,)))
    assert joint["kept graphs"] == sum(terms["kept graphs"] for terms in each)


def test_runs_that_train_the_model_or_differ_in_form_are_refused() -> None:
    whole = replace(SMALL, typical=workload(adapter=AdapterSpec.none(all_weights(FACTS))))
    with pytest.raises(OffloadError, match="share no weight that trains"):
        sharing([SMALL, whole])
    with pytest.raises(OffloadError, match="layers in nf4"):
        sharing([SMALL, with_workload(SMALL, codec="nf4")])
    with pytest.raises(OffloadError, match="64 tokens per head chunk"):
        sharing([SMALL, with_workload(SMALL, head_chunk_tokens=64)])


# ---------------------------------------------------------------------------------------------
# Waves


def planned(
    runs: Sequence[PlanRequest],
    num_steps: Sequence[int] | None = None,
    *,
    most: int = 8,
    apart: Sequence[frozenset[int]] = (),
    start_s: float = 0.0,
) -> RunsPlan | None:
    def planner(some: tuple[int, ...]) -> Plan | None:
        return together(*[runs[run] for run in some]) if len(some) <= most else None

    steps = num_steps or (1,) * len(runs)
    return plan_runs(planner, num_steps=steps, kinds=runs, apart=apart, start_s=start_s)


def partitions(left: Sequence[int]) -> Iterator[list[list[int]]]:
    if not left:
        yield []
        return
    first, rest = left[0], left[1:]
    for number in range(len(rest) + 1):
        for others in itertools.combinations(rest, number):
            for more in partitions([run for run in rest if run not in others]):
                yield [[first, *others], *more]


def test_the_table_has_1_2_4_and_all_runs_with_what_they_save() -> None:
    found = planned([SMALL] * 5)
    assert found is not None
    assert [one.num_runs for one in found.sharings] == [1, 2, 4, 5]
    alone_s = together(SMALL).step_s
    for one in found.sharings:
        assert one.alone_s == pytest.approx(one.num_runs * alone_s)
        assert one.tokens_per_s == pytest.approx(sum(one.run_tokens_per_s))
        assert len(set(one.run_bytes)) == 1
    rates = [one.tokens_per_s for one in found.sharings]
    assert rates == sorted(rates)
    assert [sorted(wave.runs) for wave in found.waves] == [[0, 1, 2, 3, 4]]
    assert found.alone_s == pytest.approx(5 * alone_s)
    assert found.together_s == found.sharings[-1].plan.step_s < found.alone_s


def test_what_a_run_has_for_itself_is_what_one_more_adds() -> None:
    found = planned([SMALL] * 4)
    assert found is not None
    peaks = [one.plan.peak_bytes for one in found.sharings]
    own = found.sharings[0].run_bytes[0]
    assert peaks[1] - peaks[0] == pytest.approx(1.03 * own, rel=0.01)
    assert peaks[2] - peaks[1] == pytest.approx(2 * 1.03 * own, rel=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("most", mostly_slow([1, 2, 3], 2))
def test_waves_are_as_fast_as_the_best_partition_of_a_few_runs(most: int) -> None:
    runs = [SMALL, adapted(rank=64), SMALL, replace(SMALL, num_micro_batches=16), SMALL]
    num_steps = [3, 3, 5, 3, 3]
    found = planned(runs, num_steps, most=most)
    assert found is not None
    assert sorted(run for wave in found.waves for run in wave.runs) == [0, 1, 2, 3, 4]
    assert max(len(wave.runs) for wave in found.waves) <= most

    def time_s(wave: list[int]) -> float:
        return wave_s(together(*[runs[i] for i in wave]), [num_steps[i] for i in wave])

    best_s = min(
        sum(map(time_s, waves)) for waves in partitions(range(5)) if max(map(len, waves)) <= most
    )
    assert best_s * (1 - 1e-9) <= found.together_s <= 1.05 * best_s
    assert found.together_s <= found.alone_s


def test_runs_that_gain_nothing_by_sharing_share_where_a_wave_takes_time_to_begin() -> None:
    runs = [replace(SMALL, num_micro_batches=16)] * 2
    for start_s, num_waves in ((0.0, 2), (1.0, 1)):
        found = planned(runs, start_s=start_s)
        assert found is not None
        assert len(found.waves) == num_waves
        steps_s = sum(wave.plan.step_s for wave in found.waves)
        assert found.together_s == pytest.approx(steps_s + num_waves * start_s)
        assert found.alone_s == pytest.approx(steps_s + 2 * start_s)


def test_runs_that_cannot_be_together_are_in_different_waves() -> None:
    apart = [frozenset({0, 1}), frozenset({0, 2, 3})]
    found = planned([SMALL] * 4, apart=apart)
    assert found is not None
    waves = [set(wave.runs) for wave in found.waves]
    assert not any(one <= wave for wave in waves for one in apart)
    assert len(waves) == 2


def test_a_run_that_ends_leaves_and_the_others_go_on() -> None:
    shared, alone = together(SMALL, SMALL), together(SMALL)
    assert wave_s(shared, [2, 5]) == pytest.approx(2 * shared.step_s + 3 * alone.step_s)
    assert wave_s(shared, [2, 2]) == pytest.approx(2 * shared.step_s)


def test_there_is_no_plan_if_a_run_does_not_fit_alone() -> None:
    assert planned([SMALL, SMALL], most=0) is None


# ------------------------------------------------------------------------------------------ scoring


NO_ADAPTER = AdapterSpec(rank=1, targets=(), experts=False)


def card(vram_gib: float = 24) -> Machine:
    return replace(named_machine("rtx4090"), vram_bytes=int(vram_gib * GIB))


def request_scoring(**changes: Any) -> ScoreRequest:
    fields: dict[str, Any] = {
        "workload": workload(),
        "lengths": (512,) * 200,
        "num_labels": 200 * 256,
        "num_adapters": 4,
        "adapter_bytes": 4 * 100 * 2**20,
        "num_slots": None,
        "vram_budget_bytes": None,
        "is_on_disk": False,
    }
    return ScoreRequest(**fields | changes)


def planned_scoring(vram_gib: float = 24, **changes: Any) -> ScorePlan:
    return plan_scoring(FACTS, card(vram_gib), request_scoring(**changes))


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60), max_tokens=st.integers(1, 900)
)
def test_a_cut_has_each_row_once_in_micro_batches_that_are_small_enough(
    lengths: list[int], max_tokens: int
) -> None:
    cut = cut_rows(lengths, max_tokens=max_tokens)
    assert sorted(row for rows in cut for row in rows) == list(range(len(lengths)))
    for rows in cut:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= max_tokens
    longest = [max(lengths[row] for row in rows) for rows in cut]
    assert all(one >= other for one, other in pairwise(longest))


def test_loads_depend_on_neither_rows_nor_adapters_while_they_fit() -> None:
    for num_adapters in (1, 2, 8):
        made = planned_scoring(num_adapters=num_adapters, num_slots=3)
        assert len(made.sweeps) == 1
        assert made.num_loads == FACTS.num_layers
    assert planned_scoring(lengths=(512,) * 20, num_labels=20).num_loads == FACTS.num_layers


def test_the_plan_fits_what_may_be_used_and_counts_every_micro_batch() -> None:
    for vram_gib in (6, 8, 12, 24):
        made = planned_scoring(vram_gib, lengths=(512,) * 2000, num_labels=2000 * 256)
        assert made.peak_bytes <= vram_gib * GIB
        rows = sorted(row for batches in made.sweeps for rows in batches for row in rows)
        assert rows == list(range(2000))
        names = {term.name: term.num_bytes for term in made.device_memory}
        assert names["adapters"] == 4 * 100 * 2**20
        assert names["hidden states"] > 0


def test_less_memory_takes_more_sweeps_and_more_loads() -> None:
    lengths = (1024,) * 4000
    few, many = (planned_scoring(g, lengths=lengths, num_labels=4000) for g in (24, 8))
    assert len(few.sweeps) < len(many.sweeps)
    assert many.num_loads == len(many.sweeps) * FACTS.num_layers
    assert many.sweep_s > few.sweep_s


def test_adapters_take_time_and_hidden_states_and_no_loads() -> None:
    one, four = planned_scoring(num_adapters=1), planned_scoring(num_adapters=4)
    assert four.num_loads == one.num_loads
    assert one.sweep_s < four.sweep_s < 4.2 * one.sweep_s
    together = [
        next(t.num_bytes for t in made.device_memory if t.name == "hidden states")
        for made in (one, four)
    ]
    assert together[1] > 3.5 * together[0]


def test_a_base_without_adapters_is_faster_than_with_one() -> None:
    plain = planned_scoring(workload=workload(adapter=NO_ADAPTER), num_adapters=1)
    assert plain.sweep_s < planned_scoring(num_adapters=1).sweep_s


def test_a_resident_model_is_loaded_once_for_all_sweeps() -> None:
    made = planned_scoring(24, lengths=(512,) * 4000, num_labels=4000, num_slots=36, num_adapters=8)
    assert made.num_slots == 36
    assert len(made.sweeps) > 1
    assert made.num_loads == FACTS.num_layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vram_budget_bytes": 2 * GIB}, "scoring a row of 512 tokens under 4 adapters with 2"),
        ({"vram_budget_bytes": 4 * GIB, "num_slots": 9}, "`offload.num_slots=2`"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DoesNotFitError) as found:
        planned_scoring(**changes)
    assert message in str(found.value)


def test_layers_that_do_not_fit_in_ram_are_refused_unless_they_are_on_disk() -> None:
    machine = replace(card(), ram_bytes=8 * GIB)
    with pytest.raises(DoesNotFitError, match=r"the layers take .* GiB of RAM"):
        plan_scoring(FACTS, machine, request_scoring())
    assert (
        plan_scoring(FACTS, machine, request_scoring(is_on_disk=True)).num_loads == FACTS.num_layers
    )


# ---------------------------------------------------------------------------------------- objective


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
        drafted_s = Split(needs=needs, costs=found.costs).step_s(found.residency)
        assert drafted_s == pytest.approx(found.step_s, rel=1e-6)


def scored_bytes(objective: ObjectiveCost) -> int:
    """Return what the passes that only score take, at the instants when they do."""
    asked = replace(REQUEST, objective=objective)
    needs = MemoryNeeds.of(FACTS, CARD, asked).on_device
    (found,) = (row for row in needs.rows if row.name == "rows that are only scored")
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
        row.num_bytes
        for one in (plain, other, named)
        for row in MemoryNeeds.of(FACTS, CARD, one.request).on_device.rows
        if row.name == "head chunk"
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
    costs = calibrate(found.costs, measured, optimizer_s=found.costs.optimizer_s)
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
    drafts = Drafts(
        facts=FACTS, request=choice.plan.request, costs=choice.plan.costs, is_staged=False
    )
    assert drafts.schedule(choice.plan.residency).num_loads


# ---------------------------------------------------------------------------------------- reduction


HERE = named_machine("rtx4090", ram_bytes=128 * GIB)


def planned_reduction(asked: PlanRequest) -> Plan:
    return plan(qwen3_8b(), HERE, asked)


def sums_of(made: Plan) -> list[tuple[int | None, int | None, int]]:
    return [(op.layer, op.run, op.num_bytes) for op in made.schedule.ops if op.kind is Kind.REDUCE]


def test_a_single_rank_has_no_network() -> None:
    made = planned_reduction(request())
    assert made.network is None
    assert not any(op.lane is Lane.NETWORK for op in made.schedule.ops)
    assert "network" not in made.predict().phases()


@pytest.mark.parametrize(("num_ranks", "element_bytes"), [(2, 4), (2, 2), (4, 4)])
def test_each_layer_sends_its_share_of_an_all_reduce(num_ranks, element_bytes) -> None:
    spec = lora(modules=("embed_tokens",))
    made = planned_reduction(
        request(
            workload(adapter=spec),
            num_ranks=num_ranks,
            reduction=Reduction(element_bytes=element_bytes),
        )
    )
    # q_proj 4096 -> 4096 and v_proj 4096 -> 1024 at rank 16; then the embedding
    of_layer, outer = 16 * (4096 + 4096) + 16 * (4096 + 1024), 151936 * 4096
    share = 2 * (num_ranks - 1) * element_bytes / num_ranks
    assert 36 * of_layer + outer == trained_parameters(qwen3_8b(), spec)
    assert sums_of(made) == [
        *((layer, 0, share * of_layer) for layer in reversed(range(36))),
        (None, 0, share * outer),
    ]


def test_all_but_the_sum_of_the_first_layer_overlaps_with_compute() -> None:
    made = planned_reduction(request(num_ranks=2))
    assert made.network_hidden_frac > 0.9
    slower = made.step_s - planned_reduction(request(num_micro_batches=4)).step_s
    last = made.predict().spans[-1]
    assert slower == pytest.approx(last.duration_s, rel=0.01)  # that of layer 0 hides nowhere


def test_runs_that_share_a_step_add_up_each_by_itself() -> None:
    small, large = (request(workload(adapter=lora(rank=r)), num_ranks=2) for r in (8, 16))
    sums = sums_of(planned_reduction(sharing([small, large])))
    assert [run for _, run, _ in sums] == [0, 1] * 36
    assert all(2 * a[2] == b[2] for a, b in zip(sums[::2], sums[1::2], strict=True))


def test_the_network_is_the_measured_one_or_assumed_by_where_the_ranks_are() -> None:
    asked = request(num_ranks=2)
    assert network_of(HERE, replace(asked, most_local_ranks=1)).bytes_per_s == ETHERNET
    on_one = network_of(HERE, asked).bytes_per_s
    assert on_one.value == HERE.h2d_duplex_bytes_per_s.value
    assert on_one.source.startswith("assumed")
    rate = Rate(value=5e6, source=MEASURED)
    known = Network(world_size=2, latency_s=Rate(value=0.25, source=MEASURED), bytes_per_s=rate)
    made = plan(qwen3_8b(), replace(HERE, network=known), asked)
    assert made.network == known
    for span in made.predict().spans:
        if span.kind is Kind.REDUCE:
            assert span.duration_s == pytest.approx(0.25 + span.num_bytes / 5e6)


def test_a_plain_run_may_visit_layers_while_rows_of_another_wait_for_their_loss() -> None:
    at = {Instant.SCORED_VISIT}
    load = replace(REQUEST.typical, seq_len=4 * REQUEST.typical.seq_len)
    plain = replace(REQUEST, objective=None, typical=load, largest=load)
    short = replace(REQUEST, objective=DPO)
    long = MemoryNeeds.of(FACTS, CARD, replace(plain, objective=DPO)).on_device
    shared = MemoryNeeds.of(FACTS, CARD, sharing([plain, short])).on_device
    assert shared.live(at) == long.live(at) != ()
    assert MemoryNeeds.of(FACTS, CARD, plain).on_device.live(at) == ()
