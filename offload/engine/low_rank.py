"""Linear layers with low-rank branches, computed at the precision of the frozen weights.

    y_i = W_i x + b_i + s_i B_i (A_i x)

W_i and b_i are frozen, in bf16 say; A_i and B_i train and are held in fp32.

Problem. Computed as written, in fp32, a branch of a few columns costs more than its arithmetic: x
is copied to fp32 and kept for the backward once per linear, y_i is read and written again for the
sum, and on a GPU the narrow products run at the fp32 rate.

Idea. One autograd function for all linears that read the same x. A and B are cast to the dtype of
x; one narrow product computes A x for the whole group; B's product is added into W's output in
place. The backward needs x once and A x, a few columns. The gradients by x are summed in one
tensor.

DoRA: outputs are scaled, and the gradients by x start from scaled ones: see
`offload.engine.pointwise.magnitudes`.

Precision. Products take inputs in the dtype of x and sum in fp32. Gradients of A and B are returned
in fp32 (on CUDA without having been rounded before), so autograd sums micro-batches in fp32.

Shapes: N rows (tokens), K features in, M features out, R rank. A group's ranks lie side by side.

Source: arXiv:2106.09685, eq. 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from offload.engine.pointwise.magnitudes import Scale
from offload.engine.recompute.unread import not_a_value

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRank:
    """The branch of one adapter on one linear layer: scaling * B (A x).

    Attributes:
        a_RK: A, which trains.
        b_MR: B, which trains.
        scaling: Factor of the branch.
    """

    a_RK: torch.Tensor
    b_MR: torch.Tensor
    scaling: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdaptedLinear:
    """A frozen linear layer and its branches.

    Attributes:
        weight_MK: The frozen weight.
        bias_M: The frozen bias, if there is one.
        branches: One per adapter that is active.
        magnitude_M: DoRA's magnitudes, which train, of a linear with one branch; None without DoRA.
    """

    weight_MK: torch.Tensor
    bias_M: torch.Tensor | None
    branches: tuple[LowRank, ...]
    magnitude_M: torch.Tensor | None = None


class VisitCache:
    """Values that are the same for all micro-batches of a visit, computed once.

    What trains changes between steps, never within a visit. Without a visit nothing is kept.
    """

    def __init__(self) -> None:
        """Keep nothing until a visit begins."""
        self._visit: object = None
        self._values: dict[object, Any] = {}

    def enter(self, visit: object) -> None:
        """Begin a visit unless it is the current one; None ends it."""
        if visit != self._visit:
            self._visit = visit
            self._values.clear()

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return what `make` returned first in this visit."""
        if self._visit is None:
            return make()
        if key not in self._values:
            self._values[key] = make()
        value: T = self._values[key]
        return value


VISIT_CACHE = VisitCache()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Casts:
    """A of all branches, one below the other, and B of each, in the dtype that computes.

    And of each linear what DoRA scales its output by; gradients meet B times that.
    """

    a_RK: torch.Tensor
    bs_MR: tuple[torch.Tensor, ...]
    scaled_bs_MR: tuple[torch.Tensor, ...]
    scales: tuple[Scale | None, ...]


