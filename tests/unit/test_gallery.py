"""The gallery and the recipes that are shipped as suggestions are what the planner says today."""

import re

import pytest

from finetune.recipe.recipe import shipped_recipes
from tests.tiers import mostly_slow
from tests.tools.gallery import MODELS, PAGE, RAM_GIB, SHIPPED, VRAM_GIB, cell, recipe


def written() -> dict[tuple[str, int, int], str]:
    """Return the cells of the page, by model, VRAM and RAM."""
    found = {}
    for table in re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        ram = int(table.split(" GiB")[0])
        rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:1] == "|"]
        head, _, *models = rows
        for model, *cells in models:
            for column, text in zip(head[1:], cells, strict=True):
                found[model, int(column.split()[0]), ram] = text
    return found


PLACES = [(model, vram, ram) for ram in RAM_GIB for model in MODELS for vram in VRAM_GIB]
DRAWN = PLACES[::17]


def test_every_model_has_a_cell_for_each_card_and_ram() -> None:
    assert list(written()) == PLACES
    assert all(
        re.fullmatch(r"-|[\d,]+( (int8|fp8|nf4|disk))?(, disk)?", x) for x in written().values()
    )


@pytest.mark.parametrize("place", mostly_slow([(place,) for place in DRAWN], (DRAWN[1],)))
def test_a_cell_is_what_the_planner_says(place: tuple[str, int, int]) -> None:
    assert written()[place] == cell(*place), "`make generate` writes it"


@pytest.mark.parametrize("name", mostly_slow(list(SHIPPED), "llama32_3b_8gb"))
def test_a_suggestion_that_is_shipped_is_current(name: str) -> None:
    assert shipped_recipes()[name].read_text() == recipe(name), "`make generate` writes it"
