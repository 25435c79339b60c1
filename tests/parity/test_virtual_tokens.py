"""Virtual tokens in rows against peft's own, in front of embeddings, on one row of each model."""

import copy
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model

from finetune.adapter.virtual_tokens import add_virtual_tokens
from finetune.errors import ConfigError
from finetune.recipe.sections import AdapterSection
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow

NUM = 3
TYPES = ("qwen3", "gemma3_text", "gemma2", "gpt2", "opt", "mixtral", "gpt_oss")
PROMPT = AdapterSection(method="prompt", num_virtual_tokens=NUM)


@pytest.mark.parametrize("model_type", mostly_slow(TYPES, "gemma3_text"))
def test_logits_and_gradients_are_those_of_plain_peft(model_type: str) -> None:
    model: Any = tiny_model(model_type)
    plain: Any = copy.deepcopy(model)
    ours: Any = add_virtual_tokens(model, PROMPT, seed=1)
    config = PromptTuningConfig(num_virtual_tokens=NUM, task_type="CAUSAL_LM")
    theirs: Any = get_peft_model(plain, config)
    theirs.prompt_encoder["default"].load_state_dict(ours.prompt_encoder["default"].state_dict())
    vocab = model.config.vocab_size
    ids = torch.arange(5, 15)[None]
    longer = torch.cat([torch.arange(vocab, vocab + NUM)[None], ids], dim=1)
    found = model(input_ids=longer, attention_mask=torch.ones_like(longer)).logits
    wanted = theirs(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(found, wanted)
    for logits in (found, wanted):
        logits.square().mean().backward()
    of_ours, of_theirs = (
        one.prompt_encoder["default"].embedding.weight.grad for one in (ours, theirs)
    )
    assert of_theirs.norm() > 0
    torch.testing.assert_close(of_ours, of_theirs, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("model_type", ["gemma4_text", "deepseek_v4"])
def test_a_model_with_other_tables_of_tokens_is_refused(model_type: str) -> None:
    model: Any = tiny_model(model_type)
    with pytest.raises(ConfigError, match=f"prompt for a {model_type} model"):
        add_virtual_tokens(model, PROMPT, seed=1)


def test_an_embedding_of_other_size_than_the_vocabulary_is_refused() -> None:
    model: Any = tiny_model("qwen3")
    model.resize_token_embeddings(80)
    model.config.vocab_size = 64
    with pytest.raises(ConfigError, match="for a qwen3 model"):
        add_virtual_tokens(model, PROMPT, seed=1)
