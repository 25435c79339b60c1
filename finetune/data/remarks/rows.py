"""What a user should know about single rows that are used: counted, and the first ones named.

Special tokens. A rendering is tokenised as a whole, so `<|im_end|>` in what a user said ends the
turn as the template's own does. Trainers leave it at that, and so it is here; but who did not write
it on purpose has another conversation than the file shows.

Ratings. A pair says which answer is chosen, and ratings in the row may say the opposite. The pair
is learned as it is, and what contradicts it is counted: columns may have been swapped.

Turns at the end. Nothing after the last answer is learned, so turns there are left out.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from finetune.data.rows import Classified, Compared, Conversation, Document
from finetune.data.tagged import Tagged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.dataset import Tokens

REMARKS = {
    "special": "hold special tokens in their text, which are read as real ones",
    "trailing": "end with turns after their last answer, which are left out",
    "rating": "have ratings by which the rejected answer is the better one",
}
"""Kinds of remarks, in words; those on prompts are said once for all sources."""
NUM_NAMED = 3


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str] | None:
    """Return what finds the tokenizer's special tokens in a text; None if it has none.

    `<think>` and the like are tokens of their own, but not special: templates leave them to rows.
    """
    added = tokenizer.added_tokens_decoder.values()
    texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def remarks_on(row: object, tokens: re.Pattern[str] | None) -> Iterator[tuple[str, str]]:
    """Give the kind and the detail of each remark on a row.

    Args:
        row: As it was read.
        tokens: What finds special tokens.
    """
    found = (tokens.search(text) for text in _texts(row)) if tokens is not None else ()
    special = next((match.group() for match in found if match is not None), None)
    if special is not None:
        yield "special", special
    if isinstance(row, Conversation) and row.messages[-1].role != "assistant":
        yield "trailing", row.messages[-1].role
    if isinstance(row, Compared) and row.contradiction is not None:
        yield "rating", row.contradiction


def remark_notes(tokens: "Tokens") -> list[str]:
    """Say how many rows of a source there is something to say about, and name the first ones."""
    report, source = tokens.store.report, tokens.rows.source
    num_rows = report.num_documents or len(tokens.store.fates)
    return [
        f"{num:,} of {num_rows:,} rows of {source.path} {REMARKS[kind]} ("
        + ", ".join(f"{source.name((file, line))}: {detail}" for file, line, detail in first)
        + (", ...)" if num > len(first) else ")")
        for kind, (num, first) in report.remarks.items()
        if kind in REMARKS
    ]


def _texts(row: object) -> Iterator[str]:
    if isinstance(row, Document | Classified | Tagged):
        yield row.text
    turns = row.conversations if isinstance(row, Compared) else (row,)
    for conversation in turns:
        if not isinstance(conversation, Conversation):
            continue
        for message in conversation.messages:
            yield message.content
            yield message.thought or ""
