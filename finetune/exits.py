"""How a command ends: its exit code and, after an error, the message on stderr."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from finetune.env import rank_label
from finetune.errors import ConfigError, RankError, file_error
from finetune.interrupts import Interrupted, exit_code, raised
from offload.errors import DoesNotFitError, SluiceError

EXIT_USER, EXIT_DOES_NOT_FIT = 1, 3


def warn(text: str) -> None:
    """Print what is not part of the answer; on a terminal lines end between words."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        console.print(text, markup=False)
    else:
        print(text, file=sys.stderr)


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn errors that a user or machine can cause into a message on stderr and an exit code."""
    try:
        with raised():
            yield
    except SluiceError as error:
        if isinstance(error, RankError) and not error.is_shown:
            raise typer.Exit(EXIT_USER) from None  # another rank of this machine shows why
        _show(error, where)
        code = EXIT_DOES_NOT_FIT if isinstance(error, DoesNotFitError) else EXIT_USER
        raise typer.Exit(code) from None
    except BrokenPipeError:
        raise  # the reader of a pipe has gone, as with `| head`: typer exits silently
    except OSError as error:
        warn(f"error{rank_label()}: {file_error(error, where)}")
        raise typer.Exit(EXIT_USER) from None
    except KeyboardInterrupt as error:
        warn("stopped")
        number = error.number if isinstance(error, Interrupted) else signal.SIGINT
        raise typer.Exit(exit_code(number)) from None


def _show(error: SluiceError, where: str) -> None:
    joint = "\n" if "\n" in error.what else "; " if error.limit else ""
    is_named = isinstance(error, ConfigError) or where in f"{error.what} {error.limit}"
    limit, newline, details = error.limit.partition("\n")
    what = f"{error.what}{joint}{limit}{'' if is_named else f' ({where})'}{newline}{details}"
    warn(f"error{rank_label()}: {what}\n\nhint: {error.hint}")
