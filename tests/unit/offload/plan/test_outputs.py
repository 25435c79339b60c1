"""Outputs of attention that a plan keeps or sends: times, bytes, and where there are none."""

from dataclasses import replace

import pytest

from offload.engine.bound import EngineOptions
from offload.plan.facts.linears import SoftmaxAttention
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.memory.memory import CARRIERS, KEPT_OUTPUTS, SENT
from offload.plan.plan import calibrate, costs_of, plan
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import Residency
from offload.plan.schedule.simulate import simulate
from offload.plan.split import SAME_FRAC, Split
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
    assert cost.back_s(has_graph=False, has_output=True) == cost.backward_s - cost.attention_s
    assert cost.forth_s(is_sent=True) == cost.forward_s + cost.pack_s
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
    built = replace(FACTS, grade="built")
    assert not plan(built, CARD, REQUEST).residency.has_outputs


def test_what_is_sent_slows_loads_as_a_stash_does() -> None:
    costs = costs_of(FACTS, CARD, REQUEST)
    assert costs.given(Residency(num_slots=2, num_kept_outputs=1)) == costs
    sent = costs.given(Residency(num_slots=2, num_sent_outputs=1))
    stashed = costs_of(FACTS, CARD, replace(REQUEST, is_stashed=True))
    assert sent.h2d_bytes_per_s == pytest.approx(stashed.h2d_bytes_per_s)
    assert sent.fetch_bytes_per_s == pytest.approx(stashed.fetch_bytes_per_s)
    assert sent.given(Residency(num_slots=2, num_sent_outputs=1)) == sent


def test_a_plan_that_keeps_and_sends_predicts_the_step_it_was_calibrated_on() -> None:
    priced = plan(FACTS, CARD, REQUEST)
    costs = priced.costs

    def twice_s(op) -> float:
        if op.kind in (Kind.FORWARD, Kind.BACKWARD):
            layer = costs.layers[op.layer_index]
            is_up = op.kind is Kind.FORWARD
            one_s = (
                layer.forth_s(is_sent=op.carrier is not None, has_graph=op.has_graph)
                if is_up
                else layer.back_s(has_graph=op.has_graph, has_output=op.has_output)
            )
            return 2 * one_s
        return 0.01

    measured = simulate(priced.schedule, twice_s)
    found = calibrate(
        costs,
        measured,
        optimizer_s=0.5,
        num_kept_graphs=priced.num_kept_graphs,
        saved=priced.saved,
    )
    for old, new in zip(costs.layers, found.layers, strict=True):
        assert new.forward_s == pytest.approx(2 * old.forward_s)
        assert new.backward_s == pytest.approx(2 * old.backward_s)
        assert new.attention_s == pytest.approx(2 * old.attention_s)
