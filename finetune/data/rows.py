"""Read the rows of a data set into one form: conversations that know where they came from.

A row may be a chat (`messages` with role and content, or ShareGPT's `conversations` with from and
value), an Alpaca instruction, or a prompt with its completion. All become a `Conversation`:
messages with the roles system, user and assistant, and a source such as `train.jsonl:17`.

A row that cannot be used is never skipped: the reader goes through the whole file and then raises
one error that names the bad rows. A run that silently trains on 97 % of its rows has a bug that
nobody finds.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from finetune.data.unread import MEANINGS, find_unread, find_unread_in_turns
from finetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

LossOn = Literal["assistant", "all"]

FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion")

_MAX_SHOWN = 10
_ROLES = ("system", "user", "assistant")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


_TURN_KEYS = {
    "messages": (("role", "content"), ("system", "user")),
    "sharegpt": (("from", "value"), ("system", "human", "user")),
}
"""Format -> the keys of a turn's role and text, and the roles that ask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn: who speaks (system, user or assistant) and what is said."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One row of the data.

    Attributes:
        messages: Its turns.
        source: Where it is: `path:line` or `path[index]`.
        unused: Keys of the row and of its turns that hold something that is not read.
    """

    messages: tuple[Message, ...]
    source: str
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """The column names that the recipe gives; None means the format's usual name."""

    prompt: str | None
    completion: str | None
    messages: str | None

    def of(self, data_format: str) -> tuple[str, ...]:
        """Return the columns without which a row is not of the format."""
        return {
            "messages": (self.messages or "messages",),
            "sharegpt": (self.messages or "conversations",),
            "alpaca": ("instruction", "output"),
            "prompt_completion": (self.prompt or "prompt", self.completion or "completion"),
        }[data_format]

    def optional(self, data_format: str) -> tuple[str, ...]:
        """Return the columns that are read where a row has them."""
        return ("input",) if data_format == "alpaca" else ()


class _RowError(Exception):
    """What is wrong with one row; collected, never seen by a caller.

    Attributes:
        lost: Keys that mean something and would not be read.
    """

    def __init__(self, problem: str, *, lost: Sequence[str] = ()) -> None:
        super().__init__(problem)
        self.lost = tuple(lost)


class _Repeated(dict[str, object]):
    """A JSON object that has a key twice; Python would keep the last value."""

    def __init__(self, pairs: Sequence[tuple[str, object]]) -> None:
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        self.key = next(key for key in keys if keys.count(key) > 1)


def read_conversations(
    *,
    path: str,
    data_format: str,
    prompt_column: str | None,
    completion_column: str | None,
    messages_column: str | None,
    system: str | None,
    ignored: Sequence[str] = (),
    loss_on: LossOn = "assistant",
) -> list[Conversation]:
    """Read every row of a data set as a conversation.

    Args:
        path: A .jsonl, .json (one array) or .parquet file, a directory or a Hub id; the last two
            with an optional `:split`.
        data_format: One of `FORMATS`, or `auto` to detect it from the keys of the first row.
        prompt_column: Column of the prompt in the format prompt_completion; None is `prompt`.
        completion_column: Column of the completion in that format; None is `completion`.
        messages_column: Column of the turns; None is `messages`, or `conversations` in sharegpt.
        system: System prompt for the rows that have none of their own.
        ignored: Columns, and keys of turns, that are left out on purpose.
        loss_on: What is learned; a turn without a loss may have a weight of 0.

    Returns:
        One conversation per row, in the order of the file.

    Raises:
        DataError: The data is missing or empty, its format cannot be detected, or rows are bad;
            the first bad rows are named, all are counted.
    """
    columns = _Columns(prompt=prompt_column, completion=completion_column, messages=messages_column)
    rows = list(_read_rows(path))
    if not rows:
        raise DataError(
            f"{path} holds no rows",
            limit="training needs at least one row",
            hint="set `data.path` to a file with rows",
        )
    if data_format == "auto":
        data_format = _detect_format(rows, columns, path)
    parse = _PARSERS[data_format]
    conversations, problems = [], []
    lost: dict[str, None] = {}
    for source, row in rows:
        try:
            fields = _mapping(row)
            unused = _unused(fields, data_format, columns, ignored=ignored, loss_on=loss_on)
            messages = _with_system(_checked(parse(fields, columns)), system)
            conversations.append(Conversation(messages=messages, source=source, unused=unused))
        except _RowError as error:
            problems.append(f"{source}: {error}")
            lost |= dict.fromkeys(error.lost)
    if problems:
        names = [*ignored, *lost] if lost else []
        raise _bad_rows(problems, len(rows), path=path, data_format=data_format, to_ignore=names)
    return conversations


