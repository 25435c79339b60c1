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

An answer that calls tools is followed by its calls; each is replaced by marks as texts are. Its
turn ends with as many special tokens as the template writes after the calls where nothing follows.

A template may write an earlier turn otherwise once later ones follow: gpt-oss drops the reasoning
before a tool call when the final answer is known. Then the text of the whole row does not begin
with the prompt from which that answer is generated. Such an answer is taken from its own rendering
and follows its own prompt, which is what the model will be given. An answer that this text would
show after another prompt than its own is trained in a text of its own: the row up to that answer.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from finetune.data.chat_template import limited, refused, render
from finetune.data.rows import Conversation, Message
from finetune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_END = "</think>"
_PRIVATE_USE = range(0xE000, 0xF900)
_MOST_SHAPES = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The part of one turn that the model must generate, as positions in the text.

    Attributes:
        turn: Number of the turn in the row, from 0.
        start: Where the generation prompt ends.
        end: Where the special token that ends the turn ends.
        end_token: That token.
    """

    turn: int
    start: int
    end: int
    end_token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """A text that ends with an answer, and the answers that are learned in it."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Marked:
    """How an answer is written where every text of the row is a mark.

    Attributes:
        closing: The text from its end to the end of the special token that ends the turn.
        num_closing: Special tokens in it.
        has_thoughts: Whether its reasoning is written too.
    """

    closing: str
    num_closing: int
    has_thoughts: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """A row's rendering with marks; it is the same for all rows with turns of the same kinds.

    Attributes:
        shown: The rendering.
        answers: Turn -> how its answer is written.
    """

    shown: str
    answers: Mapping[int, _Marked]


@dataclass(kw_only=True, slots=True)
class Shapes:
    """What is known of a tokenizer's template, to render the marks of many like rows once.

    Attributes:
        tokenizer: With a template that does not change.
    """

    tokenizer: "PreTrainedTokenizerBase"
    specials: re.Pattern[str] | None = field(init=False)
    known: dict[object, _Shape] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.specials = _specials(self.tokenizer)


class _RewrittenError(Exception):
    """The text does not begin with an answer's prompt: turns before it are written otherwise."""


def render_answers(conversation: Conversation, shapes: Shapes) -> tuple[Rendering, ...]:
    """Return the texts in which a row's answers are learned, each answer once.

    One text, up to the end of the last answer, unless the template writes earlier turns otherwise
    when later ones follow. The last text ends with the last answer.

    Raises:
        DataError: The template fails, changes an answer, leaves out a turn, or does not say where
            an answer begins and ends.
    """
    with limited(conversation.source):
        return _renderings(conversation, shapes)


def _renderings(conversation: Conversation, shapes: Shapes) -> tuple[Rendering, ...]:
    """Return one text if it begins with every answer's prompt, else several."""
    roles = [message.role for message in conversation.messages]
    num_turns = len(roles) - roles[::-1].index("assistant")
    chat = _Chat(conversation, num_turns, shapes)
    marked = chat.marked_answers()
    try:
        return (chat.rendering([chat.span(number, one) for number, one in marked.items()]),)
    except _RewrittenError:
        return _apart(conversation, num_turns, shapes)


def _apart(conversation: Conversation, num_turns: int, shapes: Shapes) -> tuple[Rendering, ...]:
    """Return texts that each begin with the prompts of the answers that are learned in them."""
    renderings: list[Rendering] = []
    left: list[int] | None = None
    while left is None or left:
        chat = _Chat(conversation, num_turns if left is None else left[-1] + 1, shapes)
        marked = chat.marked_answers()
        wanted = list(marked) if left is None else left
        spans, left = [], []
        for number in wanted[::-1]:  # the last one first: it may need another text
            try:
                spans.append(chat.span(number, marked[number]))
            except _RewrittenError:
                if not spans:
                    chat.follow_prompt()
                    spans.append(chat.span(number, marked[number]))
                else:
                    left.append(number)
        left.reverse()
        renderings.insert(0, chat.rendering(spans[::-1]))
    return tuple(renderings)


