"""Linear layers with low-rank branches, computed at the precision of the frozen weights.

    y_i = W_i x + b_i + s_i B_i (A_i x)

W_i and b_i are frozen, in bf16 say; A_i and B_i train and are held in fp32.

Problem. Computed as written, in fp32, a branch of a few columns costs more than its arithmetic: x
is copied to fp32 and kept for the backward once per linear, y_i is read and written again for the
sum, and on a GPU the narrow products run at the fp32 rate.

Idea. One autograd function for all linears that read the same x. A and B are cast to the dtype of
x; one narrow product computes A x for the whole group; W's product is added to B's in place. The
backward needs x once and A x, a few columns. The gradients by x are summed in one tensor.

DoRA: outputs are scaled, and the gradients by x start from scaled ones: see
`offload.engine.pointwise.magnitudes`.

Precision. Products take inputs in the dtype of x and sum in fp32. Gradients of A and B are returned
in fp32 (on CUDA without having been rounded before), so autograd sums micro-batches in fp32.

Shapes: N rows (tokens), K features in, M features out, R rank. A group's ranks lie side by side.

Source: arXiv:2106.09685, eq. 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from offload.engine.pointwise.magnitudes import Scale, row_norms
from offload.engine.recompute import not_a_value
from offload.engine.visit_cache import VISIT_CACHE


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRank:
    """The branch of one adapter on one linear layer: scaling * B (A x)."""

    a_RK: torch.Tensor  # a, which trains
    b_MR: torch.Tensor  # b, which trains
    scaling: float  # factor of the branch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdaptedLinear:
    """A frozen linear layer and its branches."""

    weight_MK: torch.Tensor  # the frozen weight
    bias_M: torch.Tensor | None  # the frozen bias, if there is one
    branches: tuple[LowRank, ...]  # one per adapter that is active
    # DoRA's magnitudes, which train, of a linear with one branch; None without DoRA.
    magnitude_M: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Casts:
    """What is cast to the dtype that computes."""

    a_RK: torch.Tensor  # a of all branches, one below the other
    # B of each branch; with DoRA times the scaling and the scale of each output.
    bs_MR: tuple[torch.Tensor, ...]
    plain_bs_MR: tuple[torch.Tensor, ...]  # B itself where there is DoRA
    scales: tuple[Scale | None, ...]  # the scales of each linear's outputs


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
        key: Names these linears in the cache of a visit, and of a pass; None casts A and B at each
            call.
        has_value: Whether the outputs are computed, or only their graph.

    Returns:
        One output per linear, (..., M).
    """
    casts = (
        _cast(linears, x.dtype, key)
        if key is None
        else VISIT_CACHE.once((key, x.dtype), lambda: _cast(linears, x.dtype, key))
    )
    flat = [t for one in linears for branch in one.branches for t in (branch.a_RK, branch.b_MR)]
    flat += [one.magnitude_M for one in linears if one.magnitude_M is not None]
    outputs: tuple[torch.Tensor, ...] = _Group.apply(  # type: ignore[no-untyped-call]  # torch's
        x, x if x_branch is None else x_branch, tuple(linears), casts, has_value, *flat
    )
    return outputs


@torch.no_grad()
def _cast(linears: Sequence[AdaptedLinear], dtype: torch.dtype, key: object) -> _Casts:
    branches = [branch for one in linears for branch in one.branches]
    scales = tuple(_scale(one, key) for one in linears)
    scaled = [
        (branch, scale)
        for one, scale in zip(linears, scales, strict=True)
        for branch in one.branches
    ]
    return _Casts(
        a_RK=_joined([branch.a_RK for branch in branches]).to(dtype),
        bs_MR=tuple(
            (branch.b_MR if scale is None else scale.of_b(branch.b_MR, branch.scaling)).to(dtype)
            for branch, scale in scaled
        ),
        plain_bs_MR=tuple(branch.b_MR.to(dtype) for branch, scale in scaled if scale is not None),
        scales=scales,
    )


def _scale(one: AdaptedLinear, key: object) -> Scale | None:
    if one.magnitude_M is None:
        return None
    (branch,) = one.branches

    def norms() -> torch.Tensor:
        a_RK, b_MR = branch.a_RK, branch.b_MR
        return row_norms(one.weight_MK, a_RK=a_RK, b_MR=b_MR, scaling=branch.scaling)

    # a key may be that of several linears and adapters, so B, which the cache holds, is part of it
    norm_M = norms() if key is None else VISIT_CACHE.once_in_pass((key, branch.b_MR), norms)
    return Scale.of(one.magnitude_M, norm_M)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


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


