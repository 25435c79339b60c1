"""Memory passes over a mixture's routed rows outside its products, by expert kernels.

Counted from the operators that run; `tests/unit/offload/plan/time/test_expert_passes.py` counts
them again. A gather reads as much as it writes. Of our Triton kernels: what their launcher hands
them besides the rows that a product reads, and what they write: declared, until a card has shown
it.
"""

from dataclasses import dataclass, replace

from offload.plan.facts.linears import FP32_BYTES
from offload.plan.machine.machine import ExpertsImplementation


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPasses:
    """Passes over the features of each routed row, and of each token."""

    width: float  # over the input of the projection down
    hidden: float  # over hidden features
    tokens: float = 0  # over hidden features of each token
    # Passes over hidden features of each token, for each expert that has rows.
    tokens_per_expert: float = 0

    def features(
        self, *, width: int, hidden: int, rows_per_token: float, num_experts: float
    ) -> float:
        """Return features read or written for each row."""
        of_tokens = (self.tokens + self.tokens_per_expert * num_experts) / rows_per_token
        return self.width * width + (self.hidden + of_tokens) * hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """Launches in addition to the products: once, and for each expert that has rows."""

    once: int = 0
    per_expert: int = 0

    def of(self, num_experts: float) -> float:
        """Return their number."""
        return self.once + self.per_expert * num_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchPasses:
    """What a branch takes besides the arithmetic of its products."""

    d_in: float  # passes over the rows that its projection takes
    d_out: float  # over those that it gives
    num_products: int  # products that are kernels of their own
    launches: Launches  # launches in addition to these products


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Passes and launches of an expert kernel backend."""

    forward: RowPasses  # passes of a forward without a graph
    recompute: RowPasses  # passes of a forward with a graph
    backward: RowPasses  # passes of the backward after it
    down: RowPasses  # passes of a forward that come after the projection down
    forward_launches: Launches  # launches of a forward or a recompute
    backward_launches: Launches  # launches of the backward
    down_launches: Launches  # launches of a forward that come after the projection down
    branch_forward: BranchPasses  # passes of a branch in a forward
    branch_inner: BranchPasses  # passes of a branch whose projection is left out of a recompute
    branch_backward: BranchPasses  # passes of a branch in a backward
    branch_sides: int  # passes over both sides of a branch, by products that are separate kernels
    # Passes of a backward over A and B, in the weights' dtype: they are read, and unless the
    # kernels fuse it, their gradients are written and cast.
    factor_passes: int
    # Passes of a backward over A and B in fp32: gradients are cast, put in order, and added up.
    factor_fp32_passes: int
    num_calls: int  # functions of our own, forward as well as backward
    is_fused: bool  # whether its kernels fuse these passes
    # Whether its kernels multiply tiles of rows, some of them empty; see `tile_rows`.
    is_tiled: bool = False


LARGE_TILE_ROWS, TILE_ROWS, LEAST_TILE_ROWS = 128, 64, 16
"""Rows of a tile of our Triton kernels: on Hopper, on other cards, and the least."""


def tile_rows(rows_per_expert: int, *, is_large: bool) -> int:
    """Return the rows of a tile: fewer where an expert's rows leave more than a quarter empty."""
    rows = LARGE_TILE_ROWS if is_large else TILE_ROWS
    if 4 * rows_per_expert >= 3 * rows:
        return rows
    least = 1 << max(0, rows_per_expert - 1).bit_length()
    return max(LEAST_TILE_ROWS, min(TILE_ROWS, least))


_ROUTE = 9  # launches that clamp and sort the choices, and find where each expert's rows end
# A gate, its product with up, and that with the routing weights, which are gathered; backward the
# gradients of all, those of gate and up side by side.
_GATE, _GATE_LAUNCHES, _GATE_BACK, _GATE_BACK_LAUNCHES = 7, 4, 19, 9
# By transformers' own code: it weights what comes down.
_PLAIN_GATE, _PLAIN_GATE_BACK = 5, 13


def _grouped(*, is_cast: bool) -> Way:
    """Rows are gathered once; a branch's output is a tensor that the frozen product adds up with.

    A gradient of A or B is one product, after which rows of experts without tokens become zeros.
    """
    casts, sides = 2 if is_cast else 1, RowPasses(width=0, hidden=1, tokens=1)
    passes = RowPasses(width=_GATE, hidden=3, tokens=1)
    return Way(
        forward=passes,
        recompute=passes,
        backward=RowPasses(width=_GATE_BACK, hidden=5, tokens=1),
        down=sides,
        forward_launches=Launches(once=_ROUTE + 1 + _GATE_LAUNCHES + 2),
        backward_launches=Launches(once=_GATE_BACK_LAUNCHES + 5),
        down_launches=Launches(once=2),
        branch_forward=BranchPasses(
            d_in=0, d_out=3, num_products=2, launches=Launches(once=casts + 2)
        ),
        branch_inner=BranchPasses(
            d_in=0, d_out=0, num_products=1, launches=Launches(once=casts + 1)
        ),
        branch_backward=BranchPasses(
            d_in=3, d_out=0, num_products=4, launches=Launches(once=17 + 2 * is_cast)
        ),
        branch_sides=1,
        factor_passes=4 + is_cast,
        factor_fp32_passes=4 + is_cast,
        num_calls=2,
        is_fused=False,
    )


