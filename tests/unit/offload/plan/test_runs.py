"""Several runs that share their steps: one stream of the layers, and each run's own work."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from offload.errors import OffloadError
from offload.plan.facts.codec import CodecName
from offload.plan.facts.facts import AdapterSpec
from offload.plan.facts.trainable import adapter_parameters, all_weights
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import named_machine
from offload.plan.memory.memory import FRAGMENTATION, MemoryTerm
from offload.plan.plan import Plan, calibrate, costs_of, laid_out, plan, with_costs
from offload.plan.request import ObjectiveCost, PlanRequest, sharing, with_workload
from offload.plan.runs import RunsPlan, plan_runs, wave_s
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import (
    Passes,
    Residency,
    TransferSizes,
    step_schedule,
    warm_ring,
)
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
    codec: CodecName, objective: ObjectiveCost | None, *, is_stashed: bool
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
    costs = calibrate(found.costs, step, optimizer_s=2 * found.costs.optimizer_s, num_kept_graphs=0)
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
