"""Gradients of adapters of other methods than LoRA, against plain peft and autograd."""

import copy
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from finetune.adapter.lora import add_lora, trained
from finetune.recipe.sections import AdapterSection
from offload import attach
from tests.tiers import mostly_slow

SHAPE = Qwen3Config(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    tie_word_embeddings=False,
)
IGNORED = -100


@pytest.mark.parametrize("dtype", mostly_slow([torch.float32, torch.bfloat16], torch.float32))
@pytest.mark.parametrize(
    "method", mostly_slow(["loha", "lokr", "ia3", "vera", "oft", "miss", "hira"], "ia3", "vera")
)
def test_gradients_are_those_of_plain_peft(method: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    section = AdapterSection.model_validate({"method": method, "rank": 4})
    base: Any = Qwen3ForCausalLM(SHAPE)
    adapted = add_lora(base.to(dtype), section, seed=1)
    with torch.no_grad():
        for parameter in trained(adapted).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    plain = copy.deepcopy(adapted.train())
    ids = torch.randint(0, SHAPE.vocab_size, (2, 9))
    labels = ids.clone()
    labels[0, :3] = IGNORED
    # rows apart, as the engine computes them: products in 16 bits round by their shape
    num_labels = int((labels[:, 1:] != IGNORED).sum())
    for row, label in zip(ids, labels, strict=True):
        logits = plain(input_ids=row[None], use_cache=False).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(
            logits, label[1:], ignore_index=IGNORED, reduction="sum"
        )
        (loss / num_labels).backward()
    engine = attach(adapted, device="cpu", num_slots=2)
    engine.forward_backward(
        [
            {"input_ids": row[None], "labels": label[None]}
            for row, label in zip(ids, labels, strict=True)
        ]
    )
    for (name, ours), theirs in zip(trained(adapted).items(), trained(plain).values(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert theirs.grad.norm() > 0, name
        assert (ours.grad - theirs.grad).norm() <= 1e-6 * theirs.grad.norm(), name
