"""Alpaca's instructions: an input follows the instruction after a blank line."""

from collections.abc import Mapping

from finetune.data.formats._chat import checked
from finetune.data.rows import Row, RowForm
from finetune.data.turns import Message, text
from finetune.recipe.extensions import DataFormat


def read(row: Mapping[str, object], form: RowForm, source: str, unused: tuple[str, ...]) -> Row:
    """Read an instruction and its output."""
    instruction, output = (text(row, form.column(name)) for name in form.format.columns)
    extra_column = form.column("input")
    extra = text(row, extra_column) if row.get(extra_column) is not None else ""
    prompt = f"{instruction}\n\n{extra}" if extra else instruction
    messages = [Message(role="user", content=prompt), Message(role="assistant", content=output)]
    return form.conversation(checked(messages), row, source, unused)


EXTENSION = DataFormat(
    summary="an instruction, an input that may follow it, and the output",
    columns=("instruction", "output"),
    optional=("input", "system", "images", "image"),
    read=read,
)
