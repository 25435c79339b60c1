"""Turn a row that compares answers into one example for each of them: all, or none."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.rows import Compared
from finetune.data.sources import RowError
from finetune.data.tokenize import IGNORE_INDEX, Encoder, Example, Fate

if TYPE_CHECKING:
    from numpy.typing import NDArray


def encode_answers(row: Compared, encoder: Encoder) -> tuple[Fate, list[Example]]:
    """Tokenise a row; what befalls one of its answers befalls the row.

    Raises:
        RowError: The template writes the turns of an answer apart from each other.
        DataError: As `Encoder.encode`.
    """
    fates, examples = list[Fate](), list[Example]()
    nothing = (None,) * len(row.values)
    known = zip(row.values, row.references or nothing, row.logprobs or nothing, strict=True)
    for conversation, (value, reference, drawn) in zip(row.conversations, known, strict=True):
        fate, parts = encoder.encode(conversation)
        if len(parts) > 1:
            raise RowError(
                "the template writes earlier turns of an answer otherwise once later ones follow:"
                " leave one turn in each answer, and make the others the prompt"
            )
        if fate is Fate.CUT and reference is not None:
            raise RowError(
                f"an answer has the reference's log-probability, and is cut to {encoder.seq_len}"
                " tokens"
            )
        fates.append(fate)
        for one in parts:
            logprobs = None if drawn is None else _at_labels(drawn, one, is_cut=fate is Fate.CUT)
            examples.append(replace(one, value=value, reference=reference, logprobs=logprobs))
    worst = max(fates)
    if worst not in (Fate.WHOLE, Fate.CUT):
        return worst, []
    if worst is Fate.CUT and len(examples) > 1 and _are_alike(examples):
        return Fate.ALIKE, []
    return worst, examples


def _at_labels(drawn: Sequence[float], example: Example, *, is_cut: bool) -> "NDArray[np.float32]":
    """Put the log-probabilities of an answer's tokens where the tokens are.

    Raises:
        RowError: Their numbers differ.
    """
    places = np.flatnonzero(example.labels != IGNORE_INDEX)
    if len(drawn) != len(places) and not (is_cut and len(drawn) > len(places)):
        raise RowError(
            f"it has {len(drawn)} `logprobs` for an answer of {len(places)} tokens, its end"
            " included"
        )
    found = np.zeros(len(example.labels), dtype=np.float32)
    found[places] = drawn[: len(places)]
    return found


def _are_alike(examples: list[Example]) -> bool:
    return len({one.input_ids.tobytes() for one in examples}) == 1
