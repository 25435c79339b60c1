"""Tiny models with a head of their own, and a step of each."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from tests.parity.steps import LAYER_TYPES, MODELS, SHAPE, gradients, micro_batches, with_lora


def scaled() -> PreTrainedModel:
    """Return a model whose embedding multiplies what it looks up, and is not the head's."""
    config = Gemma3TextConfig(
        **SHAPE, sliding_window=8, layer_types=LAYER_TYPES, tie_word_embeddings=False
    )
    return Gemma3ForCausalLM(config)


def learned_positions() -> PreTrainedModel:
    """Return a model that looks up positions too, and projects what it looks up."""
    return OPTForCausalLM(
        OPTConfig(
            hidden_size=32,
            word_embed_proj_dim=16,
            ffn_dim=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            vocab_size=64,
            max_position_embeddings=64,
            dropout=0.0,
            tie_word_embeddings=False,
        )
    )


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": MODELS["qwen3"],
    "qwen3_moe": MODELS["qwen3_moe"],
    "scaled": scaled,
    "learned_positions": learned_positions,
}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return with_lora(KINDS[kind](), dropout=0.2) if kind != "learned_positions" else opt()


def step_of(
    model: nn.Module,
    options: EngineOptions,
    batches: list[dict[str, torch.Tensor]] | None = None,
    **changes: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a step."""
    model = copy.deepcopy(model)
    engine = Engine(model, device=torch.device("cpu"), options=options)
    try:
        result = engine.forward_backward(batches or micro_batches(), dropout_seed=0, **changes)
        return result.loss, gradients(model)  # type: ignore[arg-type]
    finally:
        engine.detach()


def opt() -> nn.Module:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(learned_positions(), adapter)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()
