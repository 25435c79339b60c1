"""The input embedding in host memory, in plans: bytes and times by hand, and when it may be."""

from dataclasses import replace
from typing import Any

import pytest

from offload.engine.bound import EngineOptions
from offload.errors import DoesNotFitError, OffloadError
from offload.plan.facts.facts import AdapterSpec, WholeWeights
from offload.plan.facts.trainable import all_weights
from offload.plan.facts.workload import rows_bytes, why_on_device
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.memory.memory import (
    EMBEDDINGS,
    OTHER_RANKS,
    OUTER,
    ROWS,
    MemoryTerm,
)
from offload.plan.plan import Plan, plan
from offload.plan.request import ObjectiveCost, sharing, with_workload
from offload.plan.schedule.op import Kind, Lane
from offload.plan.split import draft_step_s
from offload.plan.what_if import what_if
from tests.builders import lora, qwen3_8b, request, workload
from tests.parity.steps import MODELS

CARD = named_machine("rtx4090")
LARGE = named_machine("rtx4090", ram_bytes=256 * GIB)
FACTS = qwen3_8b()
TABLE = 151936 * 4096 * 2
ROW = 4096 * 2
ALL = AdapterSpec.none(all_weights(FACTS))
LAYERS = AdapterSpec.none(WholeWeights(layers=all_weights(FACTS).layers, outer=()))
OF_2048 = 2048 * 8 + 2049 * ROW  # tokens, int64; their rows, and one of a token that is not there


def both(**changes: Any) -> tuple[Plan, Plan]:
    """Return a plan with the embedding on the device, and on the host, with as many slots."""
    asked = request(**{"num_slots": 4, **changes})
    host = with_workload(asked, embeddings="host")
    return plan(FACTS, CARD, asked), plan(FACTS, CARD, host)


def sizes(terms: tuple[MemoryTerm, ...]) -> dict[str, int]:
    return {term.name: term.num_bytes for term in terms}


def test_the_device_has_two_buffers_of_rows_in_place_of_the_table() -> None:
    device, host = both()
    before, after = sizes(device.device_memory), sizes(host.device_memory)
    assert before[OUTER] - after[OUTER] == TABLE
    assert ROWS not in before
    assert after[ROWS] == 2 * OF_2048
    assert before.keys() | {ROWS} == after.keys()
    in_ram = sizes(host.host_memory)
    assert in_ram[EMBEDDINGS] == TABLE
    assert in_ram[ROWS] == 2 * OF_2048
    assert host.host_bytes - device.host_bytes == TABLE + 2 * OF_2048


def test_a_small_vocabulary_has_no_more_rows_than_tokens() -> None:
    facts = qwen3_8b(vocab_size=1000)
    found = plan(facts, CARD, with_workload(request(num_slots=4), embeddings="host"))
    assert sizes(found.device_memory)[ROWS] == 2 * (8192 - 8192 % 256 + 1001 * ROW)
    assert rows_bytes(1000, ROW) == 32 * 256 + 1001 * ROW  # 8,000 bytes of tokens, aligned


def test_each_pass_brings_its_rows_ahead_of_its_front() -> None:
    device, host = both(num_micro_batches=3, objective=ObjectiveCost(has_reference=True))
    ops = host.schedule.ops
    for kind, lane in ((Kind.LOOK_UP, Lane.HOST), (Kind.ROWS, Lane.H2D)):
        found = [op for op in ops if op.kind is kind]
        assert [op.micro_batch for op in found] == list(range(6))  # model, and reference
        assert {op.num_bytes for op in found} == {OF_2048}
        assert {op.lane for op in found} == {lane}
    assert host.schedule.h2d_bytes - device.schedule.h2d_bytes == 6 * OF_2048
    spans = {(span.kind, span.micro_batch): span for span in host.predict().spans}
    for number in range(6):
        look_up, rows, front = (
            spans[kind, number] for kind in (Kind.LOOK_UP, Kind.ROWS, Kind.FRONT)
        )
        assert look_up.end_s <= rows.start_s < rows.end_s <= front.start_s
    kept = [op for op in ops if op.kind not in (Kind.LOOK_UP, Kind.ROWS)]
    assert [op._replace(waits=(), buffer=None) for op in kept if op.kind is Kind.FRONT] == [
        op._replace(waits=()) for op in device.schedule.ops if op.kind is Kind.FRONT
    ]


def test_rows_take_the_time_of_their_bytes_in_memory_and_on_the_link() -> None:
    _, host = both()
    costs = host.costs
    assert costs.look_up_bytes_per_s == CARD.host_memory_bytes_per_s.value / 2
    spans = host.predict().spans
    (look_up,) = {round(s.duration_s, 9) for s in spans if s.kind is Kind.LOOK_UP}
    (rows,) = {round(s.duration_s, 9) for s in spans if s.kind is Kind.ROWS}
    assert look_up == pytest.approx(OF_2048 / costs.look_up_bytes_per_s, abs=1e-9)
    assert rows == pytest.approx(costs.h2d_latency_s + OF_2048 / costs.h2d_bytes_per_s, abs=1e-9)


