"""A tiny model for several clients: adapters on some of its linears come and go while attached."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from finetune.adapter.linear_lora import compute_in_base_dtype
from finetune.clients.scheduler import settle
from offload.engine.adapters import Adapters, AdapterSettings
from offload.engine.shared import SharedEngine
from tests.parity.runs import own_name
from tests.parity.steps import MODELS, OPTIONS

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
SMALL = AdapterSettings(rank=4, alpha=8.0, targets=frozenset({"q_proj", "v_proj", "o_proj"}))
LARGE = AdapterSettings(
    rank=16, alpha=32.0, targets=frozenset({"q_proj", "k_proj", "down_proj", "lm_head"})
)


def base_model(name: str = "qwen3", adapter: str = "pattern", **config: Any) -> Any:
    """Return a model with one adapter, by peft, in evaluation mode."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"r": 1, "target_modules": LINEARS, **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(MODELS[name](), LoraConfig(**settings), adapter_name=adapter)
    compute_in_base_dtype(model)
    return model.eval()


def shared_engine(model: nn.Module, **changes: Any) -> SharedEngine:
    return SharedEngine(model, device=torch.device("cpu"), options=replace(OPTIONS, **changes))


@contextmanager
def attached(
    *, max_adapters: int = 4, max_rank: int = 16, num_slots: int = 2, **options: Any
) -> Iterator[tuple[SharedEngine, Adapters]]:
    model = base_model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    engine = shared_engine(model, num_slots=num_slots, **options)
    try:
        yield (
            engine,
            Adapters(
                engine,
                pattern="pattern",
                max_adapters=max_adapters,
                max_rank=max_rank,
                settle=settle,
            ),
        )
    finally:
        engine.detach()


def alone(settings: AdapterSettings) -> Any:
    """Return a model that was made with an adapter of these settings, and no other."""
    return base_model(
        adapter="default",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=sorted(settings.targets),
    )


def values_of(model: nn.Module, adapter: str) -> dict[str, torch.Tensor]:
    """Return an adapter's values by names that do not say whose they are."""
    return {
        own_name(path, adapter): parameter.detach().clone()
        for path, parameter in model.named_parameters()
        if adapter in path.split(".")
    }


def is_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )
