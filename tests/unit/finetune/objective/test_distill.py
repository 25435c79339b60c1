"""Distillation to a teacher's likeliest tokens, against a loop over tokens written by hand."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from finetune.objective.factory import objective_of
from finetune.objective.pairs import Exchange
from finetune.objective.step_rows import StepRows
from finetune.recipe.sections import ObjectiveSection
from offload.engine.objective import Scores, StepLoss

N, V, K = 9, 16, 4


def known(*, seed: int = 0, mass: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits of the model (N, V), the teacher's tokens and log-probabilities (N, K)."""
    generator = torch.Generator().manual_seed(seed)
    logits_NV, teacher_NV = (
        torch.randn(N, V, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    top = (2 * teacher_NV).log_softmax(1).topk(K, dim=1)
    ids_NK, logps_NK = top.indices, top.values + math.log(mass)
    ids_NK[2, 1:], logps_NK[2, 1:] = -1, 0.0
    return logits_NV.requires_grad_(), ids_NK, logps_NK


def scores_of(logits_NV: torch.Tensor, ids_NK: torch.Tensor) -> Scores:
    """Return what the engine would take from logits; labels are token 0."""
    logps_NV = logits_NV.log_softmax(1)
    is_named = torch.stack([torch.tensor([v in row for v in range(V)]) for row in ids_NK.tolist()])
    num = len(logits_NV)
    return Scores(
        policy_N=logps_NV[:, 0],
        reference_N=None,
        rows_N=torch.arange(num) // 3,
        num_rows=-(-num // 3),
        top_NK=logps_NV.gather(1, ids_NK.clamp(min=0)).where(ids_NK >= 0, 0.0),
        others_N=logps_NV.masked_fill(is_named, -torch.inf).logsumexp(1),
    )


def found_loss(
    values: dict[str, Any],
    logits_NV: torch.Tensor,
    ids_NK: torch.Tensor,
    logps_NK: torch.Tensor,
    exchange: Exchange | None = None,
) -> StepLoss:
    scores = scores_of(logits_NV, ids_NK)
    rows = StepRows(
        groups_R=torch.arange(scores.num_rows),
        values_R=torch.ones(scores.num_rows, dtype=torch.float64),
        num_trained=scores.num_rows,
        top_ids_NK=ids_NK,
        top_logps_NK=logps_NK,
    )
    section = ObjectiveSection.model_validate({"method": "distill", **values})
    return objective_of(section, rows, seq_len=8, exchange=exchange).loss(scores)


def by_hand(
    values: dict[str, Any], logits_NV: torch.Tensor, ids_NK: torch.Tensor, logps_NK: torch.Tensor
) -> torch.Tensor:
    t, losses = values.get("temperature", 1.0), []
    for logits_V, ids, logps in zip(logits_NV, ids_NK.tolist(), logps_NK.tolist(), strict=True):
        q_V = logits_V.softmax(0)
        pairs = [(math.exp(logp), q_V[i]) for i, logp in zip(ids, logps, strict=True) if i >= 0]
        if values.get("loss", "kl") == "kl":
            pairs.append((1 - sum(p for p, _ in pairs), 1 - sum(q for _, q in pairs)))
        else:
            of_p, of_q = sum(p ** (1 / t) for p, _ in pairs), sum(q ** (1 / t) for _, q in pairs)
            pairs = [(p ** (1 / t) / of_p, q ** (1 / t) / of_q) for p, q in pairs]
        kl = sum(p * (math.log(p) - q.log()) for p, q in pairs)
        losses.append(t**2 * kl - values.get("sft_weight", 0.0) * q_V[0].log())
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"sft_weight": 0.5},
        {"loss": "kl_top"},
        {"loss": "kl_top", "temperature": 2.5, "sft_weight": 0.1},
    ],
)
def test_loss_and_gradient_are_those_of_a_loop_over_tokens(values: dict[str, Any]) -> None:
    logits_NV, ids_NK, logps_NK = known()
    value = found_loss(values, logits_NV, ids_NK, logps_NK).value
    expected = by_hand(values, logits_NV, ids_NK, logps_NK)
    (gradient,) = torch.autograd.grad(value, logits_NV)
    (truth,) = torch.autograd.grad(expected, logits_NV)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, truth, rtol=1e-10, atol=1e-14)
    assert truth.abs().sum() > 0.1


