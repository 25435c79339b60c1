"""Conversations, and their tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.dataset import Chosen, ExampleSet, Tokens, examples_of
from finetune.data.encode_source import SourceRows, stored_tokens
from finetune.data.remarks.choice import choice_notes
from finetune.data.rows import Conversation, LossOn, Message, RowForm
from finetune.data.sources import Place, Raw
from finetune.data.tokenize import Encoder
from finetune.report.progress import unseen
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
