"""What a plan says that a sent graph takes, against what the engine sends."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapter.linear_lora import compute_in_base_dtype
from finetune.adapter.lora import add_lora
from finetune.adapter.targets import chosen_targets
from offload.engine.batch import shape_of
from offload.engine.engine import Engine
from offload.plan.facts.facts import AdapterSpec, linear_names, model_facts
from offload.plan.machine.machine import named_machine
from offload.plan.memory.visit import visit_bytes
from tests.builders import adapter, workload
from tests.parity.steps import OPTIONS
from tests.tiers import mostly_slow

T = 256
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
TYPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "olmo2": {},
    "gemma3_text": {"layer_types": ["full_attention"] * 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "targets", "dtype", "code"),
    mostly_slow(
        {
            f"{name}-{targets}-{dtype}-{code}": (name, targets, dtype, code)
            for name in TYPES
            for targets in ("all-linear", "attention")
            for dtype in (torch.float32, torch.bfloat16)
            for code in ("plain", "fused")
        },
        "qwen3-all-linear-torch.bfloat16-plain",
    ),
)
def test_a_sent_graph_takes_what_the_plan_says_within_a_tenth(
    name: str,
    targets: Literal["all-linear", "attention"],
    dtype: torch.dtype,
    code: Literal["plain", "fused"],
) -> None:
    config = {**SIZES, **TYPES[name], "model_type": name}
    facts = model_facts(config)
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    model = add_lora(base, adapter(rank=4, targets=targets), seed=0).train()
    compute_in_base_dtype(model)
    options = replace(OPTIONS, num_sent_graphs=2, layer_kernels=code)
    engine = Engine(model, device=torch.device("cpu"), options=options)
    ids = torch.randint(0, 32, (1, T))
    engine.forward_backward([{"input_ids": ids, "labels": ids}])
    found = engine._bound.executor.found().graph_sizes.of(0, shape_of(1, T, ()))
    engine.detach()
    names = chosen_targets(targets, known=linear_names(facts), modules_to_save=())
    spec = AdapterSpec(rank=4, targets=names, experts=False, is_in_base_dtype=True)
    asked = workload(
        micro_batch_size=1, seq_len=T, adapter=spec, dtype_bytes=dtype.itemsize, layer_code=code
    )
    card = named_machine("rtx3090")
    experts = replace(card.experts_implementation, value="grouped_mm")  # as transformers' default
    machine = replace(card, device="cpu", experts_implementation=experts)
    said = visit_bytes(facts, machine, facts.layers[0], asked, is_padded=False)
    assert said.sent_graph == pytest.approx(found, rel=0.1)
