"""What cannot be combined with processes that each hold a part of the model, with the fix."""

from typing import Any

import pytest

from finetune.recipe.rules import broken_rules, broken_sharded_rules
from finetune.recipe.sections import Settings


def settings(**sections: dict[str, Any]) -> Settings:
    content: dict[str, dict[str, Any]] = {
        "model": {"path": "Qwen/Qwen3-8B"},
        "data": {"path": "rows.jsonl", "eval_frac": 0.1},
        "train": {"parallel": "fsdp2", "steps": 3, "grad_accum_steps": 1},
        "output": {"name": "x", "eval_every": 1},
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section
    return Settings.model_validate(content)


def test_a_plain_recipe_breaks_none() -> None:
    assert not list(broken_rules(settings()))
    assert not list(broken_rules(settings(train={"what": "all"})))
    assert not list(broken_rules(settings(offload={"codec": "native", "vram_budget": 20.0})))
    assert not list(broken_rules(settings(adapter={"dropout": 0.1, "loraplus_ratio": 16.0})))


@pytest.mark.parametrize(
    ("section", "field", "value", "fix"),
    [
        ("offload", "codec", "nf4", "native"),
        ("offload", "codec", "bf16_packed", "native"),
        ("offload", "tier", "disk", "auto"),
        ("offload", "num_slots", 4, "auto"),
        ("offload", "kept_graphs", 2, "auto"),
        ("offload", "sent_graphs", "none", "auto"),
        ("offload", "attention_outputs", "none", "auto"),
        ("offload", "stash", "host", "auto"),
        ("offload", "head_chunk", 256, "auto"),
        ("offload", "mlp_chunk", 512, "auto"),
        ("offload", "embeddings", "host", "auto"),
        ("data", "packing", "on", "off"),
        ("model", "dtype", "float16", "bfloat16"),
        ("model", "layer_kernels", "fused", "plain"),
        ("model", "experts_implementation", "triton", "grouped_mm"),
        ("adapter", "method", "vera", "lora"),
        ("adapter", "dora", True, "false"),
        ("adapter", "experts", True, "false"),
        ("adapter", "modules_to_save", ["norms"], "[]"),
        ("train", "optimizer", "adamw_8bit", "adamw"),
        ("train", "reduce_dtype", "bf16", "fp32"),
        ("train", "compile", True, "false"),
        ("train", "router_loss_coef", 0.1, "0"),
        ("output", "best_checkpoint", "use", "keep"),
        ("report", "samples", 4, "0"),
    ],
)
def test_what_does_not_hold_there_is_refused_by_name(section, field, value, fix) -> None:
    (breach,) = broken_sharded_rules(settings(**{section: {field: value}}))
    assert breach.field == f"{section}.{field}"
    assert breach.what.endswith(" and train.parallel is fsdp2")
    assert breach.hint == f"`{section}.{field}: {fix}`, or `train.parallel: stream`"
    assert not list(broken_sharded_rules(settings(**{section: {field: _fixed(fix)}})))


def test_preferences_are_refused() -> None:
    found = list(broken_sharded_rules(settings(objective={"method": "dpo"})))
    assert [breach.field for breach in found] == ["objective.method"]


def _fixed(text: str) -> object:
    return {"false": False, "0": 0, "[]": ()}.get(text, text)
