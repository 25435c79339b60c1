"""Loss of rows with a teacher's distribution at each token: distillation to its likeliest tokens.

Of a label token, p_k and q_k are the probabilities of the k-th given token by the teacher and by
the model, p and q those of all other tokens together. N label tokens of this rank, K given tokens.
"""

import math
from dataclasses import dataclass

import torch

from finetune.data.step_rows import SectionObjective
from finetune.objectives.distill import Distill
from offload.engine.objective import Scores, StepLoss

ROUNDING = 1e-6
"""A rest of the teacher's mass below it is the rounding of log-probabilities in float32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DistillObjective(SectionObjective):
    """The KL divergence of the model from its teacher, a mean over the label tokens of a step.

        kl      sum of p_k log(p_k / q_k) + p log(p / q): that of the distributions over the given
                tokens and one more for all others. It is 0 only where the model agrees on each
                given token, and never above the KL divergence over the whole vocabulary.
        kl_top  t^2 times that of the two distributions over the given tokens alone, each
                proportional to its probabilities to the power 1 / t. Of all others it says nothing.

    Source: arXiv:1503.02531 for the loss, t and t^2; arXiv:2306.13649 for its form over the tokens
    of an answer; one more token for all others as in trl 1.16.0, `_add_tail_bucket`.
    """

    section: Distill

    @property
    def top_ids(self) -> torch.Tensor:
        """The teacher's tokens."""
        assert self.step.rows.top_ids_NK is not None, "rows of the format have them"
        return self.step.rows.top_ids_NK

    def loss(self, scores: Scores) -> StepLoss:
        """Return the loss of a step.

        Args:
            scores: The scores of all rows of the step.
        """
        assert scores.top_NK is not None
        assert scores.others_N is not None
        rows, exchange, sft_weight = self.step.rows, self.step.exchange, self.section.sft_weight
        assert rows.top_logps_NK is not None
        is_given_NK = self.top_ids.cpu() >= 0
        teacher_NK = _at_most_one(rows.top_logps_NK.cpu().double(), is_given_NK)
        student_NK = scores.top_NK.cpu().double()
        if self.section.loss == "kl":
            kl_N = _with_others(teacher_NK, student_NK, scores.others_N.cpu().double(), is_given_NK)
        else:
            kl_N = _of_given(
                teacher_NK, student_NK, is_given_NK, temperature=self.section.temperature or 1.0
            )
        nll_N = -scores.policy_N.cpu().double()
        known_NK = student_NK.detach().where(is_given_NK, -math.inf)
        named = {
            "kl": kl_N.detach(),
            "nll_loss": nll_N.detach(),
            "teacher_top_k_mass": teacher_NK.exp().sum(1),
            "student_top_k_mass": known_NK.exp().sum(1),
            "top_1_agreement": (known_NK.argmax(1) == teacher_NK.argmax(1)).double(),
        }
        num = torch.tensor(float(len(kl_N)), dtype=torch.float64)
        own_C = torch.stack([*(values_N.sum() for values_N in named.values()), num])
        others = exchange(own_C[None]) if exchange else ()
        all_C = torch.cat((own_C[None], *others)).sum(0)
        losses_N = kl_N + sft_weight * nll_N if sft_weight else kl_N
        return StepLoss(
            value=losses_N.sum() / all_C[-1],
            metrics=dict(zip(named, all_C[:-1] / all_C[-1], strict=True)),
        )


def _at_most_one(logps_NK: torch.Tensor, is_given_NK: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities whose rounding makes no sum above 1; -inf where none is given."""
    logps_NK = logps_NK.where(is_given_NK, -math.inf)
    return logps_NK - logps_NK.logsumexp(1, keepdim=True).clamp(min=0)


def _with_others(
    teacher_NK: torch.Tensor,
    student_NK: torch.Tensor,
    others_N: torch.Tensor,
    is_given_NK: torch.Tensor,
) -> torch.Tensor:
    terms_NK = teacher_NK.exp() * (teacher_NK - student_NK)
    rest_N = 1 - teacher_NK.exp().sum(1)
    has_rest_N = rest_N > ROUNDING
    rest_N, others_N = rest_N.where(has_rest_N, 1.0), others_N.where(has_rest_N, 0.0)
    of_rest_N = rest_N * (rest_N.log() - others_N)
    return terms_NK.where(is_given_NK, 0.0).sum(1) + of_rest_N.where(has_rest_N, 0.0)


def _of_given(
    teacher_NK: torch.Tensor,
    student_NK: torch.Tensor,
    is_given_NK: torch.Tensor,
    *,
    temperature: float,
) -> torch.Tensor:
    p_NK = (teacher_NK / temperature).log_softmax(1)
    q_NK = (student_NK / temperature).where(is_given_NK, -math.inf).log_softmax(1)
    terms_NK = p_NK.exp() * (p_NK - q_NK.where(is_given_NK, 0.0))
    return temperature**2 * terms_NK.where(is_given_NK, 0.0).sum(1)
