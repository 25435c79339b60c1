"""Read the rows of a data set into one form: conversations that know where they came from.

A format (`finetune.data.formats`) says which columns a row has, and reads it. A document stays
text; most others become a `Conversation`: messages, and a source such as `train.jsonl:17`. A row
that compares answers (`finetune.data.answers`) becomes several of them.

A row that cannot be used is not skipped unless the recipe says how many may be: the reader goes
through the whole file and then raises one error that names the bad rows. A run that silently trains
on 97 % of its rows has a bug that nobody finds.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Self

from finetune.data.pictures.picture import COLUMNS, Picture
from finetune.data.sources import Filled, Raw, decoded
from finetune.data.turns import (
    Message,
    has_nulls_in_tools,
    keys_read,
    mapping,
    read_tools,
    text,
)
from finetune.errors import DataError, RowError
from finetune.recipe.extensions import FORMATS, DataFormat, repeated_formats
from finetune.recipe.sections import DataSection

if TYPE_CHECKING:
    from finetune.data.tokenize import Encoder, Example, Fate
    from finetune.data.top_tokens import TopTokens


# ---------------------------------------------------------------------------------------------
# Fields of a row that training would not read: refused if they change its meaning, else listed.
#
# A weight of 0, an undesired answer, a system prompt in its own column: without them the row means
# something else. Other columns (ids, sources, languages) change nothing and are listed once.
# `data.ignored_columns` names what is left out on purpose.

_TOOLS = "tools and their calls are read in chats only (`messages`, `sharegpt`)"
_REASONING = "write it into the answer, between <think> and </think>"
_PAIRS = "pairs of answers are learned by `objective.method: dpo` and others, or `reward`"
_FOR_KTO = "desired and undesired answers are learned by `objective.method: kto`"
_SYSTEM = "make it the first turn of `messages`, or set `data.system` for all rows"
_MEDIA = "only texts and images are trained"
_IMAGES = "images are columns of chats, prompts with completions, and pairs or labelled answers"

MEANINGS: Mapping[str, str] = {
    "tools": _TOOLS,
    "functions": _TOOLS,
    "tool_calls": _TOOLS,
    "tool_call_id": _TOOLS,
    "function_call": _TOOLS,
    "reasoning_content": _REASONING,
    "reasoning": _REASONING,
    "thinking": _REASONING,
    "weight": "every answer counts alike",
    "train": "every answer is trained",
    "label": _FOR_KTO,
    "kto_tag": _FOR_KTO,
    "chosen": _PAIRS,
    "rejected": _PAIRS,
    "system": _SYSTEM,
    "system_prompt": _SYSTEM,
    "history": "make it turns of `messages`",
    "documents": "make it part of the question",
    "chat_template_kwargs": "the template has the same settings for all rows",
    "image": _IMAGES,
    "images": _IMAGES,
    "audio": _MEDIA,
    "audios": _MEDIA,
    "video": _MEDIA,
    "videos": _MEDIA,
}
"""Columns that change what a row means -> the problem, or what to do about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """The keys of a row that are not read."""

    lost: Mapping[str, str]  # keys that mean something -> the problem to report
    unused: tuple[str, ...]  # all keys that hold something


def find_unread(
    row: Mapping[str, object], *, read: Collection[str], ignored: Collection[str]
) -> Unread:
    """Return the columns of a row that are not read.

    Args:
        row: The row.
        read: Columns that are read.
        ignored: Columns that are left out on purpose.
    """
    unused = tuple(key for key, value in row.items() if key not in read and not _is_absent(value))
    lost = {
        key: f"{key!r} would be dropped: {MEANINGS[key]}"
        for key in unused
        if key in MEANINGS and key not in ignored and not _is_same_as_none(key, row[key])
    }
    return Unread(lost=lost, unused=unused)


