"""What an adapter of another method than LoRA adds to a linear layer, in counts."""

from dataclasses import dataclass

from offload.plan.facts.optimizer import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A count that grows with the tokens."""

    fixed: float
    per_token: float

    def at(self, num_tokens: int) -> float:
        """Return the count for so many tokens."""
        return self.fixed + self.per_token * num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCounts:
    """What a forward or a backward does, in addition to the frozen layer's product.

    Attributes:
        fp32_flops: Arithmetic of products in float32.
        half_flops: Arithmetic of products in 16 bits.
        num_bytes: Read and written by operations that are not such products.
        num_ops: Operations that run a kernel.
    """

    fp32_flops: Line
    half_flops: Line
    num_bytes: Line
    num_ops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodCounts:
    """An adapter on one linear layer.

    Attributes:
        shapes: Of its tensors that train.
        forward: What a forward adds.
        backward: What a backward adds.
        saved: Bytes of what is saved for the backward, but for the layer's own input.
        saves_input: Whether the layer's own input is saved too.
        live: Bytes that are live at once at most, in addition to what is saved.
    """

    shapes: tuple[Shape, ...]
    forward: PassCounts
    backward: PassCounts
    saved: Line
    saves_input: bool
    live: Line


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftMethod:
    """The counts of a method on all kinds of linear layers of a model.

    Attributes:
        name: Of the method, such as "loha".
        linears: (name, d_in, d_out) -> counts.
        frozen_bytes: Of the adapter's tensors that do not train, of the whole model.
    """

    name: str
    linears: tuple[tuple[tuple[str, int, int], MethodCounts], ...]
    frozen_bytes: int

    def of(self, name: str, d_in: int, d_out: int) -> MethodCounts:
        """Return the counts of a linear layer."""
        return dict(self.linears)[name, d_in, d_out]
