"""The loss of odds ratios.

Of a pair, c' and r' are the mean log-probabilities of the tokens of the chosen and the rejected
answer, b is beta.
"""

import math
from collections.abc import Mapping

import torch
from torch.nn import functional

from finetune.objectives._pairs import Pairs


def orpo(pairs: Pairs, *, beta: float) -> torch.Tensor:
    """-b log s(o), o the log of the odds of c' over those of r'; odds of p are p / (1 - p).

    Source: arXiv:2403.07691 eq. 7, where b is lambda.
    """
    return -beta * functional.logsigmoid(log_odds_ratios(pairs))


def orpo_metrics(pairs: Pairs) -> Mapping[str, torch.Tensor]:
    """Return the mean of o, and that of log s(o)."""
    odds_P = log_odds_ratios(pairs)
    return {
        "log_odds_chosen": odds_P.mean(),
        "log_odds_ratio": functional.logsigmoid(odds_P).mean(),
    }


def log_odds_ratios(pairs: Pairs) -> torch.Tensor:
    """The log of the odds of the chosen answer over those of the rejected one."""
    return pairs.differences - _log1mexp(pairs.chosen_P) + _log1mexp(pairs.rejected_P)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) of a negative x, without cancellation on either side of -log 2."""
    is_small = x < -math.log(2)
    low, high = x.where(is_small, -1.0), x.where(~is_small, -0.5)
    return torch.where(is_small, torch.log1p(-low.exp()), torch.log(-torch.expm1(high)))
