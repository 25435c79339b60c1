"""The loss of classifiers: the cross-entropy of each class, of a row or a word, and who is found.

Macro F1 is the mean over classes of the harmonic mean of precision and recall,
2 hits / (predicted + labelled), over the classes that some row has or is predicted to have. It is
no mean over rows: from parts of the rows it follows by their counts.

All of it is computed on the CPU in float64, as in `finetune.objective.pairs`. N rows or words of
this rank, A of all ranks, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from finetune.objective.pairs import Exchange
from finetune.objective.step_rows import StepRows
from offload.engine.objective import Scores, StepLoss

ACCURACY, F1 = "accuracy", "f1"
HITS, PREDICTED, LABELLED = COUNTS = ("hits/", "predicted/", "labelled/")
"""How the names of a class's counts begin."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassifyObjective:
    """The cross-entropy of a step's classes, by the head's outputs; each row or word as much.

    Attributes:
        rows: What the step's rows are; `classes_N` are the numbers of the words' classes, or else
            the value of a row is that of its class.
        has_counts: Whether the metrics have the counts of each class, from which F1 follows.
        exchange: Gets the rows of the other ranks.
    """

    rows: StepRows
    has_counts: bool = False
    exchange: Exchange | None = None
    reference: None = None

    @property
    def output_index(self) -> None:
        """All outputs are read."""
        return

    def loss(self, scores: Scores) -> StepLoss:
        """Return the loss of a step.

        Args:
            scores: The outputs (N, C) at the last token of each row, or at the first of each word.
        """
        outputs_NC = scores.policy_N.cpu().double()
        classes_N = self.rows.classes_N
        if classes_N is None:
            classes_N = self.rows.values_R[scores.rows_N.cpu()].long()
        losses_N = torch.nn.functional.cross_entropy(outputs_NC, classes_N, reduction="none")
        own_N3 = torch.stack(
            (losses_N.detach(), classes_N.double(), outputs_NC.argmax(1).double()), dim=1
        )
        others = self.exchange(own_N3) if self.exchange is not None else ()
        all_A3 = torch.cat((own_N3, *others))
        counts = counts_of(all_A3[:, 1].long(), all_A3[:, 2].long(), outputs_NC.shape[1])
        metrics = {
            ACCURACY: (all_A3[:, 1] == all_A3[:, 2]).double().mean(),
            F1: torch.tensor(macro_f1(counts), dtype=torch.float64),
        }
        if self.has_counts:
            metrics |= {name: torch.tensor(float(number)) for name, number in counts.items()}
        return StepLoss(value=losses_N.sum() / len(all_A3), metrics=metrics)


def counts_of(
    classes_A: torch.Tensor, predicted_A: torch.Tensor, num_classes: int
) -> dict[str, float]:
    """Return of each class how many rows or words have it, are predicted to have it, and both."""
    of_all = (
        (HITS, classes_A[classes_A == predicted_A]),
        (PREDICTED, predicted_A),
        (LABELLED, classes_A),
    )
    return {
        f"{name}{index}": float(number)
        for name, rows in of_all
        for index, number in enumerate(rows.bincount(minlength=num_classes).tolist())
    }


def macro_f1(counts: Mapping[str, float]) -> float:
    """Return the mean F1 of the classes that some row or word has or is predicted to have."""
    scores = []
    for name, hits in counts.items():
        if name.startswith(HITS):
            index = name.removeprefix(HITS)
            both = counts[PREDICTED + index] + counts[LABELLED + index]
            scores += [2 * hits / both] if both else []
    return sum(scores) / len(scores)
