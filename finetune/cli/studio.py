"""The command that serves the local page."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.arguments import Machine
from finetune.cli.console import print_text, warn
from finetune.errors import ConfigError
from finetune.exits import explained

PORT = 8765


def studio(
    folder: Annotated[Path, typer.Argument(help="The folder whose runs are shown.")] = Path("runs"),
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes any that is free.")
    ] = PORT,
    machine: Machine = None,
) -> None:
    """Serve a page on this machine alone: plan by sliders, and watch runs."""
    with explained("sluice studio"):
        try:
            from finetune.studio.server import serve
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the page needs {error.name}, which is not installed",
                limit="it is in the extra `studio`",
                hint='`python -m pip install ".[studio]"` in the repository',
            ) from error
        from tempfile import TemporaryDirectory

        from finetune.commands.plan import probed
        from finetune.planning.request import find_machine
        from finetune.studio.answer import Planner
        from finetune.studio.background import Background

        known = None if machine is None else find_machine(machine, dtype="bfloat16")
        with (
            TemporaryDirectory(prefix="sluice-studio-") as configs,
            Background(Path(configs)) as background,
        ):
            planner = Planner(
                here=lambda: known or probed("bfloat16", note=warn),
                folder=Path(configs),
                background=background.answer,
            )
            serve(planner, folder=folder, port=port, announce=print_address)


def print_address(address: str) -> None:
    """Print what to open."""
    print_text(f"Open {address}\nIt is for you alone: the token in it is new at each start.")
