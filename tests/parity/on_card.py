"""Models whose layers take long enough on a card for copies to run beside them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.parity.steps import EXPERTS, MODELS, SHAPE, with_lora

Found = tuple[float, dict[str, torch.Tensor]]

Batches = list[dict[str, torch.Tensor]]


# Copies of these layers take long enough to run beside the kernels of others.
MID_SHAPE: dict[str, Any] = {
    **SHAPE,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}

MID_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**MID_SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**MID_SHAPE)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**MID_SHAPE, **{**EXPERTS, "moe_intermediate_size": 512})
    ),
}


def tiny(
    name: str, dtype: torch.dtype, *, models: Mapping[str, Callable[[], PreTrainedModel]] = MODELS
) -> PeftModel:
    torch.manual_seed(0)
    base = models[name]()
    torch.nn.Module.to(base, dtype)  # transformers' own has no types
    base.config._experts_implementation = "eager"  # the grouped kernel is not for every card
    return with_lora(base)


def long_micro_batches() -> Batches:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for width in (128, 160, 192):
        input_ids = torch.randint(0, 64, (2, width), generator=generator)
        batches.append({"input_ids": input_ids, "labels": input_ids.clone()})
    return batches
