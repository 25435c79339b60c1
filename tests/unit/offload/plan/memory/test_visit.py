"""Memory of a layer's visit with fused parts: the formula, autograd, and a trace."""

import itertools
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapter.lora import add_lora
from finetune.adapter.targets import chosen_targets
from offload.engine.tracing.visits import trace_visits
from offload.plan.facts.facts import AdapterSpec, linear_names, model_facts
from offload.plan.machine.machine import named_machine
from offload.plan.memory.memory import head_chunk_bytes
from offload.plan.memory.visit import visit_bytes
from tests.builders import adapter, workload
from tests.tiers import each_value, mostly_slow, tiered

T = 512
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
TYPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "olmo2": {},
    "gemma3_text": {"layer_types": ["full_attention"]},
}


BF16 = torch.bfloat16
CASES = (tuple(TYPES), ("all-linear", "attention"), (torch.float32, BF16, BF16, torch.float32))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "targets", "dtype"),
    tiered(
        itertools.product(*CASES),
        default=[("gemma3_text", "attention", BF16)],
        slow=[("qwen3", "all-linear", torch.float32), *each_value(*CASES)],
    ),
)
def test_a_visit_with_fused_parts_takes_what_is_traced_within_a_tenth(
    name: str, targets: Literal["all-linear", "attention"], dtype: torch.dtype
) -> None:
    config = {**SIZES, **TYPES[name], "model_type": name}
    facts = model_facts(config)
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    model = add_lora(base, adapter(rank=2, targets=targets), seed=0).train()
    names = chosen_targets(targets, known=linear_names(facts), modules_to_save=())
    spec = AdapterSpec(rank=2, targets=names, experts=False, is_in_base_dtype=True)
    load = workload(seq_len=T, adapter=spec, dtype_bytes=dtype.itemsize, leaves_out=False)
    machine = replace(named_machine("rtx3090"), device="cpu")
    sizes = {}
    for code in ("plain", "fused"):
        said = visit_bytes(
            facts, machine, facts.layers[0], replace(load, layer_code=code), is_padded=False
        )
        (found,) = trace_visits(
            model,
            batch_size=1,
            seq_len=T,
            is_padded=False,
            head_chunk_tokens=64,
            capability=None,
            plain_parts=frozenset() if code == "fused" else None,
        ).visits
        sizes[code] = (said.graph + said.gradients, found)
    said_fused, found_fused = sizes["fused"]
    assert said_fused == pytest.approx(found_fused, rel=0.1), sizes
    assert sizes["plain"][1] > found_fused


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(itertools.product(TYPES, [torch.float32, BF16]), ("qwen3", BF16)),
)
def test_a_visit_with_dora_takes_what_is_traced_within_a_tenth(
    name: str, dtype: torch.dtype
) -> None:
    config = {**SIZES, **TYPES[name], "model_type": name}
    facts = model_facts(config)
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    model = add_lora(base, adapter(rank=2, dora=True), seed=0).train()
    spec = AdapterSpec(
        rank=2,
        targets=linear_names(facts),
        experts=False,
        is_in_base_dtype=True,
        is_dora=True,
    )
    load = workload(
        seq_len=T,
        adapter=spec,
        dtype_bytes=dtype.itemsize,
        leaves_out=False,
        layer_code="fused",
    )
    machine = replace(named_machine("rtx3090"), device="cpu")
    said = visit_bytes(facts, machine, facts.layers[0], load, is_padded=False)
    (found,) = trace_visits(
        model,
        batch_size=1,
        seq_len=T,
        is_padded=False,
        head_chunk_tokens=64,
        capability=None,
        plain_parts=frozenset(),
    ).visits
    assert said.dora == 0
    assert said.graph + said.gradients == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(
    ("name", "dtype", "code"),
    mostly_slow(
        itertools.product(["qwen3", "llama"], [torch.float32, BF16], ["plain", "fused"]),
        ("qwen3", BF16, "fused"),
        ("llama", torch.float32, "plain"),
    ),
)
def test_a_head_chunk_takes_what_is_traced_within_a_hundredth(
    name: str, dtype: torch.dtype, code: Literal["plain", "fused"]
) -> None:
    config = {**SIZES, "model_type": name, "vocab_size": 8192}
    facts = model_facts(config)
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    model = add_lora(base, adapter(rank=2, targets="attention"), seed=0).train()
    spec = AdapterSpec(rank=2, targets=("q_proj",), experts=False)
    load = workload(seq_len=T, adapter=spec, dtype_bytes=dtype.itemsize, head_chunk_tokens=128)
    found = trace_visits(
        model,
        batch_size=1,
        seq_len=T,
        is_padded=False,
        head_chunk_tokens=128,
        capability=None,
        plain_parts=frozenset() if code == "fused" else None,
    ).head_chunk
    said = head_chunk_bytes(facts, load, is_fused=code == "fused")
    assert said == pytest.approx(found, rel=0.01)
