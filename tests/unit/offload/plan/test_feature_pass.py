"""What the features of a linear probe cost: a forward of the stream, and bytes in RAM."""

from dataclasses import replace

import pytest

from offload.plan.facts.facts import with_classifier_head
from offload.plan.feature_pass import feature_pass
from offload.plan.machine.machine import named_machine
from offload.plan.memory.memory import FEATURES
from offload.plan.plan import Plan, calibrate, plan, with_costs
from offload.plan.request import ObjectiveCost, Probe
from offload.plan.schedule.simulate import simulate
from tests.builders import qwen3_8b, request, slow_link

FACTS = with_classifier_head(qwen3_8b(), 3, has_bias=False)
D, NUM_LAYERS = 4096, 36


def made(probe: Probe | None, *, num_slots: int = 4, is_slow: bool = False) -> Plan:
    asked = request(num_slots=num_slots)
    spec = replace(asked.typical.adapter, modules=("score",))
    asked = replace(
        asked,
        typical=replace(asked.typical, adapter=spec),
        largest=replace(asked.largest, adapter=spec),
        objective=ObjectiveCost(),
        probe=probe,
    )
    return plan(FACTS, slow_link() if is_slow else named_machine("rtx5090"), asked)


def test_features_are_counted_in_ram_and_cost_no_step_anything() -> None:
    plain, found = made(None), made(Probe(num_features=1000, num_passes=5))
    sizes = {term.name: term.num_bytes for term in found.host_memory}
    assert sizes[FEATURES] == 1000 * D * 2
    assert found.host_bytes - plain.host_bytes == 1000 * D * 2
    assert found.step_s == plain.step_s
    assert feature_pass(plain, plain.request) is None
    cost = feature_pass(found, found.request)
    assert cost is not None
    assert cost.num_parameters == 3 * D
    assert cost.pass_s == pytest.approx(5 * cost.one_pass_s)


def test_of_runs_that_share_a_step_each_has_its_own_probe_or_none() -> None:
    probe = Probe(num_features=1000, num_passes=5)
    alone, with_probe = made(None), made(probe)
    both = replace(alone.request, others=(with_probe.request,))
    shared = plan(FACTS, alone.machine, both)
    first, second = (feature_pass(shared, run) for run in shared.request.runs)
    expected = feature_pass(with_probe, with_probe.request)
    assert first is None
    assert second is not None
    assert expected is not None
    assert second.num_features == expected.num_features == 1000
    assert second.pass_s == pytest.approx(expected.pass_s)


def test_before_rows_are_known_there_is_a_price_of_one_pass() -> None:
    found = made(Probe())
    cost = feature_pass(found, found.request)
    assert cost is not None
    assert cost.one_pass_s > 0
    assert cost.pass_s is None
    assert cost.feature_bytes == D * 2


def test_a_pass_is_a_forward_of_the_stream() -> None:
    found = made(Probe(), is_slow=True)
    cost = feature_pass(found, found.request)
    assert cost is not None
    loads_s = sum(found.costs.load_s(layer) for layer in range(NUM_LAYERS))
    assert cost.one_pass_s > (NUM_LAYERS - 4) / NUM_LAYERS * loads_s
    assert cost.one_pass_s < 0.7 * found.step_s  # a step loads layers twice, but for those in slots


def test_a_step_of_a_head_alone_visits_no_layer_and_reads_its_features() -> None:
    plain, found = made(Probe()), made(Probe(is_alone=True, num_features=1000, num_passes=5))
    assert found.schedule.num_loads == found.schedule.h2d_bytes == 0
    phases = found.predict().phases()
    assert phases["forward"] == phases["backward"] == phases["stall"] == 0
    assert phases["head and loss"] == phases["step"]
    typical = found.request.typical
    num_features = typical.label_tokens * found.request.rank_micro_batches
    read_s = num_features * D * 2 / found.machine.memory_bytes_per_s.value
    assert read_s < found.costs.tail_s < 20 * read_s
    assert found.step_s < plain.step_s / 100
    assert found.bound_s == found.step_s
    assert found.break_even_tokens is None
    costs = feature_pass(plain, plain.request), feature_pass(found, found.request)
    assert costs[0] is not None
    assert costs[1] is not None
    assert costs[1].one_pass_s == pytest.approx(costs[0].one_pass_s)


def test_a_measured_step_of_a_head_alone_replaces_its_price() -> None:
    found = made(Probe(is_alone=True))
    measured = simulate(found.schedule, lambda _: 0.25)
    costs = calibrate(found.costs, measured, optimizer_s=0.5, num_kept_graphs=0)
    assert with_costs(found, costs).step_s == 0.75
    assert costs.layers == found.costs.layers
    assert costs.grade == "calibrated"