def apply_linears(
    x: torch.Tensor,
    linears: Sequence[AdaptedLinear],
    *,
    x_branch: torch.Tensor | None = None,
    key: object = None,
    has_value: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of linears that read the same input.

    Args:
        x: Their input, (..., K), in the dtype of the frozen weights.
        linears: The layers.
        x_branch: What the branches read, if it differs, as after a dropout.
        key: Names these linears in the cache of a visit; None casts A and B at each call.
        has_value: Whether the outputs are computed, or only their graph.

    Returns:
        One output per linear, (..., M).
    """
    casts = (
        _cast(linears, x.dtype)
        if key is None
        else VISIT_CACHE.once((key, x.dtype), lambda: _cast(linears, x.dtype))
    )
    flat = [t for one in linears for branch in one.branches for t in (branch.a_RK, branch.b_MR)]
    flat += [one.magnitude_M for one in linears if one.magnitude_M is not None]
    way = _Way(has_value=has_value, has_graph=torch.is_grad_enabled())
    outputs: tuple[torch.Tensor, ...] = _Group.apply(  # type: ignore[no-untyped-call]  # torch's
        x, x if x_branch is None else x_branch, tuple(linears), casts, way, *flat
    )
    return outputs


@torch.no_grad()
def _cast(linears: Sequence[AdaptedLinear], dtype: torch.dtype) -> _Casts:
    branches = [branch for one in linears for branch in one.branches]
    scales = tuple(map(_scale, linears))
    bs_MR = tuple(branch.b_MR.to(dtype) for branch in branches)
    scaled_bs_MR = bs_MR
    if any(scales):
        scaled_bs_MR = tuple(
            (branch.b_MR if scale is None else branch.b_MR * scale.factor_M[:, None]).to(dtype)
            for one, scale in zip(linears, scales, strict=True)
            for branch in one.branches
        )
    return _Casts(
        a_RK=_joined([branch.a_RK for branch in branches], dim=0).to(dtype),
        bs_MR=bs_MR,
        scaled_bs_MR=scaled_bs_MR,
        scales=scales,
    )


def _scale(one: AdaptedLinear) -> Scale | None:
    if one.magnitude_M is None:
        return None
    (branch,) = one.branches
    return Scale.of(
        one.weight_MK,
        one.magnitude_M,
        a_RK=branch.a_RK,
        b_MR=branch.b_MR,
        scaling=branch.scaling,
    )


def _joined(tensors: Sequence[torch.Tensor], *, dim: int) -> torch.Tensor:
    return torch.cat(list(tensors), dim=dim) if len(tensors) > 1 else tensors[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a branch is: its linear, its columns of A x, and its scaling."""

    linear: int
    columns: slice
    scaling: float


def _places(linears: Sequence[AdaptedLinear]) -> list[_Place]:
    of = [(i, branch) for i, one in enumerate(linears) for branch in one.branches]
    ends = pairwise(accumulate((len(branch.a_RK) for _, branch in of), initial=0))
    return [
        _Place(linear=i, columns=slice(start, end), scaling=branch.scaling)
        for (i, branch), (start, end) in zip(of, ends, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """How a group is computed.

    Attributes:
        has_value: Whether the outputs are computed, or only their graph.
        has_graph: Whether gradients may be asked for.
    """

    has_value: bool
    has_graph: bool


class _Group(torch.autograd.Function):
    """The linears of a group; x and x_branch are the same tensor unless there is a dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        x_branch: torch.Tensor,
        linears: tuple[AdaptedLinear, ...],
        casts: _Casts,
        way: _Way,
        *_: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        places = _places(linears)
        branch_NK = x_branch.flatten(0, -2)
        low_NR = branch_NK @ casts.a_RK.t()
        if way.has_value:
            outputs = [_linear(x, one) for one in linears]
        else:
            outputs = [not_a_value(x, len(one.weight_MK)) for one in linears]
        for place, b_MR in zip(places, casts.bs_MR, strict=True) if way.has_value else ():
            low = low_NR[:, place.columns]
            y_NM = outputs[place.linear].flatten(0, -2)  # a view: it is contiguous
            y_NM.addmm_(low, b_MR.t(), alpha=place.scaling)
        before_NM = _scale_outputs(outputs, linears, casts.scales, keeps=way.has_graph)
        ctx.places, ctx.shape, ctx.is_same = places, x.shape, x_branch is x
        weights = [one.weight_MK for one in linears]
        ctx.scales = casts.scales
        ctx.save_for_backward(
            branch_NK, low_NR, casts.a_RK, *casts.scaled_bs_MR, *weights, *before_NM
        )
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # A and B enter as casts, through which nothing could be differentiated
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        places: list[_Place] = ctx.places
        scales: tuple[Scale | None, ...] = ctx.scales
        x_NK, low_NR, a_RK, *rest = ctx.saved_tensors
        bs_MR, rest = rest[: len(places)], rest[len(places) :]
        weights_MK, before_NM = rest[: len(scales)], rest[len(scales) :]
        needs_x, needs_branch, _, _, _, *needs = ctx.needs_input_grad
        needs, needs_magnitude = needs[: 2 * len(places)], needs[2 * len(places) :]
        known = [None if g is None else g.flatten(0, -2) for g in gradients]
        of_lows: list[torch.Tensor] = []
        of_bs: list[torch.Tensor | None] = []
        for place, b_MR in zip(places, bs_MR, strict=True):
            g_NM, low = known[place.linear], low_NR[:, place.columns]
            scale = scales[place.linear]
            if g_NM is None:
                of_lows.append(torch.zeros_like(low))
                of_bs.append(None)
            else:
                of_lows.append((g_NM @ b_MR).mul_(place.scaling))
                of_b = _outer(g_NM, low).mul_(place.scaling)
                of_bs.append(of_b if scale is None else of_b.mul_(scale.factor_M[:, None]))
        of_low_NR = _joined(of_lows, dim=1)
        of_a_RK = _outer(of_low_NR, x_NK) if any(needs[::2]) else None
        of_factors = [
            factor
            for place, of_b in zip(places, of_bs, strict=True)
            for factor in (None if of_a_RK is None else of_a_RK[place.columns], of_b)
        ]
        scaled = [(g, scale) for g, scale in zip(known, scales, strict=True) if scale is not None]
        of_magnitudes = [
            scale.of_magnitude(g_NM, y_NM) if need and g_NM is not None else None
            for (g_NM, scale), y_NM, need in zip(scaled, before_NM, needs_magnitude, strict=True)
        ]
        of_x_NK: torch.Tensor | None = None
        of_branch_NK = of_low_NR @ a_RK if needs_branch or (needs_x and ctx.is_same) else None
        if needs_x:
            of_x_NK = of_branch_NK if ctx.is_same else None
            for g_NM, scale, weight_MK in zip(known, scales, weights_MK, strict=True):
                if g_NM is None:
                    continue
                g_NM = g_NM if scale is None else scale.scaled(g_NM)
                of_x_NK = g_NM @ weight_MK if of_x_NK is None else of_x_NK.addmm_(g_NM, weight_MK)
        return (
            None if of_x_NK is None else of_x_NK.view(ctx.shape),
            None if ctx.is_same or of_branch_NK is None else of_branch_NK.view(ctx.shape),
            None,
            None,
            None,
            *(g if need else None for g, need in zip(of_factors, needs, strict=True)),
            *of_magnitudes,
        )


def _scale_outputs(
    outputs: list[torch.Tensor],
    linears: Sequence[AdaptedLinear],
    scales: Sequence[Scale | None],
    *,
    keeps: bool,
) -> list[torch.Tensor]:
    """Scale outputs where there is DoRA; return them as they were before, if that is kept."""
    before_NM = []
    for i, (one, scale) in enumerate(zip(linears, scales, strict=True)):
        if scale is None:
            continue
        y = outputs[i]
        if keeps:
            before_NM.append(y.flatten(0, -2))
            outputs[i] = torch.empty_like(y)
        scale.scale(y.flatten(0, -2), out_NM=outputs[i].flatten(0, -2), bias_M=one.bias_M)
    return before_NM


def _linear(x: torch.Tensor, one: AdaptedLinear) -> torch.Tensor:
    """Return W x + b in memory of its own: a model's code cannot change a view in place.

    With DoRA b is added later: it is not scaled.
    """
    y = x.new_empty(*x.shape[:-1], len(one.weight_MK))
    x_NK, y_NM = x.flatten(0, -2), y.view(-1, len(one.weight_MK))
    if one.bias_M is None or one.magnitude_M is not None:
        torch.mm(x_NK, one.weight_MK.t(), out=y_NM)
    else:
        torch.addmm(one.bias_M, x_NK, one.weight_MK.t(), out=y_NM)
    return y


def _outer(left_NM: torch.Tensor, right_NK: torch.Tensor) -> torch.Tensor:
    """Return left^T right in fp32; on CUDA it was not rounded to the dtype of both before."""
    if left_NM.is_cuda and left_NM.dtype != torch.float32:
        return torch.mm(left_NM.t(), right_NK, out_dtype=torch.float32)
    return (left_NM.t() @ right_NK).float()
