"""The fused operators as torch knows them: one each, with a gradient.

A trace without values, a mode that counts operations and torch's own tools see one operator with
its operands. On CUDA its kernel is Triton's, on a CPU plain torch (for tests: runs on a CPU use the
models' own code), which also gives the shapes of results where tensors have no values. Nothing is
written over; a graph keeps of a norm its input and one number per row, of a rotation the angles, of
norms with a rotation both, of a gate its two inputs. A cross-entropy gives its gradient at once.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from offload.engine.pointwise import launcher, reference
from offload.engine.pointwise.reference import Curve

_SCHEMAS = (
    "norm(Tensor x, Tensor weight, float eps, float offset, bool is_cast_first)"
    " -> (Tensor, Tensor)",
    "norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor inverse, float offset)"
    " -> Tensor",
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, bool is_back) -> (Tensor, Tensor)",
    "norm_rotate(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin,"
    " float eps, float offset, bool is_cast_first) -> (Tensor, Tensor, Tensor, Tensor)",
    "norm_rotate_backward(Tensor of_q, Tensor of_k, Tensor q, Tensor k, Tensor q_weight,"
    " Tensor k_weight, Tensor cos, Tensor sin, Tensor q_inverse, Tensor k_inverse, float offset)"
    " -> (Tensor, Tensor)",
    "gated(Tensor gate, Tensor up, str curve) -> Tensor",
    "gated_backward(Tensor gradient, Tensor gate, Tensor up, str curve) -> (Tensor, Tensor)",
    "cross_entropy(Tensor logits, Tensor labels, Tensor num_items, bool has_gradient)"
    " -> (Tensor, Tensor)",
)


_library = torch.library.Library("sluice", "DEF")
for _schema in _SCHEMAS:
    _name = _schema.partition("(")[0]
    _plain = getattr(reference, _name)
    _library.define(_schema)
    _library.impl(_name, getattr(launcher, _name), "CUDA")
    _library.impl(_name, _plain, "CPU")
    torch.library.register_fake(f"sluice::{_name}", _plain, lib=_library)


def norm(
    x: torch.Tensor, weight_N: torch.Tensor, *, eps: float, offset: float, is_cast_first: bool
) -> torch.Tensor:
    """Return RMSNorm of rows (..., N); see `reference.norm`. The weight gets no gradient."""
    y: torch.Tensor = _Norm.apply(  # type: ignore[no-untyped-call]  # torch's
        x, weight_N, eps, offset, is_cast_first
    )
    return y


def rotate(
    q_BHTD: torch.Tensor, k_BHTD: torch.Tensor, cos_BTD: torch.Tensor, sin_BTD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated queries and keys; see `reference.rotate`."""
    both: tuple[torch.Tensor, torch.Tensor] = _Rotate.apply(  # type: ignore[no-untyped-call]
        q_BHTD, k_BHTD, cos_BTD, sin_BTD
    )
    return both


def norm_rotate(
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    cos_BTD: torch.Tensor,
    sin_BTD: torch.Tensor,
    *,
    weights_D: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    offset: float,
    is_cast_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, each head normed, and rotated; the weights get no gradient.

    What is rounded is what `norm` and `rotate` round, one after the other; a card may sum a head's
    squares in another order than they do.
    """
    both: tuple[torch.Tensor, torch.Tensor] = _NormRotate.apply(  # type: ignore[no-untyped-call]
        q_BHTD, k_BHTD, *weights_D, cos_BTD, sin_BTD, eps, offset, is_cast_first
    )
    return both


def gated(gate: torch.Tensor, up: torch.Tensor, curve: Curve) -> torch.Tensor:
    """Return the activation of a gate, times up; see `reference.gated`."""
    y: torch.Tensor = _Gated.apply(gate, up, curve)  # type: ignore[no-untyped-call]  # torch's
    return y


def cross_entropy(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    num_items: torch.Tensor,
    has_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's cross-entropy, and the gradient; see `reference.cross_entropy`."""
    both: tuple[torch.Tensor, torch.Tensor] = torch.ops.sluice.cross_entropy(
        logits_NV, labels_N, num_items, has_gradient
    )
    return both


def _in_memory_order(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the order of dimensions in which rows lie in memory, and the one back."""
    strides = x.stride()
    order = [*sorted(range(x.dim() - 1), key=lambda i: -strides[i]), x.dim() - 1]
    return order, sorted(range(x.dim()), key=lambda i: order[i])


class _Norm(torch.autograd.Function):
    """Rows are normed where they are: those of heads before tokens are not copied."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_N: torch.Tensor,
        eps: float,
        offset: float,
        is_cast_first: bool,  # noqa: FBT001  # torch passes arguments by position
    ) -> Any:
        order, back = _in_memory_order(x)
        rows = x.permute(order)
        y, inverse_M = torch.ops.sluice.norm(rows, weight_N, eps, offset, is_cast_first)
        ctx.offset, ctx.order, ctx.back = offset, order, back
        ctx.save_for_backward(rows, weight_N, inverse_M)
        return y.permute(back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = gradient.permute(ctx.order)
        of_x = torch.ops.sluice.norm_backward(given, *ctx.saved_tensors, ctx.offset)
        return of_x.permute(ctx.back), None, None, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
        ctx.save_for_backward(*tensors[2:])
        return torch.ops.sluice.rotate(*tensors, False)  # noqa: FBT003

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *torch.ops.sluice.rotate(*gradients, *ctx.saved_tensors, True), None, None  # noqa: FBT003


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, *inverses = torch.ops.sluice.norm_rotate(*given)
        ctx.offset = given[7]
        ctx.save_for_backward(*given[:6], *inverses)
        return q, k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = torch.ops.sluice.norm_rotate_backward(*gradients, *ctx.saved_tensors, ctx.offset)
        return *back, *(None,) * 7


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, curve: Curve) -> Any:
        ctx.curve = curve
        ctx.save_for_backward(gate, up)
        return torch.ops.sluice.gated(gate, up, curve)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *torch.ops.sluice.gated_backward(gradient, *ctx.saved_tensors, ctx.curve), None
