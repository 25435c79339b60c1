"""Gates: the activation after the up projection, identified by what a model computes."""

from dataclasses import dataclass
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

GateName = Literal["silu", "clamped_swiglu", "gelu_tanh"]
GATE_NAMES = get_args(GateName)  # in the order of the kernels' numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """How the up projection's output becomes an activation.

    Attributes:
        name: See kernels.gate_parts.
        is_interleaved: Whether gate and up columns alternate, or all gates come first.
        alpha: Of clamped_swiglu.
        limit: Of clamped_swiglu.
    """

    name: GateName
    is_interleaved: bool
    alpha: float = 1.0
    limit: float = 0.0

    def __call__(self, both_SF: torch.Tensor) -> torch.Tensor:
        """Compute it with torch."""
        if self.is_interleaved:
            gate, up = both_SF[..., ::2], both_SF[..., 1::2]
        else:
            gate, up = both_SF.chunk(2, dim=-1)
        if self.name == "silu":
            return F.silu(gate) * up
        if self.name == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


GATES: WeakKeyDictionary[nn.Module, Gate | None] = WeakKeyDictionary()


def gate_of(experts: Any) -> Gate | None:
    """Return the gate of a module of experts, found by its results; None if it is unknown.

    Matching names would need a case for each model.
    """
    if experts not in GATES:
        GATES[experts] = _find_gate(experts) if experts.has_gate else None
    return GATES[experts]


def _find_gate(experts: Any) -> Gate | None:
    clamped = {name: float(getattr(experts, name, 0.0)) for name in ("alpha", "limit")}
    span = torch.linspace(-12, 12, 49, dtype=torch.float64)
    both_SF = torch.stack(torch.meshgrid(span, span, indexing="ij"), -1).view(1, -1)
    with torch.no_grad():
        computed = experts._apply_gate(both_SF)
        for is_interleaved in (False, True):
            for gate in (
                Gate(name="silu", is_interleaved=is_interleaved),
                Gate(name="gelu_tanh", is_interleaved=is_interleaved),
                Gate(name="clamped_swiglu", is_interleaved=is_interleaved, **clamped),
            ):
                if torch.allclose(gate(both_SF), computed, rtol=1e-6, atol=1e-9):
                    return gate
    return None
