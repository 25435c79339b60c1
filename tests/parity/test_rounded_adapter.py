"""Gradients of an adapter that is kept in bf16, against plain peft and autograd."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from finetune.adapter.lora import add_lora, trained
from finetune.errors import ConfigError
from finetune.recipe.sections import AdapterSection
from offload import attach

SHAPE: Any = Qwen3Config(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    tie_word_embeddings=False,
)
TARGETS = ("q_proj", "v_proj", "down_proj")


def base() -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(SHAPE)


def test_gradients_are_those_of_plain_peft_rounded_to_nearest() -> None:
    section = AdapterSection(rank=4, alpha=8, targets=TARGETS, dtype="bfloat16")
    ours = add_lora(base(), section, seed=1)
    with torch.no_grad():
        for parameter in trained(ours).values():
            assert parameter.dtype is torch.bfloat16
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    plain = get_peft_model(base(), config)
    plain.load_state_dict(ours.state_dict())  # the same values, in fp32
    ids = torch.randint(0, SHAPE.vocab_size, (2, 9))
    plain(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    attach(ours.train(), device="cpu", num_slots=2).forward_backward(
        [{"input_ids": ids, "labels": ids}]
    )
    theirs = trained(plain)
    for name, parameter in trained(ours).items():
        grad, truth = parameter.grad, theirs[name].grad
        assert grad is not None
        assert truth is not None
        assert truth.norm() > 0
        apart = (grad.float() - truth).abs()
        assert bool((apart <= 2.0**-8 * truth.abs() + 1e-6 * truth.norm()).all()), name


class OwnLinear(nn.Linear):
    """A linear layer whose forward might be another."""


def test_an_adapter_that_peft_computes_is_refused_in_bf16() -> None:
    model = base()
    model.model.layers[1].self_attn.q_proj.__class__ = OwnLinear
    section = AdapterSection(rank=4, alpha=8, targets=TARGETS, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"bfloat16, and peft computes .*1\.self_attn\.q_proj"):
        add_lora(model, section, seed=0)
