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

A template whose generation prompt ends in `<think>` may write answers without that tag, and may cut
their reasoning (DeepSeek-R1). After such a prompt the model must say the reasoning, end it, and
answer. So an answer follows its prompt there too: the reasoning is the row's, as it is written in
the row, or empty where the row has none; the answer and its end are as the template writes them.

A template may have a variable that turns reasoning off, which empties the think block that its
generation prompt ends with (`finetune.data.chat_template`). Rows without reasoning follow that
prompt, or by `data.empty_think: learn` the one without a value, and learn the block.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from finetune.data.chat_template import (
    EMPTY,
    NO_SETTINGS,
    Switch,
    limited,
    refused,
    render,
    switch_of,
)
from finetune.data.pictures.picture import AWAITED, PLACE
from finetune.data.rows import Conversation
from finetune.data.turns import Message
from finetune.errors import DataError
from finetune.recipe.sections import EmptyThink

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_START, THINK_END = "<think>", "</think>"
_PRIVATE_USE = range(0xE000, 0xF900)
_MOST_SHAPES = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The part of one turn that the model must generate, as positions in the text."""

    turn: int  # number of the turn in the row, from 0
    start: int  # where the generation prompt ends
    end: int  # where the special token that ends the turn ends
    end_token: str  # the token that ends it
    # What a user should know of its prompt: kinds of `finetune.data.chat_template`.
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """A text that ends with an answer, and the answers that are learned in it."""

    text: str
    spans: tuple[Span, ...]
    silent: tuple[tuple[int, int], ...] = ()  # where images are, which have no loss


@dataclass(frozen=True, kw_only=True, slots=True)
class _Marked:
    """How an answer is written where every text of the row is a mark."""

    closing: str  # the text from its end to the end of the special token that ends the turn
    num_closing: int  # special tokens in it
    has_thoughts: bool  # whether its reasoning is written too


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """A row's rendering with marks; it is the same for all rows with turns of the same kinds."""

    shown: str  # the rendering
    answers: Mapping[int, _Marked]  # turn -> how its answer is written