@pytest.mark.parametrize("objective", [None, ObjectiveCost(has_reference=True)])
def test_the_step_that_a_search_compares_is_the_one_that_is_planned(
    objective: ObjectiveCost | None,
) -> None:
    asked = with_workload(request(num_slots=4, objective=objective), embeddings="host")
    found, needs = plan(FACTS, CARD, asked), MemoryNeeds.of(FACTS, CARD, asked)
    drafted_s = draft_step_s(needs, found.costs, found.residency)
    assert drafted_s == pytest.approx(found.step_s, rel=1e-9)


def test_ranks_of_a_machine_have_it_once() -> None:
    alone, both_ranks = (
        sizes(both(num_ranks=num, is_slab_shared=True)[1].host_memory) for num in (1, 2)
    )
    slab_and_table = alone["slab"] + TABLE
    assert both_ranks[OTHER_RANKS] == sum(alone.values()) - slab_and_table
    apart = sizes(both(num_ranks=2, is_slab_shared=False)[1].host_memory)
    assert apart[OTHER_RANKS] - both_ranks[OTHER_RANKS] == slab_and_table


@pytest.mark.parametrize(
    ("changes", "adapter", "why"),
    [
        ({}, lora(modules=("lm_head", "norms")), ""),
        ({}, lora(modules=("embed_tokens",)), "it trains"),
        ({}, lora(virtual=((8, 4096),)), "virtual tokens train"),
        ({}, ALL, "it trains"),
        ({}, LAYERS, ""),
        ({"tie_word_embeddings": True}, lora(), ""),
        ({"tie_word_embeddings": True}, LAYERS, ""),
        ({"tie_word_embeddings": True}, ALL, "it trains"),
        (
            {"tie_word_embeddings": True},
            lora(modules=("embed_tokens",)),
            "it trains",
        ),
        ({"tie_word_embeddings": True}, lora(virtual=((8, 4096),)), "virtual tokens train"),
    ],
)
def test_what_needs_it_on_the_device_is_named(
    changes: dict[str, bool], adapter: AdapterSpec, why: str
) -> None:
    found = why_on_device(qwen3_8b(**changes), adapter)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_an_engine_leaves_room_to_page_lock_rows_and_layer_inputs_after_the_layers() -> None:
    """Bytes by hand: inputs of all layers but the last, of 8 micro-batches, and the buffers."""
    asked = with_workload(request(num_slots=4, is_stashed=True), embeddings="host")
    options = EngineOptions.planned(plan(FACTS, LARGE, asked))
    locked = 35 * 8 * 2048 * ROW + 2 * OF_2048
    model = MODELS["qwen3"]().requires_grad_(requires_grad=False)
    assert options.others_to_lock(model) == options.locked_bytes == locked
    head = replace(options, head="host").others_to_lock(model)
    assert head == locked + model.get_output_embeddings().weight.nbytes
    plain = EngineOptions.planned(plan(FACTS, LARGE, request(num_slots=4)))
    assert plain.others_to_lock(model) == 0


def test_runs_that_share_a_step_have_it_in_one_place() -> None:
    runs = [request(workload(seq_len=1024)), with_workload(request(), embeddings="host")]
    with pytest.raises(OffloadError, match="one has its embedding on the host") as refused:
        sharing(runs)
    assert refused.value.limit == "the first has it on the device"
    shared = sharing([with_workload(one, embeddings="host") for one in runs])
    found = plan(FACTS, CARD, shared)
    # both runs use the same buffers
    assert sizes(found.device_memory)[ROWS] == 2 * OF_2048


def test_a_refusal_names_the_setting_where_it_helps() -> None:
    small = replace(CARD, vram_bytes=5 * GIB)
    with pytest.raises(DoesNotFitError) as refused:
        plan(FACTS, small, request())
    assert "2.32 GiB  embeddings, norm and head; less with `offload.embeddings: host`" in str(
        refused.value.limit
    )
    with pytest.raises(DoesNotFitError, match=r"36 layers, the embedding in RAM, the plan needs"):
        plan(FACTS, replace(CARD, vram_bytes=2 * GIB), with_workload(request(), embeddings="host"))


def test_the_other_place_is_priced_with_the_slots_as_they_are() -> None:
    device, host = both()
    (there,) = (x for x in what_if(device, num_cards=2).options if x.name == "offload embeddings")
    assert (there.standing, there.how) == ("a setting", "`offload.embeddings: host`")
    assert there.figures is not None
    assert there.figures.vram_bytes == host.peak_bytes
    assert there.figures.step_s == host.step_s
    (back,) = (x for x in what_if(host, num_cards=2).options if x.name == "offload embeddings")
    assert (back.standing, back.how) == ("in the plan", "`offload.embeddings: device`")
