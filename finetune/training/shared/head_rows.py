"""A new head on features of rows: its outputs, its loss, and what held-out rows say of it.

Shapes: N label tokens of some rows, D model dim, C outputs of the head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn import functional

from finetune.data.steps import Steps
from finetune.objective.features import Features
from finetune.objective.pairs import StepRows
from finetune.training.objectives import Evaluation, Objectives, mean_of, parts_of
from offload.engine.objective import Objective, OutputObjective, Scores, StepLoss
from offload.plan.facts.trainable import SCORE

if TYPE_CHECKING:
    from finetune.training.session import Session


class Head:
    """A head's weights in float32."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Take weights, by their names in a checkpoint."""
        self.weights = dict(weights)
        by_kind = {name.rpartition(".")[2]: weight for name, weight in weights.items()}
        self._weight_CD, self._bias_C = by_kind["weight"], by_kind.get("bias")

    @property
    def num_parameters(self) -> int:
        """Of all weights."""
        return sum(weight.numel() for weight in self.weights.values())

    def outputs(self, values_ND: torch.Tensor) -> torch.Tensor:
        """Return the outputs (N, C) of features."""
        values_ND = values_ND.to(self._weight_CD.device).float()
        return functional.linear(values_ND, self._weight_CD, self._bias_C)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadRows:
    """Rows with their features.

    Attributes:
        steps: Of the rows, all this rank's.
        features: Of each row.
    """

    steps: Steps
    features: Features

    def loss(self, rows: tuple[int, ...], objective: Objective, head: Head) -> StepLoss:
        """Return an objective's loss of rows, of which it knows in the order of a step's share."""
        places = self.steps.in_order(rows)
        values_ND, rows_N = self.features.of(places)
        outputs_NC = head.outputs(values_ND)
        assert isinstance(objective, OutputObjective), "a head of its own has outputs"
        index = objective.output_index
        return objective.loss(
            Scores(
                policy_N=outputs_NC if index is None else outputs_NC[:, index],
                reference_N=None,
                rows_N=rows_N,
                num_rows=len(places),
            )
        )

    @torch.no_grad()
    def evaluation(self, objectives: Objectives, head: Head) -> Evaluation:
        """Return what all rows say of a head, cut into the parts of an evaluation."""
        parts = []
        for num_groups, rows in parts_of(self.steps):
            share = self.steps.share_of(rows)
            relations = cast("StepRows", share.rows)
            found = self.loss(rows, objectives.of_held_out(relations), head)
            weight = objectives.weight(
                num_groups=num_groups, num_rows=len(rows), num_label_tokens=share.num_label_tokens
            )
            evaluation = objectives.evaluation(
                relations,
                label_lens=(),
                loss=float(found.value),
                metrics={name: float(value) for name, value in found.metrics.items()},
            )
            parts.append((weight, evaluation))
        return mean_of(parts)


def head_of(session: "Session") -> dict[str, torch.Tensor]:
    """Return the weights of the head that a run updates, by their names in a checkpoint."""
    return {n: weight for n, weight in session.loop.weights.items() if SCORE in n.split(".")}


def featured(session: "Session") -> tuple[HeadRows, HeadRows | None]:
    """Compute the features of the rows that are trained on, and of those that are held out."""
    run, loop = session.run, session.loop
    dtype: torch.dtype = getattr(torch, run.recipe.model.dtype)

    def of(steps: Steps, name: str) -> HeadRows:
        with run.working(name, "rows") as progress:
            features = loop.features(steps, dtype=dtype, progress=progress)
        return HeadRows(steps=steps, features=features)

    trained = of(session.steps, "Taking features")
    if session.held_out is None or run.recipe.output.eval_every is None:
        return trained, None
    return trained, of(session.held_out, "Taking features of held-out rows")


def objectives_of(session: "Session") -> Objectives:
    """Return the losses of a run whose head learns."""
    recipe, ranks = session.run.recipe, session.run.ranks
    return Objectives(section=recipe.objective, seq_len=recipe.train.seq_len, ranks=ranks)