class _Group(torch.autograd.Function):
    """The linears of a group; x and x_branch are the same tensor unless there is a dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        x_branch: torch.Tensor,
        linears: tuple[AdaptedLinear, ...],
        casts: _Casts,
        has_value: bool,  # noqa: FBT001  # torch passes arguments by position
        *_: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        places = _places(linears)
        branch_NK = x_branch.flatten(0, -2)
        low_NR = branch_NK @ casts.a_RK.t()
        outputs, before_NM = [], []  # the latter is what DoRA scales
        for i, (one, scale) in enumerate(zip(linears, casts.scales, strict=True)):
            pairs = zip(places, casts.bs_MR, strict=True)
            own = [
                (low_NR[:, place.columns], b_MR, place.scaling)
                for place, b_MR in pairs
                if place.linear == i
            ]
            if not has_value:
                outputs.append(not_a_value(x, len(one.weight_MK)))
            elif scale is None:
                outputs.append(_added(x, one, own))
            else:
                low, b_MR = own[0][:2]  # of its one branch
                outputs.append(_branch(x, low, b_MR, alpha=1.0, bias_M=one.bias_M))
                before_NM.append(x.flatten(0, -2) @ one.weight_MK.t())
                scale.add_scaled(outputs[i].flatten(0, -2), before_NM[-1])
        ctx.places, ctx.shape, ctx.is_same = places, x.shape, x_branch is x
        weights = [one.weight_MK for one in linears]
        ctx.scales = casts.scales
        ctx.save_for_backward(
            branch_NK, low_NR, casts.a_RK, *casts.bs_MR, *weights, *before_NM, *casts.plain_bs_MR
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
        weights_MK, rest = rest[: len(scales)], rest[len(scales) :]
        before_NM, plain_bs_MR = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        needs_x, needs_branch, _, _, _, *needs = ctx.needs_input_grad
        needs, needs_magnitude = needs[: 2 * len(places)], needs[2 * len(places) :]
        known = [None if g is None else g.flatten(0, -2) for g in gradients]
        of_low_NR = torch.empty_like(low_NR)
        of_bs: list[torch.Tensor | None] = []
        for place, b_MR in zip(places, bs_MR, strict=True):
            g_NM, low = known[place.linear], low_NR[:, place.columns]
            of_low = of_low_NR[:, place.columns]
            if g_NM is None:
                of_low.zero_()
                of_bs.append(None)
            else:
                alpha = place.scaling if scales[place.linear] is None else 1.0  # else it is in B
                torch.addmm(of_low, g_NM, b_MR, beta=0, alpha=alpha, out=of_low)
                of_bs.append(_outer(g_NM, low).mul_(place.scaling))
        kept = zip(before_NM, plain_bs_MR, needs_magnitude, strict=True)
        of_magnitudes = [
            _through_scale(scale, known[place.linear], of_b, *next(kept))
            for place, of_b in zip(places, of_bs, strict=True)
            if (scale := scales[place.linear]) is not None
        ]
        of_a_RK = _outer(of_low_NR, x_NK) if any(needs[::2]) else None
        of_factors = [
            factor
            for place, of_b in zip(places, of_bs, strict=True)
            for factor in (None if of_a_RK is None else of_a_RK[place.columns], of_b)
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


def _through_scale(
    scale: Scale,
    g_NM: torch.Tensor | None,
    of_b_MR: torch.Tensor | None,
    y_NM: torch.Tensor,
    b_MR: torch.Tensor,
    needs_magnitude: bool,  # noqa: FBT001  # as torch says what needs a gradient
) -> torch.Tensor | None:
    """Scale the gradient of B in place; return that of the magnitudes, if it is wanted."""
    if g_NM is None or of_b_MR is None:
        return None
    wanted = scale.of_magnitude(g_NM, y_NM, b_MR=b_MR, of_b_MR=of_b_MR) if needs_magnitude else None
    of_b_MR.mul_(scale.factor_M[:, None])
    return wanted


def _added(
    x: torch.Tensor,
    one: AdaptedLinear,
    branches: Sequence[tuple[torch.Tensor, torch.Tensor, float]],
) -> torch.Tensor:
    """Return W x + b with branches, of A x, B and scaling each; W's product adds to theirs.

    So what is rounded between both is the smaller, and is read again within the larger product.
    """
    (low_NR, b_MR, scaling), *others = branches
    y = _branch(x, low_NR, b_MR, alpha=scaling, bias_M=one.bias_M)
    y_NM = y.flatten(0, -2)  # a view: it is contiguous
    for low_NR, b_MR, scaling in others:
        y_NM.addmm_(low_NR, b_MR.t(), alpha=scaling)
    y_NM.addmm_(x.flatten(0, -2), one.weight_MK.t())
    return y


def _branch(
    x: torch.Tensor,
    low_NR: torch.Tensor,
    b_MR: torch.Tensor,
    *,
    alpha: float,
    bias_M: torch.Tensor | None,
) -> torch.Tensor:
    """Return alpha B (A x) + b in memory of its own: a model's code cannot change a view in place.

    Its leading dimensions are those of x.
    """
    y = x.new_empty(*x.shape[:-1], len(b_MR))
    y_NM = y.flatten(0, -2)
    if bias_M is None:
        torch.addmm(y_NM, low_NR, b_MR.t(), beta=0, alpha=alpha, out=y_NM)
    else:
        torch.addmm(bias_M, low_NR, b_MR.t(), alpha=alpha, out=y_NM)
    return y


def _outer(left_NM: torch.Tensor, right_NK: torch.Tensor) -> torch.Tensor:
    """Return left^T right in fp32; on CUDA it was not rounded to the dtype of both before."""
    if left_NM.is_cuda and left_NM.dtype != torch.float32:
        return torch.mm(left_NM.t(), right_NK, out_dtype=torch.float32)
    return (left_NM.t() @ right_NK).float()
