"""A weight of embedding and head, by recipe: both settings together, and both last by `auto`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import ConfigError
from finetune.planning.candidates import choose, full_requests, in_forms
from finetune.planning.request import facts_of
from finetune.planning.subject import model_subject
from finetune.recipe.recipe import Recipe, resolved_yaml, with_settings
from finetune.run.run_dir import RunDir, as_begun
from finetune.training.prepare import with_chosen
from offload.errors import DoesNotFitError
from offload.plan.machine.machine import GIB, Machine, named_machine
from offload.plan.request import PlanRequest, with_workload
from tests.builders import recipe_values

CARD = named_machine("rtx4090")
ON_HOST = ("offload.embeddings=host", "offload.head=host")


def small_card(gib: float) -> Machine:
    return replace(CARD, vram_bytes=int(gib * GIB))


def requests(*overrides: str, model: str = "qwen3-4b", num_ranks: int = 1) -> list[PlanRequest]:
    asked = model_subject(model, ["train.tokens_per_step=4096", *overrides])
    return full_requests(asked.recipe, asked.facts, num_ranks=num_ranks)


def places(*overrides: str, **asked: Any) -> set[tuple[str, str]]:
    return {(x.typical.embeddings, x.typical.head) for x in requests(*overrides, **asked)}


def chosen(gib: float, *overrides: str, model: str = "qwen3-4b") -> tuple[str, str]:
    """Return where embedding and head are on a card with so much memory."""
    asked = model_subject(model, ["train.tokens_per_step=4096", *overrides])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    typical = choose(asked.facts, small_card(gib), ways).plan.request.typical
    return typical.embeddings, typical.head


def test_it_is_in_ram_only_where_nothing_else_fits() -> None:
    device, host = ("device", "device"), ("host", "host")
    assert [chosen(gib) for gib in (24, 4, 2.7)] == [device, device, host]
    assert chosen(24, *ON_HOST) == host
    with pytest.raises(DoesNotFitError) as refused:
        chosen(2.7, "offload.embeddings=device")
    assert "`offload.embeddings: host` and `offload.head: host`" in refused.value.hint
    with pytest.raises(DoesNotFitError, match="the embedding in RAM, the head in RAM"):
        chosen(1)


def test_auto_is_where_the_other_of_the_two_is() -> None:
    assert places() == {("device", "device"), ("host", "host")}
    for one in (*ON_HOST, "offload.embeddings=device", "offload.head=device"):
        place = one.rpartition("=")[2]
        assert places(one) == {(place, place)}
    assert places("offload.embeddings=device", model="qwen3-8b") == {
        ("device", "device"),
        ("device", "host"),
    }  # of a head of its own


@pytest.mark.parametrize(("here", "there"), [("head", "embeddings"), ("embeddings", "head")])
def test_one_of_both_alone_is_refused_with_the_fix(here: str, there: str) -> None:
    with pytest.raises(ConfigError) as no:
        requests(f"offload.{here}=host", f"offload.{there}=device")
    assert str(no.value).startswith(
        f"offload.{here}: host with offload.{there}: device for this qwen3 model: they are one"
    )
    assert no.value.hint == f"`offload.{there}: host`, or `offload.{here}: device`"
    assert places(f"offload.{there}=host", f"offload.{here}=host") == {("host", "host")}
    assert places(f"offload.{here}=device", f"offload.{there}=device") == {("device", "device")}


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (
            ["offload.head=host", "adapter.modules_to_save=[embed_tokens]"],
            "offload.head: host for this qwen3 model: the embedding has the same weight: it trains",
            "`offload.head: device`",
        ),
        (
            [*ON_HOST, 'train.what=["*embed_tokens*", "*q_proj*"]', "train.steps=3"],
            "offload.embeddings: host for this qwen3 model: it trains",
            "`offload.embeddings: device` with `offload.head: device`",
        ),
        (
            ["offload.head=host", "adapter.method=prompt"],
            "the embedding has the same weight: virtual tokens train, which it looks up",
            "`offload.head: device`",
        ),
    ],
)
def test_one_that_trains_or_looks_virtual_tokens_up_is_refused_by_name(
    words: list[str], what: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as no:
        requests(*words)
    assert what in str(no.value)
    assert no.value.hint == hint
    autos = [word.replace("=host", "=auto") for word in words]
    assert places(*autos) == {("device", "device")}


@pytest.mark.parametrize("what", ['["*q_proj*"]', '["last_4_layers"]'])
def test_weights_of_layers_may_train_with_it_in_ram(what: str) -> None:
    words = (f"train.what={what}", "train.steps=3")
    assert places(*words, *ON_HOST) == {("host", "host")}
    assert places(*words) == {("device", "device"), ("host", "host")}


def test_the_other_place_comes_last_and_does_not_change_the_requests_before_it() -> None:
    found, plain = requests(), requests("offload.head=device")
    assert found[: len(plain)] == plain
    assert found[len(plain) :] == [
        with_workload(one, embeddings="host", head="host") for one in plain
    ]
    # where layers compute in RAM, nothing is saved there
    forms = in_forms(found, replace(CARD, device="cpu"))
    assert {one.typical.head for form in forms for one in form} == {"device"}


def test_where_a_plan_has_put_it_is_written_down() -> None:
    asked = model_subject("qwen3-4b", ["train.tokens_per_step=4096"])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    for gib, place in ((24, "auto"), (2.7, "host")):
        made = choose(asked.facts, small_card(gib), ways).plan
        written = with_chosen(asked.recipe, made).offload
        assert (written.embeddings, written.head) == (place, place)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ("host", "host")),
        ({"head": "host"}, ("host", "host")),
        ({"head": "device"}, ("auto", "device")),
        ({"embeddings": "device"}, ("device", "auto")),
        ({"embeddings": "device", "head": "device"}, ("device", "device")),
    ],
)
def test_a_resumed_run_keeps_it_unless_one_of_both_is_asked_to_be_elsewhere(
    asked: dict[str, Any], expected: tuple[str, str], tmp_path: Path
) -> None:
    def recipe(**offload: Any) -> Recipe:
        changes = {f"offload__{name}": place for name, place in offload.items()}
        values = recipe_values(
            model__path=None, model__config="tiny-qwen3", model__init="random", **changes
        )
        return Recipe.model_validate(values)

    run = RunDir(tmp_path)
    begun = with_settings(recipe(), {"offload.embeddings": "host", "offload.head": "host"})
    run.recipe_file.write_text(resolved_yaml(begun))
    found = as_begun(recipe(**asked), run.begun())
    assert (found.offload.embeddings, found.offload.head) == expected
    before = with_settings(recipe(), {"offload.embeddings": "device", "offload.head": "device"})
    moved = as_begun(recipe(head="host"), before).offload
    assert (moved.embeddings, moved.head) == ("auto", "host")
    facts = facts_of(found.model)
    assert facts.tie_word_embeddings
    assert full_requests(found, facts, num_ranks=1)  # and none of them is refused
