"""A model card is published: it says nothing of the machine, and no prompt unasked."""

from typing import Any

import pytest
from pydantic import BaseModel

from finetune.recipe.recipe import Recipe, resolved_yaml
from finetune.recipe.sections import MixSource
from finetune.report.model_card import public_recipe
from tests.builders import recipe_values

HOME = "/home/alice/secret-project"
PROMPT = "/no_think You are Bob's private tutor."


def with_paths(part: BaseModel) -> Any:
    """Return a part of a recipe in which each text that can be a path is one."""
    changed: dict[str, Any] = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            changed[name] = with_paths(value)
        elif field.annotation in (str, str | None) and name != "system":
            changed[name] = f"{HOME}/{name}"
        elif name == "mix":
            changed[name] = (with_paths(MixSource(path="x")),)
    return part.model_copy(update=changed)


def test_no_setting_s_path_is_in_a_card() -> None:
    """That of `adapter.init_from` was: settings with paths were listed by hand (#41)."""
    recipe = with_paths(Recipe.model_validate(recipe_values()))
    assert recipe.adapter.init_from.startswith(HOME)
    text = resolved_yaml(public_recipe(recipe))
    assert "alice" not in text
    assert "secret" not in text
    assert "init_from: init_from\n" in text


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("place", ["data", "mix"])
def test_system_prompts_are_shown_where_a_recipe_asks_for_it(place: str, is_asked: bool) -> None:
    recipe = Recipe.model_validate(recipe_values())
    update = (
        {"system": PROMPT} if place == "data" else {"mix": (MixSource(path="x", system=PROMPT),)}
    )
    recipe = recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update=update),
            "output": recipe.output.model_copy(update={"card_system": is_asked}),
        }
    )
    text = resolved_yaml(public_recipe(recipe))
    assert (PROMPT in text) is is_asked
    assert ("(left out of this card)" in text) is not is_asked
    assert recipe.data.system == (PROMPT if place == "data" else None)
