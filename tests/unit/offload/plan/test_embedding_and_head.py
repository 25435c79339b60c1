"""Embedding, head and virtual tokens in plans: bytes and times by hand."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from peft import (
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from finetune.errors import ConfigError
from finetune.planning.request import full_request
from finetune.recipe.recipe import Recipe
from offload.engine.engine import EngineOptions
from offload.errors import DoesNotFitError, OffloadError, UnsupportedModelError
from offload.plan.facts.facts import AdapterSpec, WholeWeights, with_classifier_head
from offload.plan.facts.linears import DeltaAttention, SoftmaxAttention
from offload.plan.facts.trainable import HEAD as HEAD_NAME
from offload.plan.facts.trainable import (
    all_weights,
    prefix_spec,
    trained_parameters,
    trained_tensor_shapes,
    virtual_shapes,
)
from offload.plan.facts.workload import rows_bytes, why_head_on_device, why_on_device
from offload.plan.feature_pass import feature_pass
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.memory.memory import (
    EMBEDDINGS,
    FEATURES,
    HEAD,
    OTHER_RANKS,
    OUTER,
    ROWS,
    SLOTS,
    STAGING,
    MemoryTerm,
    recorded_bytes,
)
from offload.plan.memory.visit import visit_bytes
from offload.plan.place_cost import PlaceCost
from offload.plan.plan import Plan, calibrate, plan, with_costs
from offload.plan.request import ObjectiveCost, PlanRequest, Probe, sharing, with_workload
from offload.plan.schedule.op import Kind, Lane, Route
from offload.plan.schedule.simulate import simulate
from offload.plan.split import Split
from offload.plan.time.attention import attention_work
from offload.plan.what_if import what_if
from tests.builders import lora, model_facts, qwen3_8b, request, slow_link, workload
from tests.parity.steps import MODELS

CARD = named_machine("rtx4090", is_headless=True)
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
    assert costs.speed(Route.LOOK_UP).bytes_per_s == CARD.host_memory_bytes_per_s.value / 2
    spans = host.predict().spans
    (look_up,) = {round(s.duration_s, 9) for s in spans if s.kind is Kind.LOOK_UP}
    (rows,) = {round(s.duration_s, 9) for s in spans if s.kind is Kind.ROWS}
    assert look_up == pytest.approx(costs.speed(Route.LOOK_UP).seconds(OF_2048), abs=1e-9)
    assert rows == pytest.approx(costs.speed(Route.FETCH).seconds(OF_2048), abs=1e-9)


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
def test_what_needs_an_embedding_on_the_device_is_named(
    changes: dict[str, bool], adapter: AdapterSpec, why: str
) -> None:
    found = why_on_device(qwen3_8b(**changes), adapter)
    assert (found[: len(why)], bool(found)) == (why, bool(why))


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


# --------------------------------------------------------------------------------------------- head


# of a layer: q and o, k and v, three matrices of the MLP, two norms and those of q and k
LAYER = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12288 * 4096 + 2 * 4096 + 2 * 128)
PIECE = 64 * 2**20


def both_head(**changes: Any) -> tuple[Plan, Plan]:
    """Return a plan with the head on the device, and on the host, with as many slots."""
    asked = request(**{"num_slots": 8, **changes})
    return plan(FACTS, CARD, asked), plan(FACTS, CARD, with_workload(asked, head="host"))


def to_pages(num_bytes: int) -> int:
    return -(-num_bytes // 4096) * 4096


def test_the_device_has_room_for_the_head_in_its_slots_alone() -> None:
    device, host = both_head()
    before, after = sizes(device.device_memory), sizes(host.device_memory)
    assert before[OUTER] - after[OUTER] == TABLE
    assert before[SLOTS] == after[SLOTS] == 8 * to_pages(LAYER)
    assert before.keys() == after.keys()
    assert sizes(host.host_memory)[HEAD] == host.host_bytes - device.host_bytes == TABLE


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_slots_are_no_smaller_than_the_head(num_slots: int) -> None:
    assert 3 * LAYER < TABLE < 4 * LAYER
    _, host = both_head(num_slots=num_slots)
    expected = 4 * to_pages(LAYER) if num_slots == 4 else TABLE
    assert sizes(host.device_memory)[SLOTS] == expected
    copied = [op for op in host.schedule.ops if op.kind is Kind.HEAD]
    assert {op.slot for op in copied} == set(range(num_slots))


@pytest.mark.parametrize("objective", [None, ObjectiveCost(has_reference=True)])
def test_a_step_copies_the_head_once_and_loads_the_layers_under_it_again(
    objective: ObjectiveCost | None,
) -> None:
    device, host = both_head(num_micro_batches=3, objective=objective)
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
    _, host = both_head()
    spans = host.predict().spans
    copies = [span for span in spans if span.kind is Kind.HEAD]
    tail = next(span for span in spans if span.kind is Kind.TAIL)
    visits = {span.layer: span for span in spans if span.kind is Kind.FORWARD}
    assert visits[28].end_s <= copies[0].start_s < visits[35].start_s
    assert copies[-1].end_s <= tail.start_s
    for span in (copies[0], copies[-1]):
        expected = host.costs.speed(Route.FETCH).seconds(span.num_bytes)
        assert span.duration_s == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("is_tied", [False, True])
def test_each_rank_of_a_machine_has_its_own_copy(is_tied: bool) -> None:
    """The memory of a head is page-locked by the process that copies from it."""
    pair = both_tied if is_tied else both_head
    alone, together = (
        sizes(pair(num_ranks=num, is_slab_shared=True)[1].host_memory) for num in (1, 2)
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
def test_what_needs_a_head_on_the_device_is_named(
    changes: dict[str, bool], adapter: AdapterSpec, why: str
) -> None:
    found = why_head_on_device(qwen3_8b(**changes), adapter)
    assert (found[: len(why)], bool(found)) == (why, bool(why))


def test_runs_that_share_a_step_have_it_in_one_place_head() -> None:
    runs = [request(workload(seq_len=1024)), with_workload(request(), head="host")]
    with pytest.raises(OffloadError, match="one has its head on the host") as refused:
        sharing(runs)
    assert refused.value.limit == "the first has it on the device"
    found = plan(FACTS, CARD, sharing([with_workload(one, head="host") for one in runs]))
    copied = [op for op in found.schedule.ops if op.kind is Kind.HEAD]
    assert sum(op.num_bytes for op in copied) == TABLE


def test_a_refusal_names_the_setting_where_it_helps_head() -> None:
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


# --------------------------------------------------------------------------------------------- tied


TIED_FACTS = qwen3_8b(tie_word_embeddings=True)
ROWS_BYTES = 2048 * 8 + 2049 * 4096 * 2  # tokens, int64; their rows, and one of no token


def both_tied(**changes: Any) -> tuple[Plan, Plan]:
    """Return a plan with the weight on the device, and on the host, with as many slots."""
    asked = request(**{"num_slots": 8, **changes})
    return plan(TIED_FACTS, CARD, asked), plan(
        TIED_FACTS, CARD, with_workload(asked, embeddings="host", head="host")
    )


def test_it_is_in_host_memory_once_and_not_on_the_device() -> None:
    device, host = both_tied()
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
    _, host = both_tied(num_slots=num_slots)
    assert sizes(host.device_memory)[SLOTS] == TABLE
    copied = [op for op in host.schedule.ops if op.kind is Kind.HEAD]
    assert {op.slot for op in copied} == set(range(num_slots))


@pytest.mark.parametrize("objective", [None, ObjectiveCost(has_reference=True)])
def test_a_step_brings_rows_for_each_pass_and_copies_it_once(
    objective: ObjectiveCost | None,
) -> None:
    device, host = both_tied(num_micro_batches=3, objective=objective)
    copied = [op for op in host.schedule.ops if op.kind is Kind.HEAD]
    assert sum(op.num_bytes for op in copied) == TABLE
    assert {op.lane for op in copied} == {Lane.H2D}
    num = 3 if objective is None else 6
    kinds = Counter(op.kind for op in host.schedule.ops)
    assert kinds[Kind.LOOK_UP] == kinds[Kind.ROWS] == num
    layer = host.costs.layers[0].weight_bytes  # four are loaded again, from under it
    moved = host.schedule.h2d_bytes - device.schedule.h2d_bytes
    assert moved == TABLE + 4 * layer + num * ROWS_BYTES


@pytest.mark.parametrize("weights", [("embeddings",), ("head",), ("embeddings", "head")])
@pytest.mark.parametrize("num_slots", [2, 8, 36])
@pytest.mark.parametrize("objective", [None, ObjectiveCost(has_reference=True)])
def test_the_step_that_a_search_compares_is_the_one_that_is_planned(
    objective: ObjectiveCost | None, num_slots: int, weights: tuple[str, ...]
) -> None:
    facts = FACTS if len(weights) == 1 else TIED_FACTS
    asked = request(num_slots=num_slots, objective=objective)
    asked = with_workload(asked, **dict.fromkeys(weights, "host"))
    found, needs = plan(facts, CARD, asked), MemoryNeeds.of(facts, CARD, asked)
    drafted_s = Split(needs=needs, costs=found.costs).step_s(found.residency)
    assert drafted_s == pytest.approx(found.step_s, rel=1e-9)
    assert found.bound_s <= found.step_s * (1 + 1e-9)


def test_it_is_page_locked_memory_that_may_be_too_small() -> None:
    tight = replace(CARD, pinned_bytes=TABLE - 1)
    with pytest.raises(DoesNotFitError, match=r"1\.19 GiB of page-locked memory for the head"):
        plan(TIED_FACTS, tight, with_workload(request(), embeddings="host", head="host"))


def test_a_classifier_has_a_head_of_its_own() -> None:
    """The embedding alone may be in host memory then, and is counted there."""
    facts = with_classifier_head(TIED_FACTS, 3, has_bias=False)
    assert why_head_on_device(facts, lora()).startswith("it has 3 outputs")
    found = plan(facts, CARD, with_workload(request(num_slots=8), embeddings="host"))
    assert sizes(found.host_memory)[EMBEDDINGS] == TABLE


def test_a_refusal_names_both_settings_where_they_help() -> None:
    small, load = replace(CARD, vram_bytes=int(3.5 * GIB)), workload(head_chunk_tokens=256)
    asked = request(load, is_stashed=True)
    with pytest.raises(DoesNotFitError) as refused:
        plan(TIED_FACTS, small, asked)
    both_settings = "`offload.embeddings: host` and `offload.head: host`"
    assert f"1.16 GiB  embeddings, norm and head; less with {both_settings}" in str(
        refused.value.limit
    )
    assert refused.value.hint == both_settings
    plan(TIED_FACTS, small, with_workload(asked, embeddings="host", head="host"))
    trained = request(workload(adapter=lora(modules=("embed_tokens",))))
    with pytest.raises(DoesNotFitError) as refused:
        plan(TIED_FACTS, small, trained)
    assert "host` and" not in f"{refused.value.limit}{refused.value.hint}"


def test_of_a_head_of_its_own_each_setting_is_named_by_itself() -> None:
    with pytest.raises(DoesNotFitError) as refused:
        plan(qwen3_8b(), replace(CARD, vram_bytes=3 * GIB), request())
    assert "less with `offload.embeddings: host`, `offload.head: host`\n" in f"{refused.value}"


@pytest.mark.parametrize(
    ("pair", "name", "how"),
    [
        (both, "offload embeddings", "`offload.embeddings: host`"),
        (both_head, "offload the head", "`offload.head: host`"),
        (
            both_tied,
            "offload embeddings and head",
            "`offload.embeddings: host` and `offload.head: host`",
        ),
    ],
)
def test_the_other_place_is_priced_with_the_slots_as_they_are(
    pair: Callable[[], tuple[Plan, Plan]], name: str, how: str
) -> None:
    device, host = pair()
    there, back = ({x.name: x for x in what_if(one, num_cards=2).options} for one in (device, host))
    assert (there[name].standing, there[name].how) == ("a setting", how)
    figures = there[name].figures
    assert figures is not None
    assert (figures.vram_bytes, figures.step_s) == (host.peak_bytes, host.step_s)
    expected = ("in the plan", how.replace("host", "device"))
    assert (back[name].standing, back[name].how) == expected
    if pair is both_tied:
        assert not {"offload embeddings", "offload the head"} & there.keys()


def test_what_a_moved_embedding_frees_is_listed_and_not_spent_on_graphs() -> None:
    made = plan(FACTS, CARD, request(num_kept_graphs=None, num_micro_batches=2))
    held = with_workload(replace(made.request, num_slots=made.num_slots), embeddings="host")
    assert plan(FACTS, CARD, held).num_kept_graphs > made.num_kept_graphs > 0
    options = {one.name: one for one in what_if(made, num_cards=2).options}
    figures = options["offload embeddings"].figures
    assert figures is not None
    assert made.peak_bytes - figures.vram_bytes > 0.9 * TABLE
    assert figures.step_s == pytest.approx(made.step_s, rel=2e-3)


def test_a_tied_weight_that_trains_has_no_other_place() -> None:
    trained = request(workload(adapter=lora(modules=("embed_tokens",))), num_slots=2)
    options = what_if(plan(TIED_FACTS, CARD, trained), num_cards=2).options
    assert "offload embeddings and head" not in {x.name for x in options}


def test_what_the_head_costs_is_without_the_rows() -> None:
    device, host = both_tied()
    cost = PlaceCost.of(host, "head")
    assert cost is not None
    layer = host.costs.layers[0].weight_bytes
    assert (cost.saved_vram_bytes, cost.num_loads) == (TABLE, 4)
    assert cost.h2d_bytes == TABLE + 4 * layer
    assert 0 <= cost.added_s <= host.step_s - device.step_s
    assert PlaceCost.of(device, "head") is None


def test_full_training_of_layers_alone_may_have_it_there() -> None:
    layers = tuple(layer.num_parameters for layer in TIED_FACTS.layers)
    frozen = AdapterSpec.none(WholeWeights(layers=layers, outer=()))
    large = named_machine("rtx4090", ram_bytes=256 * GIB)
    asked = request(workload(adapter=frozen), num_slots=4)
    device, host = (
        plan(TIED_FACTS, large, asked),
        plan(TIED_FACTS, large, with_workload(asked, embeddings="host", head="host")),
    )
    assert host.host_bytes - device.host_bytes == TABLE + 2 * ROWS_BYTES
    assert sizes(host.device_memory)[OUTER] == 4096 * 2


# ----------------------------------------------------------------------------------- virtual tokens


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "vocab_size": 9,
}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3}
CONFIGS = {"prompt": PromptTuningConfig, "p_tuning": PromptEncoderConfig}

DELTA = DeltaAttention(num_key_heads=1, num_value_heads=1, key_dim=8, value_dim=8, conv_tokens=4)


@pytest.mark.parametrize("method", CONFIGS)
def test_what_trains_has_the_shapes_that_peft_makes(method: str) -> None:
    config = Qwen3Config(hidden_size=32, intermediate_size=8, num_hidden_layers=1, vocab_size=9)
    made = CONFIGS[method](num_virtual_tokens=6, task_type="CAUSAL_LM")
    adapted = get_peft_model(Qwen3ForCausalLM(config), made)
    shapes = [tuple(p.shape) for p in adapted.parameters() if p.requires_grad]
    assert list(virtual_shapes(6, 32, has_encoder=method == "p_tuning")) == shapes


@pytest.mark.parametrize("has_mlp", [False, True])
def test_a_prefix_has_the_shapes_that_peft_makes(has_mlp: bool) -> None:
    config = Qwen3Config(**SIZES)
    made = PrefixTuningConfig(
        num_virtual_tokens=6, prefix_projection=has_mlp, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(Qwen3ForCausalLM(config), made)
    shapes = [tuple(p.shape) for p in adapted.parameters() if p.requires_grad]
    spec = prefix_spec(model_facts(config.to_dict()), num_past=6, has_encoder=has_mlp)
    assert list(spec.virtual) == shapes
    assert spec.past_bytes == 4 * 6 * 3 * 2 * 2 * 16  # layers, keys and values, heads, features


def test_a_model_of_other_caches_is_refused_where_it_is_planned() -> None:
    facts = qwen3_8b()
    kind = facts.layers[0].attention
    assert isinstance(kind, SoftmaxAttention)
    wider = replace(facts.layers[0], attention=replace(kind, num_kv_heads=1))
    for layers in ((wider, *facts.layers[1:]), (replace(wider, attention=DELTA), wider)):
        with pytest.raises(UnsupportedModelError, match="prefix for a qwen3 model"):
            prefix_spec(replace(facts, layers=layers), num_past=6, has_encoder=False)


def asked(method: str, **adapter: object) -> PlanRequest:
    recipe = Recipe.model_validate(
        {
            "model": {"path": "Qwen/Qwen3-8B"},
            "adapter": {"method": method, **adapter},
            "data": {"path": "rows.jsonl"},
            "train": {"seq_len": 1000, "grad_accum_steps": 4, "steps": 2},
            "output": {"name": "x"},
        }
    )
    return full_request(recipe, qwen3_8b(), num_ranks=1)


@pytest.mark.parametrize("method", CONFIGS)
def test_the_plan_prices_longer_rows_and_a_trained_front(method: str) -> None:
    request, facts = asked(method), qwen3_8b()
    spec = request.typical.adapter
    assert request.typical.seq_len == request.largest.seq_len == 1020
    assert request.typical.label_tokens == 1000
    shapes = trained_tensor_shapes(facts, spec)
    assert trained_parameters(facts, spec) == sum(map(math.prod, shapes))
    assert shapes[0] == (20, 4096)
    found = plan(facts, named_machine("rtx5090"), request)
    assert found.costs.front_backward_s > 0
    shorter = replace(request, typical=replace(request.typical, seq_len=1000))
    assert plan(facts, named_machine("rtx5090"), shorter).step_s < found.step_s


def test_the_plan_prices_the_keys_of_a_prefix_and_its_mask() -> None:
    facts, card = qwen3_8b(), named_machine("rtx5090")
    few, many = (asked("prefix", num_virtual_tokens=num) for num in (20, 1020))
    assert few.typical.seq_len == few.largest.seq_len == few.typical.label_tokens == 1000
    assert trained_parameters(facts, few.typical.adapter) == 20 * 36 * 2 * 8 * 128
    costs = [plan(facts, card, request).costs.layers[0] for request in (few, many)]
    work = [
        attention_work(
            facts.layers[0].attention,
            card,
            num_tokens=1000,
            seq_len=1000,
            dtype_bytes=2,
            num_past=num,
        )
        for num in (0, 20, 1020)
    ]
    assert work[1].flops == 4 * 32 * 128 * 1000 * 1020  # a mask that is a tensor hides no block
    assert work[0].flops == work[1].flops * 1000 / 2040
    assert costs[1].forward_s > costs[0].forward_s
    spec = many.typical.adapter
    workloads = [replace(many.largest, adapter=replace(spec, num_past=num)) for num in (0, 1020)]
    recorded = [recorded_bytes(facts, workload, is_padded=True) for workload in workloads]
    tokens = many.largest.num_tokens
    assert recorded[1] - recorded[0] == tokens * 1020 + spec.past_bytes
    visits = [
        visit_bytes(facts, card, facts.layers[0], workload, is_padded=True)
        for workload in workloads
    ]
    of_all_heads = many.largest.micro_batch_size * 1020 * 32 * 2 * 128 * 2
    assert visits[1].saved - visits[0].saved == of_all_heads
    with pytest.raises(ConfigError, match="and 40000 virtual tokens"):
        asked("prefix", num_virtual_tokens=40000)


# ------------------------------------------------------------------------------------- feature pass


FEATURE_PASS_FACTS = with_classifier_head(qwen3_8b(), 3, has_bias=False)
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
    return plan(FEATURE_PASS_FACTS, slow_link() if is_slow else named_machine("rtx5090"), asked)


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
    shared = plan(FEATURE_PASS_FACTS, alone.machine, both)
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
    costs = calibrate(found.costs, measured, optimizer_s=0.5)
    assert with_costs(found, costs).step_s == 0.75
    assert costs.layers == found.costs.layers
    assert costs.grade == "calibrated"
