"""Read the rows of a data set into one form: conversations that know where they came from.

A row may be a chat (`messages` with role and content, or ShareGPT's `conversations` with from and
value), an Alpaca instruction, a prompt with its completion, or a document. A document stays text;
all others become a `Conversation`: messages, and a source such as `train.jsonl:17`. A row that
compares answers (`finetune.data.answers`) becomes several of them.

A row that cannot be used is not skipped unless the recipe says how many may be: the reader goes
through the whole file and then raises one error that names the bad rows. A run that silently trains
on 97 % of its rows has a bug that nobody finds.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from finetune.data.answers import is_turns, read_answers, read_completion, recast
from finetune.data.sources import Filled, Raw, RowError, decoded
from finetune.data.tagged import Tagged, read_tagged
from finetune.data.teacher import TopTokens
from finetune.data.turns import Message as Message
from finetune.data.turns import (
    has_nulls_in_tools,
    keys_read,
    mapping,
    read_tools,
    read_turn,
    text,
)
from finetune.data.unread import MEANINGS, find_unread, find_unread_in_turns
from finetune.errors import DataError
from finetune.recipe.data_section import FORMAT_COLUMNS, DataSection
from finetune.recipe.objective_section import COMPARED, SUPERVISED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LossOn = Literal["assistant", "last", "all"]

FORMATS = SUPERVISED
"""Formats that are read where nothing else is asked for."""

_MAX_SHOWN = 10
_OF_FORMAT = "; it is a row of the format "
_TURN_KEYS = {
    "messages": (("role", "content"), ("system", "developer", "user", "tool")),
    "sharegpt": (("from", "value"), ("system", "human", "user", "observation", "tool")),
}
"""Format -> the keys of a turn's role and text, and the roles that are not learned."""
_COLUMNS = {name: columns for name, (columns, _) in FORMAT_COLUMNS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One row of the data.

    Attributes:
        messages: Its turns.
        source: Where it is: `path:line` or `path[index]`.
        unused: Keys of the row and of its turns that hold something that is not read.
        tools: Definitions of the tools that its answers may call.
    """

    messages: tuple[Message, ...]
    source: str
    unused: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text to continue pretraining on, all of it learned."""

    text: str
    source: str
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Classified:
    """A text with the number of its class."""

    text: str
    label: int
    source: str
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Answers to one prompt.

    Attributes:
        conversations: The prompt with each answer, which alone is learned.
        values: What is known of each; see `finetune.data.answers.Answers`.
        references: The reference's log-probability of each; empty where the row has none.
        logprobs: Of each token of each, that by which it was sampled; empty where there is none.
        teacher: Of each, a teacher's likeliest tokens; empty where there are none.
        source: Where the row is.
        is_rated: Whether one number is learned of each, at its last token.
        unused: Keys of the row that hold something that is not read.
        contradiction: As `finetune.data.answers.Answers.contradiction`.
    """

    conversations: tuple[Conversation, ...]
    values: tuple[float, ...]
    references: tuple[float, ...]
    logprobs: tuple[tuple[float, ...], ...]
    teacher: tuple[TopTokens, ...]
    source: str
    is_rated: bool = False
    unused: tuple[str, ...] = ()
    contradiction: str | None = None

    @property
    def best(self) -> Conversation:
        """The first of those with the highest value."""
        return self.conversations[self.values.index(max(self.values))]


Row = Conversation | Document | Classified | Tagged | Compared


@dataclass(frozen=True, kw_only=True, slots=True)
class RowForm:
    """How a source's rows are read.

    Attributes:
        path: Of the source, for errors.
        data_format: One of `formats`, or `auto` to detect it from the keys of the first row.
        columns: A format's column name -> the name in the file, where that is another.
        system: System prompt for conversations that have none of their own.
        ignored: Columns, and keys of turns, that are left out on purpose.
        loss_on: What is learned; a turn without a loss may have a weight of 0.
        formats: Those that may be read.
    """

    path: str
    data_format: str
    columns: Mapping[str, str]
    system: str | None
    ignored: tuple[str, ...]
    loss_on: LossOn
    formats: tuple[str, ...] = FORMATS

    def detected(self, rows: "Iterable[tuple[str, Raw]]") -> "RowForm":
        """Return the form with the format of the first readable row.

        Raises:
            DataError: No row can be read, or its format is not clear.
        """
        if self.data_format != "auto":
            return self._checked_columns()
        problems = []
        for source, raw in rows:
            row = decoded(raw)
            if isinstance(row, Mapping):
                found = replace(self, data_format=self._detect(source, row))
                return found._checked_columns()
            problems.append(f"{source}: {row if isinstance(row, RowError) else 'not an object'}")
        raise bad_rows(problems, len(problems), form=self)

    def _checked_columns(self) -> "RowForm":
        """Return the form, if it reads no column as two.

        Raises:
            DataError: It does, as if an answer were its own question.
        """
        columns = [name for part in FORMAT_COLUMNS[self.data_format] for name in part]
        by_column = dict[str, str]()
        for name in columns:
            other = by_column.setdefault(self.column(name), name)
            if other != name and name in {*self.columns, *_COLUMNS[self.data_format]}:
                raise DataError(
                    f"data.columns reads {self.column(name)} as {name} and as {other}",
                    limit="a column of a file is one of the format's",
                    hint=f"leave {name} or {other} out of `data.columns`",
                )
        return self

    def read(self, source: str, raw: Raw) -> Row:
        """Read one row.

        Raises:
            RowError: It cannot be used.
        """
        row = mapping(decoded(raw))
        try:
            if isinstance(row, Filled):
                self._require_no_fills(row)
            row = self._with_turns(recast(row, self.data_format, column=self.column))
            unused = self._unused(row)
            if self.data_format == "text":
                return _document(text(row, self.column("text")), source, unused)
            if self.data_format == "classified":
                return self._classified(row, source, unused)
            if self.data_format == "tagged":
                return read_tagged(row, self.column, source, unused)
            tools_column = self.column("tools")
            tools = row.get(tools_column) if tools_column in self._optional() else None
            read = read_tools(tools) if tools else ()
            if self.data_format in COMPARED:
                return self._compared(row, source, tools=read, unused=unused)
            messages = _PARSERS[self.data_format](row, self)
            return Conversation(
                messages=self._with_system(_checked(messages), row),
                source=source,
                unused=unused,
                tools=read,
            )
        except RowError as error:
            others = [name for name in self.formats if self._fits(row, name)]
            if others and self.data_format not in others:
                problem = f"{error}{_OF_FORMAT}{others[0]}"
                raise RowError(problem, error.lost) from None
            raise

    def column(self, name: str) -> str:
        """Return the file's name of a column."""
        return self.columns.get(name, name)

    def _classified(
        self, row: Mapping[str, object], source: str, unused: tuple[str, ...]
    ) -> Classified:
        """Read a text and the number of its class."""
        document, name = _document(text(row, self.column("text")), source, unused), "label"
        label = row[self.column(name)]
        if not isinstance(label, int) or label < 0:
            raise RowError(
                f"{self.column(name)!r} is {json.dumps(label, default=repr)}, and classes are"
                " numbered from 0"
            )
        return Classified(text=document.text, label=int(label), source=source, unused=unused)

    def _compared(
        self,
        row: Mapping[str, object],
        source: str,
        *,
        tools: tuple[Mapping[str, Any], ...],
        unused: tuple[str, ...],
    ) -> Compared:
        """Read a row that compares answers."""
        found = read_answers(row, self.data_format, column=self.column, ignored=self.ignored)
        prompt = self._with_system(list(found.prompt), row)
        return Compared(
            conversations=tuple(
                Conversation(messages=(*prompt, *answer), source=source, tools=tools)
                for answer in found.answers
            ),
            values=found.values,
            references=found.references,
            logprobs=found.logprobs,
            teacher=found.teacher,
            source=source,
            is_rated=self.data_format == "rated",
            unused=unused,
            contradiction=found.contradiction,
        )

    def _detect(self, source: str, row: Mapping[str, object]) -> str:
        """Return the one format whose columns a row has."""
        found = [name for name in self.formats if self._fits(row, name)]
        if len(found) > 1 and "text" in found:
            found.remove("text")
        if len(found) == 1:
            return found[0]
        wanted = "; ".join(f"{name} ({', '.join(self._shown(name))})" for name in self.formats)
        reason = f"fit several formats: {', '.join(found)}" if found else "fit no format"
        raise DataError(
            f"{source} has the keys {', '.join(map(str, row))}, which {reason}",
            limit=f"the formats and their columns are: {wanted}",
            hint=f"`data.format: {found[0]}`" if found else _hint_for_columns(row),
        )

    def _shown(self, data_format: str) -> tuple[str, ...]:
        return tuple(self.column(name) for name in _COLUMNS[data_format])

    def _fits(self, row: Mapping[str, object], data_format: str) -> bool:
        """Return whether a row has a format's columns.

        Two chat formats that share a column differ in their turns.
        """
        keys, row = self._shown(data_format), recast(row, data_format, column=self.column)
        if not all(key in row for key in keys):
            return False
        turns = row[keys[0]]
        first = turns[0] if isinstance(turns, list) and turns else None
        foreign = {"messages": "from", "sharegpt": "role"}.get(data_format)
        return not (isinstance(first, Mapping) and foreign in first)

    def _unused(self, row: Mapping[str, object]) -> tuple[str, ...]:
        """Return the keys of a row and its turns that are not read, if that loses nothing."""
        ignored = self.ignored
        columns = self._shown(self.data_format)
        read = columns + self._optional()
        found = [find_unread(row, read=read, ignored=ignored)]
        turns = row.get(columns[0])
        if self.data_format in _TURN_KEYS and isinstance(turns, list):
            keys, asks = _TURN_KEYS[self.data_format]
            found.append(
                find_unread_in_turns(
                    turns,
                    read=keys,
                    also_read=partial(keys_read, is_chosen=self.loss_on != "all"),
                    ignored=ignored,
                    unlearned_roles=asks if self.loss_on != "all" else (),
                )
            )
        lost = {key: problem for part in found for key, problem in part.lost.items()}
        if lost:
            raise RowError("; ".join(lost.values()), lost=list(lost))
        return tuple(dict.fromkeys(key for part in found for key in part.unused))

    def _optional(self) -> tuple[str, ...]:
        """Return the columns that are read where a row has them."""
        known: tuple[str, ...] = FORMAT_COLUMNS[self.data_format][1]
        names = [name for name in known if name != "system" or "system" in self.columns]
        return tuple(name for name in map(self.column, names) if name not in self.ignored)

    def _require_no_fills(self, row: Filled) -> None:
        """Refuse calls and definitions of tools with nulls, which other rows' keys may have made.

        Raises:
            RowError: There are some.
        """
        read = {*self._shown(self.data_format), *self._optional()} - {*self.ignored}
        if any(has_nulls_in_tools(row[key], ignored=self.ignored) for key in read & {*row}):
            raise RowError(
                "a tool's arguments or parameters hold nulls, and a table has them for the keys of"
                " other rows too: write `arguments` and `parameters` as JSON texts"
            )

    def _with_turns(self, row: Mapping[str, object]) -> Mapping[str, object]:
        """Return a row whose turns are a list, where they were the JSON text of one."""
        key = self._shown(self.data_format)[0]
        turns = row.get(key) if self.data_format in _TURN_KEYS else None
        if not isinstance(turns, str) or not turns.lstrip().startswith("["):
            return row
        read = decoded(turns.encode(errors="surrogatepass"))
        if isinstance(read, RowError):
            raise RowError(f"{key!r}: {read}")
        return {**row, key: read}

    def _with_system(
        self, messages: list[Message], row: Mapping[str, object]
    ) -> tuple[Message, ...]:
        """Put the row's own or the recipe's system prompt first, unless a turn is one."""
        system = self.system
        if "system" in self.columns and row.get(self.column("system")):
            system = text(row, self.column("system"))
        if system and not any(message.role == "system" for message in messages):
            return (Message(role="system", content=system), *messages)
        return tuple(messages)


def no_rows(path: str) -> DataError:
    """Return the error for a source without rows."""
    return DataError(
        f"{path} holds no rows",
        limit="there must be at least one",
        hint="name a file with rows: `data.path`, or `data.eval_path` for held-out ones",
    )


def bad_rows(
    problems: Sequence[str],
    num_rows: int,
    *,
    form: RowForm,
    lost: Sequence[str] = (),
    num_allowed: int = 0,
) -> DataError:
    """Return the one error that names the bad rows, and columns that could be ignored.

    Args:
        problems: `source: problem` of each, or of the first ones with what is left of them.
        num_rows: Rows that were read.
        form: How.
        lost: Columns whose meaning would be lost.
        num_allowed: How many may be skipped.
    """
    hint = "fix or remove these rows, or set `data.format` and its columns to what they hold"
    others = [problem.partition(_OF_FORMAT)[2] for problem in problems]
    if len(problems) == num_rows and others[0] and len(set(others)) == 1:
        hint = f"`data.format: {others[0]}`, or leave `data.format` and the columns out"
    elif any(others):
        hint = "one format in a file: split it, and name the parts in `data.mix`"
    if lost:
        names = ", ".join([*form.ignored, *lost])
        hint = f"`data.ignored_columns: [{names}]` leaves them out on purpose"
    shown = "\n  ".join(problems[:_MAX_SHOWN])
    more = len(problems) - _MAX_SHOWN
    rest = f"\n  and {more} more" if more > 0 else ""
    allowed = f", and `data.skip_bad` allows {num_allowed}" if num_allowed else ""
    return DataError(
        f"{len(problems)} of {num_rows} rows in {form.path} cannot be used:\n  {shown}{rest}\n",
        limit=f"every row must be a complete row of the format {form.data_format}{allowed}",
        hint=hint,
    )


def _hint_for_columns(row: Mapping[str, object]) -> str:
    """Return what to do with a row of no known format."""
    known = next((key for key in row if key in MEANINGS), None)
    named = "for other columns set `data.columns: {prompt: ..., completion: ...}`"
    return named if known is None else f"{named}; {known!r}: {MEANINGS[known]}"


def _document(content: str, source: str, unused: tuple[str, ...]) -> Document:
    if not content.strip():
        raise RowError("empty text")
    return Document(text=content, source=source, unused=unused)


def _turns(row: Mapping[str, object], key: str, form: RowForm) -> list[Message]:
    """Read the turns of a chat."""
    key = form.column(key)
    turns = row.get(key)
    if key not in row:
        text(row, key)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise RowError(f"{key!r} must be a list of objects, this is {type(turns).__name__}")
    keys = _TURN_KEYS[form.data_format][0]
    return [read_turn(mapping(turn), keys=keys, ignored=form.ignored) for turn in turns]


def _parse_messages(row: Mapping[str, object], form: RowForm) -> list[Message]:
    """Read the format messages."""
    return _turns(row, "messages", form)


def _parse_sharegpt(row: Mapping[str, object], form: RowForm) -> list[Message]:
    """Read the format sharegpt."""
    return _turns(row, "conversations", form)


def _parse_alpaca(row: Mapping[str, object], form: RowForm) -> list[Message]:
    """Read the format alpaca: an input follows the instruction after a blank line."""
    instruction, output = (text(row, form.column(name)) for name in _COLUMNS["alpaca"])
    extra_column = form.column("input")
    extra = text(row, extra_column) if row.get(extra_column) is not None else ""
    prompt = f"{instruction}\n\n{extra}" if extra else instruction
    return [Message(role="user", content=prompt), Message(role="assistant", content=output)]


def _parse_prompt_completion(row: Mapping[str, object], form: RowForm) -> list[Message]:
    """Read the format prompt_completion."""
    names = form.column("prompt"), form.column("completion")
    if any(isinstance(row.get(name), list) for name in names) or is_turns(row.get(names[0])):
        return read_completion(row, names, form.ignored)
    prompt, completion = (text(row, name) for name in names)
    return [Message(role="user", content=prompt), Message(role="assistant", content=completion)]


_PARSERS: dict[str, "Callable[[Mapping[str, object], RowForm], list[Message]]"] = {
    "messages": _parse_messages,
    "sharegpt": _parse_sharegpt,
    "alpaca": _parse_alpaca,
    "prompt_completion": _parse_prompt_completion,
}


def _checked(messages: list[Message]) -> list[Message]:
    """Return the messages if there is something to learn from each answer."""
    roles = [message.role for message in messages]
    answers = [message for message in messages if message.role == "assistant"]
    if not answers:
        raise RowError("no assistant turn")
    if "user" not in roles[: roles.index("assistant")]:
        raise RowError("it begins with an answer, before any user turn")
    asked = messages[: roles.index("assistant")]
    if not any(message.content.strip() for message in asked if message.role != "system"):
        raise RowError("empty prompt")
    if not all(answer.content.strip() or answer.calls for answer in answers):
        raise RowError("empty answer")
    return messages


def require_nothing_for_turns(data: DataSection) -> None:
    """Check the settings of rows that have turned out to be documents, all of them.

    Raises:
        DataError: A setting is about turns.
    """
    if data.set_for_turns:
        names = " and ".join(f"data.{name}" for name in data.set_for_turns)
        raise DataError(
            f"all rows are documents, and {names} say how turns are learned",
            limit="documents have no turns, are joined and cut, and all of them is learned",
            hint=f"leave out {names}, or name the columns of turns by `data.columns`",
        )
