"""What cannot be combined with training the model's own weights is refused, with the fix."""

from typing import Any

import pytest

from finetune.recipe.rules import broken_full_rules, broken_rules
from finetune.recipe.sections import Settings


def settings(**sections: dict[str, Any]) -> Settings:
    content: dict[str, dict[str, Any]] = {
        "model": {"path": "Qwen/Qwen3-8B"},
        "data": {"path": "rows.jsonl"},
        "train": {"what": "all", "steps": 3, "grad_accum_steps": 1},
        "output": {"name": "x"},
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section
    return Settings.model_validate(content)


def test_a_plain_recipe_breaks_none() -> None:
    assert not list(broken_full_rules(settings()))
    assert not list(broken_full_rules(settings(train={"what": ["model.layers.*"]})))
    assert not list(broken_full_rules(settings(offload={"codec": "native", "tier": "ram"})))


@pytest.mark.parametrize(
    ("section", "field", "value", "fix"),
    [
        ("adapter", "dora", True, "leave `adapter.dora` out, or `train.what: adapter`"),
        ("adapter", "rank", 8, "leave `adapter.rank` out, or `train.what: adapter`"),
        ("offload", "codec", "nf4", "`offload.codec: native`"),
        ("offload", "codec", "bf16_packed", "`offload.codec: native`"),
        ("offload", "tier", "disk", "`offload.tier: ram`"),
        ("train", "optimizer", "paged_adamw_8bit", "`train.optimizer: adamw_8bit`"),
        ("train", "compile", True, "`train.compile: false`"),
        ("model", "experts_implementation", "triton", "`model.experts_implementation: grouped_mm`"),
        ("model", "layer_kernels", "fused", "`model.layer_kernels: plain`"),
    ],
)
def test_what_cannot_be_combined_is_named_with_its_fix(
    section: str, field: str, value: object, fix: str
) -> None:
    (breach,) = broken_full_rules(settings(**{section: {field: value}}))
    assert breach.field == f"{section}.{field}"
    assert breach.hint == fix
    assert "train.what is all" in breach.what


@pytest.mark.parametrize(("optimizer", "fix"), [("adamw_bf16", "adamw"), ("lion_bf16", "lion")])
def test_an_optimizer_of_weights_in_ram_updates_no_adapter(optimizer: str, fix: str) -> None:
    (breach,) = broken_rules(settings(train={"what": "adapter", "optimizer": optimizer}))
    assert breach.field == "train.optimizer"
    assert breach.what == f"train.optimizer is {optimizer} and train.what is adapter"
    assert breach.hint == f"`train.optimizer: {fix}`, or `train.what: all`"
    assert not list(broken_rules(settings(train={"optimizer": optimizer})))


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
def test_weights_in_float16_are_not_kept_in_another_form_of_as_many_bytes(codec: str) -> None:
    float16 = {"path": "Qwen/Qwen3-8B", "dtype": "float16"}
    sections: dict[str, Any] = {"model": float16, "train": {"what": "adapter"}}
    (breach,) = broken_rules(settings(**sections, offload={"codec": codec}))
    assert breach.what == f"offload.codec is {codec} and model.dtype is float16"
    assert not list(broken_rules(settings(**sections, offload={"codec": "nf4"})))


def test_an_empty_list_trains_nothing() -> None:
    (breach,) = broken_full_rules(settings(train={"what": []}))
    assert breach.field == "train.what"