@dataclass(kw_only=True, slots=True)
class Shapes:
    """What is known of a tokenizer's template, to render the marks of many like rows once."""

    tokenizer: "PreTrainedTokenizerBase"  # with a template that does not change
    empty_think: EmptyThink  # whether an empty think block is of the prompt, or learned
    specials: re.Pattern[str] | None = field(init=False)  # what finds special tokens
    switch: Switch | None = field(init=False)  # the template's variable for reasoning
    known: dict[object, _Shape] = field(init=False, default_factory=dict)  # renderings with marks

    def __post_init__(self) -> None:
        self.specials = _specials(self.tokenizer)
        self.switch = switch_of(self.tokenizer)


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
        self._has_thought = _has_thought(last)
        self._learns_block = shapes.empty_think == "learn"
        is_default = self._learns_block and not self._has_thought
        self._value = None if is_default else self._has_thought
        self._header, self._prompt_value, self._is_opened = "", self._value, False
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
        for value in dict.fromkeys((self._value, True)):
            prompt = self._prompt(len(self._turns) - 1, value=value)
            header = prompt.removeprefix(history)
            self._prompt_value, self._is_opened, self._header = value, _opens(header), header
            written = self._written(self._turns)
            if header and header != prompt and written is not None:
                self.text, self._places = written, {}
                return
        raise self.refused(f"rewrites the turns before turn {len(self._turns)} in its prompt")

    def _written(self, turns: Sequence[Message]) -> str | None:
        """Render turns; where they are rewritten, as prompt and answer, if it can be found."""
        shown = self._render(turns)
        if not self._header:
            return shown
        header = self._header
        if self._is_opened:
            header = header.rstrip().removesuffix(THINK_START)
        marked = self._render([*turns[:-1], self._first_mark(turns[-1])])
        first = marked.find(self._first)
        start = marked.rfind(header, 0, max(first, 0)) if header else -1
        if start < 0 or not shown.startswith(marked[: start + len(header)]):
            return None
        settings = self._settings(value=self._prompt_value)
        prompt = self._render(turns[:-1], is_prompt=True, settings=settings)
        end = start + len(header)
        if not self._is_opened:
            return prompt + shown[end:]
        return prompt + self._after_reasoning(shown[end:]) if prompt[:end] == shown[:end] else None

    def _after_reasoning(self, said: str) -> str:
        """Return what follows a prompt that ends in `<think>`: the row's reasoning, the answer.

        Args:
            said: The last turn, as the template writes it.
        """
        last, newline = self._turns[-1], "\n"
        opening = self._header[len(self._header.rstrip()) :]
        said = said.rpartition(THINK_END)[2]
        head, tag, answer = last.content.rpartition(THINK_END)
        if not tag:
            thought = newline + (last.thought or "").strip(newline) + newline
            return thought.removeprefix(opening) + f"{THINK_END}\n\n" + said.lstrip(newline)
        if head.lstrip().startswith(THINK_START):
            head = head.lstrip().removeprefix(THINK_START).removeprefix(opening)
        gap = answer[: len(answer) - len(answer.lstrip())]
        return head + tag + gap + said.lstrip()

    def _first_mark(self, turn: Message) -> Message:
        """Return the last answer with a mark at the first of its parts that is written."""
        if turn.thought is not None and not self._is_opened:
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
        key = None if has_more else (tuple(turns), has_text, self._value)
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
            mark = self._mark(str(number))
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
        """Return a turn with marks for its text, its reasoning and its calls, and any images."""
        if turn.images:
            content = PLACE * len(turn.images) + self._mark(str(number))
            return replace(turn, content=content, images=(AWAITED,) * len(turn.images))
        if turn.calls and not turn.content.strip():
            thought = None if turn.thought is None else self._thought_mark(number)
            return replace(self._with_calls_marked(turn, number), thought=thought)
        marked = _with(turn, self._mark(str(number)), self._thought_mark(number))
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
        start, value = self._start(number, is_last=is_last)
        if start > answer_end - len(shown.lstrip()):
            raise self.refused(f"begins the answer {answer[:40]!r} in its prompt")
        if THINK_END in turn.content:
            self._require_thoughts(number, self.text[:answer_start], marked)
        elif turn.thought is not None:
            self._require_thought(number, self.text[start:answer_start], marked)
        kinds = self._kinds(turn, self.text[start:answer_start], value=value)
        place = (self._calls_end(number), marked.num_closing) if turn.calls else (answer_end, 1)
        end_token = self._end_token(self.text, *place)
        closing = self.text[answer_end : end_token.end()]
        if not turn.calls and closing != marked.closing:
            raise self.refused(
                f"ends the answer {answer[:40]!r} with {closing!r}, another with {marked.closing!r}"
            )
        return Span(
            turn=number,
            start=start,
            end=end_token.end(),
            end_token=end_token.group(),
            kinds=kinds,
        )

    def _kinds(self, turn: Message, before: str, *, value: bool | None) -> tuple[str, ...]:
        """Return what a user should know of an answer's prompt.

        Args:
            turn: The answer.
            before: What is learned before its text.
            value: Value of the template's variable for reasoning in its prompt.
        """
        switch = self._shapes.switch
        kind = None if switch is None else switch.kind(value=value)
        is_empty = not _has_thought(turn) and THINK_END in before
        return ((kind,) if kind else ()) + ((EMPTY,) if is_empty else ())

    def _require_thoughts(self, number: int, before: str, marked: _Marked) -> None:
        """Check that an answer's reasoning ends the text before it, or that it may be left out."""
        thoughts = _thoughts(self._turns[number].content)
        if marked.has_thoughts and not re.search(
            re.escape(thoughts) + rf"\s*{THINK_END}\s*$", before
        ):
            raise self.refused(f"does not show the reasoning {thoughts[:40]!r} as it is")
        is_cut = not (marked.has_thoughts or self._is_opened)
        if thoughts and is_cut and number == len(self._turns) - 1:
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

    def _start(self, number: int, *, is_last: bool) -> tuple[int, bool | None]:
        """Return the length of the generation prompt that the text starts with, and its value.

        Raises:
            DataError: It starts with none.
            _RewrittenError: It may start with one as a text of its own.
        """
        prompts = list[str]()
        for value in self._values(number, is_last=is_last):
            prompts.append(self._prompt(number, value=value))
            if not self.text.startswith(prompts[-1]):
                continue
            if value is None and not is_last and self._lacks_block(number):
                raise _RewrittenError
            return len(prompts[-1]), value
        is_rewritten = not self.text.startswith(self._render(self._turns[:number]).rstrip())
        may_follow = not self._header and (is_rewritten or any(map(_opens, prompts)))
        if not is_last or may_follow:
            raise _RewrittenError
        prompt = prompts[-1]
        at = next(n for n, char in enumerate(prompt) if self.text[n : n + 1] != char)
        raise self.refused(
            f"renders turn {number + 1} unlike its generation prompt:"
            f" {self.text[at : at + 20]!r} in place of {prompt[at : at + 20]!r}"
        )

    def _values(self, number: int, *, is_last: bool) -> tuple[bool | None, ...]:
        """Return the values of the variable for reasoning that an answer's prompt may have."""
        if self._shapes.switch is None:
            return (None,)
        if self._learns_block:
            return (None, True) if _has_thought(self._turns[number]) else (None,)
        if is_last:  # an empty reasoning is the block of the prompt
            is_empty = not (_thoughts(self._turns[-1].content) or self._turns[-1].thought)
            return (False, True) if self._has_thought and is_empty else (self._has_thought,)
        return (False, True)

    def _lacks_block(self, number: int) -> bool:
        """Return whether an answer that would learn an empty think block is written without it."""
        return (
            self._learns_block
            and self._shapes.switch is not None
            and not _has_thought(self._turns[number])
            and not self.text.startswith(self._prompt(number, value=False))
        )

    def _prompt(self, number: int, *, value: bool | None) -> str:
        settings = self._settings(value=value)
        return self._render(self._turns[:number], is_prompt=True, settings=settings)

    def _render(
        self,
        turns: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_prompt: bool = False,
        settings: Mapping[str, bool] | None = None,
    ) -> str:
        """Render turns, by default with the row's value of the variable for reasoning."""
        return render(
            turns,
            self._tokenizer,
            source=self._source,
            tools=self._tools if tools is None else tools,
            is_prompt=is_prompt,
            settings=self._settings(value=self._value) if settings is None else settings,
        )

    def _settings(self, *, value: bool | None) -> Mapping[str, bool]:
        switch = self._shapes.switch
        return NO_SETTINGS if switch is None else switch.settings(value=value)

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


def _has_thought(turn: Message) -> bool:
    """Return whether an answer has reasoning, even an empty one."""
    return THINK_END in turn.content or turn.thought is not None


def _opens(prompt: str) -> bool:
    """Return whether a prompt ends with the beginning of a think block."""
    return prompt.rstrip().endswith(THINK_START)


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
