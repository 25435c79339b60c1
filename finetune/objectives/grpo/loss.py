"""Losses of sampled answers with rewards: group-relative policy optimisation and its kin.

Of a prompt's answers each has an advantage: its reward against those of the others. A token's ratio
is its probability over that by the old policy, which sampled it; clipped, it limits how far a step
moves. N label tokens and R answers of this rank, A answers of all ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from finetune.data.step_rows import RowSums, SectionObjective, summed
from finetune.errors import DataError
from finetune.objectives.grpo import Grpo
from offload.engine.objective import Scores, StepLoss

_STD_FLOOR = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GrpoObjective(SectionObjective):
    """The clipped policy gradient of all answers of a step, by their advantages in their groups.

    With a token's ratio q, its answer's advantage a and the range [l, h], the loss of a token is
    -min(q a, clip(q, l, h) a) + b q k, k = p_ref/p - log(p_ref/p) - 1 being an estimate of the KL
    divergence to the reference. Times q its gradient is that of the divergence, without a bias,
    also where q is 1 (DeepSeek-V3.2, arXiv:2512.02556; the default of TRL 1.16). A step's loss is

        grpo     the mean over answers of the mean over an answer's tokens   arXiv:2402.03300
        dapo     the mean over all tokens                                    arXiv:2503.14476
        dr_grpo  the sum over all tokens / (answers x seq_len)               arXiv:2503.20783
        rloo     the mean over answers, each one action with one ratio       arXiv:2402.14740

    The advantage is the reward less the group's mean, over the group's standard deviation + 1e-4 in
    grpo and dapo; in rloo the reward, less b log(p / p_ref) of the answer, less the mean of the
    other answers'. The old policy is the policy at this step, so ratios are 1 and have a gradient,
    or, with `ratio`, what sampled the answers.
    """

    section: Grpo

    @property
    def logits_temperature(self) -> float:
        """What logits are divided by, where answers are sampled in training."""
        return self.section.temperature or 1.0

    def loss(self, scores: Scores) -> StepLoss:
        """Return the loss of a step.

        Args:
            scores: The scores of all rows of the step.

        Raises:
            DataError: A group has one answer, or a reward is not a number.
        """
        section, sums = self.section, self.sums(scores)
        mode, beta = section.importance_sampling_mode, section.beta
        rewards_A = sums.values_A
        if section.loss == "rloo":
            rewards_A = rewards_A - beta * sums.log_ratios.detach()
        advantages_A, stds_A = _advantages(rewards_A, sums, section.loss)
        tokens = _Tokens.of(scores, sums, advantages_A, self.step.rows.sampler_N)
        old_N = tokens.policy_N.detach()
        weights_N = torch.ones_like(old_N)
        if mode == "ratio":
            assert tokens.sampler_N is not None
            old_N = tokens.sampler_N
        elif mode != "none":
            assert tokens.sampler_N is not None
            weights_N = _weights(
                old_N - tokens.sampler_N, tokens.rows_N, mode, max_weight=section.max_weight
            )
        log_ratios_N = tokens.policy_N - old_N
        if section.loss == "rloo":
            log_ratios_N = summed(log_ratios_N, tokens.rows_N, scores.num_rows)[tokens.rows_N]
        ratios_N = log_ratios_N.exp()
        clipped_N = ratios_N.clamp(*section.clip_range)
        gains_N = torch.min(ratios_N * tokens.advantages_N, clipped_N * tokens.advantages_N)
        losses_N = -weights_N * gains_N
        kl_N = _kl(tokens.policy_N, tokens.reference_N)
        if beta and section.loss != "rloo":
            kl_N = ratios_N * kl_N
            losses_N = losses_N + beta * kl_N
        shares_N = self._shares(sums, tokens.rows_N)
        return StepLoss(
            value=(losses_N * shares_N).sum(),
            metrics={
                **_reward_metrics(sums.values_A, stds_A),
                **self._token_metrics(
                    tokens,
                    {"ratio": ratios_N.detach(), "kl": kl_N.detach(), "weight": weights_N},
                    1 / sums.tokens_A[tokens.rows_N] if section.loss == "rloo" else None,
                ),
            },
        )

    def _shares(self, sums: RowSums, rows_N: torch.Tensor) -> torch.Tensor:
        """Return what each token's loss counts for in the step's."""
        num_answers, num_tokens = len(sums.tokens_A), sums.tokens_A.sum()
        if self.section.loss == "dapo":
            return torch.ones(len(rows_N), dtype=torch.float64) / num_tokens
        if self.section.loss == "dr_grpo":
            divisor = num_answers * self.step.seq_len
            return torch.ones(len(rows_N), dtype=torch.float64) / divisor
        return 1 / (sums.tokens_A[rows_N] * num_answers)

    def _token_metrics(
        self,
        tokens: "_Tokens",
        found: Mapping[str, torch.Tensor],
        counts_N: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Return means over the tokens of all ranks, or over answers.

        Args:
            tokens: This rank's.
            found: The ratio, the KL divergence and the weight of each.
            counts_N: What each counts for; None for tokens that count alike.
        """
        ratios_N = found["ratio"]
        low, high = self.section.clip_range
        is_low_N = (ratios_N < low) & (tokens.advantages_N < 0)
        is_high_N = (ratios_N > high) & (tokens.advantages_N > 0)
        per_token = {
            "clip_ratio/low_mean": is_low_N,
            "clip_ratio/high_mean": is_high_N,
            "clip_ratio/region_mean": is_low_N | is_high_N,
        }
        if tokens.reference_N is not None:
            per_token["kl"] = found["kl"]
        if tokens.sampler_N is not None:
            apart_N = (tokens.policy_N.detach() - tokens.sampler_N).abs()
            per_token["sampling/sampling_logp_difference/mean"] = apart_N
            per_token["sampling/importance_sampling_ratio/mean"] = found["weight"]
        if counts_N is None:
            counts_N = torch.ones_like(ratios_N)
        totals = [(values * counts_N).sum() for values in per_token.values()]
        own_C = torch.stack([*totals, counts_N.sum()])
        others = exchange(own_C[None]) if (exchange := self.step.exchange) else ()
        all_C = torch.cat((own_C[None], *others)).sum(0)
        return dict(zip(per_token, all_C[:-1] / all_C[-1], strict=True))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tokens:
    """This rank's label tokens, in float64 on the CPU."""

    policy_N: torch.Tensor
    reference_N: torch.Tensor | None
    sampler_N: torch.Tensor | None
    rows_N: torch.Tensor
    advantages_N: torch.Tensor

    @classmethod
    def of(
        cls,
        scores: Scores,
        sums: RowSums,
        advantages_A: torch.Tensor,
        sampler_N: torch.Tensor | None,
    ) -> "_Tokens":
        """Bring together what is known of each token; own rows are the first of all."""
        assert bool(sums.is_trained_A.all()), "every sampled answer is trained on"
        rows_N, reference_N = scores.rows_N.cpu(), scores.reference_N
        return cls(
            policy_N=scores.policy_N.cpu().double(),
            reference_N=None if reference_N is None else reference_N.cpu().double(),
            sampler_N=None if sampler_N is None else sampler_N.cpu().double(),
            rows_N=rows_N,
            advantages_N=advantages_A[rows_N],
        )


