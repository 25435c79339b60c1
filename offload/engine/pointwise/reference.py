"""The same in plain torch: what a CPU computes in tests, and what a model's code is proven to be.

Sums and products are in fp32, those of fp64 in fp64, and each result is rounded once.
"""

from typing import Literal, get_args

import torch
from torch.nn import functional as F

Curve = Literal["silu", "gelu_tanh", "gelu"]
CURVES: tuple[Curve, ...] = get_args(Curve)


def norm(
    x: torch.Tensor,
    weight_N: torch.Tensor,
    eps: float,
    offset: float,
    is_cast_first: bool,  # noqa: FBT001  # torch passes an operator's arguments by position
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows over their root mean square, times weight plus offset, and each row's factor.

    Args:
        x: Rows (..., N).
        weight_N: The weight.
        eps: Added to the mean square.
        offset: Added to the weight.
        is_cast_first: Whether the normed row is rounded to its dtype before the product.
    """
    wide = _wide(x)
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * inverse
    if is_cast_first:
        normed = normed.to(x.dtype).to(wide.dtype)
    factor_N = weight_N.to(wide.dtype) + offset if offset else weight_N.to(wide.dtype)
    return (normed * factor_N).to(x.dtype).contiguous(), inverse.squeeze(-1).contiguous()


def norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight_N: torch.Tensor,
    inverse_M: torch.Tensor,
    offset: float,
) -> torch.Tensor:
    """Return the gradient by a norm's input."""
    inverse = inverse_M.unsqueeze(-1)
    normed = _wide(x) * inverse
    given = _wide(gradient) * (weight_N.to(normed.dtype) + offset)
    mean = (given * normed).mean(-1, keepdim=True)
    return (inverse * (given - normed * mean)).to(x.dtype).contiguous()


def rotate(
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    cos_BTD: torch.Tensor,
    sin_BTD: torch.Tensor,
    is_back: bool,  # noqa: FBT001  # torch passes an operator's arguments by position
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys whose first features are rotated, each half by the other.

    Args:
        q_BHTD: Queries.
        k_BHTD: Keys, of as many heads or fewer.
        cos_BTD: Cosines of their first features (B or 1, T, ...).
        sin_BTD: Sines.
        is_back: Whether to apply the transpose, which turns gradients back.
    """
    return tuple(  # type: ignore[return-value]  # of two
        torch.empty_like(x).copy_(_rotated(x, cos_BTD, sin_BTD, is_back=is_back))
        for x in (q_BHTD, k_BHTD)
    )


def _rotated(
    x_BHTD: torch.Tensor, cos_BTD: torch.Tensor, sin_BTD: torch.Tensor, *, is_back: bool
) -> torch.Tensor:
    wide = _wide(x_BHTD)
    width = cos_BTD.shape[-1]
    turned, rest = wide[..., :width], wide[..., width:]
    cos, sin = (table.unsqueeze(1).to(wide.dtype) for table in (cos_BTD, sin_BTD))
    if is_back:
        first, second = (turned * sin).chunk(2, dim=-1)
        other = torch.cat((second, -first), dim=-1)
    else:
        first, second = turned.chunk(2, dim=-1)
        other = torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned * cos + other, rest), dim=-1)


def norm_rotate(  # noqa: PLR0913  # as torch's operators take them
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    cos_BTD: torch.Tensor,
    sin_BTD: torch.Tensor,
    eps: float,
    offset: float,
    is_cast_first: bool,  # noqa: FBT001  # torch passes an operator's arguments by position
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `rotate` makes of queries and keys that `norm` normed, and each head's factor.

    Factors are (B, T, H): heads lie by tokens.
    """
    pairs = ((q_BHTD, q_weight_D), (k_BHTD, k_weight_D))
    (q, q_inverse), (k, k_inverse) = (
        norm(x.transpose(1, 2), weight_D, eps, offset, is_cast_first) for x, weight_D in pairs
    )
    normed = [torch.empty_like(x).copy_(y.transpose(1, 2)) for x, y in ((q_BHTD, q), (k_BHTD, k))]
    return *rotate(normed[0], normed[1], cos_BTD, sin_BTD, False), q_inverse, k_inverse  # noqa: FBT003


def norm_rotate_backward(  # noqa: PLR0913  # as torch's operators take them
    of_q_BHTD: torch.Tensor,
    of_k_BHTD: torch.Tensor,
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    cos_BTD: torch.Tensor,
    sin_BTD: torch.Tensor,
    q_inverse_BTH: torch.Tensor,
    k_inverse_BTH: torch.Tensor,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients by queries and keys before they were normed."""
    turned_q, turned_k = rotate(of_q_BHTD, of_k_BHTD, cos_BTD, sin_BTD, True)  # noqa: FBT003
    back = []
    for turned, x, weight_D, inverse_BTH in (
        (turned_q, q_BHTD, q_weight_D, q_inverse_BTH),
        (turned_k, k_BHTD, k_weight_D, k_inverse_BTH),
    ):
        of_x = norm_backward(
            turned.transpose(1, 2), x.transpose(1, 2), weight_D, inverse_BTH, offset
        )
        back.append(torch.empty_like(x).copy_(of_x.transpose(1, 2)))
    return back[0], back[1]


def gated(gate: torch.Tensor, up: torch.Tensor, curve: Curve) -> torch.Tensor:
    """Return the activation of a gate, times up; both (..., N)."""
    return (_curve(_wide(gate), curve) * _wide(up)).to(gate.dtype).contiguous()


def gated_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, curve: Curve
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients by gate and up."""
    wide, given = _wide(gate), _wide(gradient)
    if curve == "silu":
        slope = torch.ops.aten.silu_backward(given * _wide(up), wide)
    else:
        form = "tanh" if curve == "gelu_tanh" else "none"
        slope = torch.ops.aten.gelu_backward(given * _wide(up), wide, approximate=form)
    of_up = given * _curve(wide, curve)
    return slope.to(gate.dtype).contiguous(), of_up.to(up.dtype).contiguous()


def cross_entropy(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    num_items: torch.Tensor,
    has_gradient: bool,  # noqa: FBT001  # torch passes an operator's arguments by position
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's cross-entropy, and the gradient of their sum over `num_items` by logits.

    Args:
        logits_NV: Logits of N tokens.
        labels_N: A token of the vocabulary each.
        num_items: What the sum is divided by, a scalar; or of each token what its own cross-entropy
            is divided by, (N,).
        has_gradient: Whether the gradient is wanted, in the logits' dtype; it has no elements else.
    """
    log_probs_NV = F.log_softmax(_wide(logits_NV), dim=-1)
    losses_N = -log_probs_NV.gather(1, labels_N[:, None]).squeeze(1)
    if not has_gradient:
        return losses_N, logits_NV.new_empty(0)
    gradient_NV = log_probs_NV.exp()
    gradient_NV[torch.arange(len(labels_N), device=labels_N.device), labels_N] -= 1
    return losses_N, (gradient_NV / num_items.reshape(-1, 1)).to(logits_NV.dtype)


def _curve(gate: torch.Tensor, curve: Curve) -> torch.Tensor:
    if curve == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if curve == "gelu_tanh" else "none")


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
