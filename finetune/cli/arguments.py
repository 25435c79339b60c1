"""Arguments and options that several commands take."""

import math
from pathlib import Path
from typing import Annotated

import typer


def finite(value: float | None) -> float | None:
    """Refuse nan, which is in every range."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is no number")
    return value


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
    typer.Option(
        min=1, max=1_000_000, callback=finite, help="GiB of RAM in the machine of a named card."
    ),
]
Vram = Annotated[
    float | None,
    typer.Option(min=1, max=1_000_000, callback=finite, help="GiB of VRAM of the card."),
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
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]
Temperature = Annotated[
    float, typer.Option(min=0, help="0 takes the most probable token, more draws one.")
]
TopK = Annotated[int | None, typer.Option(min=1, help="Draw from so many tokens.")]
TopP = Annotated[
    float | None, typer.Option(min=0, max=1, help="Draw from tokens of this probability.")
]
DrawSeed = Annotated[int | None, typer.Option(min=0, help="Of the draws; 0 if not given.")]
