"""Parameters of built models, counted by class from their names."""

from collections import Counter

from torch import nn

from offload.plan.facts.facts import LayerFacts

_PARTS = (
    ("self_attn", "attention"),
    ("linear_attn", "attention"),
    ("mixer.gate.", "router"),
    ("feed_forward.gate.", "router"),
    ("shared_expert", "shared_experts"),
    ("experts", "experts"),
    ("mlp.gate.", "router"),
    ("router", "router"),
    ("mixer", "attention"),
    ("mlp", "mlp"),
    ("feed_forward", "mlp"),
    ("conv.", "mlp"),
    ("per_layer_", "mlp"),
)
_OTHERS = {"sinks", "A_log", "D", "dt_bias", "scale", "per_expert_scale"}


def class_of(name: str) -> str:
    """Return the class of a layer's parameter."""
    last = name.split(".")[-1]
    if last in _OTHERS or "conv1d" in name or "conv.conv" in name:
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
