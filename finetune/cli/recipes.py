"""The commands about shipped recipes."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.arguments import Gpus, Machine, Overrides, Ram, Vram
from finetune.cli.console import print_text, warn
from finetune.exits import explained

GoalName = Annotated[
    str, typer.Option(help="What comes first: balanced, fastest, quality or context.")
]

recipes_app = typer.Typer(
    help="List, show and copy the shipped recipes, and write one for a model and a card.",
    no_args_is_help=True,
)


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


@recipes_app.command("for")
def recipes_for(
    model: Annotated[
        str, typer.Argument(help="A shipped shape, loosely named, a model directory or a hub id.")
    ],
    overrides: Overrides = None,
    *,
    vram: Vram = None,
    ram: Ram = None,
    gpus: Gpus = None,
    machine: Machine = None,
    goal: GoalName = "balanced",
    out: Annotated[
        Path | None, typer.Option(help="Write it to this file, which must be new.")
    ] = None,
) -> None:
    """Write a recipe for a model and a card, with the predicted figures on top."""
    with explained(model):
        from finetune.commands.recipes import Asked, recipe_for

        asked = Asked(machine=machine, vram_gib=vram, ram_gib=ram, num_gpus=gpus, goal=goal)
        text, notes = recipe_for(model, overrides or [], asked, out=out)
        for note in notes:
            warn(note)
        print_text(text.rstrip() if out is None else f"Written: {out}")


@recipes_app.command("schema")
def recipes_schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from finetune.recipe.recipe import json_schema

    print_text(json_schema().rstrip())


def _first_comment(path: Path) -> str:
    return path.read_text().splitlines()[0].removeprefix("#").strip()
