"""Memory passes over a mixture's routed rows outside its products, by expert kernels."""

from dataclasses import dataclass, replace

from offload.plan.facts.linears import Linear
from offload.plan.machine.machine import ExpertsImplementation

SWIGLU_PASSES = 5  # over the width of a gated activation, with torch's operators


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Passes of an expert kernel backend in a forward; a backward has twice as many.

    Attributes:
        width_passes: Over a row's features between the projections.
        hidden_passes: Over a row's hidden features.
        branch_in_passes: Over the input of a projection with a branch.
        branch_out_passes: Over its output.
        branch_sides: Over both, by products of a branch that are separate kernels.
        num_ops: Launches in addition to the products.
        ops_per_expert: Likewise, for each expert.
        is_fused: Whether its kernels fuse these passes.
    """

    width_passes: float
    hidden_passes: float
    branch_in_passes: float
    branch_out_passes: float
    branch_sides: int
    num_ops: int
    ops_per_expert: int
    is_fused: bool

    def routed_features(self, *, width: int, hidden: int) -> float:
        """Return features read or written for each row."""
        return self.width_passes * width + self.hidden_passes * hidden

    def branch_features(self, linear: Linear) -> float:
        """Return features read or written for each row by a branch."""
        return self.branch_in_passes * linear.d_in + self.branch_out_passes * linear.d_out


# Rows are gathered, gated, weighted and added up by separate operators, and a branch's output is
# added to that of the frozen product.
_BY_TORCH = Way(
    width_passes=SWIGLU_PASSES,
    hidden_passes=9,
    branch_in_passes=0,
    branch_out_passes=1,
    branch_sides=1,
    num_ops=33,
    ops_per_expert=0,
    is_fused=False,
)
# A loop finds, gathers, gates, weights and adds up the rows of one expert at a time.
_LOOP = replace(_BY_TORCH, ops_per_expert=10)
# The inputs and output of the gated activation are written in the tiles, and read once in the
# backward; rows that become tokens are written and read. A branch reads its input, and all three in
# the backward.
_FUSED = Way(
    width_passes=3,
    hidden_passes=2,
    branch_in_passes=2 / 3,
    branch_out_passes=2 / 3,
    branch_sides=0,
    num_ops=14,
    ops_per_expert=0,
    is_fused=True,
)


def way_of(implementation: ExpertsImplementation) -> Way:
    """Return the passes of an expert kernel backend."""
    return {"eager": _LOOP, "grouped_mm": _BY_TORCH, "triton": _FUSED}[implementation]
