"""Settings without an effect and combinations that cannot be are refused, with the fix."""

from typing import Any, get_args

import pytest

from finetune.recipe.rules import broken_objective_rules
from finetune.recipe.sections import LOSSES, Method, Settings


def settings(objective: dict[str, Any], **sections: dict[str, Any]) -> Settings:
    content: dict[str, dict[str, Any]] = {
        "model": {"path": "Qwen/Qwen3-8B"},
        "data": {"path": "rows.jsonl"},
        "train": {"steps": 3, "grad_accum_steps": 1},
        "output": {"name": "x"},
        "objective": objective,
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section
    return Settings.model_validate(content)


@pytest.mark.parametrize("method", get_args(Method))
def test_every_loss_with_its_defaults_breaks_no_rule(method: str) -> None:
    for loss in LOSSES.get(method, (None,)):
        smoothing = {"label_smoothing": 0.1} if loss == "robust" else {}
        reward: dict[str, dict[str, Any]] = {
            "model": {"head": "reward"},
            "data": {"too_long": "drop"},
        }
        classes = reward | {"model": {"head": "classes", "num_classes": 3}}
        words = reward | {"model": {"head": "token_classes", "num_classes": 3}}
        by_head = {"reward": reward, "classify": classes, "classify_tokens": words}
        sections = by_head.get(method, {})
        recipe = settings({"method": method, "loss": loss} | smoothing, **sections)
        assert not list(broken_objective_rules(recipe))


@pytest.mark.parametrize(
    ("sections", "field", "what"),
    [
        ({"data": {"too_long": "truncate"}}, "data.too_long", "data.too_long is truncate"),
        ({"train": {"what": "all"}}, "train.what", "train.what is all"),
        ({"train": {"router_loss_coef": 0.01}}, "train.router_loss_coef", "is 0.01"),
        ({"model": {"head": "tokens"}}, "model.head", "model.head is tokens"),
        ({"data": {"format": "preference"}}, "data.format", "data.format is preference"),
        ({"report": {"samples": 3}}, "report.samples", "report.samples is 3"),
    ],
)
def test_what_makes_no_reward_is_named(
    sections: dict[str, dict[str, Any]], field: str, what: str
) -> None:
    right = {"model": {"head": "reward"}, "data": {"too_long": "drop"}}
    given = {name: right.get(name, {}) | sections.get(name, {}) for name in {**right, **sections}}
    found = list(broken_objective_rules(settings({"method": "reward"}, **given)))
    assert [one.field for one in found] == [field]
    assert what in found[0].what


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ({"num_classes": None}, "model.num_classes is null and objective.method is classify"),
        ({"head": "reward"}, "model.head is reward and objective.method is classify"),
    ],
)
def test_what_makes_no_classifier_is_named(model: dict[str, Any], what: str) -> None:
    right = {"head": "classes", "num_classes": 3}
    (found,) = broken_objective_rules(
        settings({"method": "classify"}, model=right | model, data={"too_long": "drop"})
    )
    assert found.what == what


def test_a_reward_head_is_for_rewards_alone() -> None:
    (found,) = broken_objective_rules(settings({"method": "sft"}, model={"head": "reward"}))
    assert found.what == "model.head is reward and objective.method is sft"
    assert "`model.head: tokens`" in found.hint


@pytest.mark.parametrize(
    ("objective", "field", "hint"),
    [
        ({"beta": 0.1}, "beta", "`objective.method: dpo`, or leave out `objective.beta`"),
        ({"loss": "dr_grpo"}, "loss", "`objective.method: grpo`, or leave out `objective.loss`"),
        ({"gamma": 0.5}, "gamma", "`objective.method: simpo`, or leave out `objective.gamma`"),
        (
            {"reference": "base"},
            "reference",
            "`objective.method: dpo`, or leave out `objective.reference`",
        ),
        ({"method": "simpo", "reference": "base"}, "reference", "leave out `objective.reference`"),
        (
            {"method": "dpo", "loss": "hinge", "label_smoothing": 0.1},
            "label_smoothing",
            "leave out `objective.label_smoothing`",
        ),
        ({"method": "orpo", "sft_weight": 1.0}, "sft_weight", "leave out `objective.sft_weight`"),
        ({"method": "orpo", "loss": "sigmoid"}, "loss", "leave out `objective.loss`"),
        (
            {"method": "grpo", "beta": 0.0, "reference": "base"},
            "reference",
            "leave out `objective.reference`",
        ),
    ],
)
def test_a_setting_that_the_method_does_not_read_is_named(
    objective: dict[str, Any], field: str, hint: str
) -> None:
    (breach,) = broken_objective_rules(settings(objective))
    assert breach.field == f"objective.{field}"
    assert breach.what.startswith(f"objective.{field} is {objective[field]}")
    assert breach.limit == "it has no effect there"
    assert breach.hint == hint


def test_a_loss_of_another_method_is_refused_with_those_that_there_are() -> None:
    (breach,) = broken_objective_rules(settings({"method": "kto", "loss": "ipo"}))
    assert breach.what == "objective.loss is ipo and objective.method is kto"
    assert breach.limit == "the losses of kto are kto, apo_zero_unpaired"
    assert breach.hint == "`objective.loss: kto`"


