"""The loss of classifiers: the cross-entropy of each class, of a row or a word, and who is found.

Macro F1 is the mean over classes of the harmonic mean of precision and recall,
2 hits / (predicted + labelled), over the classes that some row has or is predicted to have. It is
no mean over rows: from parts of the rows it follows by their counts.

All of it is computed on the CPU in float64, as in `finetune.data.step_rows`. N rows or words of
this rank, A of all ranks, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from finetune.data.step_rows import SectionObjective
from finetune.objectives.classify import Classify
from offload.engine.objective import Scores, StepLoss

ACCURACY, F1 = "accuracy", "f1"
HITS, PREDICTED, LABELLED = COUNTS = ("hits/", "predicted/", "labelled/")
"""How the names of a class's counts begin."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassifyObjective(SectionObjective):
    """The cross-entropy of a step's classes, by the head's outputs; each row or word as much."""

    section: Classify

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
        rows, exchange = self.step.rows, self.step.exchange
        classes_N = rows.classes_N
        if classes_N is None:
            classes_N = rows.values_R[scores.rows_N.cpu()].long()
        losses_N = torch.nn.functional.cross_entropy(outputs_NC, classes_N, reduction="none")
        own_N3 = torch.stack(
            (losses_N.detach(), classes_N.double(), outputs_NC.argmax(1).double()), dim=1
        )
        others = exchange(own_N3) if exchange is not None else ()
        all_A3 = torch.cat((own_N3, *others))
        counts = counts_of(all_A3[:, 1].long(), all_A3[:, 2].long(), outputs_NC.shape[1])
        metrics = {
            ACCURACY: (all_A3[:, 1] == all_A3[:, 2]).double().mean(),
            F1: torch.tensor(macro_f1(counts), dtype=torch.float64),
        }
        if self.step.is_held_out:
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


def merged(means: Mapping[str, float], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean metrics of parts of the rows, and F1 by the counts of all of them."""
    counts = {
        name: sum(part[name] for part in parts if name in part)
        for name in means
        if name.startswith(COUNTS)
    }
    kept = {name: value for name, value in means.items() if name not in counts}
    return kept | {F1: macro_f1(counts)}


def macro_f1(counts: Mapping[str, float]) -> float:
    """Return the mean F1 of the classes that some row or word has or is predicted to have."""
    scores = []
    for name, hits in counts.items():
        if name.startswith(HITS):
            index = name.removeprefix(HITS)
            both = counts[PREDICTED + index] + counts[LABELLED + index]
            scores += [2 * hits / both] if both else []
    return sum(scores) / len(scores)
