"""Pairs of answers, of which the chosen one is to have a higher reward."""

from collections.abc import Mapping
from dataclasses import replace

from finetune.data.answers import Answers, number, reading, recast_pair
from finetune.data.formats.preference import read_pair
from finetune.data.rows import RowForm
from finetune.errors import RowError
from finetune.recipe.extensions import DataFormat


def read(row: Mapping[str, object], form: RowForm) -> Answers:
    """Read a pair, and by how much the reward of the chosen answer is to be larger."""
    pair, name = replace(read_pair(row, form), is_rated=True), form.column("margin")
    if name in form.ignored or row.get(name) is None:
        return pair
    margin = number(row[name], name)
    if margin < 0:
        raise RowError(
            f"{name!r} is {margin:g}, and the chosen answer is the better one: at least 0"
        )
    return replace(pair, values=(1 + margin, 0.0))


EXTENSION = DataFormat(
    summary="a pair of answers, with the margin between their rewards",
    columns=("chosen", "rejected"),
    optional=("prompt", "tools", "system", "margin"),
    read=reading(read),
    recast=recast_pair,
)
