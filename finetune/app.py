"""The program: its commands, and how it ends."""

import os
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Annotated, Any

import typer

from finetune.cli.commands import (
    adapter,
    chat,
    compare,
    data,
    doctor,
    explain,
    export,
    finetune,
    fit,
    generate,
    init,
    merge,
    plan,
    probe,
    push,
    recipes_app,
    score,
    serve,
    share,
    studio,
    sweep,
    validate,
)
from finetune.cli.console import print_versions
from finetune.env import quiet_libraries, rank_label
from finetune.exits import EXIT_USER
from offload.errors import SluiceError
from offload.registry import Registry

CHATTY_MODULES = r"(transformers|peft|accelerate|datasets|bitsandbytes|huggingface_hub)(\.|$)"
_OURS: Sequence[Callable[..., None]] = (
    *(finetune, sweep),
    *(init, plan, fit, probe, doctor, validate),
    *(data, explain, compare, generate, chat, score),
    *(adapter, merge, export, push, share),
    *(studio, serve),
)
COMMANDS = Registry[Any]("commands", {one.__name__: one for one in _OURS}, FunctionType)

app = typer.Typer(
    name="sluice",
    help="Fine-tune language models larger than the GPU, and know the step time beforehand.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def sluice(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=print_versions,
            is_eager=True,
            help="Print the versions of Sluice, torch and transformers.",
        ),
    ] = False,
) -> None:
    """Take the options in front of a command."""


app.add_typer(recipes_app, name="recipes")
try:
    for name, command in COMMANDS.items():
        app.command(name)(command)
except SluiceError as error:
    sys.exit(f"error: {error}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program.

    With several ranks, exit without interpreter shutdown: communication threads that are still in
    use by other ranks, or left over after disconnecting, have aborted the process there.
    """
    _quiet_libraries()
    try:
        app(list(argv) if argv is not None else None)
    except BaseException as error:
        code = int(error.code or 0) if isinstance(error, SystemExit) else EXIT_USER
        if not rank_label():
            raise
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _quiet_libraries() -> None:
    """Silence library messages meant for their developers; errors are still shown.

    torch's warnings are kept: a driver that is too old concerns the user. But for one: torch 2.11
    tells of its own thread for backwards, once, that it gets its context late.
    """
    import logging
    import warnings

    quiet_libraries()
    for name in ("bitsandbytes", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    warnings.filterwarnings("ignore", category=UserWarning, module=CHATTY_MODULES)
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA")
