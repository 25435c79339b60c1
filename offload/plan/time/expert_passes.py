"""Memory passes over a mixture's routed rows outside its products, by expert kernels.

Of our Triton kernels: what their launcher hands them besides the rows that a product reads, and
what they write. Declared, until a card has shown it.
"""

from dataclasses import dataclass, replace

from offload.plan.machine.machine import ExpertsImplementation

SWIGLU_PASSES = 5  # over the width of a gated activation, with torch's operators


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPasses:
    """Passes over the features of each routed row.

    Attributes:
        width: Over the input of the projection down.
        hidden: Over hidden features.
    """

    width: float
    hidden: float

    def features(self, *, width: int, hidden: int) -> float:
        """Return features read or written for each row."""
        return self.width * width + self.hidden * hidden

    def times(self, factor: float) -> "RowPasses":
        """Return so many times as many."""
        return RowPasses(width=factor * self.width, hidden=factor * self.hidden)


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchPasses:
    """Passes of a branch over the rows that its projection takes and gives."""

    d_in: float
    d_out: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Passes of an expert kernel backend.

    Attributes:
        forward: Of a forward without a graph.
        recompute: Of one with a graph.
        backward: Of the backward after it.
        down: Of a forward's, those that come after the projection down.
        branch_forward: Of a branch, in a forward.
        branch_backward: Of a branch, in a backward.
        branch_sides: Over both sides of a branch, by products that are separate kernels.
        num_ops: Launches of a forward in addition to the products; a backward has twice as many.
        ops_per_expert: Likewise, for each expert.
        is_fused: Whether its kernels fuse these passes.
    """

    forward: RowPasses
    recompute: RowPasses
    backward: RowPasses
    down: RowPasses
    branch_forward: BranchPasses
    branch_backward: BranchPasses
    branch_sides: int
    num_ops: int
    ops_per_expert: int
    is_fused: bool


# Rows are gathered, gated, weighted and added up by separate operators, and a branch's output is
# added to that of the frozen product.
_ROWS = RowPasses(width=SWIGLU_PASSES, hidden=9)
_BY_TORCH = Way(
    forward=_ROWS,
    recompute=_ROWS,
    backward=_ROWS.times(2),
    down=RowPasses(width=0, hidden=1),  # rows are read and added up
    branch_forward=BranchPasses(d_in=0, d_out=1),
    branch_backward=BranchPasses(d_in=0, d_out=2),
    branch_sides=1,
    num_ops=33,
    ops_per_expert=0,
    is_fused=False,
)
# A loop finds, gathers, gates, weights and adds up the rows of one expert at a time.
_LOOP = replace(_BY_TORCH, ops_per_expert=10)
# A tile writes the gated activation, and with a graph the two halves that it is computed from; the
# backward reads these, and writes their gradients and the activation again, for the adapter. Rows
# that become tokens are written and read. A branch reads its input; in the backward it reads that
# for A, and the gradient of its output twice, for B and on the way to A.
_FUSED = Way(
    forward=RowPasses(width=1, hidden=2),
    recompute=RowPasses(width=3, hidden=2),
    backward=RowPasses(width=5, hidden=2),
    down=RowPasses(width=0, hidden=2),
    branch_forward=BranchPasses(d_in=1, d_out=0),
    branch_backward=BranchPasses(d_in=1, d_out=2),
    branch_sides=0,
    num_ops=14,
    ops_per_expert=0,
    is_fused=True,
)


def way_of(implementation: ExpertsImplementation) -> Way:
    """Return the passes of an expert kernel backend."""
    return {"eager": _LOOP, "grouped_mm": _BY_TORCH, "triton": _FUSED}[implementation]
