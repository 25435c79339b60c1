import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import ConfigError
from finetune.planning.candidates import (
    SUGGESTED_ROUNDING,
    choose,
    chooser,
    full_requests,
    in_forms,
    with_each_size,
)
from finetune.planning.request import facts_of
from finetune.planning.subject import model_subject
from finetune.recipe.load import load_shape
from finetune.recipe.recipe import Recipe, resolved_yaml, with_settings
from finetune.recipe.rules import broken_rules
from finetune.run.run_dir import RunDir, as_begun
from finetune.training.prepare import with_chosen
from offload.errors import DoesNotFitError
from offload.plan.facts.facts import ModelFacts, model_facts
from offload.plan.machine.machine import GIB, Machine, named_machine
from offload.plan.request import PlanRequest, with_workload
from offload.plan.schedule.schedule import Order
from tests.builders import recipe_values

CARD = named_machine("rtx4090")


def recipe(**changes: Any) -> Recipe:
    values = recipe_values(
        model__path=None, model__config="tiny-qwen3", model__init="random", **changes
    )
    return Recipe.model_validate(values)


def open_recipe(**changes: Any) -> Recipe:
    """Return a recipe of 12 sequences per step that leaves everything open."""
    return recipe(
        train__grad_accum_steps=None,
        train__tokens_per_step=12 * 512,
        train__micro_batch_size="auto",
        **changes,
    )


def requests(asked: Recipe, *, num_ranks: int = 1) -> list[PlanRequest]:
    return full_requests(asked, facts_of(asked.model), num_ranks=num_ranks)


def codecs(asked: Recipe) -> list[str]:
    return list(dict.fromkeys(one.largest.codec for one in requests(asked)))


def test_each_cut_of_a_step_has_its_sequences() -> None:
    found = with_each_size(open_recipe(), num_ranks=1)
    assert [one.train.micro_batch_size for one in found] == [1, 2, 3, 4, 6, 12]
    for one in found:
        assert one.train.sequences * one.train.num_micro_batches == 12
        assert one.train.global_batch_size == 12
        assert not list(broken_rules(one))
    for asked in requests(open_recipe()):
        assert asked.typical.num_tokens * asked.num_micro_batches == 12 * 512
        assert asked.typical.label_tokens == asked.typical.num_tokens


def test_attention_is_kept_unless_the_recipe_says_none_or_layers_are_compiled() -> None:
    for asked, has_outputs in (
        (recipe(), True),
        (recipe(offload__attention_outputs="none"), False),
        (recipe(train__compile=True), False),
    ):
        assert {one.has_outputs for one in requests(asked)} == {has_outputs}


def test_graphs_may_be_sent_unless_the_recipe_says_none_or_layers_are_compiled() -> None:
    for asked, has_sent_graphs in (
        (recipe(), True),
        (recipe(offload__sent_graphs="none"), False),
        (recipe(train__compile=True), False),
    ):
        assert {one.has_sent_graphs for one in requests(asked)} == {has_sent_graphs}


def test_each_rank_has_a_micro_batch() -> None:
    assert [one.train.num_micro_batches for one in with_each_size(open_recipe(), num_ranks=4)] == [
        12,
        6,
        4,
    ]


def test_a_size_that_was_given_is_kept() -> None:
    asked = recipe(train__micro_batch_size=3)
    assert with_each_size(asked, num_ranks=1) == (asked,)


def test_auto_means_exact_forms_alone() -> None:
    assert codecs(recipe()) == ["native", "bf16_packed"]
    assert codecs(recipe(model__dtype="float32")) == ["native"]
    assert codecs(recipe(offload__codec="nf4")) == ["nf4"]
    assert codecs(recipe(adapter__modules_to_save=["norms"])) == ["native", "bf16_packed"]
    whole = recipe(adapter__targets=["q_proj"], adapter__modules_to_save=["v_proj"])
    assert codecs(whole) == ["native"]


