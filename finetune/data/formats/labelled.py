"""Single answers that are desired or not."""

import json
from collections.abc import Mapping

from finetune.data.answers import (
    Answers,
    Column,
    asked_and_said,
    reading,
    references_of,
    turns_of_column,
    with_prompt,
)
from finetune.data.rows import RowForm
from finetune.data.sources import Filled
from finetune.errors import RowError
from finetune.recipe.extensions import DataFormat

_LABELS = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}


def read(row: Mapping[str, object], form: RowForm) -> Answers:
    """Read an answer that is desired, or not: true and false, 1 and 0, or the texts of these."""
    column, ignored = form.column, form.ignored
    name = column("label")
    label = row.get(name)
    value = float(label) if isinstance(label, int | float) and label in (0, 1) else None
    if isinstance(label, str):
        value = _LABELS.get(label.strip().lower())
    if value is None:
        raise RowError(f"{name!r} is {json.dumps(label, default=repr)}, neither true nor false")
    answer = turns_of_column(row, column("completion"), "assistant", ignored)
    prompt, *answers = asked_and_said(row, column("prompt"), [answer], ignored)
    return Answers(
        prompt=prompt,
        answers=tuple(answers),
        names=(column("completion"),),
        values=(value,),
        references=references_of(row, ("ref_logps",), column, ignored),
    )


def recast(row: Mapping[str, object], column: Column) -> Mapping[str, object]:
    """Return a row with the format's columns, where it has them as LLaMA-Factory names them.

    An answer with a label is there the end of a conversation, or an `output`, and its label is
    `kto_tag`. Any other row is returned as it is.

    Source: LLaMA-Factory's data/README.md, read in 2026.
    """
    found, said = with_prompt(row, column, num_answers=1) if "kto_tag" in row else (row, [])
    if found is row:
        return row
    fields = dict(found)
    if said:
        fields[column("completion")] = said
    elif "output" in row:
        fields[column("completion")] = fields.pop("output")
    fields[column("label")] = fields.pop("kto_tag")
    return Filled(fields) if isinstance(row, Filled) else fields


EXTENSION = DataFormat(
    summary="an answer that is desired or not",
    columns=("prompt", "completion", "label"),
    optional=("tools", "system", "images", "image", "ref_logps"),
    read=reading(read),
    recast=recast,
    suggests={"method": "kto"},
)
