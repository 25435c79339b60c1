"""Printing: the one module besides `finetune.exits` that does it."""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from finetune.env import columns, launch

if TYPE_CHECKING:
    from rich.console import RenderableType


PIPE_COLUMNS = 120  # of a file or pipe: tables stay whole
GIB, MOST_GIB = "GIB", 1_000_000


def open_console(*, is_quiet: bool = False) -> Console:
    """Return the terminal, or a stream as wide as COLUMNS says: 120 if it is not set.

    With several processes only the first one prints.

    Args:
        is_quiet: Whether nothing is printed.
    """
    is_quiet = is_quiet or launch().index > 0
    console = Console(highlight=False, quiet=is_quiet)
    if console.is_terminal:
        return console
    return Console(highlight=False, width=columns() or PIPE_COLUMNS, quiet=is_quiet)


def open_errors() -> Console:
    """Return where notes go that are not part of the answer."""
    return Console(stderr=True, highlight=False)


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """Print notes, each on its own line: commands in them are copied, so none is broken."""
    end = "\n" if notes else ""
    console.print(*notes, sep="\n", end=end, markup=False, soft_wrap=True)


def print_text(text: str) -> None:
    """Print an answer, unchanged."""
    print(text)


def print_lines(text: str) -> None:
    """Print sentences of an answer; on a terminal lines end between words."""
    console = open_console()
    if console.is_terminal:
        console.print(text, markup=False)
    else:
        print_text(text)


def print_part(text: str) -> None:
    """Print a part of an answer, at once."""
    print(text, end="", flush=True)


def typed_lines(prompt: str) -> Iterator[str]:
    """Give what the user types, line by line, until the end of the input."""
    is_shown = sys.stdin.isatty()
    while True:
        try:
            yield input(prompt if is_shown else "")
        except EOFError:
            return


def show(content: "RenderableType") -> None:
    """Print tables as wide as the terminal, and text unchanged."""
    if isinstance(content, str):
        print_text(content)
    else:
        open_console().print(content)


def print_versions(is_asked: bool) -> None:  # noqa: FBT001 - by its place, as typer gives it
    """Print the versions of this program and of what it runs on, if they are asked for, and end."""
    if is_asked:
        from finetune.commands.doctor import versions

        print_text(versions())
        raise typer.Exit


def finite(value: float | None) -> float | None:
    """Refuse nan, which is in every range."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is no number")
    return value


def gib(text: str) -> float:
    """Read GiB, with the unit or without it."""
    from finetune.report.format import gib_in

    found = gib_in(text)
    if found is None or not 1 <= found <= MOST_GIB:
        raise typer.BadParameter(f"{text} is no number of GiB from 1 to {MOST_GIB:,}")
    return found


Source = Annotated[str, typer.Argument(help="A recipe's path, or a shipped name.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings over the recipe's.")
]
Machine = Annotated[
    str | None,
    typer.Option(help="A named card such as rtx5090, or a file of `sluice probe --save`."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue where it stopped.")]
MachineFile = Annotated[
    Path | None, typer.Option(help="What `sluice probe --save` wrote, in place of measuring again.")
]
Ram = Annotated[
    float | None,
    typer.Option(metavar=GIB, parser=gib, help="GiB of RAM in the machine of a named card."),
]
Headless = Annotated[
    bool, typer.Option("--headless", help="No desktop uses the named card: all of it is free.")
]
Vram = Annotated[
    float | None,
    typer.Option(metavar=GIB, parser=gib, help="GiB of VRAM to use, of a card that has them."),
]
Link = Annotated[
    float | None,
    typer.Option(min=0.1, max=1_000_000, callback=finite, help="GB/s of a named card's link."),
]
Gpus = Annotated[
    int | None,
    typer.Option(min=1, max=16, help="GPUs of the machine, which share a step and its RAM."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print figures for programs.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print every table.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors only.")]
JsonLogs = Annotated[
    bool, typer.Option("--json-logs", help="Print a JSON object a line, one for each step.")
]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print it as Markdown.")]
Temperature = Annotated[
    float, typer.Option(min=0, help="0 takes the most probable token, more draws one.")
]
TopK = Annotated[int | None, typer.Option(min=1, help="Draw from so many tokens.")]
TopP = Annotated[
    float | None, typer.Option(min=0, max=1, help="Draw from tokens of this probability.")
]
DrawSeed = Annotated[int | None, typer.Option(min=0, help="Of the draws; 0 if not given.")]
