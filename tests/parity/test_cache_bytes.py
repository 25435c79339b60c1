"""The formula for the memory of key-value caches, against caches of real generations."""

from typing import Any

import pytest
import torch

import offload
from finetune.model.facts import facts_of
from offload.plan.memory.memory import cache_bytes
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow

NUM_ROWS, NUM_PROMPT = 2, 11
TYPES = ("llama", "qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_next", "gpt2")


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", mostly_slow(TYPES, "gemma3_text", "qwen3_next"))
def test_caches_take_what_the_formula_says(model_type: str) -> None:
    model: Any = tiny_model(model_type).eval()
    facts = facts_of(model)
    ids = torch.arange(3, 3 + NUM_ROWS * NUM_PROMPT).view(NUM_ROWS, NUM_PROMPT)
    engine = offload.attach(model, num_slots=2, device="cpu")
    try:
        with engine.generation() as generation:
            given = {0: ids}
            found = []
            for _ in range(4):
                logits = generation.next_logits(given)
                given = {0: logits[0].argmax(-1, keepdim=True)}
                found.append(generation.cache_bytes)
    finally:
        engine.close()
    for new_tokens in range(1, 5):
        expected = cache_bytes(
            facts, prompt_tokens=NUM_PROMPT, new_tokens=new_tokens, dtype_bytes=4
        )
        assert expected is not None
        assert max(found[:new_tokens]) == NUM_ROWS * expected


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["mamba2", "deepseek_v3"])
def test_what_differs_by_model_is_not_counted(model_type: str) -> None:
    facts = facts_of(tiny_model(model_type))
    assert cache_bytes(facts, prompt_tokens=1, new_tokens=1, dtype_bytes=2) is None
