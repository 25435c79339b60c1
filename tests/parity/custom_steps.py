"""Steps of a model of custom code: streamed, and by its own loss and plain autograd."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import offload
from tests.parity.custom_model import (
    VOCABULARY,
    CustomConfig,
    CustomLayer,
    CustomModel,
)

SHARED: dict[str, Any] = {}


def built(kind: type[CustomModel], **options: Any) -> Any:
    """Build a model with LoRA on its layers, all of it away from where it starts."""
    SHARED.clear()
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options)
    model = get_peft_model(kind(CustomConfig()), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def batches() -> list[dict[str, torch.Tensor]]:
    """Return two micro-batches of one width; the first has one label token."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        input_ids = torch.randint(3, VOCABULARY, (2, 9), generator=generator)
        found.append({"input_ids": input_ids, "labels": input_ids.clone()})
    found[0]["labels"][:] = -100
    found[0]["labels"][0, 4] = 7
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def plain(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Run the whole model, with its own loss, one micro-batch after the other."""
    numbers = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches()]
    total = 0.0
    for number, batch in zip(numbers, batches(), strict=True):
        part = model(**batch, use_cache=False).loss * number / sum(numbers)
        part.backward()
        total += part.item()
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return total, found


def streamed(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=5)
    try:
        return engine.forward_backward(batches(), dropout_seed=0).loss, gradients(model)
    finally:
        engine.detach()


def assert_equal(model: Any) -> None:
    loss, expected = plain(model)
    found_loss, found = streamed(model)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = float((found[name] - gradient).norm())
        assert difference <= 1e-4 * float(gradient.norm()) + 1e-7, name


def assert_refused(model: Any, match: str) -> None:
    with pytest.raises(offload.UnsupportedModelError, match=match):
        streamed(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def of(layer: type[CustomLayer]) -> type[CustomModel]:
    return type(f"Of{layer.__name__}", (CustomModel,), {"layer": layer})
