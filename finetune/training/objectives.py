"""The losses of a run's steps where rows are compared, and its held-out rows under the same loss.

Held-out rows are taken in their order, whole groups, about as many at a time as a step has: a loss
that reads all rows of a step reads as many. The means over them are weighted by what they are over:
groups, or what the objective says of itself. The cross-entropy of chosen answers, `nll_loss`, is
weighted by their tokens, in the loss too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from finetune.data.step_rows import StepRows, summed
from finetune.data.steps import Steps, parts_of
from finetune.recipe.extensions import ObjectiveSection, StepData
from finetune.run.references import read_references
from finetune.run.run_files import Evaluation
from finetune.training.loop import Loop, Progress
from finetune.training.ranks import Ranks
from finetune.training.session import Session
from offload.engine.batch import rows_of_labels
from offload.engine.engine import Engine
from offload.engine.objective import Objective, Reference, Scores, StepLoss

if TYPE_CHECKING:
    from numpy.typing import NDArray

PREFERRED, PREFERRED_BY = "logps/accuracies", "logps/margins"


@dataclass(frozen=True, kw_only=True, slots=True)
class Objectives:
    """Makes the loss of each step."""

    section: ObjectiveSection  # the recipe's section, which is not cross-entropy
    seq_len: int  # longest row, in tokens
    ranks: Ranks  # the processes that share each step

    def of_step(self, rows: StepRows) -> Objective:
        """Return the loss of a step that ranks share; each gives what it knows of its own rows."""
        exchange = self._others if self.ranks.num > 1 else None
        return self.section.objective(StepData(rows=rows, seq_len=self.seq_len, exchange=exchange))

    def of_held_out(self, rows: StepRows) -> Objective:
        """Return the loss of rows that this rank has alone."""
        found = self.section.objective(StepData(rows=rows, seq_len=self.seq_len, is_held_out=True))
        if self.section.head != "tokens" or self.section.has_teacher:
            return found
        return WithLogps(objective=found, rows=rows)

    def evaluation(
        self,
        rows: StepRows,
        *,
        label_lens: Sequence[int],
        loss: float,
        metrics: Mapping[str, float],
    ) -> Evaluation:
        """Return what held-out rows say, with what its means are over.

        Args:
            rows: The relations of the rows to each other.
            label_lens: Tokens with a label of each row.
            loss: The loss of the rows.
            metrics: The metrics of the loss.
        """
        counts = self.section.counts(rows, label_lens, metrics)
        if PREFERRED in metrics:
            counts |= dict.fromkeys((PREFERRED, PREFERRED_BY), len(_ordered_pairs(rows)[0]))
        if "nll_loss" in metrics:
            counts["nll_loss"] = sum(label_lens[row] for row in _best_rows(rows))
        return Evaluation(
            loss=loss, metrics=metrics, counts=counts, nll_weight=self.section.nll_weight
        )

    def validation(self, loop: Loop, held_out: Steps, *, progress: Progress) -> Evaluation:
        """Return the mean of the objective's loss and metrics over held-out rows.

        Args:
            loop: The run's optimizer steps.
            held_out: Their steps, all this rank's; the ranks share them out by their numbers.
            progress: Called with the rows that are done, and all.

        Raises:
            DivergedError: The loss is not finite.
        """
        engine, ranks = streamed(loop), self.ranks
        found: dict[int, tuple[int, Evaluation]] = {}
        num_rows = 0
        with loop.evaluated():
            for number, (num_groups, rows) in enumerate(parts_of(held_out)):
                num_rows += len(rows)
                if number % ranks.num != ranks.index:
                    continue
                share = held_out.share_of(rows)
                assert share.rows is not None
                result = engine.evaluate(
                    share.micro_batches,
                    objective=self.of_held_out(share.rows),
                    scored=share.scored,
                )
                found[number] = (
                    self.section.weight(
                        num_groups=num_groups,
                        num_rows=len(rows),
                        num_label_tokens=result.num_label_tokens,
                    ),
                    self.evaluation(
                        share.rows,
                        label_lens=rows_of_labels(share.micro_batches)[0].bincount().tolist(),
                        loss=result.loss,
                        metrics=result.metrics,
                    ),
                )
                progress(num_rows, len(held_out.rows))
        parts = {number: part for one in ranks.exchange(found) for number, part in one.items()}
        mean = mean_of([parts[number] for number in sorted(parts)], self.section)
        loop.require_finite_held_out(mean.loss)
        return mean

    def _others(self, table: torch.Tensor) -> Sequence[torch.Tensor]:
        tables = self.ranks.exchange(table)
        return [one for rank, one in enumerate(tables) if rank != self.ranks.index]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WithLogps:
    """An objective that also reports which answers the model itself finds likelier.

    A reward is measured from the reference, so before the first step all rewards are 0. The log
    probabilities alone tell how often the better of two answers is the likelier one, before and
    after, and by how much.
    """

    objective: Objective  # the loss
    rows: StepRows  # the relations of its rows to each other

    @property
    def reference(self) -> Reference | None:
        """That of the loss."""
        return self.objective.reference

    def loss(self, scores: Scores) -> StepLoss:
        """Return the loss, with the two metrics where answers are compared with each other."""
        found = self.objective.loss(scores)
        better, worse = _ordered_pairs(self.rows)
        if not len(better):
            return found
        policy_R = summed(scores.policy_N.detach(), scores.rows_N.cpu(), scores.num_rows)
        apart = policy_R[better] - policy_R[worse]
        more = {PREFERRED: (apart > 0).double().mean(), PREFERRED_BY: apart.mean()}
        return StepLoss(value=found.value, metrics={**found.metrics, **more})


def _best_rows(rows: StepRows) -> list[int]:
    """Return the row of each group that has the highest value, the first of those."""
    best: dict[int, int] = {}
    values = rows.values_R.tolist()
    for row, group in enumerate(rows.groups_R[: rows.num_trained].tolist()):
        if group not in best or values[row] > values[best[group]]:
            best[group] = row
    return list(best.values())


def _ordered_pairs(rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of all pairs of a group of which one is better: the better, and the worse."""
    groups, values = (array[: rows.num_trained] for array in (rows.groups_R, rows.values_R))
    is_pair = groups[:, None] == groups[None, :]
    better, worse = (is_pair & (values[:, None] > values[None, :])).nonzero(as_tuple=True)
    return better, worse


