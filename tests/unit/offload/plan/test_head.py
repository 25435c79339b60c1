"""The output head in host memory, in plans: bytes and times by hand, and when it may be."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from offload.errors import DoesNotFitError, OffloadError
from offload.plan.facts.facts import AdapterSpec, WholeWeights, with_classifier_head
from offload.plan.facts.trainable import HEAD as HEAD_NAME
from offload.plan.facts.trainable import all_weights
from offload.plan.facts.workload import why_head_on_device
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.memory.memory import (
    HEAD,
    OTHER_RANKS,
    OUTER,
    SLOTS,
    STAGING,
    MemoryTerm,
)
from offload.plan.plan import Plan, plan
from offload.plan.request import ObjectiveCost, sharing, with_workload
from offload.plan.schedule.op import Kind, Lane
from offload.plan.split import draft_step_s
from offload.plan.what_if import what_if
from tests.builders import lora, qwen3_8b, request, workload

CARD = named_machine("rtx4090")
FACTS = qwen3_8b()
TABLE = 151936 * 4096 * 2
# of a layer: q and o, k and v, three matrices of the MLP, two norms and those of q and k
LAYER = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12288 * 4096 + 2 * 4096 + 2 * 128)
PIECE = 64 * 2**20
ALL = AdapterSpec.none(all_weights(FACTS))
LARGE = replace(CARD, ram_bytes=512 * GIB, pinned_bytes=256 * GIB)


def both(**changes: Any) -> tuple[Plan, Plan]:
    """Return a plan with the head on the device, and on the host, with as many slots."""
    asked = request(**{"num_slots": 8, **changes})
    return plan(FACTS, CARD, asked), plan(FACTS, CARD, with_workload(asked, head="host"))


def sizes(terms: tuple[MemoryTerm, ...]) -> dict[str, int]:
    return {term.name: term.num_bytes for term in terms}


def to_pages(num_bytes: int) -> int:
    return -(-num_bytes // 4096) * 4096


def test_the_device_has_room_for_the_head_in_its_slots_alone() -> None:
    device, host = both()
    before, after = sizes(device.device_memory), sizes(host.device_memory)
    assert before[OUTER] - after[OUTER] == TABLE
    assert before[SLOTS] == after[SLOTS] == 8 * to_pages(LAYER)
    assert before.keys() == after.keys()
    assert sizes(host.host_memory)[HEAD] == host.host_bytes - device.host_bytes == TABLE


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_slots_are_no_smaller_than_the_head(num_slots: int) -> None:
    assert 3 * LAYER < TABLE < 4 * LAYER
    _, host = both(num_slots=num_slots)
    expected = 4 * to_pages(LAYER) if num_slots == 4 else TABLE
    assert sizes(host.device_memory)[SLOTS] == expected
    copied = [op for op in host.schedule.ops if op.kind is Kind.HEAD]
    assert {op.slot for op in copied} == set(range(num_slots))


@pytest.mark.parametrize("objective", [None, ObjectiveCost(has_reference=True)])
def test_a_step_copies_the_head_once_and_loads_the_layers_under_it_again(
    objective: ObjectiveCost | None,
) -> None:
    device, host = both(num_micro_batches=3, objective=objective)
    copied = [op for op in host.schedule.ops if op.kind is Kind.HEAD]
    assert sum(op.num_bytes for op in copied) == TABLE
    assert max(op.num_bytes for op in copied) == PIECE
    assert {op.lane for op in copied} == {Lane.H2D}
    # of 36 layers in 8 slots, 28 to 31 were visited longest ago: they are in slots 4 to 7
    assert {op.slot for op in copied} == {4, 5, 6, 7}
    again = [op.layer for op in host.schedule.ops if op.kind is Kind.LOAD and not op.offset]
    plainly = [op.layer for op in device.schedule.ops if op.kind is Kind.LOAD and not op.offset]
    assert Counter(again) == Counter([*plainly, 28, 29, 30, 31])
    assert host.schedule.h2d_bytes - device.schedule.h2d_bytes == TABLE + 4 * to_pages(LAYER)


def test_the_copy_runs_while_the_last_layers_compute_and_ends_before_the_head_does() -> None:
    _, host = both()
    spans = host.predict().spans
    copies = [span for span in spans if span.kind is Kind.HEAD]
    tail = next(span for span in spans if span.kind is Kind.TAIL)
    visits = {span.layer: span for span in spans if span.kind is Kind.FORWARD}
    assert visits[28].end_s <= copies[0].start_s < visits[35].start_s
    assert copies[-1].end_s <= tail.start_s
    for span in (copies[0], copies[-1]):
        rate = host.costs.fetch_bytes_per_s
        expected = host.costs.h2d_latency_s + span.num_bytes / rate
        assert span.duration_s == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_slots", [2, 8, 36])
@pytest.mark.parametrize("objective", [None, ObjectiveCost(has_reference=True)])
def test_the_step_that_a_search_compares_is_the_one_that_is_planned(
    objective: ObjectiveCost | None, num_slots: int
) -> None:
    asked = with_workload(request(num_slots=num_slots, objective=objective), head="host")
    found, needs = plan(FACTS, CARD, asked), MemoryNeeds.of(FACTS, CARD, asked)
    drafted_s = draft_step_s(needs, found.costs, found.residency)
    assert drafted_s == pytest.approx(found.step_s, rel=1e-9)


def test_each_rank_of_a_machine_has_its_own_copy() -> None:
    alone, together = (
        sizes(both(num_ranks=num, is_slab_shared=True)[1].host_memory) for num in (1, 2)
    )
    assert together[OTHER_RANKS] == sum(alone.values()) - alone["slab"]


def test_it_is_page_locked_before_the_slab_is() -> None:
    slab = 36 * to_pages(LAYER)
    tight = replace(CARD, pinned_bytes=slab + TABLE - 1)
    host = plan(FACTS, tight, with_workload(request(num_slots=8), head="host"))
    assert STAGING in sizes(host.host_memory)
    assert STAGING not in sizes(plan(FACTS, tight, request(num_slots=8)).host_memory)
    with pytest.raises(DoesNotFitError, match=r"1\.16 GiB of page-locked memory for the head"):
        plan(FACTS, replace(CARD, pinned_bytes=TABLE - 1), with_workload(request(), head="host"))


@pytest.mark.parametrize(
    ("changes", "adapter", "why"),
    [
        ({}, lora(), ""),
        ({}, lora(modules=("embed_tokens", "norms")), ""),
        ({"tie_word_embeddings": True}, lora(), ""),
        (
            {"tie_word_embeddings": True},
            AdapterSpec.none(all_weights(qwen3_8b(tie_word_embeddings=True))),
            "the embedding has the same weight: it trains",
        ),
        (
            {"tie_word_embeddings": True},
            lora(virtual=((8, 4096),)),
            "the embedding has the same weight: virtual tokens train",
        ),
        ({}, lora(modules=("lm_head",)), "it trains"),
        ({}, ALL, "it trains"),
        ({}, AdapterSpec.none(replace(all_weights(FACTS), outer=())), ""),
        ({}, AdapterSpec.none(WholeWeights(layers=(9,), outer=((HEAD_NAME, 9),))), "it trains"),
    ],
)
def test_what_needs_it_on_the_device_is_named(
    changes: dict[str, bool], adapter: AdapterSpec, why: str
) -> None:
    found = why_head_on_device(qwen3_8b(**changes), adapter)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_the_head_of_a_classifier_stays_on_the_device() -> None:
    facts = with_classifier_head(FACTS, 3, has_bias=False)
    assert why_head_on_device(facts, lora()).startswith("it has 3 outputs")


def test_runs_that_share_a_step_have_it_in_one_place() -> None:
    runs = [request(workload(seq_len=1024)), with_workload(request(), head="host")]
    with pytest.raises(OffloadError, match="one has its head on the host") as refused:
        sharing(runs)
    assert refused.value.limit == "the first has it on the device"
    found = plan(FACTS, CARD, sharing([with_workload(one, head="host") for one in runs]))
    copied = [op for op in found.schedule.ops if op.kind is Kind.HEAD]
    assert sum(op.num_bytes for op in copied) == TABLE


def test_a_refusal_names_the_setting_where_it_helps() -> None:
    asked, small = (
        with_workload(request(), embeddings="host"),
        replace(CARD, vram_bytes=int(4.2 * GIB)),
    )
    with pytest.raises(DoesNotFitError) as refused:
        plan(FACTS, small, asked)
    assert "1.16 GiB  embeddings, norm and head; less with `offload.head: host`" in str(
        refused.value.limit
    )
    with pytest.raises(DoesNotFitError, match=r"36 layers, the head in RAM, the plan") as refused:
        plan(FACTS, replace(CARD, vram_bytes=2 * GIB), with_workload(request(), head="host"))
    few = with_workload(request(workload(head_chunk_tokens=64), is_stashed=True), head="host")
    with pytest.raises(DoesNotFitError) as refused:
        plan(FACTS, replace(CARD, vram_bytes=2 * GIB), few)
    limit = str(refused.value.limit)
    assert "1.16 GiB  slots" in limit
    assert "slots;" not in limit  # they are as large as the head, and no setting makes them less


def test_the_other_place_is_priced_with_the_slots_as_they_are() -> None:
    device, host = both()
    (there,) = (x for x in what_if(device, num_cards=2).options if x.name == "offload the head")
    assert (there.standing, there.how) == ("a setting", "`offload.head: host`")
    assert there.figures is not None
    assert there.figures.vram_bytes == host.peak_bytes
    assert there.figures.step_s == host.step_s
    (back,) = (x for x in what_if(host, num_cards=2).options if x.name == "offload the head")
    assert (back.standing, back.how) == ("in the plan", "`offload.head: device`")
    tied = plan(qwen3_8b(tie_word_embeddings=True), CARD, request(num_slots=4))
    assert "offload the head" not in {x.name for x in what_if(tied, num_cards=2).options}