def test_a_teacher_of_the_whole_vocabulary_gives_the_whole_divergence() -> None:
    logits_NV, _, _ = known()
    teacher_NV = torch.randn(N, V, dtype=torch.float64).log_softmax(1)
    ordered = teacher_NV.sort(dim=1, descending=True)
    logps_NK = ordered.values.float()  # rounded, so that they do not add up to 1
    for name in ("kl", "kl_top"):
        value = found_loss({"loss": name}, logits_NV, ordered.indices, logps_NK).value
        whole = torch.nn.functional.kl_div(
            logits_NV.log_softmax(1), teacher_NV, log_target=True, reduction="batchmean"
        )
        assert value.item() == pytest.approx(whole.item(), rel=1e-5)
        (gradient,) = torch.autograd.grad(value, logits_NV, retain_graph=True)
        (truth,) = torch.autograd.grad(whole, logits_NV)
        torch.testing.assert_close(gradient, truth, rtol=1e-4, atol=1e-7)


def test_a_model_that_agrees_on_each_given_token_has_no_loss_and_no_gradient() -> None:
    logits_NV, ids_NK, logps_NK = known()
    own_NK = logits_NV.detach().log_softmax(1).gather(1, ids_NK.clamp(min=0))
    agreed = found_loss({}, logits_NV, ids_NK, own_NK)
    assert agreed.value.item() == pytest.approx(0, abs=1e-14)
    (gradient,) = torch.autograd.grad(agreed.value, logits_NV)
    assert gradient.abs().max() < 1e-14
    assert agreed.metrics["top_1_agreement"] == 1
    mass = agreed.metrics["teacher_top_k_mass"]
    assert mass == pytest.approx(agreed.metrics["student_top_k_mass"].item())
    assert found_loss({}, logits_NV, ids_NK, logps_NK).value > 0


def test_probabilities_that_rounding_made_more_than_1_are_scaled() -> None:
    logits_NV, ids_NK, logps_NK = known(mass=1.5)
    found = found_loss({}, logits_NV, ids_NK, logps_NK)
    is_over = logps_NK.exp().where(ids_NK >= 0, 0.0).sum(1) > 1
    assert is_over.any()
    assert found.value.isfinite()
    assert found.metrics["teacher_top_k_mass"] <= 1


def _given(tables: Sequence[torch.Tensor], _: torch.Tensor) -> Sequence[torch.Tensor]:
    return tables


def test_two_ranks_give_the_loss_gradient_and_metrics_of_one() -> None:
    logits_NV, ids_NK, logps_NK = known()
    values = {"sft_weight": 0.3}
    whole = found_loss(values, logits_NV, ids_NK, logps_NK)
    (expected,) = torch.autograd.grad(whole.value, logits_NV)
    parts = [slice(0, 3), slice(3, N)]
    tables: list[torch.Tensor] = []

    def hand_over(table: torch.Tensor) -> Sequence[torch.Tensor]:
        tables.append(table)
        return ()

    for part in parts:
        found_loss(values, logits_NV[part], ids_NK[part], logps_NK[part], hand_over)
    found = []
    for part, other in zip(parts, reversed(tables), strict=True):
        theirs: list[torch.Tensor] = [other]
        parts_of = logits_NV[part], ids_NK[part], logps_NK[part]
        found.append(found_loss(values, *parts_of, partial(_given, theirs)))
    assert sum(one.value.item() for one in found) == pytest.approx(whole.value.item(), rel=1e-13)
    gradient = sum(torch.autograd.grad(one.value, logits_NV)[0] for one in found)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
    for one in found:
        for name, value in whole.metrics.items():
            assert one.metrics[name].item() == pytest.approx(value.item(), rel=1e-12), name
