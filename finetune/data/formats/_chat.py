"""Chats: turns in a column, of which answers are learned."""

from collections.abc import Mapping, Sequence

from finetune.data.rows import Row, RowForm
from finetune.data.turns import Message, mapping, read_turn, text
from finetune.errors import RowError


def read_chat(
    row: Mapping[str, object], form: RowForm, source: str, unused: tuple[str, ...]
) -> Row:
    """Read a chat.

    Raises:
        RowError: Its turns are none, or nothing is learned.
    """
    key = form.column(form.format.columns[0])
    turns = row.get(key)
    if key not in row:
        text(row, key)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise RowError(f"{key!r} must be a list of objects, this is {type(turns).__name__}")
    assert form.format.turns is not None, "of a chat"
    keys = form.format.turns.keys
    messages = [read_turn(mapping(turn), keys=keys, ignored=form.ignored) for turn in turns]
    return form.conversation(checked(messages), row, source, unused)


def checked(messages: Sequence[Message]) -> Sequence[Message]:
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
