"""Answers to one prompt that a model has sampled, with their rewards."""

from collections.abc import Mapping

from finetune.data.answers import (
    Answers,
    listed_names,
    listed_references,
    logprobs_of,
    numbers,
    prompt_and_answers,
    reading,
)
from finetune.data.rows import RowForm
from finetune.errors import RowError
from finetune.recipe.extensions import DataFormat


def read(row: Mapping[str, object], form: RowForm) -> Answers:
    """Read answers that a model has sampled, with their rewards; some may be alike."""
    column, ignored = form.column, form.ignored
    prompt, answers = prompt_and_answers(row, column, ignored)
    if len(answers) < 2:
        raise RowError(f"{column('completions')!r} has one answer: an advantage is over others")
    return Answers(
        prompt=prompt,
        answers=answers,
        names=listed_names(form, len(answers)),
        values=tuple(numbers(row, column("rewards"), len(answers))),
        references=listed_references(row, column, ignored, len(answers)),
        logprobs=logprobs_of(row, column("logprobs"), ignored, len(answers)),
    )


EXTENSION = DataFormat(
    summary="sampled answers with their rewards",
    columns=("prompt", "completions", "rewards"),
    optional=("tools", "system", "ref_logps", "logprobs"),
    read=reading(read),
    suggests={"method": "grpo"},
)
