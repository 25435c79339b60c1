"""Tiny models with a head of their own, and what an engine computes with them."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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

from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.host_gradients import LayerUpdate
from offload.engine.model.layers import LayeredModel
from tests.parity.architectures import read_table
from tests.parity.steps import (
    LAYER_TYPES,
    MODELS,
    SHAPE,
    gradients,
    micro_batches,
    tiny,
    with_lora,
)
from tests.parity.tiny_models import tiny_model, with_adapters


def scaled() -> PreTrainedModel:
    """Return a model whose embedding multiplies what it looks up, and is not the head's."""
    config = Gemma3TextConfig(
        **SHAPE, sliding_window=8, layer_types=LAYER_TYPES, tie_word_embeddings=False
    )
    return Gemma3ForCausalLM(config)


def learned_positions(**changes: Any) -> PreTrainedModel:
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
            **changes,
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


def step_of(
    model: nn.Module,
    options: EngineOptions,
    batches: list[dict[str, torch.Tensor]] | None = None,
    **changes: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a step."""
    model = copy.deepcopy(model)
    engine = Engine(model, device=torch.device("cpu"), options=options)
    try:
        result = engine.forward_backward(batches or micro_batches(), dropout_seed=0, **changes)
        return result.loss, gradients(model)  # type: ignore[arg-type]
    finally:
        engine.detach()


def opt() -> nn.Module:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(learned_positions(), adapter)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def exact_types() -> list[str]:
    """Return the types of model that are exact by the committed table."""
    table = read_table(Path(__file__).parents[2] / "docs" / "architectures.md")
    return [one.model_type for one in table.verdicts.values() if one.is_exact]


def untied(model_type: str) -> nn.Module:
    """Return a tiny model of a type with adapters, and a head of its own."""
    model: Any = tiny_model(model_type)
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return with_adapters(model, LayeredModel(model).layers)


def found_with(model: nn.Module, options: EngineOptions) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a step, and the gradients of what it reaches."""
    own = copy.deepcopy(model)
    engine = Engine(own, device=torch.device("cpu"), options=options)
    loss = engine.forward_backward(micro_batches(), dropout_seed=0).loss
    grads = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
    engine.detach()
    return loss, grads


def trained_layers_with(
    options: EngineOptions, make: Callable[[], PreTrainedModel] = MODELS["qwen3"]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return a loss and the layers' weights after three steps in which these train on the host."""

    def update(one: LayerUpdate) -> None:
        for name, weight in one.weights.items():
            weight.sub_(0.1 * one.gradients[name])

    torch.manual_seed(0)
    model: Any = make().train().requires_grad_(requires_grad=False)
    model.model.layers.requires_grad_()
    options = replace(options, trained_weights="host")
    engine = Engine(model, device=torch.device("cpu"), options=options)
    losses = []
    for _ in range(3):
        losses.append(engine.forward_backward(micro_batches()).loss)
        engine.updates.defer(update)
        for weight in engine._bound.places.host_gradients.parameters.values():
            weight.grad = None
    assert losses[2] < losses[0]
    weights = {n: w.detach().clone() for n, w in engine.trained_parameters.items()}
    engine.detach()
    return losses[2], weights


def passes_with(options: EngineOptions, model: Any = None) -> list[Any]:
    """Return losses and logits of a batch, scores, the model's own logits, and generated ones."""
    batches = micro_batches()
    model = copy.deepcopy(tiny("qwen3") if model is None else model).eval()
    engine = Engine(model, device=torch.device("cpu"), options=options)
    rest = {name: value for name, value in batches[1].items() if name != "labels"}
    answers = [engine.forward(batches[0]).loss_sum, engine.forward(rest).logits]
    scores = engine.score(batches, adapters=[None, "default"]).scores
    answers += [tokens.logps_N for adapter in scores for tokens in adapter]
    with torch.no_grad():
        answers.append(model(input_ids=batches[2]["input_ids"]).logits)
    with engine.generation() as generation:
        ids = torch.tensor([[3, 5, 7, 9]])
        for _ in range(3):
            logits_BV = generation.next_logits({0: ids})[0]
            answers.append(logits_BV)
            ids = logits_BV.argmax(-1, keepdim=True)
    engine.detach()
    return answers
