"""From the section `objective` of a recipe to the loss of a step."""

import math
from dataclasses import replace
from functools import partial

from finetune.errors import DataError
from finetune.objective.classify import ClassifyObjective
from finetune.objective.distill import DistillObjective
from finetune.objective.dpo import LOSSES, ipo_of_means
from finetune.objective.grpo import GrpoObjective
from finetune.objective.kto import KtoObjective
from finetune.objective.pairs import Exchange, PairObjective, RankingObjective
from finetune.objective.reference_free import orpo, orpo_metrics, simpo
from finetune.objective.reward import RewardObjective
from finetune.objective.step_rows import StepRows
from finetune.recipe.sections import ObjectiveSection
from offload.engine.objective import Objective


def objective_of(
    section: ObjectiveSection,
    rows: StepRows,
    *,
    seq_len: int,
    exchange: Exchange | None = None,
) -> Objective:
    """Return the loss of a step by a recipe.

    Args:
        section: Of a recipe without broken rules; its method is not `sft`.
        rows: What the step's rows are to each other.
        seq_len: Longest row, in tokens.
        exchange: Hands a table to the other ranks and returns theirs; None without others.

    Raises:
        DataError: Rows lack what the method reads.
    """
    if section.method == "distill":
        return _distill(section, rows, exchange=exchange)
    if section.is_classification:
        return ClassifyObjective(rows=rows, exchange=exchange)
    beta = section.beta
    assert beta is not None, "filled in by the section, except for sft, distill and classify"
    if section.is_reward:
        return RewardObjective(rows=rows, center_weight=beta, exchange=exchange)
    rows = _with_reference(section, rows)
    if section.method == "kto":
        assert section.desirable_weight is not None
        assert section.undesirable_weight is not None
        return KtoObjective(
            rows=rows,
            beta=beta,
            desirable_weight=section.desirable_weight,
            undesirable_weight=section.undesirable_weight,
            has_kl=section.scores_mismatched,
            exchange=exchange,
        )
    if section.method == "grpo":
        return _grpo(section, rows, seq_len=seq_len, exchange=exchange)
    if section.is_ranking:
        return RankingObjective(
            rows=rows, beta=beta, sft_weight=section.nll_weight, exchange=exchange
        )
    return _pairs(section, rows, beta=beta, exchange=exchange)


def _with_reference(section: ObjectiveSection, rows: StepRows) -> StepRows:
    """Return the rows with the reference's sums only if these are what to compare with.

    Raises:
        DataError: They are, and the rows have none.
    """
    if section.reference == "precomputed" and rows.reference_R is None:
        raise DataError(
            "objective.reference is precomputed and the rows have no log-probabilities of it",
            limit="each answer needs the sum of the reference's log-probabilities of its tokens",
            hint="`objective.reference: base`, or rows with them",
        )
    return rows if section.reference == "precomputed" else replace(rows, reference_R=None)


def _pairs(
    section: ObjectiveSection, rows: StepRows, *, beta: float, exchange: Exchange | None
) -> PairObjective:
    """Return the loss of pairs."""
    smoothing = section.label_smoothing or 0.0
    common = partial(PairObjective, rows=rows, beta=beta, exchange=exchange)
    if section.method == "orpo":
        return common(
            loss_of=partial(orpo, beta=beta),
            sft_weight=section.nll_weight,
            is_averaged=True,
            has_reference=False,
            more_metrics=orpo_metrics,
        )
    sft_weight = section.nll_weight
    if section.method == "simpo":
        assert section.gamma is not None
        return common(
            loss_of=partial(simpo, beta=beta, gamma=section.gamma, smoothing=smoothing),
            sft_weight=sft_weight,
            is_averaged=True,
            has_reference=False,
        )
    assert section.loss is not None
    is_cpo = section.method == "cpo"
    # Means of tokens are taken beforehand, so that what CPO reports are means too.
    losses = {**LOSSES, "ipo": ipo_of_means} if is_cpo else LOSSES
    return common(
        loss_of=partial(losses[section.loss], beta=beta, smoothing=smoothing),
        sft_weight=sft_weight,
        is_averaged=is_cpo and section.loss == "ipo",
        has_reference=not is_cpo,
    )


def _distill(
    section: ObjectiveSection, rows: StepRows, *, exchange: Exchange | None
) -> DistillObjective:
    """Return the loss of rows with a teacher's distributions."""
    assert section.loss is not None
    assert section.sft_weight is not None
    return DistillObjective(
        rows=rows,
        name=section.loss,
        temperature=section.temperature or 1.0,
        sft_weight=section.sft_weight,
        exchange=exchange,
    )


def _grpo(
    section: ObjectiveSection, rows: StepRows, *, seq_len: int, exchange: Exchange | None
) -> GrpoObjective:
    """Return the loss of sampled answers."""
    assert section.beta is not None
    assert section.clip_epsilon is not None
    assert section.loss in ("dapo", "grpo", "dr_grpo", "rloo")
    if section.takes_sampler and rows.sampler_N is None:
        raise DataError(
            "the rows have no log-probabilities of the sampler and"
            f" objective.importance_sampling_mode is {section.importance_sampling_mode}",
            limit="it needs one for each token of an answer",
            hint="`objective.importance_sampling_mode: none`, or rows with `logprobs`",
        )
    above = section.clip_epsilon_high
    return GrpoObjective(
        rows=rows,
        name=section.loss,
        beta=section.beta,
        clip_range=(1 - section.clip_epsilon, 1 + (above or section.clip_epsilon)),
        mode=section.importance_sampling_mode or "none",
        max_weight=section.importance_sampling_cap or math.inf,  # null where no weight is taken
        max_tokens=seq_len,
        exchange=exchange,
    )