def find_unread_in_turns(
    turns: Sequence[object],
    *,
    read: Sequence[str],
    also_read: Callable[[object, Mapping[str, object]], Collection[str]],
    ignored: Collection[str],
    unlearned_roles: Collection[str],
) -> Unread:
    """Return the keys of a chat's turns that are not read; any of them may mean something.

    Args:
        turns: The turns; values that are not objects are skipped.
        read: The keys of role and text.
        also_read: Gives the other keys that are read in a turn of this role.
        ignored: Keys that are left out on purpose.
        unlearned_roles: Roles whose turns have no loss, so that a weight of 0 changes nothing.
    """
    lost: dict[str, str] = {}
    unused: dict[str, None] = {}
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping):
            continue
        is_learned = turn.get(read[0]) not in unlearned_roles
        known = {*read, *(key for key in also_read(turn.get(read[0]), turn) if key not in ignored)}
        for key, value in turn.items():
            if key in known or _is_absent(value):
                continue
            unused[str(key)] = None
            is_harmless = _is_same_as_none(key, value) or (
                not is_learned and key in ("weight", "train") and value in (0, 1)
            )
            if key not in ignored and not is_harmless:
                means = MEANINGS.get(key, "its meaning is not known")
                lost.setdefault(key, f"{key!r} of turn {number} would be dropped: {means}")
    return Unread(lost=lost, unused=tuple(unused))


