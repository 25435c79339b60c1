"""What a plan keeps of a layer or sends to host memory: times and bytes."""

import itertools
from dataclasses import replace
from functools import cache

import pytest

from offload.engine.engine import EngineOptions
from offload.plan.facts.linears import SoftmaxAttention
from offload.plan.fit import GRAPH_RESERVE_FRAC, MemoryNeeds
from offload.plan.machine.machine import GIB, Machine, named_machine
from offload.plan.memory.memory import (
    CARRIERS,
    HEAD_CHUNK,
    KEPT_OUTPUTS,
    SENT,
    STASH,
    UPDATE,
    total_bytes,
)
from offload.plan.memory.visit import visit_bytes
from offload.plan.plan import Plan, calibrate, costs_of, plan
from offload.plan.schedule.op import (
    KEPT_GRAPH,
    KEPT_OUTPUT,
    SENT_GRAPH,
    SENT_OUTPUT,
    Kind,
    Op,
    Route,
)
from offload.plan.schedule.schedule import Residency
from offload.plan.schedule.simulate import simulate
from offload.plan.split import SAME_FRAC, WORTH_FRAC, Split
from offload.plan.step import duration_of, schedule_of
from offload.plan.time.attention import ATTENTION_OPS, attention_work
from tests import builders
from tests.builders import qwen3_8b

FACTS = qwen3_8b()
LONG = builders.workload(micro_batch_size=1, seq_len=8192, codec="nf4")
REQUEST = builders.request(LONG, num_micro_batches=4, num_kept_graphs=None, has_outputs=True)
CARD = named_machine("rtx4090", ram_bytes=64 * GIB)
# per token 32 heads of 128 features in bf16, and 4 bytes for the log-sum-exp of each
OUTPUT_BYTES = 8192 * 32 * (2 * 128 + 4)


def test_a_recompute_that_is_given_its_attention_saves_what_the_kernel_takes() -> None:
    cost = costs_of(FACTS, CARD, REQUEST).layers[0]
    kind = FACTS.layers[0].attention
    kernel = attention_work(kind, CARD, num_tokens=8192, seq_len=8192, dtype_bytes=2)
    assert cost.output_bytes == OUTPUT_BYTES
    assert cost.attention_s == pytest.approx(kernel.compute_s, rel=1e-6)
    assert cost.back_s(KEPT_OUTPUT) == cost.backward_s - cost.attention_s
    assert cost.forth_s(SENT_OUTPUT) == cost.forward_s + cost.pack_s
    bandwidth = CARD.memory_bytes_per_s.value  # the copy reads and writes each byte
    assert cost.pack_s == pytest.approx(2 * OUTPUT_BYTES / bandwidth, rel=0.01)
    assert kernel.num_ops == ATTENTION_OPS


@pytest.mark.parametrize("scores", ["sinks", "capped"])
def test_attention_without_a_fused_kernel_is_neither_kept_nor_sent(scores) -> None:
    kind = FACTS.layers[0].attention
    assert isinstance(kind, SoftmaxAttention)
    unfused = replace(FACTS.layers[0], attention=replace(kind, scores=scores))
    facts = replace(FACTS, layers=(unfused,) * len(FACTS.layers))
    cost = costs_of(facts, CARD, REQUEST).layers[0]
    assert (cost.output_bytes, cost.attention_s) == (0, 0)
    needs = MemoryNeeds.of(facts, CARD, REQUEST)
    assert not needs.with_outputs(needs.least).has_outputs
    assert needs.most_sent(needs.least) == 0


def test_kept_outputs_take_device_memory_and_sent_ones_buffers_and_ram() -> None:
    needs = MemoryNeeds.of(FACTS, CARD, REQUEST)
    without = Residency(num_slots=2)
    some = without._replace(num_kept_outputs=3, num_sent_outputs=5)
    device = {term.name: term.num_bytes for term in needs.device(some)}
    host = {term.name: term.num_bytes for term in needs.host(some)}
    assert device[KEPT_OUTPUTS] == 3 * 4 * OUTPUT_BYTES
    assert device[CARRIERS] == 2 * 4 * OUTPUT_BYTES  # of two visits
    assert host.pop(SENT) == 5 * 4 * OUTPUT_BYTES
    assert host == {term.name: term.num_bytes for term in needs.host(without)}