@dataclass(kw_only=True, slots=True, eq=False)
class RowLogps:
    """An objective that only takes each row's log-probability, and has no loss."""

    # Sum over the label tokens of each row, in nats, once it was computed.
    sums_R: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    reference: Reference | None = None

    def loss(self, scores: Scores) -> StepLoss:
        """Keep the sums."""
        self.sums_R = summed(scores.policy_N.detach(), scores.rows_N.cpu(), scores.num_rows)
        return StepLoss(value=self.sums_R.sum(), metrics={})


@dataclass(kw_only=True, slots=True, eq=False)
class HeadOutputs:
    """An objective that only takes what a new head returns, and has no loss."""

    # The head's outputs at each label token, once computed.
    outputs_NC: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    output_index: int | None = None
    reference: Reference | None = None

    def loss(self, scores: Scores) -> StepLoss:
        """Keep the outputs."""
        self.outputs_NC = scores.policy_N.detach()
        return StepLoss(value=self.outputs_NC.sum(), metrics={})


def mean_of(parts: Sequence[tuple[int, Evaluation]], section: ObjectiveSection) -> Evaluation:
    """Return the mean over parts, each weighted by its groups; a metric's over those that have it.

    Where a metric has a count of its own, it is weighted by that; a margin is then the difference.
    What is no mean, the objective finds.

    Args:
        parts: Groups of each, or tokens, and what was measured.
        section: The recipe's.
    """
    names = dict.fromkeys(name for _, part in parts for name in part.metrics)
    metrics = {
        name: _mean(
            [(p.counts.get(name, num), p.metrics[name]) for num, p in parts if name in p.metrics]
        )
        for name in names
    }
    if any(part.counts for _, part in parts) and {"rewards/chosen", "rewards/rejected"} <= {
        *metrics
    }:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    metrics = section.merged(metrics, [part for _, part in parts])
    weight, nll = parts[0][1].nll_weight, metrics.get("nll_loss", 0.0)
    apart = [(num, part.loss - weight * part.metrics.get("nll_loss", 0.0)) for num, part in parts]
    return Evaluation(loss=_mean(apart) + weight * nll, metrics=metrics)


