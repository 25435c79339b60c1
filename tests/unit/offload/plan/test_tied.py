"""One weight of embedding and head in host memory, in plans: counted once, and moved for both."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from offload.errors import DoesNotFitError
from offload.plan.facts.facts import AdapterSpec, WholeWeights, with_classifier_head
from offload.plan.facts.workload import why_head_on_device
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.memory.memory import EMBEDDINGS, HEAD, OTHER_RANKS, OUTER, ROWS, SLOTS, MemoryTerm
from offload.plan.place_cost import HeadCost
from offload.plan.plan import Plan, plan
from offload.plan.request import ObjectiveCost, with_workload
from offload.plan.schedule.op import Kind, Lane
from offload.plan.split import draft_step_s
from offload.plan.what_if import what_if
from tests.builders import lora, qwen3_8b, request, workload

CARD = named_machine("rtx4090")
FACTS = qwen3_8b(tie_word_embeddings=True)
TABLE = 151936 * 4096 * 2
ROWS_BYTES = 2048 * 8 + 2049 * 4096 * 2  # tokens, int64; their rows, and one of no token


def both(**changes: Any) -> tuple[Plan, Plan]:
    """Return a plan with the weight on the device, and on the host, with as many slots."""
    asked = request(**{"num_slots": 8, **changes})
    return plan(FACTS, CARD, asked), plan(
        FACTS, CARD, with_workload(asked, embeddings="host", head="host")
    )


def sizes(terms: tuple[MemoryTerm, ...]) -> dict[str, int]:
    return {term.name: term.num_bytes for term in terms}


def test_it_is_in_host_memory_once_and_not_on_the_device() -> None:
    device, host = both()
    before, after = sizes(device.device_memory), sizes(host.device_memory)
    assert before[OUTER] == TABLE + 4096 * 2  # with the last norm
    assert after[OUTER] == 4096 * 2
    assert before[SLOTS] == after[SLOTS]
    assert before.keys() | {ROWS} == after.keys()
    in_ram = sizes(host.host_memory)
    assert (in_ram[HEAD], in_ram[ROWS]) == (TABLE, 2 * ROWS_BYTES)
    assert EMBEDDINGS not in in_ram
    assert host.host_bytes - device.host_bytes == TABLE + 2 * ROWS_BYTES


@pytest.mark.parametrize("num_slots", [2, 3])
def test_slots_are_no_smaller_than_it(num_slots: int) -> None:
    _, host = both(num_slots=num_slots)
    assert sizes(host.device_memory)[SLOTS] == TABLE
    copied = [op for op in host.schedule.ops if op.kind is Kind.HEAD]
    assert {op.slot for op in copied} == set(range(num_slots))


@pytest.mark.parametrize("objective", [None, ObjectiveCost(has_reference=True)])
def test_a_step_brings_rows_for_each_pass_and_copies_it_once(
    objective: ObjectiveCost | None,
) -> None:
    device, host = both(num_micro_batches=3, objective=objective)
    copied = [op for op in host.schedule.ops if op.kind is Kind.HEAD]
    assert sum(op.num_bytes for op in copied) == TABLE
    assert {op.lane for op in copied} == {Lane.H2D}
    num = 3 if objective is None else 6
    kinds = Counter(op.kind for op in host.schedule.ops)
    assert kinds[Kind.LOOK_UP] == kinds[Kind.ROWS] == num
    layer = host.costs.layers[0].weight_bytes  # four are loaded again, from under it
    moved = host.schedule.h2d_bytes - device.schedule.h2d_bytes
    assert moved == TABLE + 4 * layer + num * ROWS_BYTES


@pytest.mark.parametrize("num_slots", [2, 8, 36])
@pytest.mark.parametrize("objective", [None, ObjectiveCost(has_reference=True)])
def test_the_step_that_a_search_compares_is_the_one_that_is_planned(
    objective: ObjectiveCost | None, num_slots: int
) -> None:
    asked = with_workload(
        request(num_slots=num_slots, objective=objective), embeddings="host", head="host"
    )
    found, needs = plan(FACTS, CARD, asked), MemoryNeeds.of(FACTS, CARD, asked)
    drafted_s = draft_step_s(needs, found.costs, found.residency)
    assert drafted_s == pytest.approx(found.step_s, rel=1e-9)
    assert found.bound_s <= found.step_s


def test_each_rank_of_a_machine_has_its_own_copy() -> None:
    """The memory of a head is page-locked by the process that copies from it."""
    alone, together = (
        sizes(both(num_ranks=num, is_slab_shared=True)[1].host_memory) for num in (1, 2)
    )
    assert together[OTHER_RANKS] == sum(alone.values()) - alone["slab"]


def test_it_is_page_locked_memory_that_may_be_too_small() -> None:
    tight = replace(CARD, pinned_bytes=TABLE - 1)
    with pytest.raises(DoesNotFitError, match=r"1\.19 GiB of page-locked memory for the head"):
        plan(FACTS, tight, with_workload(request(), embeddings="host", head="host"))


def test_a_classifier_has_a_head_of_its_own() -> None:
    """The embedding alone may be in host memory then, and is counted there."""
    facts = with_classifier_head(FACTS, 3, has_bias=False)
    assert why_head_on_device(facts, lora()).startswith("it has 3 outputs")
    found = plan(facts, CARD, with_workload(request(num_slots=8), embeddings="host"))
    assert sizes(found.host_memory)[EMBEDDINGS] == TABLE


def test_a_refusal_names_both_settings_where_they_help() -> None:
    small, load = replace(CARD, vram_bytes=int(3.5 * GIB)), workload(head_chunk_tokens=256)
    asked = request(load, is_stashed=True)
    with pytest.raises(DoesNotFitError) as refused:
        plan(FACTS, small, asked)
    both_settings = "`offload.embeddings: host` and `offload.head: host`"
    assert f"1.16 GiB  embeddings, norm and head; less with {both_settings}" in str(
        refused.value.limit
    )
    assert refused.value.hint == both_settings
    plan(FACTS, small, with_workload(asked, embeddings="host", head="host"))
    trained = request(workload(adapter=lora(modules=("embed_tokens",))))
    with pytest.raises(DoesNotFitError) as refused:
        plan(FACTS, small, trained)
    assert "host` and" not in f"{refused.value.limit}{refused.value.hint}"


def test_of_a_head_of_its_own_each_setting_is_named_by_itself() -> None:
    with pytest.raises(DoesNotFitError) as refused:
        plan(qwen3_8b(), replace(CARD, vram_bytes=3 * GIB), request())
    assert "less with `offload.embeddings: host`, `offload.head: host`\n" in f"{refused.value}"


def test_the_other_place_is_priced_for_both_with_the_slots_as_they_are() -> None:
    device, host = both()
    name = "offload embeddings and head"
    (there,) = (x for x in what_if(device, num_cards=2).options if x.name == name)
    how = "`offload.embeddings: host` and `offload.head: host`"
    assert (there.standing, there.how) == ("a setting", how)
    assert there.figures is not None
    assert there.figures.vram_bytes == host.peak_bytes
    assert there.figures.step_s == host.step_s
    (back,) = (x for x in what_if(host, num_cards=2).options if x.name == name)
    assert (back.standing, back.how) == ("in the plan", how.replace("host", "device"))
    names = {x.name for x in what_if(device, num_cards=2).options}
    assert not {"offload embeddings", "offload the head"} & names
    trained = request(workload(adapter=lora(modules=("embed_tokens",))), num_slots=2)
    options = what_if(plan(FACTS, CARD, trained), num_cards=2).options
    assert name not in {x.name for x in options}


def test_what_the_head_costs_is_without_the_rows() -> None:
    device, host = both()
    cost = HeadCost.of(host)
    assert cost is not None
    assert (cost.saved_vram_bytes, cost.h2d_bytes, cost.num_loads) == (TABLE, TABLE, 4)
    assert 0 <= cost.added_s <= host.step_s - device.step_s
    assert HeadCost.of(device) is None


def test_full_training_of_layers_alone_may_have_it_there() -> None:
    layers = tuple(layer.num_parameters for layer in FACTS.layers)
    frozen = AdapterSpec.none(WholeWeights(layers=layers, outer=()))
    large = named_machine("rtx4090", ram_bytes=256 * GIB)
    asked = request(workload(adapter=frozen), num_slots=4)
    device, host = (
        plan(FACTS, large, asked),
        plan(FACTS, large, with_workload(asked, embeddings="host", head="host")),
    )
    assert host.host_bytes - device.host_bytes == TABLE + 2 * ROWS_BYTES
    assert sizes(host.device_memory)[OUTER] == 4096 * 2
