"""The parts of a decoder layer: matrix products and norms."""

from dataclasses import dataclass
from typing import Literal

FP32_BYTES = 4

Group = Literal["attention", "mlp", "experts", "shared_experts", "router"]
Reads = Literal["input", "inside", "gated", "clamped", "plain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """One matrix product of a layer, or a fused stack of one per expert.

    Attributes:
        name: Last part of the module's (or fused parameter's) name, such as q_proj.
        group: Part of the layer that it belongs to.
        d_in: Features in.
        d_out: Features out.
        num_experts: Matrices in the stack.
        active: Matrices of the stack that one token passes through.
        has_bias: Whether each matrix has a bias of d_out elements.
        reads: What its input is: the input of its part of the layer, which others read too;
            something that the part computed from it; or an activation, either of one projection
            times another, perhaps both of them clamped, or of one alone.
        is_module: Whether it is a linear module of its own, which an adapter can target by name.
        is_unread: Whether nothing but the layer's output depends on its value: a layer that is
            recomputed for its gradients can leave it out.
    """

    name: str
    group: Group
    d_in: int
    d_out: int
    num_experts: int = 1
    active: int = 1
    has_bias: bool = False
    reads: Reads = "input"
    is_module: bool = True
    is_unread: bool = False

    @property
    def num_weights(self) -> int:
        """Weights of the whole stack, without biases."""
        return self.num_experts * self.d_in * self.d_out

    @property
    def num_biases(self) -> int:
        """Biases of the whole stack."""
        return self.num_experts * self.d_out if self.has_bias else 0

    @property
    def is_down(self) -> bool:
        """Whether it is the last product of an MLP, after the activation."""
        return self.reads in ("gated", "clamped", "plain")

    @property
    def is_encodable(self) -> bool:
        """Whether a codec encodes it; routers and gates of one output are not encoded."""
        return self.group != "router" and self.d_out > 1

    def adapter_parameters(self, rank: int) -> int:
        """LoRA parameters as peft shapes them: A (rank * E, d_in) and B (d_out, rank * E)."""
        return rank * self.num_experts * (self.d_in + self.d_out)

    @property
    def key(self) -> str:
        """Name that an adapter's patterns match; others may share its last part."""
        return f"experts.{self.name}" if self.group == "experts" else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """One norm of a layer.

    Attributes:
        num_features: Elements of one token that pass through it, over all heads.
        num_weights: Its weights: those of one head, or none.
        num_biases: Its biases.
    """

    num_features: int
    num_weights: int
    num_biases: int = 0
