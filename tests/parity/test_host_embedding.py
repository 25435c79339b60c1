"""The input embedding in host memory: its rows are brought, and no bit of a step differs."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
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

from offload.engine.engine import Engine
from offload.plan.facts.embedding import rows_bytes
from offload.plan.schedule.op import Kind, Lane
from tests.parity.steps import (
    LAYER_TYPES,
    MODELS,
    OPTIONS,
    SHAPE,
    assert_equal,
    micro_batches,
    steps,
    tiny,
    with_lora,
)

pytestmark = pytest.mark.usefixtures("one_thread")

HOST = replace(OPTIONS, embeddings="host")


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


def opt() -> nn.Module:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(learned_positions(), adapter)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_move_no_bit_differs_where_the_embedding_is_on_the_host(
    kind: str, dtype: torch.dtype
) -> None:
    model = model_of(kind)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    expected, plainly = steps(model, OPTIONS)
    actual, kinds = steps(model, HOST)
    assert_equal(actual, expected)
    assert not {Kind.LOOK_UP, Kind.ROWS} & set(plainly)
    assert kinds.count(Kind.LOOK_UP) == kinds.count(Kind.ROWS) == len(micro_batches())


def test_a_step_brings_each_row_once_and_no_other() -> None:
    """Counted without our own code: 8 bytes for a token, its row in fp32, and one more row."""
    model = copy.deepcopy(tiny("qwen3"))
    batches = micro_batches()
    engine = Engine(model, device=torch.device("cpu"), options=HOST)
    spans = engine.forward_backward(batches).timeline.spans
    engine.detach()
    distinct = [len(set(batch["input_ids"].flatten().tolist())) for batch in batches]
    expected = [-(-8 * num // 256) * 256 + (num + 1) * 32 * 4 for num in distinct]
    for kind, lane in ((Kind.LOOK_UP, Lane.HOST), (Kind.ROWS, Lane.H2D)):
        found = [span for span in spans if span.kind is kind]
        assert [span.num_bytes for span in found] == expected
        assert {span.lane for span in found} == {lane}
    assert max(distinct) < 2 * 16  # some token is there twice
    assert rows_bytes(distinct[0], 32 * 4) == expected[0]