class _Chat:
    """The turns of a row up to one of its answers, and their rendering."""

    def __init__(self, conversation: Conversation, num_turns: int, shapes: Shapes) -> None:
        self._turns = conversation.messages[:num_turns]
        self._tools, self._source = conversation.tools, conversation.source
        self._shapes, self._tokenizer = shapes, shapes.tokenizer
        self._places: dict[int, tuple[int, int]] = {}
        last = self._turns[-1]
        self._is_thinking = THINK_END in last.content or last.thought is not None
        self._header, self._is_prompt_thinking = "", True
        self.text = self._render(self._turns)
        self._specials = shapes.specials
        self._left, self._right, self._first = self._unused_characters()

    def refused(self, what: str) -> DataError:
        """Return the error for this row."""
        return refused(what, source=self._source)

    def rendering(self, spans: Sequence[Span]) -> Rendering:
        """Return the text up to the last answer's end, with the spans that are learned.

        Raises:
            DataError: Two answers are in one turn.
        """
        for one, following in pairwise(spans):
            if following.start < one.end:
                raise self.refused("writes two answers into one turn")
        return Rendering(text=self.text[: spans[-1].end], spans=tuple(spans))

    def follow_prompt(self) -> None:
        """Let the last answer follow its own prompt, in place of the rewritten turns.

        Raises:
            DataError: The template does not say where the answer begins.
        """
        history = self._render(self._turns[:-1])
        for is_thinking in dict.fromkeys((self._is_thinking, True)):
            prompt = self._prompt(len(self._turns) - 1, is_thinking=is_thinking)
            self._header = prompt.removeprefix(history)
            self._is_prompt_thinking = is_thinking
            written = self._written(self._turns)
            if self._header and self._header != prompt and written is not None:
                self.text, self._places = written, {}
                return
        raise self.refused(f"rewrites the turns before turn {len(self._turns)} in its prompt")

    def _written(self, turns: Sequence[Message]) -> str | None:
        """Render turns; where they are rewritten, as prompt and answer, if it can be found."""
        shown = self._render(turns)
        if not self._header:
            return shown
        marked = self._render([*turns[:-1], self._first_mark(turns[-1])])
        first = marked.find(self._first)
        start = marked.rfind(self._header, 0, max(first, 0))
        if start < 0 or not shown.startswith(marked[: start + len(self._header)]):
            return None
        is_thinking = self._is_prompt_thinking
        prompt = self._render(turns[:-1], is_prompt=True, is_thinking=is_thinking)
        return prompt + shown[start + len(self._header) :]

    def _first_mark(self, turn: Message) -> Message:
        """Return the last answer with a mark at the first of its parts that is written."""
        if turn.thought is not None:
            return replace(turn, thought=self._first)
        if turn.calls and not turn.content.strip():
            call = replace(turn.calls[0], name=self._first)
            return replace(turn, calls=(call, *turn.calls[1:]))
        return _with(turn, self._first, None)

    def marked_answers(self) -> Mapping[int, _Marked]:
        """Return how each answer is written where every text is a mark.

        If the row is written as the marks are, with its texts in their place, that tells where its
        answers are.

        Raises:
            DataError: A turn or a tool is not written, or an answer not once.
        """
        turns = [self._all_marked(number, turn) for number, turn in enumerate(self._turns)]
        has_more = self._tools or any(turn.calls for turn in turns)
        has_text = tuple(bool(turn.content.strip()) for turn in self._turns)
        key = None if has_more else (tuple(turns), has_text, self._is_thinking)
        shape = self._shapes.known.get(key)
        if shape is None:
            shape = self._shape(turns)
        if key is not None:
            self._find_places(shape.shown)
            if len(self._shapes.known) < _MOST_SHAPES:
                self._shapes.known[key] = shape
        return shape.answers

    def _find_places(self, shown: str) -> None:
        """Find the answers by the places of their marks, if the row is written as the marks are."""
        is_plain = all(t.thought is None and THINK_END not in t.content for t in self._turns)
        pieces = re.split(f"{self._left}([0-9]+){self._right}", shown) if is_plain else [shown]
        written, end, places = pieces[:1], len(pieces[0]), {}
        for number, after in zip(map(int, pieces[1::2]), pieces[2::2], strict=True):
            content = self._turns[number].content
            written += [content, after]
            places[number] = (end, end + len(content))
            end += len(content) + len(after)
        if "".join(written) == self.text:
            self._places = places

    def _shape(self, turns: Sequence[Message]) -> _Shape:
        """Render marks, and find how each answer is written.

        Raises:
            DataError: As `marked_answers`.
        """
        shown = self._render(turns, tools=self._marked_tools())
        self._require_tools(shown)
        answers = {}
        for number, turn in enumerate(self._turns):
            mark = self._text_mark(number)
            count = shown.count(mark)
            if turn.role != "assistant":
                if count == 0 and turn.content.strip():
                    raise self.refused(f"leaves out turn {number + 1}, of the role {turn.role}")
                continue
            if count != 1 and not (turn.calls and not turn.content.strip()):
                raise self.refused(f"writes the answer of turn {number + 1} {count} times")
            end, num_closing = shown.find(mark) + len(mark), 1
            if turn.calls:
                self._require_calls(number, shown)
                mark = self._mark(f"{number}d{len(turn.calls) - 1}")
                end = shown.index(mark) + len(mark)
                num_closing = self._num_closing(turns[: number + 1])
            closing = shown[end : self._end_token(shown, end, num_closing).end()]
            if self._left in closing or self._right in closing:
                raise self.refused("does not end an answer with a special token")
            has_thoughts = self._thought_mark(number) in shown
            answers[number] = _Marked(
                closing=closing, num_closing=num_closing, has_thoughts=has_thoughts
            )
        return _Shape(shown=shown, answers=answers)

    def _all_marked(self, number: int, turn: Message) -> Message:
        """Return a turn with marks for its text, its reasoning and its calls."""
        if turn.calls and not turn.content.strip():
            thought = None if turn.thought is None else self._thought_mark(number)
            return replace(self._with_calls_marked(turn, number), thought=thought)
        marked = _with(turn, self._text_mark(number), self._thought_mark(number))
        return self._with_calls_marked(marked, number)

    def _with_calls_marked(self, turn: Message, number: int) -> Message:
        """Return a turn with marks for the name and the arguments of each call."""
        calls = tuple(
            replace(
                call,
                name=self._mark(f"{number}c{index}"),
                arguments={"a": self._mark(f"{number}d{index}")},
            )
            for index, call in enumerate(turn.calls)
        )
        return replace(turn, calls=calls)

    def _require_calls(self, number: int, shown: str) -> None:
        """Check that each call of an answer is written, with its arguments, once."""
        for index, call in enumerate(self._turns[number].calls):
            count = shown.count(self._mark(f"{number}d{index}"))
            if self._mark(f"{number}c{index}") not in shown or count != 1:
                raise self.refused(f"does not write the tool call {call.name} of turn {number + 1}")

    def _marked_tools(self) -> list[Mapping[str, Any]]:
        return [
            {**tool, "function": {**tool["function"], "name": self._mark(f"t{index}")}}
            for index, tool in enumerate(self._tools)
        ]

    def _require_tools(self, shown: str) -> None:
        """Check that each definition of a tool is written."""
        for index, tool in enumerate(self._tools):
            if self._mark(f"t{index}") not in shown:
                raise self.refused(f"leaves out the tool {tool['function']['name']}")

    def _num_closing(self, turns: Sequence[Message]) -> int:
        """Count the special tokens after the calls of the last of these turns."""
        shown = self._render(turns, tools=self._marked_tools())
        tail = shown[shown.rfind(self._right) + 1 :]
        return len(self._specials.findall(tail)) if self._specials else 0

    def span(self, number: int, marked: _Marked) -> Span:
        """Return the span of one answer, which must be written as its mark was.

        Raises:
            DataError: It is not, or it does not follow its prompt.
            _RewrittenError: Turns before it are not written as in its prompt.
        """
        turn, is_last = self._turns[number], number == len(self._turns) - 1
        is_silent = bool(turn.calls) and not turn.content.strip()
        if is_silent:
            answer_start = answer_end = self._calls_start(number)
        else:
            answer_start, answer_end = self._place(number)
        shown = self.text[answer_start:answer_end]
        answer = turn.content.rpartition(THINK_END)[2].strip()
        if not is_silent and shown.strip() != answer:
            raise self.refused(f"does not show the answer {answer[:40]!r} as it is")
        start = self._start(number, must_not_think=is_last and not self._is_thinking)
        if start > answer_end - len(shown.lstrip()):
            raise self.refused(f"begins the answer {answer[:40]!r} in its prompt")
        if THINK_END in turn.content:
            self._require_thoughts(number, self.text[:answer_start], marked)
        elif turn.thought is not None:
            self._require_thought(number, self.text[start:answer_start], marked)
        if turn.calls:
            end_token = self._end_token(self.text, self._calls_end(number), marked.num_closing)
            return Span(turn=number, start=start, end=end_token.end(), end_token=end_token.group())
        end_token = self._end_token(self.text, answer_end, 1)
        closing = self.text[answer_end : end_token.end()]
        if closing != marked.closing:
            raise self.refused(
                f"ends the answer {answer[:40]!r} with {closing!r}, another with {marked.closing!r}"
            )
        return Span(turn=number, start=start, end=end_token.end(), end_token=end_token.group())

    def _require_thoughts(self, number: int, before: str, marked: _Marked) -> None:
        """Check that an answer's reasoning ends the text before it, or that it may be left out."""
        thoughts = _thoughts(self._turns[number].content)
        if marked.has_thoughts and not re.search(
            re.escape(thoughts) + rf"\s*{THINK_END}\s*$", before
        ):
            raise self.refused(f"does not show the reasoning {thoughts[:40]!r} as it is")
        if thoughts and not marked.has_thoughts and number == len(self._turns) - 1:
            raise self.refused("leaves out the reasoning before the last answer")

    def _require_thought(self, number: int, before: str, marked: _Marked) -> None:
        """Check the same of reasoning in a field of its own, which a template writes as it likes.

        Args:
            number: Of the turn.
            before: What the turn has before its answer.
            marked: How it is written as marks.
        """
        thought = (self._turns[number].thought or "").strip()
        if thought not in before and (marked.has_thoughts or number == len(self._turns) - 1):
            how = "does not show" if marked.has_thoughts else "leaves out"
            raise self.refused(f"{how} the reasoning {thought[:40]!r} as it is")

    def _place(self, number: int) -> tuple[int, int]:
        """Return the start and end of the text after the reasoning of a turn."""
        if number in self._places:
            return self._places[number]
        turns = list(self._turns)
        turns[number] = _with(turns[number], self._left, None)
        before, _, after = (self._written(turns) or "").partition(self._left)
        end = len(self.text) - len(after)
        if end < len(before) or not self.text.startswith(before) or not self.text.endswith(after):
            raise self.refused(f"writes other text around turn {number + 1} for another answer")
        return len(before), end

    def _calls_start(self, number: int) -> int:
        """Return where a turn's first call names its tool."""
        turns = list(self._turns)
        turns[number] = self._with_calls_marked(turns[number], number)
        before = (self._written(turns) or "").partition(self._left)[0]
        if not self.text.startswith(before):
            raise self.refused(f"writes other text around turn {number + 1} for another call")
        return len(before)

    def _calls_end(self, number: int) -> int:
        """Return where the text begins that does not depend on the arguments of the last call.

        Quotes and brackets that close the arguments may be part of it.
        """
        turns = list(self._turns)
        *calls, last = turns[number].calls
        last = replace(last, arguments={"a": self._left})
        turns[number] = replace(turns[number], calls=(*calls, last))
        shown = self._written(turns) or ""
        both = zip(reversed(self.text), reversed(shown), strict=False)
        num_same = next((n for n, (one, other) in enumerate(both) if one != other), 0)
        first = self._specials.search(shown, shown.index(self._left)) if self._specials else None
        if first is None or num_same < len(shown) - first.start():
            raise self.refused(f"writes other text around turn {number + 1} for another call")
        return len(self.text) - num_same

    def _start(self, number: int, *, must_not_think: bool) -> int:
        """Return the length of the generation prompt that the text starts with."""
        prompt = self._prompt(number, is_thinking=False)
        if not self.text.startswith(prompt) and not must_not_think:
            prompt = self._prompt(number, is_thinking=True)
        if self.text.startswith(prompt):
            return len(prompt)
        if not self.text.startswith(self._render(self._turns[:number]).rstrip()):
            raise _RewrittenError
        at = next(n for n, char in enumerate(prompt) if self.text[n : n + 1] != char)
        raise self.refused(
            f"renders turn {number + 1} unlike its generation prompt:"
            f" {self.text[at : at + 20]!r} in place of {prompt[at : at + 20]!r}"
        )

    def _prompt(self, number: int, *, is_thinking: bool) -> str:
        return self._render(self._turns[:number], is_prompt=True, is_thinking=is_thinking)

    def _render(
        self,
        turns: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_prompt: bool = False,
        is_thinking: bool | None = None,
    ) -> str:
        return render(
            turns,
            self._tokenizer,
            source=self._source,
            tools=self._tools if tools is None else tools,
            is_prompt=is_prompt,
            is_thinking=self._is_thinking if is_thinking is None else is_thinking,
        )

    def _end_token(self, text: str, start: int, number: int) -> re.Match[str]:
        """Return a special token at or after a position: the first, or the one of this number."""
        found = None
        for _ in range(number):
            found = self._specials.search(text, start) if self._specials else None
            if found is None:
                break
            start = found.end()
        if found is None:
            raise self.refused("does not end an answer with a special token")
        return found

    def _mark(self, name: str) -> str:
        return f"{self._left}{name}{self._right}"

    def _text_mark(self, number: int) -> str:
        return self._mark(str(number))

    def _thought_mark(self, number: int) -> str:
        return f"{self._right}{number}{self._left}"

    def _unused_characters(self) -> tuple[str, str, str]:
        """Return three characters that are not in the row."""
        used = {*self.text}.union(
            *(turn.content for turn in self._turns),
            *(
                json.dumps(t.to_json(), ensure_ascii=False)
                for t in self._turns
                if t.thought or t.calls
            ),
        )
        unused = (char for char in map(chr, _PRIVATE_USE) if char not in used)
        try:
            return next(unused), next(unused), next(unused)
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
    if turn.thought is not None:
        return replace(turn, content=text, thought=turn.thought if thought is None else thought)
    head, tag, _ = turn.content.rpartition(THINK_END)
    if turn.role != "assistant" or not tag:
        return replace(turn, content=text)
    if thought is not None:
        head = f"<think>\n{thought}\n" if head.lstrip().startswith("<think>") else thought
    return replace(turn, content=head + tag + text)


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
