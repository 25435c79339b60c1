"""Tiny models whose output head has the input embedding's weight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from offload.engine.model.layers import LayeredModel
from tests.parity.steps import MODELS, SHAPE, with_lora
from tests.parity.tiny_models import tiny_model, with_adapters
from tests.parity.untied_models import learned_positions


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


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": qwen3,
    "qwen3_moe": lambda: tied_by_hand(MODELS["qwen3_moe"]()),
    "gemma3_text": MODELS["gemma3_text"],
    "capped": capped,
    "learned_positions": lambda: tied_by_hand(learned_positions()),
}


def tied(kind: str, *, dropout: float = 0.2) -> PeftModel:
    """Return a model of a kind with adapters, and one weight for embedding and head."""
    torch.manual_seed(0)
    base = KINDS[kind]()
    assert base.get_output_embeddings().weight is base.get_input_embeddings().weight
    if kind != "learned_positions":
        return with_lora(base, dropout=dropout)
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def wide(num_tokens: int = 400, *, dropout: float = 0.0) -> PeftModel:
    """Return a model whose table is wider than a slot of 40 KiB."""
    torch.manual_seed(0)
    return with_lora(qwen3(num_tokens), dropout=dropout)


def tied_of_type(model_type: str) -> nn.Module:
    """Return a tiny model of a type with adapters, and one weight for embedding and head."""
    model: Any = tiny_model(model_type)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embedding.weight:
        if head.weight.shape != embedding.weight.shape:
            pytest.skip("its head and its embedding have different shapes")
        tied_by_hand(model)
    return with_adapters(model, LayeredModel(model).layers)
