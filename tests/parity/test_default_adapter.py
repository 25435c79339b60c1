"""The adapter of a recipe's defaults on every architecture that is proven exact."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import offload
from finetune.adapter.lora import add_lora, trained
from finetune.errors import ConfigError
from finetune.recipe.sections import AdapterSection
from tests.parity.architectures import read_table
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow

VERDICTS = read_table(Path(__file__).parents[2] / "docs" / "architectures.md").verdicts
EXACT = [name for name, one in VERDICTS.items() if one.is_exact and name in CONFIG_MAPPING]
INDEXER = {"weights_proj", "wk", "wq_b"}  # it chooses tokens, which has no gradient
READ_DIRECTLY = {  # by type, the layers that no product of the model's output comes from
    "axk2": INDEXER,
    "deepseek_v32": INDEXER,
    "deepseek_v4": {"gate_proj", "kv_proj", "q_b_proj", "weights_proj"},
    "dots3_note": INDEXER,
    "dots3_note_text": INDEXER,
    "falcon_mamba": {"dt_proj"},
    "jamba": {"dt_proj"},
    "longcat_flash": {"classifier"},
    "mamba": {"dt_proj"},
    "qwen4_exp": {"index_qk_proj"},
    "qwen4_exp_text": {"index_qk_proj"},
}
WITHOUT_LINEARS = ("gpt-sw3", "gpt2", "openai-gpt")  # their products are transformers' Conv1D
NAMED_LIKE_OTHERS = (
    *("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("phi4_multimodal", "qwen4_exp", "qwen4_exp_text", "rembert", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
)
REFUSED = {
    **dict.fromkeys(WITHOUT_LINEARS, "can get an adapter"),
    **dict.fromkeys(NAMED_LIKE_OTHERS, "would not adapt .* as it should"),
}
PLANLESS = {"zamba2", "zamba"}  # a plan refuses models whose layers share weights
PLANNED = [name for name in EXACT if name not in PLANLESS]
DEFAULT = ("falcon", "llama4_text", "phimoe", "jamba")


@pytest.mark.parametrize("model_type", mostly_slow(PLANNED, *DEFAULT, rest=pytest.mark.thorough))
def test_the_default_adapter_learns_in_every_exact_type(model_type: str) -> None:
    section = AdapterSection()
    # on rows of few tokens big_bird replaces its attention by this one
    changes: dict[str, Any] = (
        {"attention_type": "original_full"} if model_type == "big_bird" else {}
    )
    if model_type in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[model_type]) as refused:
            add_lora(tiny_model(model_type), AdapterSection(), seed=0)
        if model_type in WITHOUT_LINEARS:
            return
        hint = re.search(r"targets: \[(.*)\]", str(refused.value))
        assert hint is not None
        section = AdapterSection(targets=tuple(hint[1].split(", ")))
    model = add_lora(tiny_model(model_type, **changes), section, seed=0)
    engine = offload.attach(model, num_slots=2, device="cpu")
    tokens = torch.randint(3, 32, (2, 2, 12), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # B starts at zero, so A learns from the second step on
        result = engine.forward_backward([{"input_ids": rows, "labels": rows} for rows in tokens])
        assert torch.isfinite(torch.tensor(result.loss))
        with torch.no_grad():
            for p in trained(model).values():
                if p.grad is not None:
                    assert bool(torch.isfinite(p.grad).all())
                    p.sub_(p.grad, alpha=0.1)
    without = {name for name, p in trained(model).items() if p.grad is None}
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in without}
    assert layers == READ_DIRECTLY.get(model_type, set())