def test_a_place_that_was_given_is_kept() -> None:
    for stash, expected in (("auto", {False, True}), ("host", {True}), ("device", {False})):
        asked = recipe(offload__stash=stash)
        assert {one.is_stashed for one in requests(asked)} == expected


def test_the_plainest_request_stands_first() -> None:
    found = requests(open_recipe())
    assert found[0].largest.codec == "native"
    assert not found[0].is_stashed
    assert found[0].largest.micro_batch_size == 1
    keys = [
        (
            one.order is Order.MICRO_BATCH_MAJOR,
            -one.largest.head_chunk_tokens,
            one.largest.codec != "native",
            one.is_stashed,
            one.largest.micro_batch_size,
        )
        for one in found
        if one.largest.mlp_chunk_tokens is None and one.typical.head == "device"
    ]
    assert keys == sorted(keys)
    # tiles come after all of these, and then a weight of embedding and head in RAM
    others = found[len(keys) :]
    assert all(one.largest.mlp_chunk_tokens or one.typical.head == "host" for one in others)
    layers, rounds = 3 * 2 * 2 * 6, 3 * 2 * 5  # a step of one micro-batch is no round
    assert len(set(keys)) == len(keys) == layers + rounds


def test_auto_needs_the_tokens_of_a_step() -> None:
    values = recipe_values(train__micro_batch_size="auto")
    with pytest.raises(ValueError, match=r"is auto and train\.grad_accum_steps is 4"):
        Recipe.model_validate(values)
    values = recipe_values(
        train__micro_batch_size="auto", train__grad_accum_steps=None, train__tokens_per_step=700
    )
    with pytest.raises(ValueError, match=r"it must be a multiple of 512 \(seq_len\)"):
        Recipe.model_validate(values)


def with_train(asked: Recipe, **changes: object) -> Recipe:
    return asked.model_copy(update={"train": asked.train.model_copy(update=changes)})


def test_a_router_loss_of_each_micro_batch_does_not_leave_the_cut_open(tmp_path) -> None:
    config = tmp_path / "config.json"
    shape = load_shape("tiny-qwen3-moe")
    config.write_text(json.dumps(shape | {"output_router_logits": True}))
    asked = open_recipe()
    asked = asked.model_copy(
        update={"model": asked.model.model_copy(update={"config": str(config)})}
    )
    assert len(with_each_size(asked, num_ranks=1)) > 1


def test_rounding_is_suggested_only_where_the_run_could_have_it() -> None:
    slow = named_machine("rtx4090", link_bytes_per_s=1e6)

    def suggested(asked: Recipe) -> set[str]:
        facts: ModelFacts = facts_of(asked.model)
        found = choose(facts, slow, full_requests(asked, facts, num_ranks=1))
        return {str(what_if.change) for what_if in found.what_ifs} & set(SUGGESTED_ROUNDING)

    few_slots = {"offload__num_slots": 2, "train__seq_len": 8}
    assert suggested(recipe(**few_slots)) == {"int8", "nf4"}
    whole = recipe(adapter__targets=["q_proj"], adapter__modules_to_save=["v_proj"], **few_slots)
    assert suggested(whole) == set()
    assert suggested(recipe(offload__codec="nf4", **few_slots)) == set()


# ------------------------------------------------------------------------------------------ head


def small_card(gib: float) -> Machine:
    return replace(named_machine("rtxa2000"), vram_bytes=int(gib * GIB))


def chosen_chunk(gib: float, *overrides: str) -> int:
    asked = model_subject(
        "qwen3-4b", ["train.tokens_per_step=2048", "model.layer_kernels=plain", *overrides]
    )
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    return choose(asked.facts, small_card(gib), ways).plan.request.largest.head_chunk_tokens


@pytest.mark.thorough
def test_fewer_logits_exist_at_a_time_only_where_more_would_not_fit() -> None:
    assert [chosen_chunk(gib) for gib in (12, 6, 3.5, 3.3)] == [1024, 1024, 256, 256]


