"""Tiny models whose output head has the input embedding's weight."""

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.parity.steps import (
    MODELS,
    SHAPE,
    with_lora,
)


def learned_positions(**changes: Any) -> PreTrainedModel:
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
            **changes,
        )
    )


def qwen3(num_tokens: int = 64) -> PreTrainedModel:
    """Return a model with so many tokens, each 128 bytes."""
    shape = SHAPE | {"vocab_size": num_tokens, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(**shape))


def capped() -> PreTrainedModel:
    """Return a model that multiplies what it looks up, and caps its logits."""
    config = Gemma2Config(**SHAPE, sliding_window=8, final_logit_softcapping=2.0)
    config._attn_implementation = "eager"
    return Gemma2ForCausalLM(config)


def tied_by_hand(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model's head the embedding's weight; their shapes are the same."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Linear)
    assert embedding.weight.shape == head.weight.shape
    head.weight = embedding.weight
    return model


TIED: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": qwen3,
    "qwen3_moe": lambda: tied_by_hand(MODELS["qwen3_moe"]()),
    "gemma3_text": MODELS["gemma3_text"],
    "capped": capped,
    "learned_positions": lambda: tied_by_hand(learned_positions()),
}


def drawn(model: Any) -> Any:
    """Give adapters that begin as zero other weights."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def with_projections(base: PreTrainedModel) -> Any:
    return drawn(get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])))


def tied(kind: str, *, dropout: float = 0.2) -> Any:
    """Return a model of a kind with adapters, and one weight for embedding and head."""
    torch.manual_seed(0)
    base = TIED[kind]()
    assert base.get_output_embeddings().weight is base.get_input_embeddings().weight
    if kind == "learned_positions":
        return with_projections(base)
    return with_lora(base, dropout=dropout)


def wide(num_tokens: int = 400, *, dropout: float = 0.0) -> PeftModel:
    """Return a model whose table is wider than a slot of 40 KiB."""
    torch.manual_seed(0)
    return with_lora(qwen3(num_tokens), dropout=dropout)
