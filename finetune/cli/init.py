"""The command that asks for what a recipe needs."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from finetune.cli.arguments import Machine, Ram, Vram
from finetune.cli.console import print_text, show, typed_lines, warn
from finetune.errors import ConfigError
from finetune.exits import explained
from offload.errors import SluiceError

_Answer = TypeVar("_Answer")


def init(
    *,
    model: Annotated[
        str | None, typer.Option(help="A shape, loosely named, a model directory or a hub id.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Rows: as `data.path` of a recipe.")] = None,
    machine: Machine = None,
    vram: Vram = None,
    ram: Ram = None,
    goal: Annotated[
        str | None, typer.Option(help="What comes first: balanced, fastest, quality or context.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The recipe's file, which must be new.")] = None,
    is_unasked: Annotated[
        bool, typer.Option("--yes", help="Ask nothing: take defaults where there are any.")
    ] = False,
) -> None:
    """Ask for a model, rows, a card and a goal; look at the rows; write a recipe and its plan."""
    with explained("init"):
        from finetune.commands.init import Answers, card_of, default_out, make, rows_of
        from finetune.commands.recipes import Asked, require_new, target_of
        from finetune.planning.goals import DEFAULT_GOAL, GOALS, goal_named
        from finetune.planning.wanted_model import wanted_model

        require_new(out)
        can_ask = sys.stdin.isatty() and not is_unasked
        wanted = _answered(
            "Model (such as qwen3-8b, a folder or a hub id)",
            "--model",
            model,
            wanted_model,
            can_ask=can_ask,
        )
        rows = _answered(
            "Rows (a file, a folder or a hub id)",
            "--data",
            data,
            lambda text: rows_of(text, wanted, warn),
            can_ask=can_ask,
        )
        for line in rows.lines():
            print_text(line)
        if machine is not None or vram is not None:
            asked = Asked(machine=machine, vram_gib=vram, ram_gib=ram, goal=DEFAULT_GOAL)
            if machine != "here":
                target_of(asked, dtype="bfloat16")
        else:
            asked = _answered(
                "Card (a name, its GiB, or `here`; GiB of RAM after a comma: 12, 64)",
                "--vram or --machine",
                None,
                lambda text: card_of(text, ram_gib=ram),
                can_ask=can_ask,
            )
        chosen = _answered(
            f"Goal ({', '.join(GOALS)})",
            "--goal",
            goal,
            goal_named,
            default=DEFAULT_GOAL,
            can_ask=can_ask,
        )
        answers = Answers(model=wanted, rows=rows, asked=replace(asked, goal=chosen.name))
        made = make(answers, out=out or default_out(wanted, rows), note=warn)
        show(made.plan)
        for line in (*made.lines, *(f"Written: {file}" for file in made.files)):
            print_text(line)


def _answered(
    question: str,
    flag: str,
    given: str | None,
    read: Callable[[str], _Answer],
    *,
    can_ask: bool,
    default: str | None = None,
) -> _Answer:
    """Return the value of a flag, or of what is typed; what cannot be read is asked for again.

    Raises:
        ConfigError: Nothing is given, and nobody can be asked.
    """
    if given is not None:
        return read(given)
    if not can_ask:
        if default is not None:
            return read(default)
        raise ConfigError(
            f"{flag} is missing",
            limit="it is asked for on a terminal, and not with --yes",
            hint=f"`sluice init {flag.partition(' ')[0]} ...`",
        )
    shown = f"{question} [{default}]: " if default else f"{question}: "
    for text in typed_lines(shown):
        try:
            return read(text.strip() or default or "")
        except SluiceError as error:
            warn(f"{error}\n")
    raise ConfigError(f"{flag} is missing", limit="the input has ended", hint=f"`{flag} ...`")
