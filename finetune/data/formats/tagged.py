"""Words with the number of the class of each."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from finetune.data.rows import LossOn, Row, RowForm
from finetune.data.tokenize import IGNORE_INDEX, Encoder, Example, Fate, check_is_fast
from finetune.errors import DataError, RowError
from finetune.recipe.extensions import DataFormat

NO_CLASS = -100
"""Of a word that has no class, as in transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagged(Row):
    """Words with the number of the class of each, or -100 for none; some word has one."""

    words: tuple[str, ...]
    labels: tuple[int, ...]

    @property
    def text(self) -> str:
        """The words, with a space between them."""
        return " ".join(self.words)

    def texts(self) -> Iterator[str]:
        """Yield the words, as one text."""
        yield self.text

    def content(self, loss_on: LossOn) -> object:
        """Return the words and their classes."""
        return [self.words, self.labels]

    def encode(self, encoder: Encoder) -> tuple[Fate, list[Example]]:
        """Tokenise words; the class of each is learned at its first token, and is the label there.

        The text begins with the tokenizer's begin-of-text token, or with end-of-text where there
        is none. It is cut after the last class: what comes later changes none.

        Raises:
            RowError: Two words begin within one token.
            DataError: The tokenizer has neither token, or no offsets.
        """
        tokenizer = encoder.tokenizer
        check_is_fast(tokenizer)
        begin = tokenizer.bos_token_id
        begin = tokenizer.eos_token_id if begin is None else begin
        if begin is None:
            raise DataError(
                "the tokenizer has neither a begin-of-text nor an end-of-text token",
                limit=f"a row of words, as {self.source}, begins with one of them",
                hint="set `model.tokenizer` to one that has it",
            )
        encoded = tokenizer(self.text, add_special_tokens=False, verbose=False)
        ids = np.array([begin, *encoded["input_ids"]], dtype=np.int32)
        labels, start, taken = np.full_like(ids, IGNORE_INDEX), 0, set[int]()
        for word, label in zip(self.words, self.labels, strict=True):
            place = encoded.char_to_token(start + len(word) - len(word.lstrip()))
            if place is None or place in taken:
                raise RowError(f"{word!r} begins with no token of its own")
            taken.add(place)
            labels[place + 1] = label
            start += len(word) + 1
        end = int(np.flatnonzero(labels != IGNORE_INDEX)[-1]) + 1
        if end > encoder.seq_len:
            return Fate.TOO_LONG, []
        one = Example(
            input_ids=ids[:end],
            labels=labels[:end],
            source=self.source,
            is_truncated=False,
            value=0.0,
        )
        return Fate.WHOLE, [one]


def read(row: Mapping[str, object], form: RowForm, source: str, unused: tuple[str, ...]) -> Tagged:
    """Read words and the number of the class of each.

    Raises:
        RowError: There are none, they differ in number, or one is no word or no number of a class.
    """
    names = form.column("tokens"), form.column("labels")
    words, labels = row[names[0]], row[names[1]]
    if not isinstance(words, list) or not words:
        raise RowError(f"{names[0]!r} is no list, or an empty one")
    if not isinstance(labels, list) or len(words) != len(labels):
        num = len(labels) if isinstance(labels, list) else "no list of"
        raise RowError(f"{names[0]!r} has {len(words)} words, {names[1]!r} {num} classes")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise RowError(f"{names[0]!r} has {json.dumps(word, default=repr)}, and no word")
    for label in labels:
        is_number = isinstance(label, int) and not isinstance(label, bool)
        if not is_number or (label < 0 and label != NO_CLASS):
            raise RowError(
                f"{names[1]!r} has {json.dumps(label, default=repr)}, and classes are numbered from"
                f" 0; {NO_CLASS} is none"
            )
    if all(label == NO_CLASS for label in labels):
        raise RowError(f"{names[1]!r} has no class")
    return Tagged(words=tuple(words), labels=tuple(labels), source=source, unused=unused)


EXTENSION = DataFormat(
    summary="words with the number of the class of each",
    columns=("tokens", "labels"),
    read=read,
)
