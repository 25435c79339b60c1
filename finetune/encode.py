"""Turn a conversation into tokens, and mark those that are learned.

What is learned. The loss covers what the model must generate: each answer and the special token
that ends its turn (`<|im_end|>` in ChatML). All before an answer is its prompt and has no loss; the
text after the last end of turn (a newline in ChatML) is left out, since nothing is learned from it.

Where an answer starts. Templates rarely mark it, and Qwen3's has a trap: it writes an empty think
block before the last answer, and none before earlier ones. So the start is found by comparison: it
is the length of the generation prompt for the turns before it, which must be a prefix of the whole
rendering. The prompt is the one used to generate: `add_generation_prompt=True` and
`enable_thinking=False`; Qwen3's empty think block is part of it and has no loss. Two cases start
from the prompt with thinking on: an answer with reasoning of its own, and earlier turns, whose
think block the template itself leaves out. A template for which no prefix fits is refused.

Which tokens. A rendering is tokenised once. If a token lies across the start of the last answer,
the two sides are tokenised apart, so that the tokens before that answer are exactly those that the
model is given to generate from. A token across the start of an earlier answer has no loss.

Without a template (a base tokenizer) a row of one prompt and one answer is joined as it stands,
prompt + answer + end of text; nothing is put between them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from finetune.errors import DataError
from finetune.rows import Conversation, Message

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
LossOn = Literal["assistant", "all"]

_THINK_END = "</think>"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Example:
    """The tokens of one row; labels are the same tokens, not shifted, or -100 for no loss."""

    input_ids: "NDArray[np.int32]"
    labels: "NDArray[np.int32]"
    source: str
    is_truncated: bool

    @property
    def num_loss_tokens(self) -> int:
        """Count the tokens that have a loss; the first one of a row is predicted by nothing."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


def encode(
    conversation: Conversation,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    loss_on: LossOn,
) -> Example:
    """Tokenise a conversation and mark what is learned; what exceeds `seq_len` is cut at the right.

    Raises:
        DataError: The template cannot render the row, or the start or end of an answer cannot be
            told from it.
    """
    text, spans = _render(conversation, tokenizer)
    ids, is_learned = _tokenise(text, spans, tokenizer, source=conversation.source)
    if loss_on == "all":
        is_learned = [True] * len(ids)
    labels = [
        token if learned else IGNORE_INDEX for token, learned in zip(ids, is_learned, strict=True)
    ]
    return Example(
        input_ids=np.array(ids[:seq_len], dtype=np.int32),
        labels=np.array(labels[:seq_len], dtype=np.int32),
        source=conversation.source,
        is_truncated=len(ids) > seq_len,
    )


