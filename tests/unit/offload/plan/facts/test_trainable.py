"""What trains, counted from a config: tensors of the shapes that peft makes."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapter.lora import add_lora, trained
from finetune.recipe.sections import AdapterSection
from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import AdapterSpec, ModelFacts, linear_names, model_facts
from offload.plan.facts.optimizer import Shape
from offload.plan.facts.trainable import (
    adapter_parameters,
    module_parameters,
    trained_parameters,
    trained_tensor_shapes,
)
from offload.plan.machine.machine import Machine, named_machine
from offload.plan.memory.memory import device_terms
from offload.plan.plan import plan
from offload.plan.schedule.op import Kind
from offload.plan.time.costs import price
from tests.builders import adapter, qwen3_8b, request, workload

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
}
MOE = TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS = {
    "qwen3": TINY | {"model_type": "qwen3"},
    "llama tied": TINY | {"model_type": "llama", "tie_word_embeddings": True},
    "gemma3_text": TINY | {"model_type": "gemma3_text"},
    "qwen3_moe": MOE | {"model_type": "qwen3_moe"},
    "qwen2_moe": MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40},
    "olmoe": TINY | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": TINY | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
}
SECTIONS = {
    "DoRA": adapter(dora=True),
    "patterns": adapter(rank_pattern={"q_proj": 5, "o_proj": 1}),
    "norms and embeddings": adapter(modules_to_save=("norms", "embed_tokens")),
    "linears": adapter(modules_to_save=("o_proj", "q_proj")),
    "router": adapter(
        modules_to_save=("router",), rank_pattern={"experts.down_proj": 1, "v_proj": 4}
    ),
    "head": adapter(modules_to_save=("lm_head",)),
}
REFUSED = {(name, "router") for name in ("qwen3", "llama tied", "gemma3_text")} | {
    (name, "head") for name in ("llama tied", "gemma3_text")
}


def spec_of(facts: ModelFacts, section: AdapterSection, *, experts: bool) -> AdapterSpec:
    return AdapterSpec(
        rank=3,
        targets=tuple(n for n in linear_names(facts) if n not in section.modules_to_save),
        experts=experts,
        rank_pattern=tuple(section.rank_pattern.items()),
        is_dora=section.dora,
        modules=section.modules_to_save,
    )


def made_by_peft(config: dict[str, Any], section: AdapterSection, *, experts: bool) -> list[Shape]:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    adapted = add_lora(model, section.model_copy(update={"rank": 3, "experts": experts}), seed=0)
    return [tuple(parameter.shape) for parameter in trained(adapted).values()]


@pytest.mark.filterwarnings("ignore:.*RoPE scaling factor")
@pytest.mark.parametrize(
    ("name", "section"),
    [
        pytest.param(name, section, id=f"{name}-{what}")
        for name in CONFIGS
        for what, section in SECTIONS.items()
        if (name, what) not in REFUSED
    ],
)
def test_what_trains_has_the_shapes_that_peft_makes(name: str, section: AdapterSection) -> None:
    facts = model_facts(CONFIGS[name])
    experts = facts.layers[0].num_experts > 0 and not section.dora
    spec = spec_of(facts, section, experts=experts)
    made = made_by_peft(CONFIGS[name], section, experts=experts)
    assert sorted(trained_tensor_shapes(facts, spec)) == sorted(made)
    assert trained_parameters(facts, spec) == sum(map(math.prod, made))


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("qwen3", {"modules": ("router",)}, "names 'router', which a qwen3 model has not"),
        ("qwen3", {"modules": ("norm",)}, r"(?s)'norm'.*hint: .*\[norms\]"),
        ("llama tied", {"modules": ("lm_head",)}, "names lm_head, which is embed_tokens"),
        ("qwen3", {"rank_pattern": (("q_prj", 4),)}, r"(?s)rank_pattern names 'q_prj'.*{q_proj: "),
        ("qwen3_moe", {"alpha_pattern": ("experts.down_proj",)}, "which has no adapter"),
        ("qwen3", {"targets": ()}, "nothing gets an adapter"),
    ],
)
def test_what_a_model_has_not_is_refused_by_name(
    name: str, changes: dict[str, Any], text: str
) -> None:
    facts = model_facts(CONFIGS[name])
    spec = replace(spec_of(facts, AdapterSection(), experts=False), **changes)
    with pytest.raises(UnsupportedModelError, match=text):
        trained_parameters(facts, spec)


# ---------------------------------------------------------------------------------- memory and time

QWEN_8B = qwen3_8b()
PLAIN = AdapterSpec(rank=16, targets=linear_names(QWEN_8B), experts=False)


def terms(spec: AdapterSpec, *, dtype_bytes: int = 2) -> dict[str, int]:
    found = device_terms(
        QWEN_8B,
        named_machine("rtx5090"),
        workload(adapter=spec, dtype_bytes=dtype_bytes),
        num_slots=4,
        num_micro_batches=2,
        is_reduced=False,
        is_padded=False,
        is_stashed=False,
    )
    return {term.name: term.num_bytes for term in found}


@pytest.mark.parametrize(("dtype_bytes", "copy_bytes"), [(2, 6), (4, 4)])
def test_a_module_that_trains_whole_is_priced_with_its_master_gradient_and_states(
    dtype_bytes: int, copy_bytes: int
) -> None:
    spec = replace(PLAIN, modules=("lm_head", "norms"))
    count, head = module_parameters(QWEN_8B, spec), QWEN_8B.head_parameters
    assert count == head + QWEN_8B.final_norm_parameters + 36 * (2 * 4096 + 2 * 128)
    without, found = terms(PLAIN, dtype_bytes=dtype_bytes), terms(spec, dtype_bytes=dtype_bytes)
    assert "trained modules" not in without
    assert found["trained modules"] == copy_bytes * count
    assert found["a module's new gradient"] == dtype_bytes * head
    assert found["adapters"] == without["adapters"]
    assert found["gradients"] - without["gradients"] == 4 * count
    assert found["optimizer states"] - without["optimizer states"] == 8 * count


def test_dora_is_priced_with_its_magnitudes_and_the_norm_of_the_widest_weight() -> None:
    dora = replace(PLAIN, is_dora=True)
    magnitudes = adapter_parameters(QWEN_8B, dora) - adapter_parameters(QWEN_8B, PLAIN)
    assert magnitudes == 36 * sum(linear.d_out for linear in QWEN_8B.layers[0].linears)
    assert terms(dora)["one visit: DoRA's norm"] == 4 * (12288**2 + 4 * 4096 * 12288)


@pytest.mark.parametrize(
    ("modules", "goes_back"),
    [((), False), (("o_proj",), False), (("norms",), True), (("embed_tokens",), True)],
)
def test_gradients_go_back_through_the_front_when_anything_outside_the_layers_trains(
    modules: tuple[str, ...], goes_back: bool
) -> None:
    micro_batch = workload(adapter=replace(PLAIN, modules=modules))
    made = plan(QWEN_8B, big(), request(micro_batch, num_micro_batches=4, num_slots=4))
    kinds = [op.kind for op in made.schedule.ops]
    assert kinds.count(Kind.FRONT_BACKWARD) == (4 if goes_back else 0)


def big() -> Machine:
    return replace(named_machine("h100"), ram_bytes=2**40, vram_bytes=2**40, pinned_bytes=2**40)


@pytest.mark.parametrize(
    ("changes", "slower"),
    [
        ({"is_dora": True}, {"layers", "optimizer_s"}),
        ({"modules": ("o_proj",)}, {"layers", "optimizer_s"}),
        ({"modules": ("lm_head",)}, {"tail_s", "optimizer_s", "front_backward_s"}),
        ({"modules": ("embed_tokens",)}, {"front_backward_s", "optimizer_s"}),
        ({"rank_pattern": (("down_proj", 256),)}, {"layers", "optimizer_s"}),
    ],
)
def test_each_option_costs_time_where_it_works(changes: dict[str, Any], slower: set[str]) -> None:
    before = price(QWEN_8B, big(), workload(adapter=PLAIN))
    after = price(QWEN_8B, big(), workload(adapter=replace(PLAIN, **changes)))
    times = {
        "layers": lambda costs: costs.layers[0].backward_s,
        "tail_s": lambda costs: costs.tail_s,
        "optimizer_s": lambda costs: costs.optimizer_s,
        "front_backward_s": lambda costs: costs.front_backward_s,
    }
    assert {name for name, of in times.items() if of(after) > of(before)} == slower
    assert not any(of(after) < of(before) for of in times.values())


def test_dora_takes_the_memory_that_the_plan_says() -> None:
    from peft import LoraConfig, get_peft_model

    for dtype in (torch.float32, torch.bfloat16):
        linear = torch.nn.Linear(256, 768, bias=False, dtype=dtype)
        model = get_peft_model(
            torch.nn.Sequential(linear), LoraConfig(r=8, target_modules=["0"], use_dora=True)
        )
        x = torch.randn(1, 256, dtype=dtype, requires_grad=True)
        with torch.profiler.profile(profile_memory=True) as profile:
            model(x)
        held = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        copies = {torch.float32: 3, torch.bfloat16: 4}[dtype]
        assert peak == pytest.approx(4 * (256**2 + copies * 256 * 768), rel=0.05)
