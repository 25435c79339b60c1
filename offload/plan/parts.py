"""What a decoder layer is built of: matrix products and norms."""

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
        reads: The input of its part of the layer, which others read too; something that the part
            made of it; or an activation: of one projection times another, perhaps both of them
            clamped, or of one alone.
        is_module: Whether it is a linear module of its own, on which an adapter can be put by name.
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
        """Whether it is the last product of an MLP, behind the activation."""
        return self.reads in ("gated", "clamped", "plain")

    @property
    def is_encodable(self) -> bool:
        """Whether a codec writes it: not what steers, routers and gates of one output."""
        return self.group != "router" and self.d_out > 1

    def adapter_parameters(self, rank: int) -> int:
        """LoRA parameters as peft shapes them: A (rank * E, d_in) and B (d_out, rank * E)."""
        return rank * self.num_experts * (self.d_in + self.d_out)

    @property
    def key(self) -> str:
        """Name by which an adapter's patterns mean it, whose last part others may share."""
        return f"experts.{self.name}" if self.group == "experts" else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """One norm of a layer.

    Attributes:
        num_features: Elements of one token that pass through it: those of all heads.
        num_weights: Its weights: of one head, or none.
        num_biases: Its biases.
    """

    num_features: int
    num_weights: int
    num_biases: int = 0
