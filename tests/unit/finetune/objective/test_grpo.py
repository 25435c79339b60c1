"""GRPO and its kin, each against a loop over answers and tokens written by hand."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from finetune.errors import DataError
from tests.tiers import mostly_slow
from tests.unit.finetune.objective.step import (
    SEQ_LEN,
    Step,
    assert_is,
    assert_two_ranks_are_one,
    computed,
    objective,
    step,
)

GROUPS = [1, 0, 1, 0, 0, 1, 2, 2]
REWARDS = [1.0, 0.0, 0.5, 2.0, 0.25, 0.0, 3.0, 3.0]
BETA, LOW, HIGH = 0.2, 0.05, 0.08
LOSSES = ("grpo", "dapo", "dr_grpo", "rloo")
MODES = ("none", "ratio", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CASES = [
    (loss, mode)
    for loss in LOSSES
    for mode in MODES
    if not (loss == "rloo" and mode.startswith("token"))
]


def settings(loss: str, mode: str = "none", **more: object) -> dict[str, object]:
    return {
        "method": "grpo",
        "loss": loss,
        "beta": BETA,
        "clip_epsilon": LOW,
        "clip_epsilon_high": HIGH,
        "importance_sampling_mode": mode,
    } | more


def of_step(*, has_sampler: bool = True, apart: float = 1.0) -> Step:
    """Answers of three prompts; the sampler's log-probabilities differ by `apart` times more."""
    made = step(GROUPS, REWARDS, has_sampler=has_sampler)
    if made.rows.sampler_N is not None:
        policy_N = made.scores.policy_N.detach()
        made.rows.sampler_N.sub_(policy_N).mul_(apart).add_(policy_N)
    return made


def advantages(loss: str, rewards: list[float]) -> list[float]:
    found = []
    for i, reward in enumerate(rewards):
        group = [rewards[j] for j in range(len(rewards)) if GROUPS[j] == GROUPS[i]]
        if loss == "rloo":
            found.append(reward - (sum(group) - reward) / (len(group) - 1))
        else:
            found.append(reward - statistics.mean(group))
            if loss != "dr_grpo":
                found[-1] /= statistics.stdev(group) + 1e-4
    return found


def weight(mode: str, apart: torch.Tensor) -> float:
    ratio = math.exp(apart)
    if mode.endswith("truncate"):
        return min(ratio, 3.0)
    return ratio if ratio <= 3.0 else 0.0


