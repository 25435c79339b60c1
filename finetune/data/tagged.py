"""Rows of words, each with the number of its class."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from finetune.data.sources import RowError

NO_CLASS = -100
"""Of a word that has no class, as in transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagged:
    """Words with the number of the class of each, or -100 for none; some word has one."""

    words: tuple[str, ...]
    labels: tuple[int, ...]
    source: str
    unused: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The words, with a space between them."""
        return " ".join(self.words)


def read_tagged(
    row: Mapping[str, object], column: Callable[[str], str], source: str, unused: tuple[str, ...]
) -> Tagged:
    """Read words and the number of the class of each.

    Args:
        row: With the columns `tokens` and `labels`.
        column: Gives the file's name of a column.
        source: Where the row is.
        unused: Keys of the row that are not read.

    Raises:
        RowError: There are none, they differ in number, or one is no word or no number of a class.
    """
    names = column("tokens"), column("labels")
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