def render_prompt(
    conversation: Conversation, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[tuple[int, ...], str]:
    """Return the tokens before the last answer, and that answer, to generate and compare."""
    text, spans = _render(conversation, tokenizer)
    answers = [message.content for message in conversation.messages if message.role == "assistant"]
    return tuple(_ids(text[: spans[-1][0]], tokenizer)), answers[-1]


def prompt_ids(
    messages: Sequence[Message], tokenizer: "PreTrainedTokenizerBase", *, source: str
) -> tuple[int, ...]:
    """Return the tokens from which the model answers `messages`, without thinking."""
    if tokenizer.chat_template is None:
        return tuple(_ids(_plain_prompt(messages, tokenizer, source=source), tokenizer))
    return tuple(_ids(_prompt(messages, tokenizer, is_thinking=False, source=source), tokenizer))


def _render(
    conversation: Conversation, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text up to the last end of turn, and from where to where each answer reaches."""
    source, messages = conversation.source, conversation.messages
    last = max(i for i, message in enumerate(messages) if message.role == "assistant")
    if tokenizer.chat_template is None:
        text = _plain_prompt(messages[:last], tokenizer, source=source)
        full = text + messages[last].content + str(tokenizer.eos_token)
        return full, [(len(text), len(full))]
    text = _template(messages[: last + 1], tokenizer, source=source)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages[: last + 1]):
        if message.role == "assistant":
            must_not_think = index == last and _THINK_END not in message.content
            start = _answer_start(
                text, messages[:index], tokenizer, must_not_think=must_not_think, source=source
            )
            end = _answer_end(text, start, message.content, tokenizer, source=source)
            if spans and start < spans[-1][1]:
                raise _refused(source, "writes two answers into one turn")
            spans.append((start, end))
    return text[: spans[-1][1]], spans


def _answer_start(
    text: str,
    before: Sequence[Message],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    must_not_think: bool,
    source: str,
) -> int:
    """Return the length of the generation prompt that `text` starts with."""
    prompt = _prompt(before, tokenizer, is_thinking=False, source=source)
    if not text.startswith(prompt) and not must_not_think:
        prompt = _prompt(before, tokenizer, is_thinking=True, source=source)
    if text.startswith(prompt):
        return len(prompt)
    at = next(n for n, char in enumerate(prompt) if text[n : n + 1] != char)
    raise _refused(
        source,
        f"renders turn {len(before) + 1} unlike its generation prompt:"
        f" {text[at : at + 20]!r} in place of {prompt[at : at + 20]!r}",
    )


def _answer_end(
    text: str, start: int, answer: str, tokenizer: "PreTrainedTokenizerBase", *, source: str
) -> int:
    """Return where the special token that ends an answer ends; an answer may name such a token."""
    shown = answer.rpartition(_THINK_END)[2].strip()
    position = text.find(shown, start)
    if position < 0:
        raise _refused(source, f"does not show the answer {shown[:40]!r} as it is")
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    ends = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    found = ends.search(text, position + len(shown)) if special else None
    if found is None:
        raise _refused(source, "does not end an answer with a special token")
    return found.end()


def _refused(source: str, what: str) -> DataError:
    """Return the error for a template from which the loss mask cannot be told."""
    return DataError(
        f"the chat template {what} ({source})",
        limit="each answer must follow its generation prompt and end with a special token",
        hint="set `model.tokenizer` to a tokenizer with another template, or mend the row",
    )


def _prompt(
    before: Sequence[Message],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    is_thinking: bool,
    source: str,
) -> str:
    """Render the text from which the next answer is generated."""
    return _template(before, tokenizer, source=source, is_prompt=True, is_thinking=is_thinking)


def _template(
    messages: Sequence[Message],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    source: str,
    is_prompt: bool = False,
    is_thinking: bool = True,
) -> str:
    """Render messages by the tokenizer's template."""
    import jinja2

    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=is_prompt, enable_thinking=is_thinking
        )
    except (jinja2.TemplateError, ValueError) as error:
        raise _refused(source, f"cannot render the row: {error}") from error
    assert isinstance(text, str)
    return text


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
    text: str,
    spans: Sequence[tuple[int, int]],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    source: str,
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a rendering, and which are learned; see the head of this file."""
    cut = spans[-1][0]
    ids, offsets = _ids_and_offsets(text, tokenizer)
    if any(start < cut < end for start, end in offsets):
        whole = str(tokenizer.decode(ids))
        ids, offsets = _ids_and_offsets(text[:cut], tokenizer)
        answer_ids, answer_offsets = _ids_and_offsets(text[cut:], tokenizer)
        ids += answer_ids
        offsets += [(cut + start, cut + end) for start, end in answer_offsets]
        if tokenizer.decode(ids) != whole:
            raise _refused(source, "puts an answer where the tokenizer cannot split the text")
    return ids, [any(a <= start and end <= b for a, b in spans) for start, end in offsets]


def _ids_and_offsets(
    text: str, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokenise text, with the characters from where to where each token reaches."""
    check_is_fast(tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(encoded["input_ids"]), list(encoded["offset_mapping"])


def check_is_fast(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse a tokenizer that cannot say where its tokens lie in the text."""
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer {type(tokenizer).__name__} does not tell where its tokens lie",
            limit="the loss mask needs a tokenizer with offsets (`is_fast`)",
            hint="set `model.tokenizer` to a folder that has a tokenizer.json",
        )
