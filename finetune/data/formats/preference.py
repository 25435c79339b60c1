"""Pairs of answers to one prompt, of which one was chosen."""

from collections.abc import Mapping, Sequence

from finetune.data.answers import (
    Answers,
    asked_and_said,
    num_common,
    number,
    reading,
    recast_pair,
    references_of,
    require_asked,
    turns_of_column,
)
from finetune.data.rows import RowForm
from finetune.errors import RowError
from finetune.recipe.extensions import DataFormat

RATINGS = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("rating_chosen", "rating_rejected"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)
"""Columns in which sets of pairs have how good each answer is; no loss reads them."""


def read_pair(row: Mapping[str, object], form: RowForm) -> Answers:
    """Read a pair: prompt, chosen and rejected, or two conversations that begin alike."""
    column, ignored = form.column, form.ignored
    names = column("chosen"), column("rejected")
    sides = [turns_of_column(row, name, "assistant", ignored) for name in names]
    prompt_name = column("prompt")
    has_prompt = row.get(prompt_name) is not None and prompt_name not in ignored
    are_answers = all(not side or side[0].role == "assistant" for side in sides)
    if has_prompt and are_answers:
        prompt, *sides = asked_and_said(row, prompt_name, sides, ignored)
    else:
        if are_answers:
            raise RowError(
                f"it has no prompt, and {names[0]!r} is no conversation that begins with 'Human:'"
            )
        num = num_common(*sides)
        prompt, sides = sides[0][:num], [side[num:] for side in sides]
        if any(side and side[0].role != "assistant" for side in sides):
            raise RowError(f"{names[0]!r} and {names[1]!r} do not begin with the same prompt")
        if has_prompt:
            require_asked(turns_of_column(row, prompt_name, "user", ignored), prompt, prompt_name)
    if sides[0] == sides[1]:
        raise RowError(f"{names[0]!r} and {names[1]!r} are the same")
    return Answers(
        prompt=tuple(prompt),
        answers=tuple(map(tuple, sides)),
        names=names,
        values=(1.0, 0.0),
        references=references_of(row, ("ref_chosen_logps", "ref_rejected_logps"), column, ignored),
        contradiction=_contradiction(row, ignored),
    )


def _contradiction(row: Mapping[str, object], ignored: Sequence[str]) -> str | None:
    """Return the ratings of a pair that say the opposite of it; equal ones say nothing."""
    for names in RATINGS:
        try:
            better, worse = (number(row.get(name), name) for name in names)
        except RowError:
            continue  # no ratings: no loss reads these columns
        if better < worse and not {*names} & {*ignored}:
            return f"{names[0]} {better:g}, {names[1]} {worse:g}"
    return None


EXTENSION = DataFormat(
    summary="a pair of answers, with its prompt in a column or in front of both",
    columns=("chosen", "rejected"),
    optional=(
        "prompt",
        "tools",
        "system",
        "images",
        "image",
        "ref_chosen_logps",
        "ref_rejected_logps",
    ),
    read=reading(read_pair),
    recast=recast_pair,
    suggests={"method": "dpo"},
)