def test_what_cannot_be_page_locked_is_not_sent() -> None:
    needs = MemoryNeeds.of(FACTS, CARD, REQUEST)
    slab = next(term.num_bytes for term in needs.host(needs.least) if term.name == "slab")
    locked = replace(CARD, pinned_bytes=slab + 7 * 4 * OUTPUT_BYTES)
    assert MemoryNeeds.of(FACTS, locked, REQUEST).most_sent(needs.least) == 7
    short = needs.least._replace(num_sent_outputs=8)
    (shortage,) = MemoryNeeds.of(FACTS, locked, REQUEST).shortages(short)
    assert shortage.what == "of page-locked memory for sent activations"
    assert shortage.short_bytes == 4 * OUTPUT_BYTES


def test_long_sequences_keep_and_send_outputs_and_the_engine_is_told() -> None:
    found = plan(FACTS, CARD, REQUEST)
    without = plan(FACTS, CARD, replace(REQUEST, has_outputs=False))
    assert not without.residency.has_outputs
    assert found.residency.num_sent_outputs > 0
    assert found.step_s < without.step_s * (1 - SAME_FRAC)
    kinds = [op.kind for op in found.schedule.ops]
    num_sent = 4 * found.residency.num_sent_outputs
    assert kinds.count(Kind.SEND) == kinds.count(Kind.RETURN) == num_sent
    options = EngineOptions.planned(found)
    assert options.num_kept_outputs == found.residency.num_kept_outputs
    assert options.num_sent_outputs == found.residency.num_sent_outputs


def test_nothing_is_sent_on_a_cpu() -> None:
    cpu = replace(CARD, device="cpu", vram_bytes=60 * GIB, ram_bytes=60 * GIB)
    needs = MemoryNeeds.of(FACTS, cpu, REQUEST)
    residency = Split(needs=needs, costs=costs_of(FACTS, cpu, REQUEST)).fastest
    assert residency is not None
    assert residency.num_sent_outputs == 0


def test_a_model_whose_attention_is_not_known_from_its_config_keeps_none() -> None:
    built = replace(FACTS, is_memory_tested=False)
    assert not plan(built, CARD, REQUEST).residency.has_outputs


def test_what_is_sent_slows_loads_as_a_stash_does() -> None:
    costs = costs_of(FACTS, CARD, REQUEST)
    assert costs.given(Residency(num_slots=2, num_kept_outputs=1)) == costs
    sent = costs.given(Residency(num_slots=2, num_sent_outputs=1))
    stashed = costs_of(FACTS, CARD, replace(REQUEST, is_stashed=True))
    assert sent.speed(Route.LOAD) == pytest.approx(stashed.speed(Route.LOAD))
    assert sent.speed(Route.FETCH) == pytest.approx(stashed.speed(Route.FETCH))
    assert sent.given(Residency(num_slots=2, num_sent_outputs=1)) == sent


def test_a_plan_that_keeps_and_sends_predicts_the_step_it_was_calibrated_on() -> None:
    priced = plan(FACTS, CARD, REQUEST)
    costs = priced.costs

    def twice_s(op) -> float:
        if op.kind in (Kind.FORWARD, Kind.BACKWARD):
            layer = costs.layers[op.layer_index]
            is_up = op.kind is Kind.FORWARD
            one_s = layer.forth_s(op.save) if is_up else layer.back_s(op.save)
            return 2 * one_s
        return 0.01

    measured = simulate(priced.schedule, twice_s)
    found = calibrate(
        costs,
        measured,
        optimizer_s=0.5,
        saved=priced.saved,
    )
    for old, new in zip(costs.layers, found.layers, strict=True):
        assert new.forward_s == pytest.approx(2 * old.forward_s)
        assert new.backward_s == pytest.approx(2 * old.backward_s)
        assert new.attention_s == pytest.approx(2 * old.attention_s)


# -------------------------------------------------------------------------------------- sent graphs


LAYER = FACTS.layers[0]
SHORT = builders.workload(micro_batch_size=2, seq_len=2048, codec="nf4")
GRAPHS_REQUEST = builders.request(
    SHORT, num_micro_batches=4, num_kept_graphs=None, has_outputs=True, has_sent_graphs=True
)
GRAPHS_CARD = named_machine("rtx4090", ram_bytes=128 * GIB)
INSTANTS = {HEAD_CHUNK, UPDATE, "one visit: saved activations"}
ONE_BYTES = visit_bytes(FACTS, GRAPHS_CARD, LAYER, SHORT, is_padded=False).sent_graph


