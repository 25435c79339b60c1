"""What a user should know about the rows of a run: what was joined, skipped, cut and dropped."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.rows import Classified, Compared, Conversation, Document, Tagged
from finetune.data.tokenize import Fate
from finetune.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from finetune.data.dataset import Chosen, Tokens
    from finetune.data.encode_source import SourceRows, TokenStore
    from finetune.data.tokenize import Encoder


# ---------------------------------------------------------------------------------------------
# Held-out rows that are training rows too: the loss on them does not show what was learned.
#
# Rows are equal if their tokens are. Few rows are read to find out: those that agree with a
# held-out one in length and in some tokens spread over it.

_NUM_NAMED = 3


def source_notes(rows: "SourceRows", store: "TokenStore") -> list[str]:
    """Say what of a source is not among its rows."""
    path, report = rows.source.path, store.report
    notes = [*rows.source.notes]
    if report.num_documents:
        notes.append(f"{path}: {report.num_documents:,} documents, joined")
    if report.num_duplicates:
        notes.append(f"{report.num_duplicates:,} rows of {path} were dropped as duplicates")
    if report.skipped:
        bad = [f"{rows.source.name((file, line))}: {what}" for file, line, what in report.skipped]
        notes.append(f"{len(bad)} bad rows of {path} were skipped:\n  " + "\n  ".join(bad[:10]))
    return notes


def choice_notes(parts: Sequence["Chosen"], encoder: "Encoder") -> list[str]:
    """Report what was cut, split and dropped.

    Raises:
        DataError: Nothing is left, or a row is too long and the recipe asks for an error.
    """
    seq_len = encoder.seq_len
    num_rows = sum(len(part.row_ids) for part in parts)
    found = {fate: _with_fate(parts, fate) for fate in Fate}
    if encoder.too_long == "error" and found[Fate.TOO_LONG][0]:
        num, named = found[Fate.TOO_LONG]
        raise DataError(
            f"{num} of {num_rows} rows have more than {seq_len} tokens: {named}",
            limit="`data.too_long` is error",
            hint="raise `train.seq_len`, or `data.too_long: truncate`, `drop` or `split`",
        )
    num_cut = found[Fate.CUT][0]
    notes = [f"{num_cut} of {num_rows} rows were cut to {seq_len} tokens"] if num_cut else []
    whys = {
        Fate.SPLIT: f"were split into parts of at most {seq_len} tokens",
        Fate.NOTHING_LEFT: f"were dropped: their answers start beyond {seq_len} tokens",
        Fate.TOO_LONG: f"were dropped: they have more than {seq_len} tokens",
        Fate.NOT_TRAINED: "were dropped: none of their turns is trained",
        Fate.ALIKE: f"were dropped: within {seq_len} tokens their answers are the same",
    }
    for fate, why in whys.items():
        num, named = found[fate]
        if num:
            notes.append(f"{num} of {num_rows} rows {why} ({named})")
    num_apart = sum(part.num_apart for part in parts)
    if num_apart:
        notes.append(
            f"{num_apart} of {num_rows} rows are learned in several texts: the template writes"
            " earlier turns otherwise once later ones follow"
        )
    if not any(len(part.examples) for part in parts):
        if found[Fate.NOT_TRAINED][0] == num_rows:
            raise DataError(
                f"none of the {num_rows} rows has a turn that is trained",
                limit="at least one row must have something to learn",
                hint="leave out `train: false` in the turns to learn",
            )
        raise DataError(
            f"none of the {num_rows} rows has an answer within {seq_len} tokens",
            limit="at least one row must have something to learn",
            hint=f"raise `train.seq_len` above {seq_len}",
        )
    return notes


def _with_fate(parts: Sequence["Chosen"], fate: Fate) -> tuple[int, str]:
    """Count the rows with a fate, and name the first ones."""
    found = [(part, part.with_fate(fate)) for part in parts]
    num = sum(len(rows) for _, rows in found)
    first = [part.tokens.name(row) for part, rows in found for row in rows[:_NUM_NAMED].tolist()]
    return num, ", ".join(first[:_NUM_NAMED]) + (", ..." if num > _NUM_NAMED else "")


_NUM_PLACES = 8  # of the tokens that are compared first


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


# ---------------------------------------------------------------------------------------------
# What a user should know about single rows that are used: counted, and the first ones named.
#
# Special tokens. A rendering is tokenised as a whole, so `<|im_end|>` in what a user said ends the
# turn as the template's own does. Trainers leave it at that, and so it is here; but who did not
# write it on purpose has another conversation than the file shows.
#
# Ratings. A pair says which answer is chosen, and ratings in the row may say the opposite. The pair
# is learned as it is, and what contradicts it is counted: columns may have been swapped.
#
# Turns at the end. Nothing after the last answer is learned, so turns there are left out.

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
