"""Parameters of built models, counted by class from their names."""

from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from offload.plan.facts.facts import LayerFacts

_PARTS = (
    ("self_attn", "attention"),
    ("linear_attn", "attention"),
    ("shared_expert", "shared_experts"),
    ("experts", "experts"),
    ("mlp.gate.", "router"),
    ("router", "router"),
    ("mlp", "mlp"),
    ("per_layer_", "mlp"),
)


def on_meta(config: dict[str, Any]) -> Any:
    """Build a model without memory for its weights."""
    known = {key: value for key, value in config.items() if key != "architectures"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**known))


def class_of(name: str) -> str:
    """Return the class of a layer's parameter."""
    last = name.split(".")[-1]
    if last in ("sinks", "A_log", "dt_bias", "scale", "per_expert_scale") or "conv1d" in name:
        return "other"
    if "norm" in name:
        return "norm"
    if last.endswith("bias"):
        return "bias"
    return next(label for part, label in _PARTS if part in name)


def counted(layer: nn.Module) -> dict[str, int]:
    """Count a layer's parameters by class."""
    counts = Counter[str]()
    for name, parameter in layer.named_parameters():
        counts[class_of(name)] += parameter.numel()
    return dict(counts)


def without_zeros(layer: LayerFacts) -> dict[str, int]:
    """Return the counts of the facts, in the same form."""
    return {name: count for name, count in layer.parameters_by_class().items() if count}
