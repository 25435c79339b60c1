"""Virtual tokens are counted as peft makes them, and rows are longer by them."""

import math
from dataclasses import replace
from typing import Any

import pytest
from peft import (
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from finetune.errors import ConfigError
from finetune.planning.request import full_request
from finetune.recipe.recipe import Recipe
from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import model_facts
from offload.plan.facts.linears import DeltaAttention, SoftmaxAttention
from offload.plan.facts.trainable import (
    prefix_spec,
    trained_parameters,
    trained_tensor_shapes,
    virtual_shapes,
)
from offload.plan.machine.machine import named_machine
from offload.plan.memory.memory import recorded_bytes
from offload.plan.memory.visit import visit_bytes
from offload.plan.plan import plan
from offload.plan.request import PlanRequest
from offload.plan.time.attention import attention_work
from tests.builders import qwen3_8b

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "vocab_size": 9,
}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3}
CONFIGS = {"prompt": PromptTuningConfig, "p_tuning": PromptEncoderConfig}

DELTA = DeltaAttention(num_key_heads=1, num_value_heads=1, key_dim=8, value_dim=8, conv_tokens=4)


@pytest.mark.parametrize("method", CONFIGS)
def test_what_trains_has_the_shapes_that_peft_makes(method: str) -> None:
    config = Qwen3Config(hidden_size=32, intermediate_size=8, num_hidden_layers=1, vocab_size=9)
    made = CONFIGS[method](num_virtual_tokens=6, task_type="CAUSAL_LM")
    adapted = get_peft_model(Qwen3ForCausalLM(config), made)
    shapes = [tuple(p.shape) for p in adapted.parameters() if p.requires_grad]
    assert list(virtual_shapes(6, 32, has_encoder=method == "p_tuning")) == shapes


@pytest.mark.parametrize("has_mlp", [False, True])
def test_a_prefix_has_the_shapes_that_peft_makes(has_mlp: bool) -> None:
    config = Qwen3Config(**SIZES)
    made = PrefixTuningConfig(
        num_virtual_tokens=6, prefix_projection=has_mlp, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(Qwen3ForCausalLM(config), made)
    shapes = [tuple(p.shape) for p in adapted.parameters() if p.requires_grad]
    spec = prefix_spec(model_facts(config.to_dict()), num_past=6, has_encoder=has_mlp)
    assert list(spec.virtual) == shapes
    assert spec.past_bytes == 4 * 6 * 3 * 2 * 2 * 16  # layers, keys and values, heads, features


def test_a_model_of_other_caches_is_refused_where_it_is_planned() -> None:
    facts = qwen3_8b()
    kind = facts.layers[0].attention
    assert isinstance(kind, SoftmaxAttention)
    wider = replace(facts.layers[0], attention=replace(kind, num_kv_heads=1))
    for layers in ((wider, *facts.layers[1:]), (replace(wider, attention=DELTA), wider)):
        with pytest.raises(UnsupportedModelError, match="prefix for a qwen3 model"):
            prefix_spec(replace(facts, layers=layers), num_past=6, has_encoder=False)


def asked(method: str, **adapter: object) -> PlanRequest:
    recipe = Recipe.model_validate(
        {
            "model": {"path": "Qwen/Qwen3-8B"},
            "adapter": {"method": method, **adapter},
            "data": {"path": "rows.jsonl"},
            "train": {"seq_len": 1000, "grad_accum_steps": 4, "steps": 2},
            "output": {"name": "x"},
        }
    )
    return full_request(recipe, qwen3_8b(), num_ranks=1)


@pytest.mark.parametrize("method", CONFIGS)
def test_the_plan_prices_longer_rows_and_a_trained_front(method: str) -> None:
    request, facts = asked(method), qwen3_8b()
    spec = request.typical.adapter
    assert request.typical.seq_len == request.largest.seq_len == 1020
    assert request.typical.label_tokens == 1000
    shapes = trained_tensor_shapes(facts, spec)
    assert trained_parameters(facts, spec) == sum(map(math.prod, shapes))
    assert shapes[0] == (20, 4096)
    found = plan(facts, named_machine("rtx5090"), request)
    assert found.costs.front_backward_s > 0
    shorter = replace(request, typical=replace(request.typical, seq_len=1000))
    assert plan(facts, named_machine("rtx5090"), shorter).step_s < found.step_s


def test_the_plan_prices_the_keys_of_a_prefix_and_its_mask() -> None:
    facts, card = qwen3_8b(), named_machine("rtx5090")
    few, many = (asked("prefix", num_virtual_tokens=num) for num in (20, 1020))
    assert few.typical.seq_len == few.largest.seq_len == few.typical.label_tokens == 1000
    assert trained_parameters(facts, few.typical.adapter) == 20 * 36 * 2 * 8 * 128
    costs = [plan(facts, card, request).costs.layers[0] for request in (few, many)]
    work = [
        attention_work(
            facts.layers[0].attention,
            card,
            num_tokens=1000,
            seq_len=1000,
            dtype_bytes=2,
            num_past=num,
        )
        for num in (0, 20, 1020)
    ]
    assert work[1].flops == 4 * 32 * 128 * 1000 * 1020  # a mask that is a tensor hides no block
    assert work[0].flops == work[1].flops * 1000 / 2040
    assert costs[1].forward_s > costs[0].forward_s
    spec = many.typical.adapter
    workloads = [replace(many.largest, adapter=replace(spec, num_past=num)) for num in (0, 1020)]
    recorded = [recorded_bytes(facts, workload, is_padded=True) for workload in workloads]
    tokens = many.largest.num_tokens
    assert recorded[1] - recorded[0] == tokens * 1020 + spec.past_bytes
    visits = [
        visit_bytes(facts, card, facts.layers[0], workload, is_padded=True)
        for workload in workloads
    ]
    of_all_heads = many.largest.micro_batch_size * 1020 * 32 * 2 * 128 * 2
    assert visits[1].saved - visits[0].saved == of_all_heads
    with pytest.raises(ConfigError, match="and 40000 virtual tokens"):
        asked("prefix", num_virtual_tokens=40000)
