"""Answers to one prompt in an order, by scores or ranks."""

from collections.abc import Mapping

from finetune.data.answers import (
    Answers,
    listed_names,
    listed_references,
    numbers,
    prompt_and_answers,
    reading,
)
from finetune.data.rows import RowForm
from finetune.errors import RowError
from finetune.recipe.extensions import DataFormat


def read(row: Mapping[str, object], form: RowForm) -> Answers:
    """Read answers with scores, the higher the better, or ranks, of which 1 is the best."""
    column, ignored = form.column, form.ignored
    prompt, answers = prompt_and_answers(row, column, ignored)
    given = [name for name in ("scores", "ranks") if row.get(column(name)) is not None]
    if len(given) != 1:
        both = f"{column('scores')!r} and {column('ranks')!r}"
        raise RowError(f"it has both {both}" if given else f"it has neither {both}")
    sign = 1.0 if given[0] == "scores" else -1.0
    values = [sign * value for value in numbers(row, column(given[0]), len(answers))]
    if len(answers) < 2:
        raise RowError(f"{column('completions')!r} has one answer, and nothing to compare it with")
    if len(set(values)) == 1:
        raise RowError(f"{column(given[0])!r} are all the same: no answer is better")
    for index, answer in enumerate(answers):
        if answer in answers[:index]:
            first = answers.index(answer)
            raise RowError(f"{column('completions')}[{first}] and [{index}] are the same")
    return Answers(
        prompt=prompt,
        answers=answers,
        names=listed_names(form, len(answers)),
        values=tuple(values),
        references=listed_references(row, column, ignored, len(answers)),
    )


EXTENSION = DataFormat(
    summary="answers with scores or ranks",
    columns=("prompt", "completions"),
    optional=("scores", "ranks", "tools", "system", "ref_logps"),
    read=reading(read),
    suggests={"method": "dpo", "loss": "plackett_luce"},
)
