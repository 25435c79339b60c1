from typing import TypeVar

import pytest

from finetune.errors import FinetuneError
from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import Recipe
from finetune.training.ranks import Ranks, require_same_settings

T = TypeVar("T")


class Two(Ranks):
    """Rank 0 of two, of which the other has said what it has."""

    num = 2

    def __init__(self, other: object) -> None:
        self._other = other

    def exchange(self, value: T, *, is_step: bool = False) -> tuple[T, ...]:
        return value, self._other  # type: ignore[return-value]  # of the same type


def recipe(*words: str) -> Recipe:
    return load_recipe("quickstart", list(words))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("train.lr=0.5",), r"train\.lr: [0-9.e-]+ -> 0\.5"),
        (("output.eval_every=7",), r"output\.eval_every: .* -> 7"),
        (("output.checkpoint_every=7",), r"output\.checkpoint_every: .* -> 7"),
        (("model.dtype=bfloat16",), r"model\.dtype: .* -> \"bfloat16\""),
        (("data.packing=off",), r"data\.packing: .* -> \"off\""),
    ],
)
def test_what_differs_is_named(words: tuple[str, ...], shown: str) -> None:
    with pytest.raises(
        FinetuneError, match=f"settings on rank 1 are not those on rank 0: {shown}; ranks train"
    ):
        require_same_settings(Two(({"": recipe(*words)}, False)), {"": recipe()}, is_resume=False)


def test_names_and_reports_may_differ() -> None:
    other = recipe("output.name=other", "output.dir=elsewhere", "report.samples=3")
    require_same_settings(Two(({"": other}, True)), {"": recipe()}, is_resume=True)


def test_a_resume_of_one_rank_and_other_runs_are_named() -> None:
    with pytest.raises(FinetuneError, match="`--resume` is given to one of them"):
        require_same_settings(Two(({"": recipe()}, True)), {"": recipe()}, is_resume=False)
    with pytest.raises(FinetuneError, match="rank 0: runs a -> a, b; "):
        require_same_settings(
            Two(({"a": recipe(), "b": recipe()}, True)), {"a": recipe()}, is_resume=True
        )