def test_a_head_chunk_that_the_recipe_names_is_kept_or_refused() -> None:
    assert chosen_chunk(12, "offload.head_chunk=100") == 100
    with pytest.raises(DoesNotFitError, match="of device memory") as refused:
        chosen_chunk(3.5, "offload.head_chunk=1024")
    assert "head chunk; less with a smaller `offload.head_chunk`" in refused.value.limit


def test_a_resumed_run_keeps_its_head_chunk(tmp_path: Path) -> None:
    begun = with_settings(recipe(), {"offload.head_chunk": 256})
    run = RunDir(tmp_path)
    run.recipe_file.write_text(resolved_yaml(begun))
    assert as_begun(recipe(), run.begun()).offload.head_chunk == 256
    assert as_begun(recipe(offload__head_chunk=64), run.begun()).offload.head_chunk == 64
    before = resolved_yaml(recipe()).replace("  head_chunk: auto\n", "")
    run.recipe_file.write_text(before)  # of a run that knew no such setting
    assert as_begun(recipe(), run.begun()) == recipe()


# ------------------------------------------------------------------------------------------- MLP


def chosen_tile(seq_len: int, *overrides: str, model: str = "llama-3.1-8b") -> int | None:
    sizes = [f"train.seq_len={seq_len}", f"train.tokens_per_step={seq_len}"]
    asked = model_subject(model, [*sizes, "offload.codec=nf4", *overrides])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    card = named_machine("rtx4090")
    return choose(asked.facts, card, ways).plan.request.largest.mlp_chunk_tokens


def test_mlps_compute_in_tiles_only_where_nothing_fits_otherwise() -> None:
    assert [chosen_tile(n) for n in (2048, 65536, 81920, 120832)] == [None, None, 8192, 8192]
    assert chosen_tile(2048, "offload.mlp_chunk=100") == 100
    with pytest.raises(DoesNotFitError):
        chosen_tile(81920, "offload.mlp_chunk=whole")
    with pytest.raises(DoesNotFitError):
        chosen_tile(81920, "train.compile=true")


def test_tiles_do_not_change_the_requests_before_them() -> None:
    words = ["train.seq_len=16384", "train.tokens_per_step=16384"]
    words += ["offload.embeddings=device", "offload.head=device"]
    asked = model_subject("llama-3.1-8b", words)
    whole = model_subject("llama-3.1-8b", [*words, "offload.mlp_chunk=whole"])
    found, plain = (full_requests(x.recipe, x.facts, num_ranks=1) for x in (asked, whole))
    assert found[: len(plain)] == plain
    assert {x.largest.mlp_chunk_tokens for x in found[len(plain) :]} == {8192, 2048, 512}


def test_a_resumed_run_keeps_its_tiles(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.recipe_file.write_text(resolved_yaml(with_settings(recipe(), {"offload.mlp_chunk": 512})))
    assert as_begun(recipe(), run.begun()).offload.mlp_chunk == 512
    assert as_begun(recipe(offload__mlp_chunk=64), run.begun()).offload.mlp_chunk == 64


def test_tiles_of_compiled_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"offload\.mlp_chunk is 64 and train\.compile is true"):
        recipe(offload__mlp_chunk=64, train__compile=True)


def test_parts_of_a_model_whose_config_asks_for_a_router_loss_are_refused(tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(load_shape("tiny-qwen3-moe") | {"output_router_logits": True}))
    values = recipe_values(
        model__path=None, model__config=str(file), model__init="random", train__parallel="fsdp2"
    )
    asked = Recipe.model_validate(values)
    with pytest.raises(
        ConfigError, match=r"config asks for a router loss; .*\n\nhint: .*_coef: 0`"
    ):
        chooser(asked)
    assert chooser(with_settings(asked, {"train.parallel": "stream"})) is choose


