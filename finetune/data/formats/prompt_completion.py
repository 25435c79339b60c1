"""A prompt and its completion, as texts or as turns."""

from collections.abc import Mapping

from finetune.data.formats._chat import checked
from finetune.data.rows import Row, RowForm
from finetune.data.turns import Message, is_turns, text
from finetune.recipe.extensions import DataFormat


def read(row: Mapping[str, object], form: RowForm, source: str, unused: tuple[str, ...]) -> Row:
    """Read a prompt and its completion."""
    names = form.column("prompt"), form.column("completion")
    if any(isinstance(row.get(name), list) for name in names) or is_turns(row.get(names[0])):
        from finetune.data.answers import read_completion

        messages = read_completion(row, names, form.ignored)
    else:
        said = zip(("user", "assistant"), (text(row, name) for name in names), strict=True)
        messages = [Message(role=role, content=content) for role, content in said]
    return form.conversation(checked(messages), row, source, unused)


EXTENSION = DataFormat(
    summary="a prompt and its completion, as texts or as turns",
    columns=("prompt", "completion"),
    optional=("tools", "system", "images", "image"),
    read=read,
)