@cache
def found(ram_gib: int = 128) -> Plan:
    return plan(FACTS, replace(GRAPHS_CARD, ram_bytes=ram_gib * GIB), GRAPHS_REQUEST)


def test_a_graph_that_is_sent_is_not_computed_again_and_is_copied_once_on_the_device() -> None:
    cost = costs_of(FACTS, GRAPHS_CARD, GRAPHS_REQUEST).layers[0]
    assert cost.graph_bytes == ONE_BYTES
    assert cost.forth_s(SENT_GRAPH) == cost.forward_s + cost.graph_pack_s
    bandwidth = GRAPHS_CARD.memory_bytes_per_s.value
    assert cost.graph_pack_s == pytest.approx(2 * ONE_BYTES / bandwidth, rel=0.01)
    assert cost.back_s(KEPT_GRAPH) == cost.backward_s - cost.recompute_s


def test_sent_graphs_take_buffers_and_ram_and_their_inputs_are_not_stashed() -> None:
    request = replace(GRAPHS_REQUEST, is_stashed=True)
    needs = MemoryNeeds.of(FACTS, GRAPHS_CARD, request)
    without = Residency(num_slots=2)
    some = without._replace(num_sent_graphs=5)
    device = {term.name: term.num_bytes for term in needs.device(some)}
    assert device[CARRIERS] == 2 * 4 * ONE_BYTES  # of two visits
    host = {term.name: term.num_bytes for term in needs.host(some)}
    before = {term.name: term.num_bytes for term in needs.host(without)}
    assert host.pop(SENT) == 5 * 4 * ONE_BYTES
    input_bytes = 2 * 2048 * 4096 * 2
    assert before.pop(STASH) - host.pop(STASH) == 5 * 4 * input_bytes
    assert host == before


def test_a_graph_is_sent_with_its_input_if_the_norm_saves_it_as_it_is() -> None:
    plain = visit_bytes(FACTS, GRAPHS_CARD, LAYER, SHORT, is_padded=False)
    fused = visit_bytes(
        FACTS, GRAPHS_CARD, LAYER, replace(SHORT, layer_code="fused"), is_padded=False
    )
    assert (plain.own_input, fused.own_input) == (0, 2 * 2048 * 4096 * 2)
    assert fused.sent_graph == fused.graph + fused.own_input


def test_what_cannot_be_page_locked_is_not_sent_and_a_reserve_is_kept() -> None:
    needs = MemoryNeeds.of(FACTS, GRAPHS_CARD, GRAPHS_REQUEST)
    slab = next(term.num_bytes for term in needs.host(needs.least) if term.name == "slab")
    room = int(7 * 4 * ONE_BYTES * (1 + GRAPH_RESERVE_FRAC)) + 1
    locked = MemoryNeeds.of(FACTS, replace(GRAPHS_CARD, pinned_bytes=slab + room), GRAPHS_REQUEST)
    assert locked.most_sent_graphs(needs.least) == 7
    (shortage,) = locked.shortages(needs.least._replace(num_sent_graphs=8))
    assert shortage.what == "of page-locked memory for sent activations"
    assert shortage.short_bytes == pytest.approx(4 * ONE_BYTES * 1.1, rel=1e-3)


def test_a_plan_sends_graphs_where_that_pays_and_the_engine_is_told() -> None:
    without = plan(FACTS, GRAPHS_CARD, replace(GRAPHS_REQUEST, has_sent_graphs=False))
    assert found().residency.num_sent_graphs > 0
    assert found().step_s < without.step_s * (1 - WORTH_FRAC)
    saved = found().saved
    sends = [op for op in found().schedule.ops if op.kind is Kind.SEND]
    graphs = [op for op in sends if op.layer in saved.which[SENT_GRAPH]]
    assert len(graphs) == 4 * found().residency.num_sent_graphs
    assert {op.num_bytes for op in graphs} == {ONE_BYTES}
    options = EngineOptions.planned(found())
    assert options.num_sent_graphs == found().residency.num_sent_graphs
    assert options.residency == found().residency


