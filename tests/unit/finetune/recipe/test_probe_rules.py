"""What steps of a head alone cannot be combined with is refused, with the fix."""

from typing import Any

import pytest

from finetune.recipe.recipe import Recipe
from finetune.recipe.rules import broken_head_alone_rules, broken_probe_rules
from finetune.recipe.sections import Settings


def settings(**sections: dict[str, Any]) -> Settings:
    content: dict[str, dict[str, Any]] = {
        "model": {"path": "Qwen/Qwen3-8B", "num_classes": 2},
        "objective": {"method": "classify"},
        "data": {"path": "rows.jsonl", "too_long": "drop"},
        "train": {"probe_steps": 9, "steps": 3, "grad_accum_steps": 1},
        "output": {"name": "x"},
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section
    return Settings.model_validate(content)


def test_a_new_head_may_be_probed() -> None:
    for method in ("classify", "classify_tokens", "reward"):
        assert not list(broken_probe_rules(settings(objective={"method": method})))
    own: dict[str, dict[str, Any]] = {
        "model": {"head": "classes"},
        "adapter": {"modules_to_save": ("score",)},
    }
    Recipe.model_validate(settings(train={"probe_lr": 0.1}, **own).model_dump())


@pytest.mark.parametrize(
    ("section", "field", "value", "fix"),
    [
        (
            "objective",
            "method",
            "sft",
            "`objective.method: classify`, or `train.probe_steps: null`",
        ),
        (
            "objective",
            "method",
            "dpo",
            "`objective.method: classify`, or `train.probe_steps: null`",
        ),
        (
            "adapter",
            "init_from",
            "runs/a",
            "`adapter.init_from: null`, or `train.probe_steps: null`",
        ),
        ("train", "probe_steps", None, "`train.probe_steps: 200`, or leave `train.probe_lr` out"),
    ],
)
def test_what_cannot_be_combined_is_named_with_its_fix(
    section: str, field: str, value: object, fix: str
) -> None:
    sections: dict[str, dict[str, Any]] = {section: {field: value}}
    if value is None:
        sections["train"]["probe_lr"] = 0.1
    (breach,) = broken_probe_rules(settings(**sections))
    assert breach.hint == fix
    assert "train.probe_steps is " in breach.what


def test_its_steps_have_the_rows_of_the_run_and_a_rate_of_their_own() -> None:
    train = settings(train={"probe_lr": 0.1, "warmup_steps": 2, "lr": 1e-3}).train
    assert train.of_probe is not None
    changed = {"steps": 9, "lr": 0.1, "warmup_steps": 0}
    assert train.of_probe == train.model_copy(update=changed)
    plain = settings(train={"lr": 1e-3}).train.of_probe
    assert plain is not None
    assert plain.lr == 1e-3


def alone(**sections: dict[str, Any]) -> Settings:
    own: dict[str, dict[str, Any]] = {
        "train": {"what": "head", "probe_steps": None},
        "adapter": {"targets": (), "modules_to_save": ("score",)},
    }
    for name, section in sections.items():
        own[name] = own.get(name, {}) | section
    return settings(**own)


def test_a_recipe_of_a_head_alone_has_the_head_and_no_adapter() -> None:
    assert not list(broken_head_alone_rules(alone()))
    content = alone().model_dump(exclude_unset=True)
    del content["adapter"]
    recipe = Recipe.model_validate(content)
    assert recipe.adapter.targets == ()
    assert recipe.adapter.modules_to_save == ("score",)
    assert recipe.model.head == "classes"
    assert not recipe.train.is_full


@pytest.mark.parametrize(
    ("section", "field", "value", "fix"),
    [
        ("objective", "method", "sft", "`objective.method: classify`, or `train.what: adapter`"),
        ("train", "probe_steps", 9, "`train.probe_steps: null`, or `train.what: adapter`"),
        ("offload", "kept_graphs", 2, "`offload.kept_graphs: auto`, or `train.what: adapter`"),
        ("adapter", "rank", 4, "leave `adapter.rank` out, or `train.what: adapter`"),
        (
            "adapter",
            "targets",
            ("q_proj",),
            "leave `adapter.targets` out, or `train.what: adapter`",
        ),
    ],
)
def test_what_a_head_alone_cannot_be_combined_with_is_named_with_its_fix(
    section: str, field: str, value: object, fix: str
) -> None:
    (breach,) = broken_head_alone_rules(alone(**{section: {field: value}}))
    assert breach.hint == fix
    assert f"{section}.{field} is" in breach.what
    assert "train.what is head" in breach.what