def answer_loss(
    loss: str, mode: str, advantage: float, logps: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The sum over an answer's tokens; of rloo, the answer's."""
    policy, reference, sampler = logps
    fixed = policy.detach()
    old = sampler if mode == "ratio" else fixed
    whole = (policy - old).sum()
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(policy)):
        ratio = whole.exp() if loss == "rloo" else (policy[t] - old[t]).exp()
        inside = min(max(ratio, ratio.new_tensor(1 - LOW)), ratio.new_tensor(1 + HIGH))
        gain = min(ratio * advantage, inside * advantage)
        if mode.startswith("token"):
            gain = gain * weight(mode, fixed[t] - sampler[t])
        elif mode.startswith("sequence"):
            gain = gain * weight(mode, (fixed - sampler).sum())
        if loss == "rloo":
            return -gain
        x = reference[t] - policy[t]
        total = total - gain + BETA * (x.exp() - x - 1)
    return total


def by_hand(loss: str, mode: str, of: Step) -> torch.Tensor:
    sampler_N = of.rows.sampler_N
    policy, reference = of.of_row(of.scores.policy_N), of.of_row(of.scores.reference_N)
    sampler = policy if sampler_N is None else of.of_row(sampler_N)
    rewards = list(REWARDS)
    if loss == "rloo":
        for i in range(len(rewards)):
            rewards[i] -= BETA * float((policy[i] - reference[i]).sum().detach())
    losses = [
        answer_loss(loss, mode, advantage, (policy[i], reference[i], sampler[i]))
        for i, advantage in enumerate(advantages(loss, rewards))
    ]
    sizes = [len(row) for row in policy]
    if loss == "grpo":
        return torch.stack([x / n for x, n in zip(losses, sizes, strict=True)]).mean()
    divisors = {"dapo": sum(sizes), "dr_grpo": len(losses) * SEQ_LEN, "rloo": len(losses)}
    return torch.stack(losses).sum() / divisors[loss]


@pytest.mark.parametrize(
    ("loss", "mode"),
    mostly_slow(CASES, *((loss, "none") for loss in LOSSES), ("dapo", "ratio")),
)
def test_a_loss_is_that_of_its_paper(loss: str, mode: str) -> None:
    of = of_step()
    assert_is(settings(loss, mode), of, lambda of: by_hand(loss, mode, of))


@pytest.mark.parametrize("mode", MODES[2:])
def test_weights_above_three_are_truncated_or_left_out(mode: str) -> None:
    of = of_step(apart=12.0)
    metrics = assert_is(settings("dapo", mode), of, lambda of: by_hand("dapo", mode, of))
    plain = computed(settings("dapo"), of)
    assert not torch.equal(computed(settings("dapo", mode), of)[1], plain[1])
    assert of.rows.sampler_N is not None
    apart_N = of.scores.policy_N.detach() - of.rows.sampler_N
    rows = of.of_row(apart_N) if mode.startswith("sequence") else apart_N[:, None]
    assert any(row.sum() > math.log(3) for row in rows), "nothing is truncated"
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(
        apart_N.abs().mean().item(), abs=1e-12
    )


@pytest.mark.parametrize("mode", MODES[2:])
def test_the_largest_weight_is_a_setting(mode: str) -> None:
    of = of_step(apart=12.0)
    found = {
        cap: computed(settings("dapo", mode, importance_sampling_cap=cap), of)[2][
            "sampling/importance_sampling_ratio/mean"
        ]
        for cap in (None, 3.0, 0.05, 1e9)
    }
    assert found[None] == found[3.0]
    assert found[0.05] <= 0.05 < found[3.0]
    assert found[1e9] > found[3.0]


def test_ratios_outside_the_range_are_clipped_and_counted() -> None:
    of = of_step()
    metrics = assert_is(settings("dapo", "ratio"), of, lambda of: by_hand("dapo", "ratio", of))
    assert of.rows.sampler_N is not None
    ratios = (of.scores.policy_N.detach() - of.rows.sampler_N).exp().tolist()
    signs = [advantages("dapo", REWARDS)[row] for row in of.scores.rows_N.tolist()]
    low = sum(q < 1 - LOW and a < 0 for q, a in zip(ratios, signs, strict=True))
    high = sum(q > 1 + HIGH and a > 0 for q, a in zip(ratios, signs, strict=True))
    assert low
    assert high
    assert metrics["clip_ratio/low_mean"] == pytest.approx(low / len(ratios))
    assert metrics["clip_ratio/high_mean"] == pytest.approx(high / len(ratios))
    assert metrics["clip_ratio/region_mean"] == pytest.approx((low + high) / len(ratios))


def test_rewards_and_divergence_are_reported() -> None:
    of = of_step()
    _, _, metrics = computed(settings("dapo"), of)
    assert of.scores.reference_N is not None
    x_N = of.scores.reference_N - of.scores.policy_N.detach()
    assert metrics["kl"] == pytest.approx((x_N.exp() - x_N - 1).mean().item(), abs=1e-12)
    assert metrics["reward"] == pytest.approx(statistics.mean(REWARDS))
    assert metrics["reward_std"] == pytest.approx(statistics.stdev(REWARDS))
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 8)


def test_without_a_divergence_nothing_asks_for_a_reference() -> None:
    of = of_step()
    values = settings("dapo", beta=0.0)
    assert objective(values, of.rows).reference is None
    assert objective(settings("dapo"), of.rows).reference is not None
    alone = replace(of, scores=replace(of.scores, reference_N=None))
    _, gradient, metrics = computed(values, alone)
    assert gradient.abs().sum() > 0
    assert "kl" not in metrics


@pytest.mark.parametrize("loss", LOSSES)
def test_two_ranks_compute_the_loss_of_the_whole_step(loss: str) -> None:
    mode = "sequence_truncate" if loss == "rloo" else "ratio"
    assert_two_ranks_are_one(settings(loss, mode), of_step(), [0, 1, 1, 1, 0, 0, 0, 1])


def test_a_prompt_with_one_answer_is_refused() -> None:
    with pytest.raises(DataError, match="group 4 of a step has one answer"):
        computed(settings("dapo"), step([0, 0, 4], [1, 0, 1]))


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    of = of_step()
    gradient = computed(settings("dapo", beta=0.0), of)[1]
    is_equal_N = of.scores.rows_N >= 6
    assert gradient[is_equal_N].eq(0).all()
    assert gradient[~is_equal_N].ne(0).any()


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(DataError, match=f"the value of row 1 of a step is {reward}"):
        computed(settings("dapo"), step([0, 0, 0], [1, reward, 1]))


def test_a_log_probability_that_is_no_number_makes_the_loss_none() -> None:
    for loss in LOSSES:
        of = of_step()
        of.scores.policy_N.data[3] = math.nan
        assert computed(settings(loss), of)[0].isnan()


def test_a_sampler_that_is_not_in_the_rows_is_missed() -> None:
    of = of_step(has_sampler=False)
    with pytest.raises(DataError, match="the rows have no log-probabilities of the sampler"):
        objective(settings("dapo", "ratio"), of.rows)
    assert computed(settings("dapo"), of)[0].isfinite()
