"""What virtual tokens in front of rows cannot be combined with is refused, with the fix."""

from contextlib import nullcontext
from typing import Any, get_args

import pytest

from finetune.adapter.methods import refuse_virtual
from finetune.errors import ConfigError
from finetune.recipe.rules import broken_method_rules
from finetune.recipe.sections import AdapterSection, Settings


def settings(**sections: dict[str, Any]) -> Settings:
    content: dict[str, dict[str, Any]] = {
        "model": {"path": "Qwen/Qwen3-8B"},
        "adapter": {"method": "prompt", "num_virtual_tokens": 8},
        "data": {"path": "rows.jsonl"},
        "train": {"steps": 3, "grad_accum_steps": 1},
        "output": {"name": "x"},
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section
    return Settings.model_validate(content)


@pytest.mark.parametrize("method", ["prompt", "p_tuning", "prefix", "prefix_mlp"])
def test_virtual_tokens_are_in_front_of_rows_of_one_objective(method: str) -> None:
    found = settings(adapter={"method": method})
    assert not list(broken_method_rules(found))
    assert found.adapter.num_in_front == 8
    assert found.adapter.num_in_rows == (0 if method.startswith("prefix") else 8)
    assert settings(adapter={"method": "lora"}).adapter.num_in_front == 0


METHODS = get_args(AdapterSection.model_fields["method"].annotation)


@pytest.mark.parametrize("method", [*METHODS, "PREFIX_TUNING", "P_TUNING", "LORA"])
def test_virtual_tokens_are_refused_where_rows_have_none(method: str) -> None:
    words = {"prompt", "p_tuning", "prefix", "prefix_mlp", "PREFIX_TUNING", "P_TUNING"}
    refused = pytest.raises(ConfigError, match=f"an adapter of the method {method}, and rows")
    with refused if method in words else nullcontext():
        refuse_virtual(method)


@pytest.mark.parametrize(
    ("section", "field", "value", "fix"),
    [
        ("objective", "method", "dpo", "`objective.method: sft`, or `adapter.method: lora`"),
        ("data", "packing", "on", "`data.packing: off`, or `adapter.method: lora`"),
        ("train", "neftune_alpha", 5, "`train.neftune_alpha: null`, or `adapter.method: lora`"),
        ("train", "what", "all", "`train.what: adapter`, or `adapter.method: lora`"),
        ("report", "samples", 9, "`report.samples: 0`, or `adapter.method: lora`"),
        ("adapter", "rank", 4, "leave `adapter.rank` out, or `adapter.method: lora`"),
        ("adapter", "method", "lora", "`adapter.method: prompt`, or leave it out"),
    ],
)
def test_what_they_cannot_be_combined_with_is_named_with_its_fix(
    section: str, field: str, value: object, fix: str
) -> None:
    (breach,) = broken_method_rules(settings(**{section: {field: value}}))
    assert breach.hint == fix


def test_a_prefix_lets_rows_be_answered_and_noise_be_added_but_not_packed() -> None:
    prefix = {"method": "prefix_mlp", "num_virtual_tokens": 8}
    for section in ({"train": {"neftune_alpha": 5}}, {"report": {"samples": 9}}):
        assert not list(broken_method_rules(settings(adapter=prefix, **section)))
    (breach,) = broken_method_rules(settings(adapter=prefix, data={"packing": "on"}))
    assert breach.field == "data.packing"
