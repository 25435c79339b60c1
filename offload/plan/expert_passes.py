"""How often a mixture's routed rows pass memory beside their products, by what multiplies them."""

from dataclasses import dataclass, replace

from offload.plan.machine import ExpertsImplementation
from offload.plan.parts import Linear

SWIGLU_PASSES = 5  # over the width of a gated activation, by torch's operators


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Passes of a forward; a backward takes twice as many.

    Attributes:
        width_passes: Over a row's features between the projections.
        hidden_passes: Over a row's hidden features.
        branch_in_passes: Over what a projection with a branch reads.
        branch_out_passes: Over what it gives.
        branch_sides: Over both by products of a branch that are kernels of their own.
        num_ops: Launches beside the products.
        ops_per_expert: Likewise, for each expert.
    """

    width_passes: float
    hidden_passes: float
    branch_in_passes: float
    branch_out_passes: float
    branch_sides: int
    num_ops: int
    ops_per_expert: int

    def routed_features(self, *, width: int, hidden: int) -> float:
        """Return features read or written for each row."""
        return self.width_passes * width + self.hidden_passes * hidden

    def branch_features(self, linear: Linear) -> float:
        """Return features read or written for each row by a branch."""
        return self.branch_in_passes * linear.d_in + self.branch_out_passes * linear.d_out


# Rows are gathered, gated, weighted and added up by operators of their own, and what a branch gives
# is added to what the frozen product gave.
_BY_TORCH = Way(
    width_passes=SWIGLU_PASSES,
    hidden_passes=9,
    branch_in_passes=0,
    branch_out_passes=1,
    branch_sides=1,
    num_ops=33,
    ops_per_expert=0,
)
# A loop finds, gathers, gates, weighs and adds up each expert's rows by themselves.
_LOOP = replace(_BY_TORCH, ops_per_expert=10)
# What the gate saw and the activation are written in the tiles, and read once backward; rows that
# become tokens are written and read. A branch reads what it is given, and backward all three.
_FUSED = Way(
    width_passes=3,
    hidden_passes=2,
    branch_in_passes=2 / 3,
    branch_out_passes=2 / 3,
    branch_sides=0,
    num_ops=14,
    ops_per_expert=0,
)


def way_of(implementation: ExpertsImplementation) -> Way:
    """Return the passes of a way to multiply experts."""
    return {"eager": _LOOP, "grouped_mm": _BY_TORCH, "triton": _FUSED}[implementation]