def full_8b(**offload: Any) -> Recipe:
    values = recipe_values(
        model__path=None,
        model__config="qwen3-8b",
        model__init="random",
        train__what="all",
        train__steps=100,
        **{f"offload__{name}": value for name, value in offload.items()},
    )
    return Recipe.model_validate(values)


# ------------------------------------------------------------------------------------ embeddings


def chosen_place(gib: float, *overrides: str, model: str = "qwen3-8b") -> str:
    asked = model_subject(model, ["train.tokens_per_step=4096", *overrides])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    return choose(asked.facts, small_card(gib), ways).plan.request.typical.embeddings


def test_the_embedding_is_in_ram_only_where_nothing_else_fits() -> None:
    assert [chosen_place(gib) for gib in (24, 6, 4)] == ["device", "device", "host"]
    assert chosen_place(24, "offload.embeddings=host") == "host"
    with pytest.raises(DoesNotFitError) as refused:
        chosen_place(4, "offload.embeddings=device")
    assert "`offload.embeddings: host`" in refused.value.hint
    with pytest.raises(DoesNotFitError, match="the embedding in RAM"):
        chosen_place(2)


def test_the_other_place_does_not_change_the_requests_before_it() -> None:
    asked = model_subject("qwen3-8b", ["offload.head=device"])
    fixed = model_subject("qwen3-8b", ["offload.head=device", "offload.embeddings=device"])
    found, plain = (full_requests(x.recipe, x.facts, num_ranks=1) for x in (asked, fixed))
    assert found[: len(plain)] == plain
    assert found[len(plain) :] == [with_workload(one, embeddings="host") for one in plain]
    # where layers compute in RAM, an embedding there saves nothing
    forms = in_forms(found, replace(CARD, device="cpu"))
    assert {one.typical.embeddings for form in forms for one in form} == {"device"}
    assert len(in_forms(found, CARD)) == 2 * len(forms)


