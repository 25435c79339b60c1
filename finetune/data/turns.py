"""One turn of a chat: who speaks, what is said, the calls of tools, and whether it is trained.

Two spellings are read: `role` and `content` (OpenAI's), `from` and `value` (ShareGPT's). A call is
`{"name": ..., "arguments": {...}}`, alone or under `function`; arguments and definitions of tools
may be JSON texts, since a column of a .csv or .parquet file cannot hold objects of any form.

A text may be a list of parts, of which some are images: `{"type": "image"}` with a source under
`image`, `path`, `url` or `base64`, or `{"type": "image_url", "image_url": ...}`. One without a
source is of a column; it may say its `index` there.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from finetune.data.pictures.picture import PLACE, Picture
from finetune.data.sources import Repeated
from finetune.errors import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
_WRITTEN_TURNS = re.compile(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")
_CALL_KEYS = ("tool_calls", "function_call")
_TRAIN_KEYS = ("train", "weight")
_KEYS_OF_ROLE = {
    "assistant": (*_CALL_KEYS, *THOUGHT_KEYS),
    "tool": ("tool_call_id", "name"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool by an answer."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it in the form that templates read."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        with_id = {} if self.call_id is None else {"id": self.call_id}
        return {"type": "function", **with_id, "function": function}


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn."""

    role: str  # who speaks: one of `ROLES`
    content: str  # what is said, with `PLACE` for each image
    images: tuple[Picture, ...] = ()  # its images, in the order of their places
    thought: str | None = None  # reasoning before it, where it is a field of its own
    calls: tuple[ToolCall, ...] = ()  # calls of tools that end an answer
    call_id: str | None = None  # the call that a tool's turn answers
    name: str | None = None  # the tool
    is_trained: bool | None = None  # whether an answer is learned; None: as the recipe says

    def to_json(self) -> dict[str, Any]:
        """Return it in the form that templates read; reasoning under both names in use."""
        content = self._parts() if self.images else self.content
        fields: dict[str, Any] = {"role": self.role, "content": content}
        if self.thought is not None:
            fields |= {"reasoning_content": self.thought, "thinking": self.thought}
        if self.calls:
            fields["tool_calls"] = [call.to_json() for call in self.calls]
        if self.call_id is not None:
            fields["tool_call_id"] = self.call_id
        if self.name is not None:
            fields["name"] = self.name
        return fields

    def _parts(self) -> list[dict[str, str]]:
        """Return what is said as a list of texts and images."""
        first, *others = self.content.split(PLACE)
        parts = [{"type": "text", "text": first}]
        for said in others:
            parts += [{"type": "image"}, {"type": "text", "text": said}]
        return [part for part in parts if part.get("text") != ""]


def keys_read(role: object, turn: Mapping[str, object], *, is_chosen: bool) -> tuple[str, ...]:
    """Return the keys that are read in a turn, in addition to those of role and text.

    Args:
        role: As it is written.
        turn: With its values, of which some can be read and others cannot.
        is_chosen: Whether a turn may say if it is trained; no turn may where all tokens are.
    """
    known = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else ""
    keys = _KEYS_OF_ROLE.get(str(known), ())
    if known == "assistant" and is_chosen:
        keys += tuple(key for key in _TRAIN_KEYS if turn.get(key) in (0, 1))
    return keys


def read_turn(
    turn: Mapping[str, object], *, keys: tuple[str, str], ignored: Sequence[str]
) -> Message:
    """Read one turn.

    Args:
        turn: An object.
        keys: The keys of its role and its text.
        ignored: Keys that are left out on purpose.

    Raises:
        RowError: Something is missing or of another kind.
    """
    named, (turn, images) = text(turn, keys[0]), _joined(turn, keys[1])
    roles = SHAREGPT_ROLES if keys[0] == "from" else {role: role for role in ROLES}
    if named not in roles:
        raise RowError(f"unknown role {named!r}; known are {', '.join(roles)}")
    role = roles[named]
    fields = {key: value for key, value in turn.items() if key not in ignored}
    if named == "function_call":
        fields = {**fields, "tool_calls": _parsed(text(turn, keys[1])), keys[1]: ""}
    if role == "assistant":
        return replace(_answer(fields, keys[1]), images=images)
    return Message(
        role=role,
        content=text(turn, keys[1]),
        images=images,
        call_id=_optional(fields, "tool_call_id") if role == "tool" else None,
        name=_optional(fields, "name") if role == "tool" else None,
    )


def _answer(fields: Mapping[str, object], text_key: str) -> Message:
    """Read an answer: text, reasoning, calls."""
    found = [fields[key] for key in _CALL_KEYS if fields.get(key)]
    if len(found) > 1:
        raise RowError(f"calls of tools under two keys: {' and '.join(_CALL_KEYS)}")
    calls = _calls(_parsed(found[0])) if found else ()
    content = "" if calls and fields.get(text_key) is None else text(fields, text_key)
    thoughts = dict.fromkeys(_optional(fields, key) for key in THOUGHT_KEYS if fields.get(key))
    thoughts.pop(None, None)
    if len(thoughts) > 1:
        raise RowError(f"different reasoning under several of {', '.join(THOUGHT_KEYS)}")
    thought = next(iter(thoughts), None)
    if thought is not None and "</think>" in content:
        raise RowError("reasoning both in a field of its own and in the answer")
    trained = [bool(fields[key]) for key in _TRAIN_KEYS if fields.get(key) in (0, 1)]
    return Message(
        role="assistant",
        content=content,
        thought=thought,
        calls=calls,
        is_trained=all(trained) if trained else None,
    )


