"""Virtual tokens are counted as peft makes them, and rows are longer by them."""

import math
from dataclasses import replace

import pytest
from peft import PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from finetune.planning.request import full_request
from finetune.recipe.recipe import Recipe
from offload.plan.facts.trainable import trained_parameters, trained_tensor_shapes, virtual_shapes
from offload.plan.machine.machine import named_machine
from offload.plan.plan import plan
from offload.plan.request import PlanRequest
from tests.builders import qwen3_8b

CONFIGS = {"prompt": PromptTuningConfig, "p_tuning": PromptEncoderConfig}


@pytest.mark.parametrize("method", CONFIGS)
def test_what_trains_has_the_shapes_that_peft_makes(method: str) -> None:
    config = Qwen3Config(hidden_size=32, intermediate_size=8, num_hidden_layers=1, vocab_size=9)
    made = CONFIGS[method](num_virtual_tokens=6, task_type="CAUSAL_LM")
    adapted = get_peft_model(Qwen3ForCausalLM(config), made)
    shapes = [tuple(p.shape) for p in adapted.parameters() if p.requires_grad]
    assert list(virtual_shapes(6, 32, has_encoder=method == "p_tuning")) == shapes


def asked(method: str) -> PlanRequest:
    recipe = Recipe.model_validate(
        {
            "model": {"path": "Qwen/Qwen3-8B"},
            "adapter": {"method": method},
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
