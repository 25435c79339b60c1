"""Commands that train."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.arguments import (
    JsonLogs,
    MachineFile,
    Overrides,
    Quiet,
    Resume,
    Source,
    Verbose,
)
from finetune.cli.console import open_console, warn
from finetune.env import launch
from finetune.errors import ConfigError
from finetune.exits import EXIT_USER, explained
from finetune.interrupts import exit_code, shown_signal

if TYPE_CHECKING:
    from finetune.report.screen import Screen
    from finetune.sweep.variants import Variants


def finetune(
    recipe: Source,
    overrides: Overrides = None,
    *,
    resume: Resume = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an old run.")] = False,
    machine: MachineFile = None,
    is_verbose: Verbose = False,
    is_quiet: Quiet = False,
    has_json_logs: JsonLogs = False,
) -> None:
    """Train an adapter, and show predicted against measured step time.

    Several recipes train over one stream of the base that they share.
    """
    from finetune.recipe.load import is_recipe, load_recipe
    from finetune.training.rendezvous import join

    with explained(recipe):
        if resume and overwrite:
            raise ConfigError(
                "both --resume and --overwrite",
                hint="`--resume` continues it, `--overwrite` begins it again",
            )
        more = [word for word in overrides or [] if is_recipe(word)]
        if more:
            from finetune.sweep.variants import recipes_together

            screen = _screen(is_verbose=is_verbose, is_quiet=is_quiet, has_json_logs=has_json_logs)
            _sweep(
                lambda: recipes_together([recipe, *more], overrides or []),
                machine,
                (resume, overwrite),
                screen,
                most=None,
            )
            return
        screen = _screen(is_verbose=is_verbose, is_quiet=is_quiet, has_json_logs=has_json_logs)
        with join(launch()) as ranks:
            settings = load_recipe(recipe, overrides or [])
            run_dir = settings.output.run_dir
            screen.note(f"Recipe {recipe}, run directory {run_dir}")
            from finetune.train import finetune as run

            outcome = run(
                settings,
                ranks=ranks,
                screen=screen,
                machine_file=machine,
                is_resume=resume,
                may_overwrite=overwrite,
            )
        if outcome.signal is not None:
            by = shown_signal(outcome.signal, outcome.signalled, num_ranks=ranks.num)
            note = f"Stopped after step {outcome.num_steps}{by}; continue with `--resume`."
            if ranks.is_first_here and not ranks.is_main:
                warn(note)  # on its machine nothing else is shown
            screen.note(note)
            raise typer.Exit(exit_code(outcome.signal))
        kind, folder = ("Model", "model") if settings.train.is_full else ("Adapter", "adapter")
        screen.note(f"{kind}: {outcome.run_dir / folder}")
        screen.note(f"Report:  {outcome.run_dir / 'report.html'}")
        if not is_verbose:
            screen.note(f"Details: `sluice explain {outcome.run_dir}`")


def sweep(
    source: Annotated[
        str, typer.Argument(help="A recipe, a file of variants, or with --resume a sweep's folder.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE,...]...", help="Settings, each with all its values."),
    ] = None,
    *,
    is_zipped: Annotated[
        bool, typer.Option("--zip", help="Take values in step, not each with each.")
    ] = False,
    max_runs: Annotated[int, typer.Option(min=1, help="The most runs.")] = 64,
    together: Annotated[
        int | None, typer.Option(min=1, help="The most runs at a time; the others wait.")
    ] = None,
    resume: Resume = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace old runs.")] = False,
    machine: MachineFile = None,
    is_verbose: Verbose = False,
    is_quiet: Quiet = False,
    has_json_logs: JsonLogs = False,
) -> None:
    """Train variants of a recipe over one stream of the base, each as if it were alone."""
    from finetune.sweep.variants import variants_of, variants_to_resume

    with explained(source):
        screen = _screen(is_verbose=is_verbose, is_quiet=is_quiet, has_json_logs=has_json_logs)
        words = settings or []
        _sweep(
            lambda: (
                variants_to_resume(source, words, is_zipped=is_zipped)
                if resume
                else variants_of(source, words, is_zipped=is_zipped, max_runs=max_runs)
            ),
            machine,
            (resume, overwrite),
            screen,
            most=together,
        )


def _sweep(
    read: Callable[[], "Variants"],
    machine: Path | None,
    resume_or_overwrite: tuple[bool, bool],
    screen: "Screen",
    *,
    most: int | None,
) -> None:
    """Run a sweep, read once all ranks are there; a run that failed makes the command fail."""
    from finetune.sweep.sweep import How
    from finetune.sweep.sweep import sweep as run
    from finetune.training.rendezvous import join

    how = How.of(machine, *resume_or_overwrite, most=most)
    with join(launch()) as ranks:
        outcome = run(read(), how, ranks=ranks, screen=screen)
    if outcome.signal is not None:
        raise typer.Exit(exit_code(outcome.signal))
    if outcome.has_failures:
        raise typer.Exit(EXIT_USER)


def _screen(*, is_verbose: bool, is_quiet: bool, has_json_logs: bool) -> "Screen":
    """Return the screen that the options ask for.

    Raises:
        ConfigError: Two of them contradict each other.
    """
    if is_quiet and (is_verbose or has_json_logs):
        other = "--verbose" if is_verbose else "--json-logs"
        raise ConfigError(f"both --quiet and {other}", hint="leave one of them out")
    from finetune.report.screen import Screen

    return Screen(
        open_console(is_quiet=is_quiet),
        is_verbose=is_verbose,
        form="json" if has_json_logs else "text",
    )