def _mean(weighted: Sequence[tuple[int, float]]) -> float:
    return sum(num * value for num, value in weighted) / sum(num for num, _ in weighted)


def row_logps(
    loop: Loop, steps: Steps, *, ranks: Ranks, max_parts: int | None = None
) -> "NDArray[np.float64]":
    """Return the log-probability of each row's label tokens, by the model as it is, in nats.

    Args:
        loop: The run's optimizer steps.
        steps: The steps of the rows, all this rank's; the ranks share them out by their numbers.
        ranks: The processes that share the rows.
        max_parts: The first parts of the rows, at most, each of about a step; those of other
            rows are 0. None takes all.
    """
    found = np.zeros(len(steps.rows))
    with loop.evaluated():
        for number, (_, rows) in enumerate(islice(parts_of(steps), max_parts)):
            if number % ranks.num != ranks.index:
                continue
            logps = RowLogps()
            batches = steps.share_of(rows).micro_batches
            streamed(loop).evaluate(batches, objective=logps)
            found[list(steps.in_order(rows))] = logps.sums_R.numpy()
    return np.asarray(sum(ranks.exchange(found)))


FAR_REFERENCE = 0.2
"""Nats per token that a reference of the rows may be from the model before a note says so."""


def take_references(session: Session) -> None:
    """Take the reference's log-probabilities of all rows, where a recipe asks for them first.

    The model has not been trained yet: it is the base, or what `adapter.init_from` names.
    """
    run, loop = session.run, session.loop
    every = {"train": session.steps} | ({"held_out": session.held_out} if session.held_out else {})
    open_ones = {
        name: steps
        for name, steps in every.items()
        if steps.comparison is not None and not len(steps.comparison.groups.references)
    }
    if "train" not in open_ones:
        _compare_references(session)
    if not open_ones:
        return
    found = run.ranks.from_main(lambda: read_references(run.dir.path, rows=session.rows_hash))
    if found is None:
        run.screen.note("Taking the reference's log-probabilities of all rows ...")
        found = {
            name: row_logps(loop, _all_of(s), ranks=run.ranks) for name, s in open_ones.items()
        }
    done = {name: steps.with_references(found[name]) for name, steps in open_ones.items()}
    session.steps = done.get("train", session.steps)
    session.held_out = done.get("held_out", session.held_out)
    session.references = found


def _compare_references(session: Session) -> None:
    """Say how far the rows' own log-probabilities are from the model's, on about a step.

    The model has not been trained yet. Rounding and a codec of the layers make some hundredths
    of a nat for a token; rows of another reference are known by more.
    """
    steps = _all_of(session.steps)
    assert steps.comparison is not None
    rows = list(next(parts_of(steps))[1])
    known = steps.comparison.groups.references[rows]
    apart = np.abs(
        row_logps(session.loop, steps, ranks=session.run.ranks, max_parts=1)[rows] - known
    ).sum()
    per_token = apart / session.rows.train.loss_tokens[rows].sum()
    end = "."
    if per_token > FAR_REFERENCE:
        end = ": they are of another model or template, or of other tokens."
    session.run.screen.note(
        f"The rows' log-probabilities of the reference are {per_token:.3f} nats per token from"
        " those of the model as the run begins, in"
        f" {len(rows):,} of {len(steps.rows):,} answers{end}"
    )


def _all_of(steps: Steps) -> Steps:
    """Return steps all of which are this rank's."""
    assert steps.comparison is not None
    return steps.held_out(steps.rows, steps.comparison)


def streamed(loop: Loop) -> Engine:
    """Return the engine of a run with settings that only this one has."""
    assert isinstance(loop.engine, Engine), "a rule of recipes"
    return loop.engine
