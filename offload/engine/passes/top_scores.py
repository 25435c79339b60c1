"""Log-probabilities of given tokens: how a distribution known at a few tokens is compared with.

A teacher's distribution is kept as the log-probabilities of its likeliest tokens. The student's at
the same tokens, and that of all others together, are taken from a chunk of logits, so that between
the two passes over the head only (N, K + 2) numbers exist.

The mass of all other tokens is a log-sum-exp over them, not one minus the sum over the given ones,
which has no digits left where these have nearly all of it.

The gradient is written where a copy of the logits was: with the gradients a of the label, r of the
others and w of the given tokens, W their sum, and q the student's probabilities, a given token's
logit has w - W q, another one's q (r / q_others - W), and the label's a more.

Shapes: N label tokens, V tokens of the vocabulary, K given tokens, C = K + 2.
"""

import torch

NONE = -1
"""In place of a given token where a label has fewer than others."""
LABEL, OTHERS, TOP = 0, 1, 2
"""Columns: the label, all tokens that are not given, and from `TOP` on the given ones."""


def top_scores(logits_NV: torch.Tensor, next_N: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities (N, C) in nats; 0 where no token is given.

    Args:
        logits_NV: Without a graph.
        next_N: The label tokens.
        ids_NK: The given tokens of each, which differ, or `NONE`; the first is always given.
    """
    wide_NV, full_N, ids_NK, is_given_NK = _prepared(logits_NV, ids_NK)
    label_N1 = wide_NV.gather(1, next_N[:, None])
    top_NK = (wide_NV.gather(1, ids_NK) - full_N[:, None]).where(is_given_NK, 0.0)
    others_N = wide_NV.scatter_(1, ids_NK, -torch.inf).logsumexp(1)
    return torch.cat((label_N1 - full_N[:, None], (others_N - full_N)[:, None], top_NK), dim=1)


def logits_gradient(
    logits_NV: torch.Tensor, next_N: torch.Tensor, ids_NK: torch.Tensor, gradient_NC: torch.Tensor
) -> torch.Tensor:
    """Return the gradient (N, V) by the logits, in their dtype.

    Args:
        logits_NV: The same as for `top_scores`.
        next_N: The same.
        ids_NK: The same.
        gradient_NC: By each log-probability; not read where no token is given.
    """
    wide_NV, full_N, ids_NK, is_given_NK = _prepared(logits_NV, ids_NK)
    label_N, others_N = gradient_NC[:, LABEL], gradient_NC[:, OTHERS]
    top_NK = gradient_NC[:, TOP:].where(is_given_NK, 0.0)
    total_N = label_N + others_N + top_NK.sum(1)
    given_NK = top_NK - total_N[:, None] * (wide_NV.gather(1, ids_NK) - full_N[:, None]).exp()
    # Where no token is given, the first is written again.
    given_NK = given_NK.where(is_given_NK, given_NK[:, :1])
    log_others_N = wide_NV.scatter_(1, ids_NK, -torch.inf).logsumexp(1) - full_N
    # In float64, and to the exponent: q_others may be far below what float32 can divide by.
    share_N = (others_N.double() * (-log_others_N.double()).exp()).where(others_N != 0, 0.0)
    factor_N = share_N - total_N
    shift_N = (full_N - factor_N.abs().log()).to(wide_NV.dtype)
    wide_NV.sub_(shift_N[:, None]).exp_().mul_(factor_N.sign().to(wide_NV.dtype)[:, None])
    wide_NV.scatter_(1, ids_NK, given_NK)
    wide_NV.scatter_add_(1, next_N[:, None], label_N[:, None])
    return wide_NV.to(logits_NV.dtype)


def _prepared(
    logits_NV: torch.Tensor, ids_NK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a copy of the logits to write to, its log-sum-exp, places to read, and which count."""
    is_wide = logits_NV.dtype == torch.float64
    wide_NV = logits_NV.detach().to(torch.float64 if is_wide else torch.float32, copy=True)
    is_given_NK = ids_NK != NONE
    return wide_NV, wide_NV.logsumexp(1), ids_NK.where(is_given_NK, ids_NK[:, :1]), is_given_NK
