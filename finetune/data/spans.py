"""Find where a rendered conversation holds its answers, by rendering it with marks in their place.

An answer cannot be found by its own text: a template may write the same words before it (gpt-oss'
`<|channel|>final`), and so may the reasoning. So each answer in turn is replaced by a mark: a
character that occurs nowhere in the row. What both renderings share before and after the mark was
written by the template and the other turns; what the true rendering has in between is the answer.

    ...<|channel|>final<|message|>a<|return|>     the row
    ...<|channel|>final<|message|>#<|return|>     the row with a mark in the answer's place

A second rendering has another mark, of another length, in the place of every text of the row at
once. It shows that each turn is written, each answer exactly once, and the reasoning before the
last answer; text that the template leaves out would silently not be trained on. The reasoning of
earlier answers may be left out, since the template does the same when the model is used.

An answer's span begins where its generation prompt ends: the prompt with which the model is used
must be what the text begins with. The span ends with the special token that ends the turn, the
first one after the answer. Templates that mark what is generated (`{% generation %}`) are read in
the same way: published ones disagree on whether a header or the newline after the end of the turn
is generated, while the generation prompt of the template is exact.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.data.chat_template import refused, render
from finetune.data.rows import Conversation, Message
from finetune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_END = "</think>"
_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The part of one turn that the model must generate, as positions in the text.

    Attributes:
        start: Where the generation prompt ends.
        end: Where the special token that ends the turn ends.
        end_token: That token.
    """

    start: int
    end: int
    end_token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Marked:
    """How an answer is written where every text of the row is a mark.

    Attributes:
        closing: The text from its end to the end of the special token that ends the turn.
        has_thoughts: Whether its reasoning is written too.
    """

    closing: str
    has_thoughts: bool


