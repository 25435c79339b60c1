"""Conversations, and their tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.dataset import Chosen, ExampleSet, Tokens, choice_notes, examples_of
from finetune.data.encode_source import SourceRows, stored_tokens
from finetune.data.rows import Conversation, LossOn, RowForm, bad_rows, no_rows
from finetune.data.sources import Place, Raw, open_source
from finetune.data.tokenize import Encoder
from finetune.data.turns import Message
from finetune.errors import RowError
from finetune.report.screen import unseen
from tests.doubles import tiny_tokenizer


def talk(*contents: str, system: str | None = None, source: str = "rows.jsonl:1") -> Conversation:
    messages = [Message(role="system", content=system)] if system else []
    for index, content in enumerate(contents):
        messages.append(Message(role=("user", "assistant")[index % 2], content=content))
    return Conversation(messages=tuple(messages), source=source)


def count_rows(num_rows: int) -> list[Conversation]:
    return [
        talk(f"say {n}", str(n) * (1 + n % 7), source=f"rows.jsonl:{n + 1}")
        for n in range(num_rows)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ListSource:
    """Conversations in memory, as a source."""

    conversations: tuple[Conversation, ...]
    path: str = "rows"
    notes: tuple[str, ...] = ()

    def digest(self) -> str:
        return repr([row.messages for row in self.conversations])

    def name(self, place: Place) -> str:
        return self.conversations[place[1]].source

    def num_rows(self) -> int:
        return len(self.conversations)

    def rows(self) -> Iterator[tuple[Place, Raw]]:
        for index, row in enumerate(self.conversations):
            yield (0, index), {"messages": [message.to_json() for message in row.messages]}


def source_of(rows: list[Conversation], *, loss_on: LossOn = "assistant") -> SourceRows:
    form = RowForm(
        path="rows", data_format="messages", columns={}, system=None, ignored=(), loss_on=loss_on
    )
    return SourceRows(
        source=ListSource(conversations=tuple(rows)),
        form=form,
        max_rows=None,
        drop_duplicates=False,
        skip_bad=0,
    )


def encoder_of(
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    seq_len: int = 512,
    loss_on: LossOn = "assistant",
) -> Encoder:
    return Encoder(
        tokenizer=tokenizer or tiny_tokenizer(),
        seq_len=seq_len,
        loss_on=loss_on,
        too_long="truncate",
        empty_think="prompt",
    )


def tokenised(
    rows: list[Conversation],
    cache_dir: Path,
    *,
    seq_len: int = 512,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> ExampleSet:
    encoder = encoder_of(tokenizer, seq_len=seq_len)
    source = source_of(rows)
    notes: list[str] = []
    store, is_from_cache = stored_tokens(
        source, encoder, num_workers=0, cache_dir=cache_dir, notes=notes, working=unseen
    )
    tokens = Tokens(rows=source, store=store, is_from_cache=is_from_cache)
    part: Chosen = examples_of(tokens, np.arange(len(rows)))
    return ExampleSet(parts=(part,), notes=(*notes, *choice_notes([part], encoder)))


def read_conversations(
    *,
    path: str,
    data_format: str,
    system: str | None,
    columns: Mapping[str, str] | None = None,
    ignored: Sequence[str] = (),
    loss_on: LossOn = "assistant",
) -> list[Conversation]:
    """Read every row of a data set as a conversation, into memory.

    Args:
        path: What `open_source` takes.
        data_format: One of `FORMATS` but `text`, or `auto` to detect it from the first row.
        system: System prompt for the rows that have none of their own.
        columns: As `data.columns`.
        ignored: Columns, and keys of turns, that are left out on purpose.
        loss_on: What is learned; a turn without a loss may have a weight of 0.

    Returns:
        One conversation per row, in the order of the file.

    Raises:
        DataError: The data is missing or empty, its format cannot be detected, or rows are bad;
            the first bad rows are named, all are counted.
    """
    source = open_source(path)
    rows = [(source.name(place), raw) for place, raw in source.rows()]
    form = RowForm(
        path=path,
        data_format=data_format,
        columns=columns or {},
        system=system,
        ignored=tuple(ignored),
        loss_on=loss_on,
    )
    if not rows:
        raise no_rows(path)
    form = form.detected(rows)
    conversations, problems, lost = [], [], dict[str, None]()
    for name, raw in rows:
        try:
            row = form.read(name, raw)
            assert isinstance(row, Conversation)
            conversations.append(row)
        except RowError as error:
            problems.append(f"{name}: {error}")
            lost |= dict.fromkeys(error.lost)
    if problems:
        raise bad_rows(problems, len(rows), form=form, lost=tuple(lost))
    return conversations
