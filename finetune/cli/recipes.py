"""The commands about shipped recipes."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.console import print_text
from finetune.exits import explained

recipes_app = typer.Typer(help="List, show and copy the shipped recipes.", no_args_is_help=True)


@recipes_app.command("list")
def recipes_list() -> None:
    """List the shipped recipes and shapes."""
    from finetune.recipe.recipe import shipped_recipes
    from finetune.recipe.shipped import shipped_shapes

    for name, path in shipped_recipes().items():
        print_text(f"{name:24} {_first_comment(path)}")
    print_text("\nshapes, for `sluice plan NAME` or `model.config`:")
    print_text("  " + ", ".join(shipped_shapes()))


@recipes_app.command("show")
def recipes_show(name: Annotated[str, typer.Argument(help="A shipped name.")]) -> None:
    """Print a shipped recipe with its comments."""
    with explained(name):
        from finetune.recipe.recipe import shipped_recipe

        print_text(shipped_recipe(name).read_text().rstrip())


@recipes_app.command("copy")
def recipes_copy(
    name: Annotated[str, typer.Argument(help="A shipped name.")],
    to: Annotated[Path, typer.Argument(help="The file to write.")],
) -> None:
    """Copy a shipped recipe, and the files that it names, to be edited."""
    with explained(name):
        from finetune.recipe.copy import copy_recipe

        for written in copy_recipe(name, to):
            print_text(f"{written}")


@recipes_app.command("schema")
def recipes_schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from finetune.recipe.recipe import json_schema

    print_text(json_schema().rstrip())


def _first_comment(path: Path) -> str:
    return path.read_text().splitlines()[0].removeprefix("#").strip()
