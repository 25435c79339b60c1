"""Whatever is asked of a recipe, it plans, or hints lead to one that does."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawn_recipes import CHOICES, Asked, followed

MOST_HINTS = 8

some_settings = st.lists(
    st.sampled_from(sorted(CHOICES)).flatmap(
        lambda path: st.tuples(st.just(path), st.sampled_from(CHOICES[path]))
    ),
    max_size=8,
).map(dict)


@settings(max_examples=40, derandomize=True)  # `python -m tests.drawn_recipes` draws more
@given(asked=some_settings, num_gpus=st.sampled_from([1, 2]))
def test_a_recipe_plans_or_is_refused_with_hints_that_lead_to_one_that_does(
    tmp_path_factory, asked: dict[str, object], num_gpus: int
) -> None:
    folder: Path = tmp_path_factory.getbasetemp()
    way = followed(Asked(settings=asked, num_gpus=num_gpus), folder, most=MOST_HINTS)
    assert way.is_planned, "\n".join(way.refusals)
    assert len(set(way.refusals)) == len(way.refusals), "a hint leads to another refusal"
