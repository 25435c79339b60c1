"""Turn a row that compares answers into one example for each of them: all, or none."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.rows import Compared
from finetune.data.sources import RowError
from finetune.data.teacher import TopTokens
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
    known = zip(
        row.values,
        row.references or nothing,
        row.logprobs or nothing,
        row.teacher or nothing,
        strict=True,
    )
    for conversation, (value, reference, drawn, top) in zip(row.conversations, known, strict=True):
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
            is_cut = fate is Fate.CUT
            logprobs = None if drawn is None else _at_labels(drawn, one, is_cut=is_cut)
            if row.is_rated:
                one = replace(one, labels=_last_alone(one.labels))
            teacher = None if top is None else _top_at_labels(top, one, is_cut=is_cut)
            examples.append(
                replace(one, value=value, reference=reference, logprobs=logprobs, top=teacher)
            )
    worst = max(fates)
    if worst not in (Fate.WHOLE, Fate.CUT):
        return worst, []
    if worst is Fate.CUT and len(examples) > 1 and _are_alike(examples):
        return Fate.ALIKE, []
    return worst, examples


def _last_alone(labels: "NDArray[np.int32]") -> "NDArray[np.int32]":
    """Return labels of which only that of the last token is left, which ends an answer."""
    assert labels[-1] != IGNORE_INDEX, "a row ends with the answer, and was not cut"
    last = np.full_like(labels, IGNORE_INDEX)
    last[-1] = labels[-1]
    return last


def _at_labels(drawn: Sequence[float], example: Example, *, is_cut: bool) -> "NDArray[np.float32]":
    """Put the log-probabilities of an answer's tokens where the tokens are.

    Raises:
        RowError: Their numbers differ.
    """
    places = _places(example, len(drawn), "`logprobs`", is_cut=is_cut)
    found = np.zeros(len(example.labels), dtype=np.float32)
    found[places] = drawn[: len(places)]
    return found


def _top_at_labels(top: TopTokens, example: Example, *, is_cut: bool) -> TopTokens:
    """Put a teacher's likeliest tokens where the tokens of an answer are.

    Raises:
        RowError: Their numbers differ.
    """
    places = _places(example, len(top.counts), "lists of `top_ids`", is_cut=is_cut)
    return top.at(places, len(example.labels))


def _places(example: Example, num: int, what: str, *, is_cut: bool) -> "NDArray[np.int64]":
    """Return the places of an answer's tokens, of which a row has so many.

    Raises:
        RowError: The answer has another number of them.
    """
    places = np.flatnonzero(example.labels != IGNORE_INDEX)
    if num != len(places) and not (is_cut and num > len(places)):
        raise RowError(
            f"it has {num} {what} for an answer of {len(places)} tokens, its end included"
        )
    return places


def _are_alike(examples: list[Example]) -> bool:
    return len({one.input_ids.tobytes() for one in examples}) == 1