def find_spans(
    conversation: Conversation, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[str, list[Span]]:
    """Return the text up to the end of the last answer, and the span of each answer.

    Raises:
        DataError: The template fails, changes an answer, leaves out a turn, or does not say where
            an answer begins and ends.
    """
    roles = [message.role for message in conversation.messages]
    num_turns = len(roles) - roles[::-1].index("assistant")
    chat = _Chat(conversation.messages[:num_turns], tokenizer, source=conversation.source)
    spans: list[Span] = []
    for number, marked in chat.marked_answers().items():
        span = chat.span(number, marked)
        if spans and span.start < spans[-1].end:
            raise chat.refused("writes two answers into one turn")
        spans.append(span)
    return chat.text[: spans[-1].end], spans


class _Chat:
    """The turns of a row up to its last answer, and their rendering."""

    def __init__(
        self, turns: Sequence[Message], tokenizer: "PreTrainedTokenizerBase", *, source: str
    ) -> None:
        self._turns, self._tokenizer, self._source = turns, tokenizer, source
        self._is_thinking = THINK_END in turns[-1].content
        self.text = self._render(turns)
        self._specials = _specials(tokenizer)
        self._left, self._right = self._unused_characters()

    def refused(self, what: str) -> DataError:
        """Return the error for this row."""
        return refused(what, source=self._source)

    def marked_answers(self) -> dict[int, _Marked]:
        """Return how each answer is written where every text is a mark.

        Raises:
            DataError: A turn is not written, or an answer not once.
        """
        shown = self._render(
            [
                _with(turn, self._text_mark(number), self._thought_mark(number))
                for number, turn in enumerate(self._turns)
            ]
        )
        answers = {}
        for number, turn in enumerate(self._turns):
            mark = self._text_mark(number)
            count = shown.count(mark)
            if turn.role == "assistant" and count != 1:
                raise self.refused(f"writes the answer of turn {number + 1} {count} times")
            if turn.role == "assistant":
                answer_end = shown.index(mark) + len(mark)
                closing = shown[answer_end : self._end_token(shown, answer_end).end()]
                if self._left in closing or self._right in closing:
                    raise self.refused("does not end an answer with a special token")
                has_thoughts = self._thought_mark(number) in shown
                answers[number] = _Marked(closing=closing, has_thoughts=has_thoughts)
            elif count == 0 and turn.content.strip():
                raise self.refused(f"leaves out turn {number + 1}, of the role {turn.role}")
        return answers

    def span(self, number: int, marked: _Marked) -> Span:
        """Return the span of one answer, which must be written as its mark was."""
        content, is_last = self._turns[number].content, number == len(self._turns) - 1
        answer = content.rpartition(THINK_END)[2].strip()
        answer_start, answer_end = self._place(number)
        shown = self.text[answer_start:answer_end]
        if shown.strip() != answer:
            raise self.refused(f"does not show the answer {answer[:40]!r} as it is")
        start = self._start(number, must_not_think=is_last and not self._is_thinking)
        if start > answer_end - len(shown.lstrip()):
            raise self.refused(f"begins the answer {answer[:40]!r} in its prompt")
        if THINK_END in content:
            self._require_thoughts(number, self.text[:answer_start], marked)
        end_token = self._end_token(self.text, answer_end)
        closing = self.text[answer_end : end_token.end()]
        if closing != marked.closing:
            raise self.refused(
                f"ends the answer {answer[:40]!r} with {closing!r}, another with {marked.closing!r}"
            )
        return Span(start=start, end=end_token.end(), end_token=end_token.group())

    def _require_thoughts(self, number: int, before: str, marked: _Marked) -> None:
        """Check that an answer's reasoning ends the text before it, or that it may be left out."""
        thoughts = _thoughts(self._turns[number].content)
        if marked.has_thoughts and not re.search(
            re.escape(thoughts) + rf"\s*{THINK_END}\s*$", before
        ):
            raise self.refused(f"does not show the reasoning {thoughts[:40]!r} as it is")
        if thoughts and not marked.has_thoughts and number == len(self._turns) - 1:
            raise self.refused("leaves out the reasoning before the last answer")

    def _place(self, number: int) -> tuple[int, int]:
        """Return the start and end of the text after the reasoning of a turn."""
        turns = list(self._turns)
        turns[number] = _with(turns[number], self._left, None)
        before, _, after = self._render(turns).partition(self._left)
        end = len(self.text) - len(after)
        if end < len(before) or not self.text.startswith(before) or not self.text.endswith(after):
            raise self.refused(f"writes other text around turn {number + 1} for another answer")
        return len(before), end

    def _start(self, number: int, *, must_not_think: bool) -> int:
        """Return the length of the generation prompt that the text starts with."""
        prompt = self._prompt(number, is_thinking=False)
        if not self.text.startswith(prompt) and not must_not_think:
            prompt = self._prompt(number, is_thinking=True)
        if self.text.startswith(prompt):
            return len(prompt)
        at = next(n for n, char in enumerate(prompt) if self.text[n : n + 1] != char)
        raise self.refused(
            f"renders turn {number + 1} unlike its generation prompt:"
            f" {self.text[at : at + 20]!r} in place of {prompt[at : at + 20]!r}"
        )

    def _prompt(self, number: int, *, is_thinking: bool) -> str:
        return render(
            self._turns[:number],
            self._tokenizer,
            source=self._source,
            is_prompt=True,
            is_thinking=is_thinking,
        )

    def _render(self, turns: Sequence[Message]) -> str:
        return render(turns, self._tokenizer, source=self._source, is_thinking=self._is_thinking)

    def _end_token(self, text: str, start: int) -> re.Match[str]:
        """Return the first special token at or after a position."""
        found = self._specials.search(text, start) if self._specials else None
        if found is None:
            raise self.refused("does not end an answer with a special token")
        return found

    def _text_mark(self, number: int) -> str:
        return f"{self._left}{number}{self._right}"

    def _thought_mark(self, number: int) -> str:
        return f"{self._right}{number}{self._left}"

    def _unused_characters(self) -> tuple[str, str]:
        """Return two characters that are not in the row."""
        used = {*self.text}.union(*(turn.content for turn in self._turns))
        unused = (char for char in map(chr, _PRIVATE_USE) if char not in used)
        try:
            return next(unused), next(unused)
        except StopIteration:
            what = "cannot be followed: the row has all of Unicode's private-use characters"
            raise self.refused(what) from None


def _with(turn: Message, text: str, thought: str | None) -> Message:
    """Return a turn with other text; in an answer with reasoning, the text after the reasoning.

    Args:
        turn: The turn whose role and form are kept.
        text: Replaces its text.
        thought: Replaces its reasoning; None keeps it.
    """
    head, tag, _ = turn.content.rpartition(THINK_END)
    if turn.role != "assistant" or not tag:
        return Message(role=turn.role, content=text)
    if thought is not None:
        head = f"<think>\n{thought}\n" if head.lstrip().startswith("<think>") else thought
    return Message(role=turn.role, content=head + tag + text)


def _thoughts(content: str) -> str:
    """Return the reasoning of an answer, without its tags."""
    head = content.rpartition(THINK_END)[0]
    return head.strip().removeprefix("<think>").strip()


def _specials(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str] | None:
    """Return a pattern that matches special tokens, longest first; None if there are none."""
    added: Iterable[object] = tokenizer.added_tokens_decoder.values()
    special = {str(token) for token in added if getattr(token, "special", False)}
    special |= set(tokenizer.all_special_tokens)
    ordered = sorted(special, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