def _loop(*, is_adapted: bool, is_cast: bool) -> Way:
    """Rows of one expert at a time are gathered for each product, and added up in fp32.

    A branch gathers them once more forward; backward it gathers gradients twice, and rows once.
    """
    casts = 2 if is_cast else 1
    added = RowPasses(width=0, hidden=9 if is_cast else 3, tokens=5 if is_cast else 1)
    gathers, gathers_back = (4, 8) if is_adapted else (2, 2)
    passes = replace(added, width=_GATE, hidden=gathers + added.hidden)
    return Way(
        forward=passes,
        recompute=passes,
        backward=replace(added, width=_GATE_BACK, hidden=gathers_back + added.hidden),
        down=added,
        forward_launches=Launches(
            once=_ROUTE + _GATE_LAUNCHES + 1 + is_cast, per_expert=gathers // 2 + 1 + is_cast
        ),
        backward_launches=Launches(
            once=_GATE_BACK_LAUNCHES + 2 + is_cast, per_expert=gathers_back // 2 + 1 + is_cast
        ),
        down_launches=Launches(once=1 + is_cast, per_expert=1 + is_cast),
        branch_forward=BranchPasses(
            d_in=0, d_out=1, num_products=2, launches=Launches(once=casts + 1)
        ),
        branch_inner=BranchPasses(
            d_in=0, d_out=0, num_products=1, launches=Launches(once=casts + 1)
        ),
        branch_backward=BranchPasses(
            d_in=1, d_out=0, num_products=4, launches=Launches(once=6 + 2 * is_cast)
        ),
        branch_sides=1,
        factor_passes=3 + is_cast,
        factor_fp32_passes=4 + is_cast,
        num_calls=2,
        is_fused=False,
    )


_NO_BRANCH = BranchPasses(d_in=0, d_out=0, num_products=0, launches=Launches())
# transformers sorts rows, weights what comes down, and puts it back in order to add it up; the
# gradients go the same way back, through tensors of zeros.
_GROUPED_PLAIN = Way(
    forward=RowPasses(width=_PLAIN_GATE, hidden=7, tokens=1),
    recompute=RowPasses(width=_PLAIN_GATE, hidden=7, tokens=1),
    backward=RowPasses(width=_PLAIN_GATE_BACK, hidden=12, tokens=4),
    down=RowPasses(width=0, hidden=5, tokens=1),
    forward_launches=Launches(once=14),
    backward_launches=Launches(once=14),
    down_launches=Launches(once=5),
    branch_forward=_NO_BRANCH,
    branch_inner=_NO_BRANCH,
    branch_backward=_NO_BRANCH,
    branch_sides=0,
    factor_passes=0,
    factor_fp32_passes=0,
    num_calls=0,
    is_fused=False,
)
# Each expert's gradient by the tokens is a tensor of its own, of all tokens.
_LOOP_PLAIN = replace(
    _GROUPED_PLAIN,
    backward=RowPasses(width=_PLAIN_GATE_BACK, hidden=9, tokens_per_expert=6),
    forward_launches=Launches(once=7, per_expert=8),
    backward_launches=Launches(once=-2, per_expert=14),
    down_launches=Launches(per_expert=3),
)


def _fused(*, is_cast: bool) -> Way:
    """A tile writes the gated activation, and with a graph the two halves that it is made of.

    The backward reads these, and writes their gradients and the activation again, for the adapter.
    Rows that become tokens are written and read. A branch reads its input; in the backward it reads
    that for A, and the gradient of its output twice, for B and on the way to A. The casts of A and
    B that a recompute made are read again; their gradients are written in fp32 and added up.
    """
    inner = BranchPasses(
        d_in=1, d_out=0, num_products=1, launches=Launches(once=2 if is_cast else 1)
    )
    return Way(
        forward=RowPasses(width=1, hidden=2),
        recompute=RowPasses(width=3, hidden=2),
        backward=RowPasses(width=5, hidden=2),
        down=RowPasses(width=0, hidden=2),
        forward_launches=Launches(once=_ROUTE + 1),
        backward_launches=Launches(once=5),
        down_launches=Launches(once=1),
        branch_forward=inner,
        branch_inner=inner,
        branch_backward=BranchPasses(d_in=1, d_out=2, num_products=3, launches=Launches(once=3)),
        branch_sides=0,
        factor_passes=1,
        factor_fp32_passes=4,
        num_calls=1,
        is_fused=True,
        is_tiled=True,
    )


def way_of(
    implementation: ExpertsImplementation, *, is_adapted: bool, is_ours: bool, dtype_bytes: int
) -> Way:
    """Return the passes of an expert kernel backend.

    Args:
        implementation: The backend.
        is_adapted: Whether experts have branches.
        is_ours: Whether a loop without branches is ours; otherwise it is transformers' own, as
            grouped products without branches are.
        dtype_bytes: Bytes of a weight and of an activation.
    """
    is_cast = dtype_bytes != FP32_BYTES
    if implementation == "triton":
        return _fused(is_cast=is_cast)
    if implementation == "grouped_mm":
        return _grouped(is_cast=is_cast) if is_adapted else _GROUPED_PLAIN
    if is_adapted or is_ours:
        return _loop(is_adapted=is_adapted, is_cast=is_cast)
    return _LOOP_PLAIN
