"""Conversations, and their tokens."""

from pathlib import Path

from finetune.data.dataset import ExampleSet, load_examples
from finetune.data.rows import Conversation, Message
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


def tokenised(rows: list[Conversation], cache_dir: Path, *, seq_len: int = 512) -> ExampleSet:
    return load_examples(
        rows,
        tiny_tokenizer(),
        seq_len=seq_len,
        loss_on="assistant",
        num_workers=0,
        cache_dir=cache_dir,
    )