@pytest.mark.parametrize(
    ("objective", "field", "hint"),
    [
        ({"method": "dpo", "beta": 0.0}, "beta", "`objective.beta: 0.1`"),
        (
            {"method": "kto", "desirable_weight": 0.0, "undesirable_weight": 0.0},
            "desirable_weight",
            "`objective.desirable_weight: 1.0`",
        ),
        (
            {"method": "dpo", "loss": "robust"},
            "label_smoothing",
            "`objective.label_smoothing: 0.1`, or `objective.loss: sigmoid`",
        ),
        (
            {"method": "dpo", "loss": "exo_pair", "label_smoothing": 0.0},
            "label_smoothing",
            "`objective.label_smoothing: 0.1`, or `objective.loss: sigmoid`",
        ),
        (
            {"method": "grpo", "beta": 0.1, "reference": "precomputed"},
            "reference",
            "`objective.reference: base`, or `objective.loss: rloo`",
        ),
        (
            {"method": "kto", "reference": "precomputed"},
            "reference",
            "`objective.reference: base`, or `objective.loss: apo_zero_unpaired`",
        ),
        (
            {"method": "grpo", "loss": "rloo", "importance_sampling_mode": "token_mask"},
            "importance_sampling_mode",
            "`objective.importance_sampling_mode: sequence_mask`",
        ),
    ],
)
def test_values_that_make_no_loss_are_refused(
    objective: dict[str, Any], field: str, hint: str
) -> None:
    (breach,) = broken_objective_rules(settings(objective))
    assert breach.field == f"objective.{field}"
    assert breach.hint == hint


@pytest.mark.parametrize(
    ("method", "loss", "hint"),
    [
        ("dpo", "ipo", "`objective.reference: precomputed`"),
        (
            "kto",
            "kto",
            "`objective.reference: precomputed` with `objective.loss: apo_zero_unpaired`",
        ),
        ("kto", "apo_zero_unpaired", "`objective.reference: precomputed`"),
    ],
)
def test_a_base_that_trains_is_no_reference(method: str, loss: str, hint: str) -> None:
    values = {"method": method, "loss": loss}
    for what in ("all", ["model.layers.*"]):
        (breach,) = broken_objective_rules(settings(values, train={"what": what}))
        assert breach.field == "objective.reference"
        assert breach.what == f"objective.reference is base and train.what is {what}"
        assert breach.hint == f"{hint}, or `train.what: adapter`"
    if loss != "kto":
        known = values | {"reference": "precomputed"}
        assert not list(broken_objective_rules(settings(known, train={"what": "all"})))
    assert not list(broken_objective_rules(settings({"method": "orpo"}, train={"what": "all"})))


@pytest.mark.parametrize(
    ("objective", "data_format", "hint"),
    [
        ({"method": "dpo"}, "labelled", "`data.format: preference`"),
        ({"method": "kto"}, "preference", "`data.format: labelled`"),
        ({"method": "dpo"}, "ranking", "`data.format: preference`"),
        ({"method": "sft"}, "preference", "leave the format out"),
    ],
)
def test_rows_that_the_objective_does_not_read_are_refused(
    objective: dict[str, Any], data_format: str, hint: str
) -> None:
    (breach,) = broken_objective_rules(settings(objective, data={"format": data_format}))
    assert (breach.field, breach.hint) == ("data.format", hint)
    mix = {"path": None, "mix": [{"path": "rows.jsonl", "format": data_format}]}
    (breach,) = broken_objective_rules(settings(objective, data=mix))
    assert breach.field == "data.mix"


def test_rankings_and_pairs_are_read_by_a_loss_of_rankings() -> None:
    ranked = {"method": "dpo", "loss": "plackett_luce"}
    for data_format in ("preference", "ranking"):
        assert not list(broken_objective_rules(settings(ranked, data={"format": data_format})))


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("data", "format", "text"),
        ("data", "too_long", "split"),
        ("data", "loss_on", "all"),
        ("data", "loss_on", "last"),
        ("train", "neftune_alpha", 5.0),
        ("report", "samples", 3),
    ],
)
def test_settings_of_rows_that_are_repeated_are_refused(
    section: str, name: str, value: object
) -> None:
    more = {section: {name: value}}
    (breach,) = broken_objective_rules(settings({"method": "simpo"}, **more))
    assert breach.field == f"{section}.{name}"
    assert breach.what == f"{section}.{name} is {value} and objective.method is simpo"
    assert not list(broken_objective_rules(settings({}, **more)))


def test_rows_that_are_compared_may_be_packed_compiled_and_have_dropout() -> None:
    recipe = settings(
        {"method": "dpo"},
        data={"packing": "on"},
        adapter={"dropout": 0.1, "modules_to_save": ["norms"]},
        offload={"codec": "nf4", "tier": "disk"},
    )
    assert not list(broken_objective_rules(recipe))
