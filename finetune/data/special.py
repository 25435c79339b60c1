"""Special tokens that are written in the text of a row, and would be read as real ones.

A rendering is tokenised as a whole, so `<|im_end|>` in what a user said ends the turn as the
template's own does. Trainers leave it at that, and so it is here; but who did not write it on
purpose has another conversation than the file shows. Such rows are counted and named.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from finetune.data.rows import Conversation, Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.dataset import Tokens


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str] | None:
    """Return what finds the tokenizer's special tokens in a text; None if it has none.

    `<think>` and the like are tokens of their own, but not special: templates leave them to rows.
    """
    added = tokenizer.added_tokens_decoder.values()
    texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def first_special(row: object, tokens: re.Pattern[str]) -> str | None:
    """Return the first special token in the text of a row, if there is one."""
    found = (tokens.search(text) for text in _texts(row))
    return next((match.group() for match in found if match is not None), None)


def _texts(row: object) -> Iterator[str]:
    if isinstance(row, Document):
        yield row.text
    if isinstance(row, Conversation):
        for message in row.messages:
            yield message.content
            yield message.thought or ""


def special_notes(tokens: "Tokens") -> list[str]:
    """Say how many rows of a source have special tokens in their text."""
    report, source = tokens.store.report, tokens.rows.source
    if not report.num_special:
        return []
    named = ", ".join(f"{source.name((f, line))}: {token}" for f, line, token in report.special)
    more = ", ..." if report.num_special > len(report.special) else ""
    return [
        f"{report.num_special:,} rows of {source.path} hold special tokens in their text, which are"
        f" read as real ones ({named}{more}); take them out if they are not meant"
    ]