def test_a_resumed_run_keeps_the_place_that_was_chosen(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.recipe_file.write_text(
        resolved_yaml(with_settings(recipe(), {"offload.embeddings": "host"}))
    )
    assert as_begun(recipe(), run.begun()).offload.embeddings == "host"
    asked = recipe(offload__embeddings="device")
    assert as_begun(asked, run.begun()).offload.embeddings == "device"
    assert as_begun(recipe(), run.begun(), num_ranks=2).offload.embeddings == "host"
    begun = full_8b(embeddings="host")
    split = with_settings(full_8b(), {"train.parallel": "fsdp2"})
    assert as_begun(split, begun, num_ranks=2).offload.embeddings == "auto"
    before = resolved_yaml(recipe()).replace("  embeddings: auto\n", "")
    run.recipe_file.write_text(before)  # of a run that knew no such setting
    assert as_begun(recipe(), run.begun()) == recipe()


def test_a_place_that_others_of_a_wave_exclude_is_written_down() -> None:
    asked = model_subject("qwen3-8b", ["offload.embeddings=host", "offload.head=host"])
    on_device = model_subject("qwen3-8b", []).recipe
    ways = full_requests(on_device, asked.facts, num_ranks=1)
    made = choose(asked.facts, CARD, ways[:1]).plan
    written = with_chosen(asked.recipe, made).offload
    assert (written.embeddings, written.head) == ("device", "device")


def test_what_a_plan_has_chosen_is_written_down() -> None:
    asked = model_subject("qwen3-8b", ["train.tokens_per_step=4096"])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    for gib, place in ((24, "auto"), (4, "host")):
        made = choose(asked.facts, small_card(gib), ways).plan
        assert with_chosen(asked.recipe, made).offload.embeddings == place


@pytest.mark.thorough
def test_an_embedding_that_is_not_among_the_weights_that_train_is_looked_up_in_ram() -> None:
    words = ["offload.embeddings=host", "train.steps=3"]
    asked = model_subject("qwen3-8b", [*words, 'train.what=["*q_proj*"]'])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    assert {one.typical.embeddings for one in ways} == {"host"}


# ------------------------------------------------------------------------------------------ head


def places_of(gib: float, *overrides: str, model: str = "qwen3-8b") -> tuple[str, str]:
    """Return where the embedding and the head are on a card with so much memory."""
    asked = model_subject(model, ["train.tokens_per_step=4096", *overrides])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    typical = choose(asked.facts, small_card(gib), ways).plan.request.typical
    return typical.embeddings, typical.head


def test_the_head_is_in_ram_only_where_nothing_fits_with_the_embedding_alone_there() -> None:
    found = [places_of(gib) for gib in (24, 6, 4, 3.4)]
    assert found == [("device", "device")] * 2 + [("host", "device"), ("host", "host")]
    assert places_of(24, "offload.head=host") == ("device", "host")
    assert places_of(4.8, "offload.embeddings=device") == ("device", "host")
    with pytest.raises(DoesNotFitError) as refused:
        places_of(3.4, "offload.head=device")
    assert "`offload.head: host`" in refused.value.hint
    with pytest.raises(DoesNotFitError, match="the embedding in RAM, the head in RAM"):
        places_of(2)


def test_the_other_place_of_the_head_does_not_change_the_requests_before_it() -> None:
    asked = model_subject("qwen3-8b", [])
    fixed = model_subject("qwen3-8b", ["offload.head=device"])
    found, plain = (full_requests(x.recipe, x.facts, num_ranks=1) for x in (asked, fixed))
    assert found[: len(plain)] == plain
    moved = [one for one in plain if one.typical.embeddings == "host"]
    assert found[len(plain) :] == [with_workload(one, head="host") for one in moved]
    # where layers compute in RAM, a head there saves nothing
    forms = in_forms(found, replace(CARD, device="cpu"))
    assert {one.typical.head for form in forms for one in form} == {"device"}


def test_a_resumed_run_keeps_the_place_of_its_head(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.recipe_file.write_text(resolved_yaml(with_settings(recipe(), {"offload.head": "host"})))
    assert as_begun(recipe(), run.begun()).offload.head == "host"
    assert as_begun(recipe(offload__head="device"), run.begun()).offload.head == "device"
    before = resolved_yaml(recipe()).replace("  head: auto\n", "")
    run.recipe_file.write_text(before)  # of a run that knew no such setting
    assert as_begun(recipe(), run.begun()) == recipe()


def test_where_a_plan_has_put_the_head_is_written_down() -> None:
    asked = model_subject("qwen3-8b", ["train.tokens_per_step=4096"])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    for gib, place in ((24, "auto"), (3.4, "host")):
        made = choose(asked.facts, small_card(gib), ways).plan
        assert with_chosen(asked.recipe, made).offload.head == place


@pytest.mark.thorough
def test_a_head_that_is_not_among_the_weights_that_train_may_be_in_ram() -> None:
    words = ["offload.head=host", "train.steps=3"]
    asked = model_subject("qwen3-8b", [*words, 'train.what=["*q_proj*"]'])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    assert {one.typical.head for one in ways} == {"host"}


@pytest.mark.parametrize("is_tied", [False, True])
def test_what_trains_around_the_layers_is_on_the_device(*, is_tied: bool) -> None:
    facts = model_facts(load_shape("qwen3-8b"))
    if is_tied:
        facts = replace(facts, tie_word_embeddings=True, head_parameters=0)
    ways = full_requests(full_8b(), facts, num_ranks=1)
    assert {(one.typical.embeddings, one.typical.head) for one in ways} == {("device", "device")}
    for name in ("embeddings", "head"):
        with pytest.raises(ConfigError, match=f"^offload.{name}: host for this") as no:
            full_requests(full_8b(**{name: "host"}), facts, num_ranks=1)
        assert str(no.value).split(";")[0].endswith("it trains")
        assert no.value.hint == f"`offload.{name}: device`"
