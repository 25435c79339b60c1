"""A model's weights and the codec in which each is stored; every parameter is counted once."""

from dataclasses import dataclass
from typing import Literal

from offload.plan.facts.codec import CodecName

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
"""Classes of parameters, in display order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InventoryRow:
    """The parameters of one class that are stored in one codec.

    Attributes:
        kind: Their class.
        codec: Their codec.
        is_in_layers: Whether they are in the decoder layers, and not trained on the device.
        num_parameters: How many parameters.
        decoded_bytes: Their size in the compute dtype.
        encoded_bytes: Their size as stored.
    """

    kind: TensorClass
    codec: CodecName
    is_in_layers: bool
    num_parameters: int
    decoded_bytes: int
    encoded_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightInventory:
    """All rows of a model."""

    rows: tuple[InventoryRow, ...]

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; shared ones count once."""
        return sum(row.num_parameters for row in self.rows)

    @property
    def decoded_bytes(self) -> int:
        """Size of all parameters in the compute dtype."""
        return sum(row.decoded_bytes for row in self.rows)

    @property
    def encoded_bytes(self) -> int:
        """Size of all parameters as stored."""
        return sum(row.encoded_bytes for row in self.rows)

    @property
    def encoded_frac(self) -> float:
        """Fraction of the parameters that are stored encoded."""
        encoded = sum(row.num_parameters for row in self.rows if row.codec != "native")
        return encoded / self.num_parameters

    @property
    def layers_encoded_frac(self) -> float:
        """Fraction of the decoder layers' bytes, in the compute dtype, that is stored encoded."""
        rows = [row for row in self.rows if row.is_in_layers]
        encoded = sum(row.decoded_bytes for row in rows if row.codec != "native")
        return encoded / sum(row.decoded_bytes for row in rows) if rows else 0.0
