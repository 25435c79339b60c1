"""What a module of experts must satisfy for another implementation to compute it."""

from torch import nn


def goes_through_interface(module: nn.Module) -> bool:
    """Return whether transformers lets the expert kernels of a module be selected."""
    return {"has_gate", "has_bias", "is_transposed", "config"} <= set(vars(module))


def reason_outside(experts: nn.Module) -> str | None:
    """Return which computation of a module bypasses transformers' experts interface, if any."""
    own = vars(experts)
    if not goes_through_interface(experts):
        return "does not go through transformers' experts interface"
    # Older versions of transformers have neither of these.
    if own.get("has_post_expert_norm"):
        return "has a norm after each expert"
    if own.get("_is_expert_parallel"):
        return "shares its experts with other devices"
    return None
