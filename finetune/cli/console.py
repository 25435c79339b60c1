"""Printing: the one module besides `finetune.exits` that does it."""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from finetune.env import columns, launch

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPE_COLUMNS = 120  # of a file or pipe: tables stay whole


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
    """Print notes, each on its own line."""
    console.print(*notes, sep="\n", end="\n" if notes else "", markup=False)


def print_text(text: str) -> None:
    """Print an answer, unchanged."""
    print(text)


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


def warn(text: str) -> None:
    """Print a note that is not part of the answer."""
    print(text, file=sys.stderr)


def show(content: "RenderableType") -> None:
    """Print tables as wide as the terminal, and text unchanged."""
    if isinstance(content, str):
        print_text(content)
    else:
        open_console().print(content)
