"""Held-out rows that are training rows too: the loss on them does not show what was learned.

Rows are equal if their tokens are. Few rows are read to find out: those that agree with a held-out
one in length and in some tokens spread over it.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from finetune.data.dataset import Chosen

_NUM_PLACES = 8  # of the tokens that are compared first
_NUM_NAMED = 3


def overlap_notes(train: "Sequence[Chosen]", held_out: "Sequence[Chosen]") -> list[str]:
    """Count the held-out rows that are training rows too, and name the first ones."""
    same = dict[bytes, str]()
    known = [_marks(part) for part in held_out]
    if not any(map(len, known)):
        return []
    wanted = np.concatenate(known)
    for part in train:
        likely = np.flatnonzero(np.isin(_marks(part), wanted))
        for content, name in _rows(part, likely):
            same.setdefault(content, name)
    found = [
        (name, same[content])
        for part in held_out
        if same
        for content, name in _rows(part, np.arange(len(part.examples)))
        if content in same
    ]
    if not found:
        return []
    num_rows = sum(len(part.examples) for part in held_out)
    named = ", ".join(f"{one} is {other}" for one, other in found[:_NUM_NAMED])
    return [
        f"{len(found)} of {num_rows} held-out rows are training rows too, so that their loss does"
        f" not measure what was learned ({named}{', ...' if len(found) > _NUM_NAMED else ''})"
    ]


def _marks(part: "Chosen") -> "NDArray[np.uint64]":
    """Return a number for each example, equal for equal ones."""
    lengths, store = part.lengths, part.tokens.store
    starts = store.offsets[part.examples]
    marks = lengths.astype(np.uint64)
    for number in range(_NUM_PLACES):
        places = starts + np.maximum(lengths - 1, 0) * number // (_NUM_PLACES - 1)
        tokens = store.input_ids[places].astype(np.uint64)
        marks = marks * np.uint64(0x9E3779B97F4A7C15) + tokens  # wraps at 64 bits
    return marks


def _rows(part: "Chosen", numbers: "NDArray[np.int64]") -> "Iterator[tuple[bytes, str]]":
    """Give the tokens and the place of some examples."""
    store = part.tokens.store
    for example in part.examples[numbers].tolist():
        ids = store.input_ids[store.offsets[example] : store.offsets[example + 1]]
        yield ids.tobytes(), part.tokens.name(int(store.rows[example]))
