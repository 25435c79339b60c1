"""A tiny model on an engine, after a step: what tests of attached models share."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from torch import nn

import offload
from offload.engine.engine import Engine
from tests.parity.steps import micro_batches, tiny

UP = "base_model.model.model.layers.1.mlp.up_proj.weight"


@contextlib.contextmanager
def attached(model: nn.Module, **settings: Any) -> Iterator[Engine]:
    """Attach, with another layer's weights in each slot than a user would read: after a step."""
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7, **settings)
    try:
        engine.forward_backward(micro_batches(), dropout_seed=0)
        model.zero_grad()
        yield engine
    finally:
        engine.detach()


def layer(model: Any, index: int = 1) -> Any:
    return model.get_base_model().model.layers[index]


def up_proj(model: Any) -> Any:
    return layer(model).mlp.up_proj


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def two_adapters() -> Any:
    model: PeftModel = tiny("qwen3")
    model.add_adapter("b", LoraConfig(r=2, target_modules=["k_proj"]))
    with torch.random.fork_rng():
        for name, parameter in model.named_parameters():
            if "lora_B.b" in name:
                nn.init.normal_(parameter, std=0.1)
    return model


def layer_values(expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = "base_model.model.model.layers.1."
    return {n.removeprefix(prefix): t for n, t in expected.items() if n.startswith(prefix)}
