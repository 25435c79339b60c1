"""Losses of answers as their papers write them, of each token's log-probability.

All are functions of a list of answers, one Python number or scalar tensor at a time, and share
nothing with the losses that they are compared with.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Loss = Callable[[Sequence["Answer"]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer of a step.

    Attributes:
        policy: Log-probability of each of its tokens, with a graph.
        reference: The same by the reference.
        sampler: The same by what sampled it.
        group: Answers of one group are to one prompt.
        value: 1 for the chosen or desired one, 0 for another; a rank or a reward.
        is_scored: Whether it is a mismatched answer, which is not trained on.
    """

    policy: torch.Tensor
    reference: torch.Tensor
    sampler: torch.Tensor
    group: int
    value: float
    is_scored: bool = False

    @property
    def logp(self) -> torch.Tensor:
        return self.policy.sum()

    @property
    def ratio(self) -> torch.Tensor:
        return self.policy.sum() - self.reference.sum()


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return -torch.log1p(torch.exp(-x))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def groups_of(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Return the answers of each group, the best first."""
    return [
        sorted((one for one in answers if one.group == group), key=lambda one: -one.value)
        for group in sorted({one.group for one in answers})
    ]


def mean(values: Sequence[Any]) -> Any:
    return sum(values[1:], values[0]) / len(values)


def nll(answers: Sequence[Answer]) -> torch.Tensor:
    """Cross-entropy of the tokens of the best answers, over all of these."""
    best = [group[0] for group in groups_of(answers)]
    tokens = torch.cat([one.policy for one in best])
    return -tokens.sum() / len(tokens)


# ------------------------------------------------------------------------- pairs and a reference


def over_pairs(of_pair: Callable[[Answer, Answer], torch.Tensor], *, sft_weight: float = 0) -> Loss:
    def loss(answers: Sequence[Answer]) -> torch.Tensor:
        value = mean([of_pair(chosen, rejected) for chosen, rejected in groups_of(answers)])
        return value + sft_weight * nll(answers) if sft_weight else value

    return loss


def of_difference(of_d: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> Loss:
    """A loss of b d, the difference of the log-ratios."""
    return over_pairs(lambda c, r: of_d(c.ratio - r.ratio), **options)


def of_mean_difference(of_d: Callable[[torch.Tensor], torch.Tensor]) -> Loss:
    """A loss of the difference of log-ratios that are means over tokens."""
    return over_pairs(lambda c, r: of_d(c.ratio / len(c.policy) - r.ratio / len(r.policy)))


def cdpo(b: float, e: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda d: -(1 - e) * log_sigmoid(b * d) - e * log_sigmoid(-b * d)


def robust(b: float, e: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda d: -((1 - e) * log_sigmoid(b * d) - e * log_sigmoid(-b * d)) / (1 - 2 * e)


def exo(b: float, e: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """KL((s(b d), 1 - s(b d)) || (1 - e, e))."""

    def of_d(d: torch.Tensor) -> torch.Tensor:
        p = sigmoid(b * d)
        return p * torch.log(p / (1 - e)) + (1 - p) * torch.log((1 - p) / e)

    return of_d


def discopop(b: float, tau: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def of_d(d: torch.Tensor) -> torch.Tensor:
        m = sigmoid(b * d / tau)
        return (1 - m) * -log_sigmoid(b * d) + m * torch.exp(-b * d)

    return of_d


def nca(b: float) -> Loss:
    return over_pairs(
        lambda c, r: (
            -log_sigmoid(b * c.ratio)
            - 0.5 * log_sigmoid(-b * c.ratio)
            - 0.5 * log_sigmoid(-b * r.ratio)
        )
    )


def bco(b: float) -> Loss:
    return over_pairs(lambda c, r: -log_sigmoid(b * c.ratio) - log_sigmoid(-b * r.ratio))


def sppo(b: float) -> Loss:
    return over_pairs(lambda c, r: (c.ratio - 1 / (2 * b)) ** 2 + (r.ratio + 1 / (2 * b)) ** 2)


def apo_zero(b: float) -> Loss:
    return over_pairs(lambda c, r: 1 - sigmoid(b * c.ratio) + sigmoid(b * r.ratio))


def apo_down(b: float) -> Loss:
    return over_pairs(lambda c, r: sigmoid(b * c.ratio) + 1 - sigmoid(b * (c.ratio - r.ratio)))


def aot(b: float, e: float, *, is_paired: bool) -> Loss:
    """Quantiles of the chosen answers' ratios are to be above those of the others."""

    def loss(answers: Sequence[Answer]) -> torch.Tensor:
        groups = groups_of(answers)
        if is_paired:
            high = [c.logp - r.logp for c, r in groups]
            low = [c.reference.sum() - r.reference.sum() for c, r in groups]
        else:
            high, low = [c.ratio for c, _ in groups], [r.ratio for _, r in groups]
        high, low = (sorted(some, key=lambda x: x.item()) for some in (high, low))
        return mean([cdpo(b, e)(u - v) for u, v in zip(high, low, strict=True)])

    return loss


def plackett_luce(b: float) -> Loss:
    """-log of the product over k of exp(s_k) / (the sum of exp(s_j) of those not yet placed)."""

    def loss(answers: Sequence[Answer]) -> torch.Tensor:
        losses = []
        for group in groups_of(answers):
            likelihood = torch.ones((), dtype=torch.float64)
            for k, one in enumerate(group):
                left = sum(torch.exp(b * other.ratio) for other in group[k:])
                likelihood = likelihood * torch.exp(b * one.ratio) / left
            losses.append(-torch.log(likelihood))
        return mean(losses)

    return loss


# ---------------------------------------------------------------------- pairs without a reference


def simpo(b: float, gamma: float, *, sft_weight: float = 0) -> Loss:
    return over_pairs(
        lambda c, r: -log_sigmoid(b * c.policy.mean() - b * r.policy.mean() - gamma),
        sft_weight=sft_weight,
    )


def cpo(of_d: Callable[[torch.Tensor], torch.Tensor], *, is_mean: bool = False) -> Loss:
    def of_pair(c: Answer, r: Answer) -> torch.Tensor:
        return of_d(c.policy.mean() - r.policy.mean() if is_mean else c.logp - r.logp)

    return over_pairs(of_pair, sft_weight=1)


def orpo(b: float) -> Loss:
    def odds(one: Answer) -> torch.Tensor:
        p = torch.exp(one.policy.mean())
        return p / (1 - p)

    return over_pairs(lambda c, r: -b * log_sigmoid(torch.log(odds(c) / odds(r))), sft_weight=1)


# --------------------------------------------------------------------- single and sampled answers


def kto(b: float, desirable: float, undesirable: float, *, has_kl: bool) -> Loss:
    def loss(answers: Sequence[Answer]) -> torch.Tensor:
        scored = [one.ratio.item() for one in answers if one.is_scored]
        k = max(0.0, sum(scored) / len(scored)) if has_kl else 0.0
        return mean(
            [
                desirable * (1 - sigmoid(b * (one.ratio - k)))
                if one.value == 1
                else undesirable * (1 - sigmoid(b * (k - one.ratio)))
                for one in answers
                if not one.is_scored
            ]
        )

    return loss


def advantages(group: Sequence[Answer], name: str, b: float) -> list[float]:
    """Return each answer's reward, less what is expected of the others or of all."""
    rewards = [one.value for one in group]
    if name == "rloo":
        rewards = [one.value - b * one.ratio.item() for one in group]
        rest = len(group) - 1
        return [
            r - sum(x for j, x in enumerate(rewards) if j != i) / rest
            for i, r in enumerate(rewards)
        ]
    average = sum(rewards) / len(rewards)
    if name == "dr_grpo":
        return [r - average for r in rewards]
    deviation = math.sqrt(sum((r - average) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - average) / (deviation + 1e-4) for r in rewards]


def corrections(one: Answer, mode: str, limit: float) -> list[float]:
    """Return by how much each token counts: how likely the policy is to draw it, by the sampler."""
    apart = [x.item() for x in one.policy.detach() - one.sampler]
    if mode.startswith("sequence"):
        apart = [sum(apart)] * len(apart)
    elif not mode.startswith("token"):
        return [1.0] * len(apart)
    weights = [math.exp(x) for x in apart]
    if mode.endswith("truncate"):
        return [min(w, limit) for w in weights]
    return [w if w <= limit else 0.0 for w in weights]


def grpo(
    name: str, *, b: float = 0.0, mode: str = "none", high: float = 0.2, limit: float, longest: int
) -> Loss:
    """The clipped objective of sampled answers, a token or for `rloo` an answer at a time."""

    def clipped(log_q: torch.Tensor, a: float) -> torch.Tensor:
        q = torch.exp(log_q)
        return torch.minimum(q * a, torch.clamp(q, 0.8, 1 + high) * a)

    def of_token(one: Answer, t: int, old: torch.Tensor, a: float) -> torch.Tensor:
        term = -corrections(one, mode, limit)[t] * clipped(one.policy[t] - old[t], a)
        r = one.reference[t] - one.policy[t]
        ratio = torch.exp(one.policy[t] - old[t])
        return term + b * ratio * (torch.exp(r) - r - 1) if b else term

    def loss(answers: Sequence[Answer]) -> torch.Tensor:
        found: list[torch.Tensor] = []  # of each answer: of its tokens, or of all as one
        for group in groups_of(answers):
            for one, a in zip(group, advantages(group, name, b), strict=True):
                old = one.sampler if mode == "ratio" else one.policy.detach()
                if name == "rloo":
                    whole = clipped((one.policy - old).sum(), a)
                    found.append(-corrections(one, mode, limit)[0] * whole[None])
                else:
                    terms = [of_token(one, t, old, a) for t in range(len(one.policy))]
                    found.append(torch.stack(terms))
        if name == "dapo":
            return torch.cat(found).mean()
        if name == "dr_grpo":
            return torch.cat(found).sum() / (len(answers) * longest)
        return mean([terms.mean() for terms in found])

    return loss
