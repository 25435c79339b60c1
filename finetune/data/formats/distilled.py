"""Answers with a teacher's likeliest tokens at each token."""

from collections.abc import Mapping

from finetune.data.answers import Answers, asked_and_said, listed, reading, turns_of_column
from finetune.data.rows import RowForm
from finetune.data.top_tokens import TopTokens
from finetune.recipe.extensions import DataFormat


def read(row: Mapping[str, object], form: RowForm) -> Answers:
    """Read an answer with a teacher's likeliest tokens at each of its tokens."""
    column, ignored = form.column, form.ignored
    answer = turns_of_column(row, column("completion"), "assistant", ignored)
    prompt, *answers = asked_and_said(row, column("prompt"), [answer], ignored)
    names = column("top_ids"), column("top_logprobs")
    ids, logprobs = (listed(row, name) for name in names)
    return Answers(
        prompt=prompt,
        answers=tuple(answers),
        names=(column("completion"),),
        values=(1.0,),
        teacher=(TopTokens.read(ids, logprobs, names),),
    )


EXTENSION = DataFormat(
    summary="an answer with a teacher's likeliest tokens",
    columns=("prompt", "completion", "top_ids", "top_logprobs"),
    optional=("tools", "system"),
    read=reading(read),
    suggests={"method": "distill"},
)