def _is_absent(value: object) -> bool:
    """Return whether a value is null or empty."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list | tuple | Mapping) and not value)


def _is_same_as_none(key: str, value: object) -> bool:
    """Return whether a value asks for the default behaviour."""
    if key == "weight":
        return isinstance(value, int | float) and value == 1
    return key in ("train", "label") and value is True


LossOn = Literal["assistant", "last", "all"]

_MAX_SHOWN = 10
_OF_FORMAT = "; it is a row of the format "


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the data, as its format has read it."""

    source: str  # where it is: `path:line` or `path[index]`
    unused: tuple[str, ...] = ()  # keys of the row that hold something that is not read

    @property
    def parts(self) -> "tuple[Row, ...]":
        """What is tokenised by itself: the row, or each of its conversations."""
        return (self,)

    def encode(self, encoder: "Encoder") -> "tuple[Fate, list[Example]]":
        """Return the row's tokens, and what befell it.

        Raises:
            RowError: It cannot be tokenised.
            DataError: No row can be.
        """
        raise NotImplementedError

    @property
    def images(self) -> tuple[Picture, ...]:
        """Its images, in order; those of a prompt once, and then those of further answers."""
        first, *others = self.parts
        own = first.images if first is not self else ()
        return own + tuple(
            dict.fromkeys(image for one in others for image in one.images if image not in own)
        )

    def content(self, loss_on: LossOn) -> object:
        """Return what the row says and trains, as JSON has it: that of a duplicate is the same."""
        raise NotImplementedError

    def texts(self) -> Iterator[str]:
        """Yield all its texts."""
        return chain.from_iterable(part.texts() for part in self.parts)

    def remarks(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the detail of what a user should know about it."""
        return iter(())


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation(Row):
    """Turns, of which answers are learned."""

    messages: tuple[Message, ...]  # its turns
    tools: tuple[Mapping[str, Any], ...] = ()  # definitions of the tools that its answers may call

    @property
    def images(self) -> tuple[Picture, ...]:
        """The images of its turns."""
        return self.images_until(len(self.messages))

    def images_until(self, turn: int) -> tuple[Picture, ...]:
        """Return the images of its turns up to one of them, by its number."""
        turns = self.messages[: turn + 1]
        return tuple(image for message in turns for image in message.images)

    def encode(self, encoder: "Encoder") -> "tuple[Fate, list[Example]]":
        """Return its tokens, those of answers with a loss."""
        return encoder.encode(self)

    def content(self, loss_on: LossOn) -> object:
        """Return its turns and tools, and which turns are learned."""
        turns = [message.to_json() for message in self.messages]
        images = [image.identity for image in self.images]
        return [turns, [*self.tools], sorted(self.learned(loss_on)), *images]

    def learned(self, loss_on: LossOn) -> set[int]:
        """Return the numbers of the answers that are learned."""
        answers = [n for n, message in enumerate(self.messages) if message.role == "assistant"]
        usual = {answers[-1]} if loss_on == "last" else set(answers)
        chosen = {n: self.messages[n].is_trained for n in answers}
        return {n for n in answers if chosen[n] or (chosen[n] is None and n in usual)}

    def texts(self) -> Iterator[str]:
        """Yield what is said and thought."""
        for message in self.messages:
            yield message.content
            yield message.thought or ""

    def remarks(self) -> Iterator[tuple[str, str]]:
        """Yield who has the last word, if that is no answer."""
        if self.messages[-1].role != "assistant":
            yield "trailing", self.messages[-1].role


@dataclass(frozen=True, kw_only=True, slots=True)
class Document(Row):
    """A text to continue pretraining on, all of it learned."""

    text: str

    @classmethod
    def read(cls, content: str, source: str, unused: tuple[str, ...]) -> Self:
        """Return a text that says something.

        Raises:
            RowError: It does not.
        """
        if not content.strip():
            raise RowError("empty text")
        return cls(text=content, source=source, unused=unused)

    def encode(self, encoder: "Encoder") -> "tuple[Fate, list[Example]]":
        """Return its tokens, all with a loss."""
        return encoder.document(self)

    def content(self, loss_on: LossOn) -> object:
        """Return the text."""
        return self.text

    def texts(self) -> Iterator[str]:
        """Yield the text."""
        yield self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared(Row):
    """Answers to one prompt."""

    conversations: tuple[Conversation, ...]  # the prompt with each answer, which alone is learned
    values: tuple[float, ...]  # what is known of each; see `finetune.data.answers.Answers`
    # The reference's log-probability of each; empty where the row has none.
    references: tuple[float, ...]
    # The log-probability by which each token of each answer was sampled; empty where there is none.
    logprobs: tuple[tuple[float, ...], ...]
    # A teacher's likeliest tokens for each answer; empty where there are none.
    teacher: "tuple[TopTokens, ...]"
    is_rated: bool = False  # whether one number is learned of each, at its last token
    # What in the row contradicts itself, see `Answers.contradiction`.
    contradiction: str | None = None

    @property
    def parts(self) -> tuple[Row, ...]:
        """Its conversations."""
        return self.conversations

    @property
    def best(self) -> Conversation:
        """The first of those with the highest value."""
        return self.conversations[self.values.index(max(self.values))]

    def encode(self, encoder: "Encoder") -> "tuple[Fate, list[Example]]":
        """Return the tokens of all answers."""
        return encoder.answers(self)

    def content(self, loss_on: LossOn) -> object:
        """Return the answers and what is known of each."""
        tops = [[x.tobytes().hex() for x in (t.counts, t.ids, t.logprobs)] for t in self.teacher]
        each = [one.content(loss_on) for one in self.conversations]
        return [each, self.values, self.references, self.logprobs, tops]

    def remarks(self) -> Iterator[tuple[str, str]]:
        """Yield ratings that say the opposite."""
        if self.contradiction is not None:
            yield "rating", self.contradiction


@dataclass(frozen=True, kw_only=True, slots=True)
class RowForm:
    """How a source's rows are read."""

    path: str  # the path of the source, for errors
    data_format: str  # one of `formats`, or `auto` to detect it from the keys of the first row
    # A format's column name -> the name in the file, where that is another.
    columns: Mapping[str, str]
    system: str | None  # system prompt for conversations that have none of their own
    ignored: tuple[str, ...]  # columns, and keys of turns, that are left out on purpose
    loss_on: LossOn  # what is learned; a turn without a loss may have a weight of 0
    allow_downloads: bool = False  # whether images are read from servers
    # The formats that may be read.
    formats: tuple[str, ...] = field(default_factory=repeated_formats)

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
        columns = [*self.format.columns, *self.format.optional]
        by_column = dict[str, str]()
        for name in columns:
            other = by_column.setdefault(self.column(name), name)
            if other != name and name in {*self.columns, *self.format.columns}:
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
            row = self._with_turns(self._recast(row, self.format))
            return self.format.read(row, self, source, self._unused(row))
        except RowError as error:
            others = [name for name in self.formats if self._fits(row, name)]
            if others and self.data_format not in others:
                problem = f"{error}{_OF_FORMAT}{others[0]}"
                raise RowError(problem, error.lost) from None
            raise

    @property
    def format(self) -> DataFormat:
        """The format, once it is known."""
        return FORMATS[self.data_format]

    def column(self, name: str) -> str:
        """Return the file's name of a column."""
        return self.columns.get(name, name)

    def conversation(
        self,
        messages: Sequence[Message],
        row: Mapping[str, object],
        source: str,
        unused: tuple[str, ...] = (),
    ) -> Conversation:
        """Return a conversation with the system prompt and the tools of its row or the recipe."""
        name, system = self.column("tools"), self.system
        tools = row.get(name) if name in self._optional() else None
        if "system" in self.columns and row.get(self.column("system")):
            system = text(row, self.column("system"))
        has_own = not system or any(message.role == "system" for message in messages)
        first = () if has_own else (Message(role="system", content=system or ""),)
        return Conversation(
            messages=self._with_images((*first, *messages), row, source),
            source=source,
            unused=unused,
            tools=read_tools(tools) if tools else (),
        )

    def _with_images(
        self, messages: Sequence[Message], row: Mapping[str, object], source: str
    ) -> tuple[Message, ...]:
        """Return turns with the images of a row in their places, if its format has images."""
        names = [name for name in map(self.column, COLUMNS) if name in self._optional()]
        if not (any(one.images for one in messages) or any(row.get(name) for name in names)):
            return tuple(messages)
        from finetune.data import row_images

        placed = row_images.with_images(messages, row_images.images_of(row, names))
        if any(one.images for one in placed) and not {*COLUMNS} <= {*self.format.optional}:
            raise RowError(f"it is of the format {self.data_format} and has images: {_IMAGES}")
        return row_images.found_in(placed, source, allow_downloads=self.allow_downloads)

    def _detect(self, source: str, row: Mapping[str, object]) -> str:
        """Return the one format whose columns a row has."""
        found = [name for name in self.formats if self._fits(row, name)]
        if len(found) > 1:
            found = [name for name in found if not FORMATS[name].is_document]
        if len(found) == 1 and not FORMATS[found[0]].clashes:
            return found[0]
        wanted = "; ".join(f"{name} ({', '.join(self._shown(name))})" for name in self.formats)
        few = ("fit no format", "fit a format that some settings do not go with")
        reason = dict(enumerate(few)).get(len(found), f"fit several formats: {', '.join(found)}")
        raise DataError(
            f"{source} has the keys {', '.join(map(str, row))}, which {reason}",
            limit=f"the formats and their columns are: {wanted}",
            hint=f"`data.format: {found[0]}`" if found else _hint_for_columns(row),
        )

    def _shown(self, data_format: str) -> tuple[str, ...]:
        return tuple(self.column(name) for name in FORMATS[data_format].columns)

    def _fits(self, row: Mapping[str, object], data_format: str) -> bool:
        """Return whether a row has a format's columns.

        Two chat formats that share a column differ in their turns.
        """
        found = FORMATS[data_format]
        keys, row = self._shown(data_format), self._recast(row, found)
        if not all(key in row for key in keys):
            return False
        turns = row[keys[0]]
        first = turns[0] if isinstance(turns, list) and turns else None
        return (
            found.turns is None
            or not isinstance(first, Mapping)
            or found.turns.foreign not in first
        )

    def _recast(self, row: Mapping[str, object], to: DataFormat) -> Mapping[str, object]:
        return row if to.recast is None else to.recast(row, self.column)

    def _unused(self, row: Mapping[str, object]) -> tuple[str, ...]:
        """Return the keys of a row and its turns that are not read, if that loses nothing."""
        if self.format.keeps_others:  # for rewards, and what a model should see is not for them
            media = (_IMAGES, _MEDIA)
            row = {key: value for key, value in row.items() if MEANINGS.get(key) in media}
        ignored = self.ignored
        columns = self._shown(self.data_format)
        read = columns + self._optional()
        found = [find_unread(row, read=read, ignored=ignored)]
        turns = row.get(columns[0])
        if self.format.turns is not None and isinstance(turns, list):
            keys, asks = self.format.turns.keys, self.format.turns.unlearned
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
        names = [
            name for name in self.format.optional if name != "system" or "system" in self.columns
        ]
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
        turns = row.get(key) if self.format.turns is not None else None
        if not isinstance(turns, str) or not turns.lstrip().startswith("["):
            return row
        read = decoded(turns.encode(errors="surrogatepass"))
        if isinstance(read, RowError):
            raise RowError(f"{key!r}: {read}")
        return {**row, key: read}


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
    named = "for other columns set `data.columns: {prompt: ..., completion: ...}`" + (
        "; prompts alone are for `objective.method: grpo` with `objective.rewards`"
        if "prompt" in row
        else ""
    )
    return named if known is None else f"{named}; {known!r}: {MEANINGS[known]}"


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