def _advantages(
    rewards_A: torch.Tensor, sums: RowSums, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantage of each answer, and the standard deviation of its group's rewards."""
    _, groups_A, counts = sums.groups_A.unique(return_inverse=True, return_counts=True)
    if bool((counts < 2).any()):
        alone = sums.groups_A[counts[groups_A] < 2][0].item()
        raise DataError(
            f"group {alone} of a step has one answer",
            limit="an answer's reward is compared with those of others to its prompt",
            hint="sample two answers of a prompt or more, or leave the row out",
        )
    sizes_A = counts[groups_A].double()

    def of_group(values_A: torch.Tensor) -> torch.Tensor:
        return summed(values_A, groups_A, len(counts))[groups_A]

    means_A = of_group(rewards_A) / sizes_A
    centred_A = rewards_A - means_A
    stds_A = (of_group(centred_A**2) / (sizes_A - 1)).sqrt()
    if name == "rloo":
        return centred_A * sizes_A / (sizes_A - 1), stds_A
    return (centred_A if name == "dr_grpo" else centred_A / (stds_A + _STD_FLOOR)), stds_A


def _weights(
    apart_N: torch.Tensor, rows_N: torch.Tensor, mode: str, *, max_weight: float
) -> torch.Tensor:
    """Return how likely the old policy was to draw each token or answer, over the sampler.

    Args:
        apart_N: The log of that, of each token.
        rows_N: The row of each.
        mode: Whether it is of tokens or answers, and truncated or left out above the limit.
        max_weight: The limit.
    """
    if mode.startswith("sequence"):
        num_rows = int(rows_N.max()) + 1
        apart_N = summed(apart_N, rows_N, num_rows)[rows_N]
    weights_N = apart_N.exp()
    if mode.endswith("truncate"):
        return weights_N.clamp(max=max_weight)
    return weights_N.where(weights_N <= max_weight, 0.0)


def _kl(policy_N: torch.Tensor, reference_N: torch.Tensor | None) -> torch.Tensor:
    """Return Schulman's estimate of the KL divergence of each token, which is never negative."""
    if reference_N is None:
        return torch.zeros_like(policy_N)
    log_N = reference_N - policy_N
    return log_N.exp() - log_N - 1


def _reward_metrics(rewards_A: torch.Tensor, stds_A: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what users know of rewards, under the names that they know."""
    return {
        "reward": rewards_A.mean(),
        "reward_std": rewards_A.std(),
        "frac_reward_zero_std": torch.isclose(stds_A, torch.zeros_like(stds_A)).double().mean(),
    }
