"""Turn a conversation into tokens, and mark those that are learned.

What is learned. The loss covers what the model must generate: each answer and the special token
that ends its turn (`<|im_end|>` in ChatML). Everything before an answer is its prompt and has no
loss. Text after the last end of turn (a newline in ChatML) is left out: nothing is learned from it.
`finetune.data.spans` finds where answers are.

Where an answer starts. It starts where the generation prompt for the turns before it ends; that
prompt must be a prefix of the whole rendering. The prompt is the one used to generate:
`add_generation_prompt=True` and `enable_thinking=False`. Qwen3's template has a trap: it writes an
empty think block before the last answer, and none before earlier ones. That block is part of the
prompt and has no loss. Two cases start from the prompt with thinking on: an answer with reasoning
of its own, and earlier turns, whose think block the template itself leaves out. A template for
which no prefix fits is refused.

Which tokens. A rendering is tokenised once. If a token spans the start of the last answer, the two
sides are tokenised separately, so that the tokens before that answer are exactly those that the
model generates from. A token that spans the start of an earlier answer has no loss.

Without a template (a base tokenizer) a row of one prompt and one answer is joined as is:
prompt + answer + end of text, with nothing in between.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.chat_template import refused, render
from finetune.data.rows import Conversation, LossOn, Message
from finetune.data.spans import Span, find_spans
from finetune.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Example:
    """The tokens of one row.

    Attributes:
        input_ids: The tokens, up to the end of the last answer.
        labels: The same tokens, not shifted, or -100 for no loss.
        source: Of the row.
        is_truncated: Whether the row was cut at its right.
        end_ids: The tokens that end its answers, of those that were not cut off.
    """

    input_ids: "NDArray[np.int32]"
    labels: "NDArray[np.int32]"
    source: str
    is_truncated: bool
    end_ids: tuple[int, ...] = ()

    @property
    def num_loss_tokens(self) -> int:
        """Count the tokens that have a loss; the first token of a row is never predicted."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


def encode(
    conversation: Conversation,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    loss_on: LossOn,
) -> Example:
    """Tokenise a conversation and mark what is learned; truncate to `seq_len` on the right.

    Raises:
        DataError: The template cannot render the row, or the start or end of an answer cannot be
            found in the rendering.
    """
    text, spans = _render(conversation, tokenizer)
    ids, answers = _tokenise(text, spans, tokenizer, source=conversation.source)
    input_ids = np.array(ids, dtype=np.int32)
    labels = np.full_like(input_ids, IGNORE_INDEX)
    for tokens in [range(len(ids))] if loss_on == "all" else answers:
        labels[tokens.start : tokens.stop] = input_ids[tokens.start : tokens.stop]
    return Example(
        input_ids=input_ids[:seq_len],
        labels=labels[:seq_len],
        source=conversation.source,
        is_truncated=len(ids) > seq_len,
        end_ids=tuple(ids[tokens[-1]] for tokens in answers if tokens[-1] < seq_len),
    )


def render_prompt(
    conversation: Conversation, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[tuple[int, ...], str]:
    """Return the tokens before the last answer, and that answer, to generate and compare."""
    text, spans = _render(conversation, tokenizer)
    answers = [message.content for message in conversation.messages if message.role == "assistant"]
    return tuple(_ids(text[: spans[-1].start], tokenizer)), answers[-1]


def prompt_ids(
    messages: Sequence[Message], tokenizer: "PreTrainedTokenizerBase", *, source: str
) -> tuple[int, ...]:
    """Return the tokens from which the model answers `messages`, without thinking."""
    if tokenizer.chat_template is None:
        return tuple(_ids(_plain_prompt(messages, tokenizer, source=source), tokenizer))
    text = render(messages, tokenizer, source=source, is_prompt=True, is_thinking=False)
    return tuple(_ids(text, tokenizer))


def _render(
    conversation: Conversation, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[str, list[Span]]:
    """Return the text up to the last end of turn, and the span of each answer."""
    if tokenizer.chat_template is not None:
        return find_spans(conversation, tokenizer)
    source, messages = conversation.source, conversation.messages
    last = max(i for i, message in enumerate(messages) if message.role == "assistant")
    prompt = _plain_prompt(messages[:last], tokenizer, source=source)
    text = prompt + messages[last].content + str(tokenizer.eos_token)
    return text, [Span(start=len(prompt), end=len(text), end_token=str(tokenizer.eos_token))]


def _plain_prompt(
    messages: Sequence[Message], tokenizer: "PreTrainedTokenizerBase", *, source: str
) -> str:
    """Join system prompt and prompt for a tokenizer without a template."""
    users = [message.content for message in messages if message.role == "user"]
    system = [message.content + "\n\n" for message in messages if message.role == "system"]
    if len(users) != 1 or len(users) + len(system) != len(messages) or tokenizer.eos_token is None:
        raise DataError(
            f"{source} has {len(messages)} turns before its last answer,"
            f" and the tokenizer has no chat template (end of text: {tokenizer.eos_token})",
            limit="without a template a row is one prompt, one answer and the end-of-text token",
            hint="set `model.tokenizer` to the instruct model's tokenizer, which has a template",
        )
    first = tokenizer("")["input_ids"]
    bos = str(tokenizer.bos_token) if first and first[0] == tokenizer.bos_token_id else ""
    return bos + "".join(system) + users[0]


def _ids(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Tokenise text that already holds its special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _tokenise(
    text: str, spans: Sequence[Span], tokenizer: "PreTrainedTokenizerBase", *, source: str
) -> tuple[list[int], list[range]]:
    """Return the tokens of a rendering, and which are learned of each answer."""
    cut = spans[-1].start
    ids, offsets = _ids_and_offsets(text, tokenizer)
    if any(start < cut < end for start, end in offsets):
        whole = str(tokenizer.decode(ids))
        ids, offsets = _ids_and_offsets(text[:cut], tokenizer)
        answer_ids, answer_offsets = _ids_and_offsets(text[cut:], tokenizer)
        ids += answer_ids
        offsets += [(cut + start, cut + end) for start, end in answer_offsets]
        if tokenizer.decode(ids) != whole:
            raise refused("puts an answer where the tokenizer cannot split the text", source=source)
    starts = [start for start, _ in offsets]
    learned = [
        range(bisect_left(starts, span.start), bisect_left(starts, span.end)) for span in spans
    ]
    for span, tokens in zip(spans, learned, strict=True):
        end_id = tokenizer.convert_tokens_to_ids(span.end_token)
        if not tokens or ids[tokens[-1]] != end_id:
            raise refused(f"ends an answer with {span.end_token}, no single token", source=source)
    return ids, learned


def _ids_and_offsets(
    text: str, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokenise text; also return the range of characters that each token covers."""
    check_is_fast(tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(encoded["input_ids"]), list(encoded["offset_mapping"])


def check_is_fast(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse a tokenizer that does not report the character offsets of its tokens."""
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer {type(tokenizer).__name__} does not tell where its tokens lie",
            limit="the loss mask needs a tokenizer with offsets (`is_fast`)",
            hint="set `model.tokenizer` to a folder that has a tokenizer.json",
        )