def _bad_rows(
    problems: Sequence[str],
    num_rows: int,
    *,
    path: str,
    data_format: str,
    to_ignore: Sequence[str] = (),
) -> DataError:
    """Return the one error that names the bad rows, and columns that could be ignored."""
    hint = "fix or remove these rows, or set `data.format` and its columns to what they hold"
    if to_ignore:
        hint = f"`data.ignored_columns: [{', '.join(to_ignore)}]` leaves them out on purpose"
    shown = "\n  ".join(problems[:_MAX_SHOWN])
    more = len(problems) - _MAX_SHOWN
    rest = f"\n  and {more} more" if more > 0 else ""
    return DataError(
        f"{len(problems)} of {num_rows} rows in {path} cannot be used:\n  {shown}{rest}\n",
        limit=f"every row must be a complete row of the format {data_format}",
        hint=hint,
    )


# --------------------------------------------------------------------------------------------------
# Where rows come from. A row that could not be read is passed on as an error value, to be counted
# with the others.
# --------------------------------------------------------------------------------------------------


def _read_rows(path: str) -> Iterator[tuple[str, object]]:
    """Yield (source, row) for each row of a file, a directory or a Hub data set."""
    file = Path(path)
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    if file.suffix not in readers:
        return _read_datasets(path)
    if not file.is_file():
        raise _missing(file)
    return readers[file.suffix](file)


def _missing(file: Path) -> DataError:
    """Return the error for a file that does not exist, with the nearest name that does."""
    folder = file.parent
    if not folder.is_dir():
        return DataError(
            f"data file {file} does not exist, nor does its folder {folder}",
            limit="`data.path` must name a file that can be read",
            hint="set `data.path`; a relative path starts at the current directory",
        )
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.5)
    return DataError(
        f"data file {file} does not exist",
        limit=f"{folder} holds {', '.join(names[:_MAX_SHOWN]) or 'no files'}",
        hint=f"`data.path: {folder / near[0]}`"
        if near
        else "set `data.path` to a file that exists",
    )


def _read_jsonl(file: Path) -> Iterator[tuple[str, object]]:
    """Yield one row per line that is not blank; a bad encoding is named by its line too."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row: object
            try:
                row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_object)
            except json.JSONDecodeError as error:
                row = _RowError(f"broken JSON: {error.msg} at column {error.colno}")
            except UnicodeDecodeError as error:
                row = _RowError(f"not UTF-8: byte 0x{line[error.start]:02x} at {error.start}")
            except (ValueError, RecursionError) as error:
                row = _RowError(f"JSON beyond what can be read: {str(error).partition(';')[0]}")
            yield f"{file}:{number}", row


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of a JSON text, marked if a key is there twice."""
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else _Repeated(pairs)


