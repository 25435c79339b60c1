"""What a module of experts must be for another implementation to compute it."""

from torch import nn


def goes_through_interface(module: nn.Module) -> bool:
    """Tell whether transformers lets a module's experts be multiplied in several ways."""
    return {"has_gate", "has_bias", "is_transposed", "config"} <= set(vars(module))


def reason_outside(experts: nn.Module) -> str | None:
    """Tell why not all that a module computes goes through transformers' experts interface."""
    own = vars(experts)
    if not goes_through_interface(experts):
        return "does not go through transformers' experts interface"
    # Older versions of transformers have neither of these.
    if own.get("has_post_expert_norm"):
        return "has a norm behind each expert"
    if own.get("_is_expert_parallel"):
        return "shares its experts with other devices"
    return None
