"""Prompts that are answered in training; their other columns are for reward functions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.answers import turns_of_column
from finetune.data.rows import Conversation, LossOn, Row, RowForm
from finetune.data.turns import Message
from finetune.errors import RowError
from finetune.recipe.extensions import DataFormat

if TYPE_CHECKING:
    from finetune.data.tokenize import Encoder, Example, Fate


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt(Row):
    """A prompt without an answer."""

    asked: Conversation  # its turns, and an answer in place of those that will be sampled

    @property
    def question(self) -> str:
        """What the user says last."""
        said = [one.content for one in self.asked.messages if one.role == "user"]
        return said[-1] if said else ""

    def encode(self, encoder: "Encoder") -> "tuple[Fate, list[Example]]":
        """Return its tokens, none with a loss; one that is too long is left out, never cut."""
        from finetune.data.tokenize import IGNORE_INDEX, Example, Fate, render_prompt

        ids, _, _ = render_prompt(self.asked, encoder.tokenizer, empty_think=encoder.empty_think)
        if len(ids) >= encoder.seq_len:
            return Fate.TOO_LONG, []
        whole = encoder.last(self.asked)
        return Fate.WHOLE, [
            Example(
                input_ids=np.array(ids, dtype=np.int32),
                labels=np.full(len(ids), IGNORE_INDEX, dtype=np.int32),
                source=self.source,
                is_truncated=False,
                end_ids=whole.end_ids,
                kinds=whole.kinds,
                value=0.0,
                logprobs=np.zeros(len(ids), dtype=np.float32),
            )
        ]

    def content(self, loss_on: LossOn) -> object:
        """Return its turns."""
        return [message.to_json() for message in self.asked.messages]

    def texts(self) -> Iterator[str]:
        """Yield what its turns say."""
        for message in self.asked.messages[:-1]:
            yield message.content


def read(row: Mapping[str, object], form: RowForm, source: str, unused: tuple[str, ...]) -> Prompt:
    """Read a prompt: a text, or turns of which the last is no answer.

    Raises:
        RowError: It says nothing, or ends with an answer.
    """
    name = form.column("prompt")
    turns = turns_of_column(row, name, "user", form.ignored)
    if not any(turn.content.strip() for turn in turns if turn.role != "system"):
        raise RowError("empty prompt")
    if turns[-1].role == "assistant":
        raise RowError(f"{name!r} ends with an answer, and a prompt is answered in training")
    answer = Message(role="assistant", content="-")
    asked = form.conversation((*turns, answer), row, source)
    return Prompt(asked=asked, source=source, unused=unused)


EXTENSION = DataFormat(
    summary="prompts, whose answers are sampled in training; other columns are for rewards",
    columns=("prompt",),
    optional=("system",),
    read=read,
    keeps_others=True,
)
