"""An adapter's fields that its method does not read or its type excludes are refused by name."""

from typing import Any

import pytest

from finetune.recipe.rules import (
    READS,
    broken_dtype_rules,
    broken_embedding_rules,
    broken_head_rules,
    broken_method_rules,
)
from finetune.recipe.sections import AdapterSection, Settings


def settings(adapter: dict[str, Any], *, dtype: str = "bfloat16", **offload: Any) -> Settings:
    content = {
        "model": {"path": "Qwen/Qwen3-8B", "dtype": dtype},
        "data": {"path": "rows.jsonl"},
        "train": {"steps": 3, "grad_accum_steps": 1},
        "output": {"name": "x"},
        "adapter": adapter,
        "offload": offload,
    }
    return Settings.model_validate(content)


def broken(adapter: dict[str, Any], **offload: Any) -> list[str]:
    return [breach.field for breach in broken_method_rules(settings(adapter, **offload))]


def test_lora_reads_all_and_each_method_its_own() -> None:
    everything = {"rank": 4, "alpha": 8, "dropout": 0.1, "dora": True, "rslora": True}
    assert broken(everything) == []
    assert broken({"method": "vera", "rank": 4, "dropout": 0.1}) == []
    assert broken({"method": "loha", "rank": 4, "alpha": 8}) == []
    assert broken({"method": "ia3", "targets": ["k_proj"]}) == []


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        ("ia3", "rank", 4),
        ("vera", "alpha", 8),
        ("loha", "dropout", 0.1),
        ("oft", "experts", True),
        ("lokr", "dora", True),
        ("miss", "rank_pattern", {"q_proj": 8}),
        ("vera", "loraplus_ratio", 16),
        ("oft", "compute_dtype", "float32"),
        ("vera", "dtype", "bfloat16"),
    ],
)
def test_a_field_that_is_not_read_is_refused(method: str, field: str, value: object) -> None:
    assert broken({"method": method, field: value}) == [f"adapter.{field}"]


def test_tiles_of_an_mlp_are_refused() -> None:
    assert broken({"method": "loha"}, mlp_chunk=64) == ["offload.mlp_chunk"]


def test_methods_are_those_of_the_field_and_read_its_fields() -> None:
    allowed = AdapterSection.model_fields["method"].annotation.__args__  # type: ignore[union-attr]
    assert {"lora", *READS} == set(allowed)
    assert all(fields <= AdapterSection.model_fields.keys() for fields in READS.values())


@pytest.mark.parametrize(
    ("adapter", "dtype", "field", "seen"),
    [
        ({"dora": True}, "bfloat16", "adapter.dora", "true"),
        ({"compute_dtype": "float32"}, "bfloat16", "adapter.compute_dtype", "float32"),
        ({}, "float16", "model.dtype", "float16"),
    ],
)
def test_what_an_adapter_in_bf16_cannot_be_combined_with(
    adapter: dict[str, Any], dtype: str, field: str, seen: str
) -> None:
    assert not list(broken_dtype_rules(settings(adapter, dtype=dtype)))
    (breach,) = broken_dtype_rules(settings(adapter | {"dtype": "bfloat16"}, dtype=dtype))
    assert breach.field == field
    assert breach.what == f"{field} is {seen} and adapter.dtype is bfloat16"


# ------------------------------------------------------------------------------------- embeddings


def test_what_trains_the_embedding_is_refused_where_it_waits_on_the_host() -> None:
    cases: dict[str, dict[str, Any]] = {
        "adapter.modules_to_save": {"modules_to_save": ["norms", "embed_tokens"]},
        "adapter.method": {"method": "prompt", "num_virtual_tokens": 4},
    }
    for field, adapter in cases.items():
        assert not list(broken_embedding_rules(settings(adapter)))
        (breach,) = broken_embedding_rules(settings(adapter, embeddings="host"))
        assert breach.field == field
        assert breach.what.endswith("and offload.embeddings is host")
        assert breach.hint.endswith(", or `offload.embeddings: device`")
    (breach,) = broken_embedding_rules(
        settings(cases["adapter.modules_to_save"], embeddings="host")
    )
    assert breach.hint.startswith("`adapter.modules_to_save: [norms]`")
    assert not list(broken_embedding_rules(settings({"rank": 4}, embeddings="host")))


# ------------------------------------------------------------------------------------------- head


def test_a_head_on_the_host_does_not_train_with_an_adapter() -> None:
    trained = {"modules_to_save": ["norms", "lm_head"]}
    assert not list(broken_head_rules(settings(trained)))
    (breach,) = broken_head_rules(settings(trained, head="host"))
    assert breach.what == "adapter.modules_to_save is norms, lm_head and offload.head is host"
    assert breach.limit == "a head in host memory is frozen"
    assert breach.hint == "`adapter.modules_to_save: [norms]`, or `offload.head: device`"
    assert not list(broken_head_rules(settings({"rank": 4}, head="host")))
    whole = settings({}, head="host")
    whole = whole.model_copy(update={"train": whole.train.model_copy(update={"what": "all"})})
    assert not list(broken_head_rules(whole))