def _optional(fields: Mapping[str, object], key: str) -> str | None:
    """Return a text that may be missing; one of spaces says nothing."""
    if fields.get(key) is None:
        return None
    value = text(fields, key)
    return value if value.strip() else None


def _calls(value: object) -> tuple[ToolCall, ...]:
    """Read the calls of a turn: a list of them, or one."""
    calls = value if isinstance(value, list) else [value]
    return tuple(_call(call, number) for number, call in enumerate(calls, start=1))


def _call(value: object, number: int) -> ToolCall:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(f"tool call {number} names no function: {_short(value)}")
    arguments = _parsed(function.get("arguments") or {})
    if not isinstance(arguments, Mapping):
        raise RowError(
            f"the arguments of tool call {number}, of {function['name']}, are no JSON object:"
            f" {_short(arguments)}"
        )
    assert isinstance(value, Mapping)
    call_id = value.get("id")
    return ToolCall(
        name=text(function, "name"),
        arguments=arguments,
        call_id=call_id if isinstance(call_id, str) else None,
    )


def read_tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """Read the definitions of a row's tools, as OpenAI writes them; without the frame is enough.

    Raises:
        RowError: A definition has no name.
    """
    tools = _parsed(value)
    tools = tools if isinstance(tools, list) else [tools] if tools else []
    return tuple(_tool(tool, number) for number, tool in enumerate(tools, start=1))


def _tool(value: object, number: int) -> Mapping[str, Any]:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(f"tool {number} of 'tools' has no name: {_short(value)}")
    given = {key: entry for key, entry in function.items() if entry is not None}
    parameters = _parsed(given.get("parameters") or {"type": "object", "properties": {}})
    return {
        "type": "function",
        "function": {"description": "", **given, "parameters": parameters},
    }


def has_nulls_in_tools(value: object, *, ignored: Sequence[str] = ()) -> bool:
    """Return whether the arguments of calls, or the parameters of tools, hold nulls.

    Args:
        value: Turns or definitions, as objects; a JSON text has the nulls that were written.
        ignored: Keys that are left out on purpose.
    """
    if isinstance(value, list):
        return any(has_nulls_in_tools(entry, ignored=ignored) for entry in value)
    if not isinstance(value, Mapping):
        return False
    if isinstance(value.get("name"), str) and any(
        _has_nulls(value[key]) for key in ("arguments", "parameters") if value.get(key)
    ):
        return True
    entries = (entry for key, entry in value.items() if key not in ignored)
    return any(has_nulls_in_tools(entry, ignored=ignored) for entry in entries)


def _has_nulls(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_nulls, value.values()))
    return any(map(_has_nulls, value)) if isinstance(value, list) else value is None


def text(fields: Mapping[str, object], key: str) -> str:
    """Return a text field of a row or turn.

    Raises:
        RowError: It is not there, or no text that can be written.
    """
    if key not in fields:
        raise RowError(f"no key {key!r}; it has {', '.join(map(repr, fields)) or 'none'}")
    value = fields[key]
    if not isinstance(value, str):
        raise RowError(f"{key!r} must be text, this is a {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{key!r} holds half a character: {value[error.start]!a}") from None
    return value


def _joined(
    fields: Mapping[str, object], key: str
) -> tuple[Mapping[str, object], tuple[Picture, ...]]:
    """Return a turn whose text is one, where it was a list of parts, and the images among them.

    Raises:
        RowError: A part is something else.
    """
    parts = fields.get(key)
    if not isinstance(parts, list) or not parts:
        return fields, ()
    read = [_part(part, f"part {number} of {key!r}") for number, part in enumerate(parts, start=1)]
    images = tuple(one for one in read if isinstance(one, Picture))
    said = "".join(PLACE if isinstance(one, Picture) else one for one in read)
    return {**fields, key: said}, images


def _part(part: object, where: str) -> str | Picture:
    """Read a part: a text, or an image."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    given = {}
    if isinstance(part, Mapping):  # a table has the keys of all parts, as nulls
        given = {key: value for key, value in part.items() if value is not None and key != "type"}
    if kind == "text" and [*given] == ["text"]:
        return text(given, "text")
    if kind not in ("image", "image_url"):
        raise RowError(f"{where} is of type {kind!r}: only texts and images are trained")
    from finetune.data.pictures.references import read_part

    return read_part(kind, given, where)


def is_turns(value: object) -> bool:
    """Return whether a value is the JSON text of turns, which a column of a .csv file may be."""
    return isinstance(value, str) and _WRITTEN_TURNS.match(value) is not None


def mapping(row: object) -> Mapping[str, object]:
    """Return a row or turn if it is an object with keys.

    Raises:
        RowError: It is something else, or could not be read.
    """
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, Mapping):
        raise RowError(f"a row must be an object, this is a {type(row).__name__}")
    if isinstance(row, Repeated):
        raise RowError(f"the key {row.key!r} is there twice")
    return row


def _parsed(value: object) -> object:
    """Return what a JSON text says, and anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"broken JSON in {_short(value)}: {error}") from None


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
