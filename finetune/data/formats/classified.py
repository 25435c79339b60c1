"""Texts with the number of their class."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from finetune.data.rows import Document, LossOn, RowForm
from finetune.data.tokenize import IGNORE_INDEX, Encoder, Example, Fate
from finetune.data.turns import text
from finetune.errors import RowError
from finetune.recipe.extensions import DataFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class Classified(Document):
    """A text with the number of its class."""

    label: int

    def content(self, loss_on: LossOn) -> object:
        """Return the text and its class."""
        return [self.text, self.label]

    def encode(self, encoder: Encoder) -> tuple[Fate, list[Example]]:
        """Tokenise a text as a document; its class is learned at the token that ends it.

        Raises:
            DataError: The tokenizer has no end-of-text token.
        """
        ids = encoder.document_ids(self)
        if len(ids) > encoder.seq_len:
            return Fate.TOO_LONG, []
        labels = np.full_like(ids, IGNORE_INDEX)
        labels[-1] = ids[-1]
        one = Example(
            input_ids=ids,
            labels=labels,
            source=self.source,
            is_truncated=False,
            value=float(self.label),
        )
        return Fate.WHOLE, [one]


def read(
    row: Mapping[str, object], form: RowForm, source: str, unused: tuple[str, ...]
) -> Classified:
    """Read a text and the number of its class."""
    document = Document.read(text(row, form.column("text")), source, unused)
    name = form.column("label")
    label = row[name]
    if not isinstance(label, int) or label < 0:
        raise RowError(
            f"{name!r} is {json.dumps(label, default=repr)}, and classes are numbered from 0"
        )
    return Classified(text=document.text, label=int(label), source=source, unused=unused)


EXTENSION = DataFormat(
    summary="a text with the number of its class",
    columns=("text", "label"),
    read=read,
)
