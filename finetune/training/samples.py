"""Answers to held-out rows before and after training, and how many match exactly."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from finetune.data.pictures.picture import PLACE, TAG
from finetune.data.rows import Conversation
from finetune.data.tokenize import PromptImages, render_prompt
from finetune.errors import RowError
from finetune.recipe.sections import EmptyThink
from finetune.report.screen import Work
from finetune.training.generate import generate
from offload.engine.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPARE_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Answers to some rows."""

    rows: tuple[tuple[str, str, str], ...]  # (prompt, wanted, got) of each
    # What the chat template was given for their prompts, such as `enable_thinking=False`, and how
    # many answers followed each; "" is its default prompt.
    prompts: Mapping[str, int]

    @property
    def exact_match(self) -> float:
        """Part of the answers that equal the wanted one, spaces at the ends left out."""
        return sum(got.strip() == wanted.strip() for _, wanted, got in self.rows) / len(self.rows)


def answer(  # noqa: PLR0913 - all that generating is
    rows: Sequence[Conversation],
    *,
    model: nn.Module,
    engine: Engine,
    tokenizer: "PreTrainedTokenizerBase",
    empty_think: EmptyThink,
    images: PromptImages | None,
    stop_ids: Collection[int],
    max_pass_tokens: int,
    seq_len: int,
    num_past: int,
    note: Callable[[str], None],
    progress: Work,
) -> Answers:
    """Let the model answer the last turn of each row, greedily.

    Args:
        rows: The rows to answer.
        model: The adapted model that the engine holds.
        engine: Runs it.
        tokenizer: Of the model.
        empty_think: Whether an empty think block is of the prompt, or answered.
        images: Those of the rows; None if no row has any.
        stop_ids: Tokens that end an answer.
        max_pass_tokens: Tokens of a pass, padding included, that are known to fit.
        seq_len: Tokens of a row and its answer at most, as trained.
        num_past: Virtual tokens that the cache of each row begins with.
        note: Reports that the model is computed without a cache.
        progress: Shows how many are answered.
    """
    rendered = [
        render_prompt(row, tokenizer, empty_think=empty_think, images=images) for row in rows
    ]
    prompts, wanted, given = zip(*rendered, strict=True)
    longest = max(len(tokenizer.encode(text, add_special_tokens=False)) for text in wanted)
    width = num_past + max(map(len, prompts)) + longest + _SPARE_TOKENS
    model.eval()
    ids = generate(
        engine,
        prompts,
        max_new_tokens=[min(longest + _SPARE_TOKENS, seq_len - len(p)) for p in prompts],
        stop_ids=frozenset(stop_ids),
        pad_id=pad_id(tokenizer),
        batch_size=max(1, max_pass_tokens // width),
        note=note,
        progress=lambda num_ended: progress(num_ended, len(rows)),
    )
    model.train()
    got = [str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in ids]
    asked = [_last_question(row) for row in rows]
    return Answers(rows=tuple(zip(asked, wanted, got, strict=True)), prompts=Counter(given))


def answerable(
    rows: Sequence[Conversation],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    empty_think: EmptyThink,
    images: PromptImages | None,
) -> list[Conversation]:
    """Return the rows whose prompt and answer fit into the length that is trained.

    Rows whose images are not what they were are left out too.
    """

    def is_asked(row: Conversation) -> bool:
        try:
            prompt, wanted, _ = render_prompt(
                row, tokenizer, empty_think=empty_think, images=images
            )
        except RowError:
            return False
        num_answer = len(tokenizer.encode(wanted, add_special_tokens=False))
        return len(prompt) + num_answer + _SPARE_TOKENS <= seq_len

    return [row for row in rows if is_asked(row)]


def pad_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the token that pads rows; `load_tokenizer` has made sure that there is one."""
    assert isinstance(tokenizer.pad_token_id, int)
    return tokenizer.pad_token_id


def _last_question(row: Conversation) -> str:
    asked = next(m.content for m in reversed(row.messages) if m.role == "user")
    return asked.replace(PLACE, TAG)