@pytest.mark.thorough
def test_less_ram_sends_fewer_graphs_and_takes_longer() -> None:
    counts = [found(ram).residency.num_sent_graphs for ram in (16, 32, 64, 128)]
    times_s = [found(ram).step_s for ram in (16, 32, 64, 128)]
    assert counts[0] < counts[1] < counts[2]
    assert counts == sorted(counts)
    assert times_s == sorted(times_s, reverse=True)
    for ram in (16, 32, 64, 128):
        assert found(ram).host_bytes <= ram * GIB


def _times_s(made: Plan, numbers: list[int]) -> list[float]:
    """Simulate whole steps that send other numbers of graphs."""
    needs = MemoryNeeds.of(FACTS, made.machine, made.request)
    plans = [made.residency._replace(num_sent_graphs=number) for number in numbers]
    assert not any(needs.shortages(one) for one in plans)
    return [
        replace(
            made,
            residency=one,
            schedule=_schedule(made, one),
        ).step_s
        for one in plans
    ]


def _schedule(made: Plan, residency: Residency):
    return schedule_of(FACTS, made.request, made.costs, residency, is_staged=False)


def test_one_graph_more_or_fewer_than_chosen_is_no_faster() -> None:
    fast = replace(GRAPHS_CARD, h2d_bytes_per_s=replace(GRAPHS_CARD.h2d_bytes_per_s, value=12e9))
    fast = replace(
        fast,
        d2h_bytes_per_s=replace(GRAPHS_CARD.d2h_bytes_per_s, value=12e9),
        h2d_duplex_bytes_per_s=replace(GRAPHS_CARD.h2d_duplex_bytes_per_s, value=11e9),
    )
    made = plan(FACTS, fast, replace(GRAPHS_REQUEST, has_outputs=False))
    number = made.residency.num_sent_graphs
    assert 1 < number < FACTS.num_layers - 1
    fewer_s, chosen_s, more_s = _times_s(made, [number - 1, number, number + 1])
    assert chosen_s == pytest.approx(made.step_s)
    assert chosen_s < fewer_s
    assert chosen_s <= more_s * 1.001


@pytest.mark.parametrize(
    ("machine", "facts"),
    [
        (replace(GRAPHS_CARD, device="cpu", vram_bytes=60 * GIB, ram_bytes=60 * GIB), FACTS),
        (GRAPHS_CARD, replace(FACTS, is_memory_tested=False)),
    ],
    ids=["on a CPU", "of a model whose graphs' size is unknown"],
)
def test_no_graph_is_sent(machine: Machine, facts) -> None:
    assert plan(facts, machine, GRAPHS_REQUEST).residency.num_sent_graphs == 0


def test_a_plan_that_sends_graphs_predicts_the_step_it_was_calibrated_on() -> None:
    priced = found()
    one_s = duration_of(priced.costs)

    def twice_s(op: Op) -> float:
        return 2 * one_s(op) if op.kind in (Kind.FORWARD, Kind.BACKWARD) else 0.01

    measured = simulate(priced.schedule, twice_s)
    costs = calibrate(
        priced.costs,
        measured,
        optimizer_s=0.5,
        saved=priced.saved,
    )
    for number in priced.saved.which[SENT_GRAPH]:
        old, new = priced.costs.layers[number], costs.layers[number]
        assert new.forward_s == pytest.approx(2 * old.forward_s)
        assert new.graph_pack_s == pytest.approx(2 * old.graph_pack_s)
        assert new.back_s(KEPT_GRAPH) == pytest.approx(2 * old.back_s(KEPT_GRAPH))


def test_the_peak_that_a_search_compares_is_the_sum_of_the_terms_of_the_worst_instant() -> None:
    tiny = builders.workload(seq_len=16, adapter=builders.lora(rank=256))
    long = builders.workload(seq_len=8192, head_chunk_tokens=64)
    instants = set()
    for request in (GRAPHS_REQUEST, builders.request(tiny), builders.request(long)):
        needs = MemoryNeeds.of(FACTS, GRAPHS_CARD, request)
        for slots, graphs, sent, kept, outputs in itertools.product((2, 5), (0, 3), *[(0, 2)] * 3):
            residency = Residency(
                num_slots=slots,
                num_kept_graphs=graphs,
                num_sent_graphs=sent,
                num_kept_outputs=kept,
                num_sent_outputs=outputs,
            )
            terms = needs.device(residency)
            assert needs.on_device.peak_bytes(residency) == total_bytes(terms)
            instants |= INSTANTS & {term.name for term in terms}
    assert instants == INSTANTS
