"""What a model's weights are, and in which form each of them waits: every parameter once."""

from dataclasses import dataclass
from typing import Literal

from offload.plan.codec import CodecName

TensorClass = Literal[
    "attention",
    "dense MLP",
    "experts",
    "shared experts",
    "router",
    "norms",
    "biases",
    "other in layers",
    "embeddings",
    "head",
    "other",
    "adapters and other trained",
]
"""Part of a model, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StockRow:
    """The parameters of one class that wait in one form.

    Attributes:
        kind: Their class.
        codec: Their form.
        is_in_layers: Whether they are in the decoder layers, and not trained on the device.
        num_parameters: How many numbers.
        decoded_bytes: What they take where they compute.
        encoded_bytes: What they take while they wait.
    """

    kind: TensorClass
    codec: CodecName
    is_in_layers: bool
    num_parameters: int
    decoded_bytes: int
    encoded_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stock:
    """All rows of a model."""

    rows: tuple[StockRow, ...]

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, those that are shared counted once."""
        return sum(row.num_parameters for row in self.rows)

    @property
    def decoded_bytes(self) -> int:
        """What they would all take as they compute."""
        return sum(row.decoded_bytes for row in self.rows)

    @property
    def encoded_bytes(self) -> int:
        """What they all take as they wait."""
        return sum(row.encoded_bytes for row in self.rows)

    @property
    def encoded_frac(self) -> float:
        """Share of the parameters that wait encoded."""
        encoded = sum(row.num_parameters for row in self.rows if row.codec != "native")
        return encoded / self.num_parameters

    @property
    def layers_encoded_frac(self) -> float:
        """Share of the decoder layers' bytes, as they compute, that waits encoded."""
        rows = [row for row in self.rows if row.is_in_layers]
        encoded = sum(row.decoded_bytes for row in rows if row.codec != "native")
        return encoded / sum(row.decoded_bytes for row in rows) if rows else 0.0
