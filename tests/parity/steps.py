"""Tiny models with adapters, and a step of each: streamed, resident, and plain."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import offload
from offload.engine.engine import Engine, EngineOptions
from offload.engine.tracing.tracer import LiveBytes, Tracer
from offload.plan.schedule.schedule import Order

OPTIONS = EngineOptions(
    codec="native",
    tier="ram",
    store_dir=None,
    num_slots=2,
    stash="device",
    trained_weights="device",
    head_chunk_tokens=7,
    num_kept_graphs=0,
)

NUM_LAYERS = 4
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

LAYER_TYPES = ["sliding_attention"] * (NUM_LAYERS - 1) + ["full_attention"]

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
    "gemma3_text": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, sliding_window=8, layer_types=LAYER_TYPES)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    ),
}


def with_lora(model: PreTrainedModel, *, dropout: float = 0.0) -> PeftModel:
    has_experts = "num_experts" in model.config.to_dict()
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if has_experts else None
    wrapped = get_peft_model(
        model,
        LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=dropout,
            target_modules=["q_proj", "v_proj", "o_proj"],
            target_parameters=experts,
        ),
    )
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:  # zero at the start: half of the gradients would be zero
            torch.nn.init.normal_(parameter, std=0.1)
    return wrapped.train()


def tiny(name: str, *, dropout: float = 0.0, seed: int = 0) -> PeftModel:
    torch.manual_seed(seed)
    return with_lora(MODELS[name](), dropout=dropout)


def micro_batches(num: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for number in range(num):
        width = 12 + 2 * number
        input_ids = torch.randint(0, 64, (2, width), generator=generator)
        attention_mask = torch.ones_like(input_ids)
        attention_mask[1, width - 3 :] = 0
        labels = input_ids.clone()
        labels[:, :4] = -100
        labels[attention_mask == 0] = -100
        batches.append({"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask})
    return batches


def gradients(model: PeftModel) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert len(found) == sum(p.requires_grad for p in model.parameters())
    return found


def streamed(
    model: PeftModel, *, num_slots: int, seed: int = 0, order: Order = Order.LAYER_MAJOR
) -> tuple[float, dict[str, torch.Tensor]]:
    model = copy.deepcopy(model)
    engine = offload.attach(model, num_slots=num_slots, device="cpu", head_chunk_tokens=7)
    try:
        result = engine.forward_backward(micro_batches(), dropout_seed=seed, order=order)
        return result.loss, gradients(model)
    finally:
        engine.detach()


@functools.cache
def resident(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the step of a tiny model all of whose layers stay on the device."""
    return streamed(tiny(name), num_slots=NUM_LAYERS)


def plain(model: PeftModel) -> tuple[float, dict[str, torch.Tensor]]:
    """Ordinary gradient accumulation, normalised over the whole step."""
    model = copy.deepcopy(model)
    batches = micro_batches()
    num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    loss = 0.0
    for batch in batches:
        part = model(**batch, use_cache=False, num_items_in_batch=num_items).loss
        part.backward()
        loss += part.item()
    return loss, gradients(model)


def truth_of(model: PeftModel) -> dict[str, torch.Tensor]:
    """The plain model's gradients in float64, for which only the loop over experts works."""
    model = copy.deepcopy(model).double()
    model.config._experts_implementation = "eager"
    return plain(model)[1]


def steps(model: nn.Module, options: EngineOptions, num: int = 2) -> Any:
    """Return the last of some steps, whose gradients add up, and its ops."""
    model = copy.deepcopy(model)
    engine = Engine(model, device=torch.device("cpu"), options=options)
    try:
        results = [engine.forward_backward(micro_batches(), dropout_seed=s) for s in range(num)]
        kinds = [span.kind for span in results[-1].timeline.spans]
        return (results[-1].loss, gradients(model)), kinds  # type: ignore[arg-type]
    finally:
        engine.detach()


def assert_equal(
    a: tuple[float, dict[str, torch.Tensor]], b: tuple[float, dict[str, torch.Tensor]]
) -> None:
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    assert all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def with_outputs(model: Any, num: int) -> Any:
    """Return a model whose head predicts so many tokens, of which labels are a few."""
    base = model.get_base_model()
    head = nn.Linear(base.lm_head.in_features, num, bias=False)
    head.to(base.lm_head.weight.dtype).requires_grad_(requires_grad=False)
    base.lm_head = head
    base.config.vocab_size = base.vocab_size = num
    return model


def second_step_bytes(engine: Engine, batches: Any) -> int:
    """Return the most bytes of tensors that are live in a second step, and end the engine."""
    memory = LiveBytes()
    try:
        with Tracer(memory):
            engine.forward_backward(batches)
            memory.reset_peak()
            engine.forward_backward(batches)
            return memory.peak_bytes
    finally:
        engine.detach()