def _read_json(file: Path) -> Iterator[tuple[str, object]]:
    """Yield the elements of a JSON array."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}:{error.lineno}: broken JSON: {error.msg} at column {error.colno}",
            limit="a .json file must hold one array of rows",
            hint="if it holds one row per line, give it the ending .jsonl",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file} cannot be read as JSON: {str(error).partition(';')[0]}",
            limit="a .json file must hold one array of rows in UTF-8",
            hint=f"`iconv -t UTF-8 {file}`, or .jsonl with a row per line, which names the bad one",
        ) from error
    if not isinstance(rows, list):
        raise DataError(
            f"{file} holds one {type(rows).__name__}",
            limit="a .json file must hold one array of rows",
            hint="wrap the rows in [ ], or use .jsonl with one row per line",
        )
    for index, row in enumerate(rows):
        yield f"{file}[{index}]", row


def _read_parquet(file: Path) -> Iterator[tuple[str, object]]:
    """Yield the rows of a parquet file."""
    return _rows_of(
        _load("parquet", split="train", data_files=str(file), path=str(file)), str(file)
    )


def _read_datasets(path: str) -> Iterator[tuple[str, object]]:
    """Yield the rows of a directory or a Hub data set, named as `name#config:split`."""
    source, _, split = path.partition(":")
    name, _, config = source.partition("#")
    if not Path(name).is_dir() and (Path(name).is_absolute() or name.startswith(".")):
        raise _missing(Path(name))
    return _rows_of(_load(name, config=config or None, split=split or "train", path=path), path)


def _load(
    name: str, *, split: str, path: str, config: str | None = None, data_files: str | None = None
) -> Any:
    """Load a data set through `datasets`, its failures turned into one error."""
    import datasets

    datasets.disable_progress_bars()
    saved = Path(name, "state.json").is_file() or Path(name, "dataset_dict.json").is_file()
    try:
        if saved:
            loaded = datasets.load_from_disk(name)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(name, config, split=split, data_files=data_files)
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        datasets.exceptions.DatasetsError,
    ) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path} cannot be loaded as a data set: {reason}",
            limit="`data.path` must be a file, a directory of data files or a Hub id in reach",
            hint="without a network set `data.path` to a local .jsonl, .json or .parquet file",
        ) from error


def _rows_of(data_set: Any, path: str) -> Iterator[tuple[str, object]]:
    """Yield the rows of a loaded data set."""
    for index, row in enumerate(data_set):
        yield f"{path}[{index}]", row


# --------------------------------------------------------------------------------------------------
# What a row means.
# --------------------------------------------------------------------------------------------------


def _detect_format(rows: Sequence[tuple[str, object]], columns: _Columns, path: str) -> str:
    """Return the one format whose columns the first readable row has."""
    first = next(((source, row) for source, row in rows if isinstance(row, Mapping)), None)
    if first is None:
        problems = [f"{s}: {r if isinstance(r, _RowError) else 'not an object'}" for s, r in rows]
        raise _bad_rows(problems, len(rows), path=path, data_format="auto")
    source, row = first
    assert isinstance(row, Mapping)
    found = [name for name in FORMATS if _fits(row, name, columns)]
    if len(found) == 1:
        return found[0]
    wanted = "; ".join(f"{name} ({', '.join(columns.of(name))})" for name in FORMATS)
    reason = f"fit several formats: {', '.join(found)}" if found else "fit no format"
    raise DataError(
        f"{source} has the keys {', '.join(map(str, row))}, which {reason}",
        limit=f"the formats and their columns are: {wanted}",
        hint=f"`data.format: {found[0]}`" if found else _hint_for_columns(row),
    )


def _hint_for_columns(row: Mapping[str, object]) -> str:
    """Return what to do with a row of no known format."""
    known = next((key for key in row if key in MEANINGS), None)
    named = "for other columns set `data.prompt_column: ...` and `data.completion_column: ...`"
    return named if known is None else f"{named}; {known!r}: {MEANINGS[known]}"


def _fits(row: Mapping[str, object], data_format: str, columns: _Columns) -> bool:
    """Return whether a row has a format's columns.

    Two chat formats that share a column differ in their turns.
    """
    keys = columns.of(data_format)
    if not all(key in row for key in keys):
        return False
    turns = row[keys[0]]
    first = turns[0] if isinstance(turns, list) and turns else None
    foreign = {"messages": "from", "sharegpt": "role"}.get(data_format)
    return not (isinstance(first, Mapping) and foreign in first)


def _mapping(row: object) -> Mapping[str, object]:
    """Return the row if it is an object with keys."""
    if isinstance(row, _RowError):
        raise row
    if not isinstance(row, Mapping):
        raise _RowError(f"a row must be an object, this is a {type(row).__name__}")
    if isinstance(row, _Repeated):
        raise _RowError(f"the key {row.key!r} is there twice")
    return row


def _unused(
    row: Mapping[str, object],
    data_format: str,
    columns: _Columns,
    *,
    ignored: Sequence[str],
    loss_on: LossOn,
) -> tuple[str, ...]:
    """Return the keys of a row and its turns that are not read, if that loses nothing."""
    read = columns.of(data_format)
    found = [find_unread(row, read=read + columns.optional(data_format), ignored=ignored)]
    turns = row.get(read[0])
    if data_format in _TURN_KEYS and isinstance(turns, list):
        keys, asks = _TURN_KEYS[data_format]
        found.append(
            find_unread_in_turns(
                turns,
                read=keys,
                ignored=ignored,
                unlearned_roles=asks if loss_on == "assistant" else (),
            )
        )
    lost = {key: problem for part in found for key, problem in part.lost.items()}
    if lost:
        raise _RowError("; ".join(lost.values()), lost=list(lost))
    return tuple(dict.fromkeys(key for part in found for key in part.unused))


def _text(row: Mapping[str, object], key: str) -> str:
    """Return a text field of a row."""
    if key not in row:
        raise _RowError(f"no key {key!r}; it has {', '.join(map(repr, row)) or 'none'}")
    value = row[key]
    if not isinstance(value, str):
        raise _RowError(f"{key!r} must be text, this is a {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _RowError(f"{key!r} holds half a character: {value[error.start]!a}") from None
    return value


def _turns(row: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    """Return the turns of a chat."""
    turns = row.get(key)
    if key not in row:
        _text(row, key)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise _RowError(f"{key!r} must be a list of objects, this is {type(turns).__name__}")
    for turn in turns:
        _mapping(turn)
    return turns


def _parse_messages(row: Mapping[str, object], columns: _Columns) -> list[Message]:
    """Read the format messages."""
    messages = []
    for turn in _turns(row, columns.of("messages")[0]):
        role = _text(turn, "role")
        if role not in _ROLES:
            raise _RowError(f"unknown role {role!r}; known are {', '.join(_ROLES)}")
        messages.append(Message(role=role, content=_text(turn, "content")))
    return messages


def _parse_sharegpt(row: Mapping[str, object], columns: _Columns) -> list[Message]:
    """Read the format sharegpt."""
    messages = []
    for turn in _turns(row, columns.of("sharegpt")[0]):
        role = _text(turn, "from")
        if role not in _SHAREGPT_ROLES:
            raise _RowError(f"unknown role {role!r}; known are {', '.join(_SHAREGPT_ROLES)}")
        messages.append(Message(role=_SHAREGPT_ROLES[role], content=_text(turn, "value")))
    return messages


def _parse_alpaca(row: Mapping[str, object], columns: _Columns) -> list[Message]:
    """Read the format alpaca: an input follows the instruction after a blank line."""
    instruction, output = (_text(row, key) for key in columns.of("alpaca"))
    extra = _text(row, "input") if row.get("input") is not None else ""
    prompt = f"{instruction}\n\n{extra}" if extra else instruction
    return [Message(role="user", content=prompt), Message(role="assistant", content=output)]


def _parse_prompt_completion(row: Mapping[str, object], columns: _Columns) -> list[Message]:
    """Read the format prompt_completion."""
    prompt, completion = (_text(row, key) for key in columns.of("prompt_completion"))
    return [Message(role="user", content=prompt), Message(role="assistant", content=completion)]


_PARSERS: dict[str, "Callable[[Mapping[str, object], _Columns], list[Message]]"] = {
    "messages": _parse_messages,
    "sharegpt": _parse_sharegpt,
    "alpaca": _parse_alpaca,
    "prompt_completion": _parse_prompt_completion,
}


def _checked(messages: list[Message]) -> list[Message]:
    """Return the messages if there is something to learn from each answer."""
    roles = [message.role for message in messages]
    answers = [message.content for message in messages if message.role == "assistant"]
    if not answers:
        raise _RowError("no assistant turn")
    if "user" not in roles[: roles.index("assistant")]:
        raise _RowError("it begins with an answer, before any user turn")
    if not all(answer.strip() for answer in answers):
        raise _RowError("empty answer")
    return messages


def _with_system(messages: list[Message], system: str | None) -> tuple[Message, ...]:
    """Put the recipe's system prompt first, unless the row has its own."""
    if system and not any(message.role == "system" for message in messages):
        return (Message(role="system", content=system), *messages)
    return tuple(messages)
