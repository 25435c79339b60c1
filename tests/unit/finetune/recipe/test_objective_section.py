"""What a run learns from: each method's settings have its defaults, and a run keeps them."""

from typing import Any, get_args

import pytest
import yaml

from finetune.recipe.recipe import Recipe, differences, resolved_yaml
from finetune.recipe.sections import LOSSES, LossName, Method, ObjectiveSection
from tests.tiers import mostly_slow

PLAIN: dict[str, dict[str, Any]] = {
    "model": {"path": "Qwen/Qwen3-8B"},
    "data": {"path": "rows.jsonl"},
    "train": {"steps": 3, "grad_accum_steps": 1},
    "output": {"name": "x"},
}


def set_values(**values: object) -> dict[str, object]:
    return ObjectiveSection.model_validate(values).model_dump(exclude_none=True)


def test_nothing_but_rows_that_are_repeated_is_the_default() -> None:
    assert set_values() == {"method": "sft"}


@pytest.mark.parametrize(
    ("values", "defaults"),
    [
        (
            {"method": "dpo"},
            {
                "loss": "sigmoid",
                "beta": 0.1,
                "reference": "base",
                "label_smoothing": 0.0,
                "sft_weight": 0.0,
            },
        ),
        (
            {"method": "dpo", "loss": "ipo"},
            {"beta": 0.1, "reference": "base", "sft_weight": 0.0},
        ),
        (
            {"method": "simpo"},
            {"beta": 2.0, "gamma": 0.5, "label_smoothing": 0.0, "sft_weight": 0.0},
        ),
        (
            {"method": "cpo"},
            {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "sft_weight": 1.0},
        ),
        ({"method": "orpo"}, {"beta": 0.1}),
        (
            {"method": "kto"},
            {
                "loss": "kto",
                "beta": 0.1,
                "reference": "base",
                "desirable_weight": 1.0,
                "undesirable_weight": 1.0,
            },
        ),
        (
            {"method": "grpo"},
            {
                "loss": "dapo",
                "beta": 0.0,
                "clip_epsilon": 0.2,
                "importance_sampling_mode": "none",
            },
        ),
        (
            {"method": "grpo", "loss": "rloo"},
            {
                "beta": 0.05,
                "clip_epsilon": 0.2,
                "importance_sampling_mode": "none",
                "reference": "base",
            },
        ),
    ],
)
def test_a_method_has_the_defaults_of_its_paper_or_of_trl(
    values: dict[str, object], defaults: dict[str, object]
) -> None:
    assert set_values(**values) == values | defaults


def test_a_setting_that_is_given_is_kept() -> None:
    values = {"method": "dpo", "loss": "robust", "beta": 0.3, "label_smoothing": 0.2}
    assert set_values(**values) == values | {"reference": "base", "sft_weight": 0.0}


def test_a_kl_divergence_needs_a_reference_and_none_needs_none() -> None:
    assert set_values(method="grpo", beta=0.04)["reference"] == "base"
    assert "reference" not in set_values(method="grpo", beta=0.0)


def test_each_loss_is_of_a_method() -> None:
    assert {loss for losses in LOSSES.values() for loss in losses} == set(get_args(LossName))
    assert set(LOSSES) <= set(get_args(Method))


@pytest.mark.parametrize(
    ("method", "loss"),
    mostly_slow(
        [(method, loss) for method in get_args(Method) for loss in LOSSES.get(method, (None,))],
        ("dpo", "robust"),
        ("grpo", "rloo"),
        ("sft", None),
    ),
)
def test_a_run_reads_its_own_recipe_as_it_was(method: str, loss: str | None) -> None:
    values: dict[str, object] = {"method": method, "loss": loss}
    if loss == "robust":
        values["label_smoothing"] = 0.1
    has_head = method in ("reward", "classify", "classify_tokens")
    whole_rows = {"too_long": "drop"} if has_head else {}
    num_classes = {"num_classes": 3} if has_head and method != "reward" else {}
    recipe = Recipe.model_validate(
        PLAIN
        | {
            "objective": values,
            "data": {**PLAIN["data"], **whole_rows},
            "model": {**PLAIN["model"], **num_classes},
        }
    )
    again = Recipe.model_validate(yaml.safe_load(resolved_yaml(recipe)))
    assert again == recipe
    assert not differences(recipe, again)


def test_a_run_begun_before_there_were_objectives_is_the_same_recipe() -> None:
    recipe = Recipe.model_validate(PLAIN)
    before = yaml.safe_load(resolved_yaml(recipe))
    assert before.pop("objective")["method"] == "sft"
    assert not differences(Recipe.model_validate(before), recipe)


def test_what_a_step_needs_is_read_off_the_section() -> None:
    sft, dpo, kto = (ObjectiveSection(method=name) for name in ("sft", "dpo", "kto"))
    assert (sft.is_sft, sft.has_reference, sft.computes_reference) == (True, False, False)
    assert (dpo.is_sft, dpo.has_reference, dpo.computes_reference) == (False, True, True)
    known = ObjectiveSection(method="dpo", reference="precomputed")
    assert (known.has_reference, known.computes_reference) == (True, False)
    assert (dpo.scores_mismatched, kto.scores_mismatched) == (False, True)
    assert not ObjectiveSection(method="kto", loss="apo_zero_unpaired").scores_mismatched
    assert ObjectiveSection(method="dpo", loss="plackett_luce").is_ranking
    assert not dpo.is_ranking
    assert ObjectiveSection(method="grpo", importance_sampling_mode="ratio").takes_sampler
    assert not ObjectiveSection(method="grpo").takes_sampler
