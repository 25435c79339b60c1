"""`report.notify`: a command of the user's that hears how a run ended.

It is called without a shell, by the main rank alone, with a line of JSON on its standard input. It
can neither end a run nor hold it up for longer than its time limit: whatever goes wrong with it is
a note.
"""

import json
import math
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

from finetune.errors import DivergedError
from finetune.run.run_files import EVAL_LOSS
from finetune.training.run import Run
from offload.errors import SluiceError

TIME_LIMIT_S = 30.0
Event = Literal["end", "error", "divergence"]


@contextmanager
def failures_notified(run: Run) -> Iterator[None]:
    """Call the command if this context fails, and let the failure pass."""
    try:
        yield
    except Exception as error:
        notify_failure(run, error)
        raise


def notify_failure(run: Run, error: Exception) -> None:
    """Call the command of a run that has failed, or diverged."""
    event: Event = "divergence" if isinstance(error, DivergedError) else "error"
    if isinstance(error, SluiceError):
        said = "; ".join(part for part in (error.what, error.limit) if part)
        notify(run, event, message=said, hint=error.hint)
    else:
        notify(run, event, message=f"{type(error).__name__}: {error}", hint=None)


def notify(run: Run, event: Event, *, message: str, hint: str | None = None) -> None:
    """Call the command of a run, if it has one and this is the main rank; this waits for it.

    Args:
        run: The run.
        event: The way in which it ended.
        message: The same in words.
        hint: The way out of an error, if one is known.
    """
    command = run.recipe.report.notify
    if command is None or not run.ranks.is_main:
        return
    content = {"event": event, "run": run.recipe.output.name, "dir": str(run.dir.path.resolve())}
    text = json.dumps({**content, "message": message, "hint": hint, **_figures(run)})
    problem = _problem_of(shlex.split(command), text)
    if problem is not None:
        run.screen.note(f"report.notify: `{command}` {problem}")


def _problem_of(words: list[str], text: str) -> str | None:
    """Call a command with a text; return what went wrong, None if nothing did."""
    try:
        ended = subprocess.run(
            words,
            input=text + "\n",
            text=True,
            errors="replace",
            capture_output=True,
            check=False,
            timeout=TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"was ended after {TIME_LIMIT_S:g} s"
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    if ended.returncode == 0:
        return None
    said = (ended.stderr or ended.stdout).strip().splitlines()[-1:]
    return f"ended with {ended.returncode}{': ' if said else ''}{''.join(said)}"


def _figures(run: Run) -> dict[str, Any]:
    """Return the newest step and its losses; nothing where none is written, or readable."""
    rows: list[dict[str, Any]] = []
    with suppress(SluiceError, OSError):
        rows = run.dir.read_metrics()[-1:]
    names = ("step", "loss", EVAL_LOSS)
    found = {name: row[name] for row in rows for name in names if name in row}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
