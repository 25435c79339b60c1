"""Fields of a row that training would not read: refused if they change its meaning, else listed.

A weight of 0, an undesired answer, a system prompt in its own column: without them the row means
something else. Other columns (ids, sources, languages) change nothing and are listed once.
`data.ignored_columns` names what is left out on purpose.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

_TOOLS = "tools and their calls are read in chats only (`messages`, `sharegpt`)"
_REASONING = "write it into the answer, between <think> and </think>"
_PAIRS = "pairs of answers are learned by `objective.method: dpo` and others, or `reward`"
_LABELS = "desired and undesired answers are learned by `objective.method: kto`"
_SYSTEM = "make it the first turn of `messages`, or set `data.system` for all rows"
_MEDIA = "only text is trained"

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
    "label": _LABELS,
    "kto_tag": _LABELS,
    "chosen": _PAIRS,
    "rejected": _PAIRS,
    "system": _SYSTEM,
    "system_prompt": _SYSTEM,
    "history": "make it turns of `messages`",
    "documents": "make it part of the question",
    "chat_template_kwargs": "the template has the same settings for all rows",
    "image": _MEDIA,
    "images": _MEDIA,
    "audio": _MEDIA,
    "audios": _MEDIA,
    "video": _MEDIA,
    "videos": _MEDIA,
}
"""Columns that change what a row means -> the problem, or what to do about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """The keys of a row that are not read.

    Attributes:
        lost: Keys that mean something -> the problem to report.
        unused: All keys that hold something.
    """

    lost: Mapping[str, str]
    unused: tuple[str, ...]


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
