"""Commands about what a run left: why it took its time, its adapter, its model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.arguments import (
    AsJson,
)
from finetune.cli.console import open_console, print_notes, print_text, warn
from finetune.errors import ConfigError
from finetune.exits import explained

if TYPE_CHECKING:
    pass


def explain(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory, finished or not.")],
    *,
    as_json: AsJson = False,
    html: Annotated[
        bool, typer.Option("--html", help="Write report.html, a page to look at, and nothing else.")
    ] = False,
) -> None:
    """Show predicted against measured again, and draw both, from a run's files alone."""
    with explained(str(run_dir)):
        from finetune.report.explain import draw
        from finetune.report.explain import explain as explanation
        from finetune.report.explain_tables import explanation_tables

        if html:
            from finetune.report.pages.run_page import write_run_page

            print_text(str(write_run_page(run_dir)))
            return
        found = explanation(run_dir)
        if as_json:
            print_text(json.dumps(found.to_json(), indent=2))
            return
        open_console().print(explanation_tables(found))
        open_console().print(f"Drawn: {' and '.join(map(str, draw(run_dir, found)))}", markup=False)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, finished or not.")],
    *,
    out: Annotated[
        Path | None, typer.Option(help="The page to write, such as compare.html.")
    ] = None,
) -> None:
    """Show runs next to each other: recipes, losses, speed, energy; with --out their curves."""
    with explained(" ".join(map(str, runs))):
        from finetune.files.atomic import write_atomically
        from finetune.report.compared_runs import read_runs, runs_table
        from finetune.report.pages.compare_page import compare_page

        if out is not None and out.suffix != ".html":
            raise ConfigError(
                f"--out {out}", limit="it is a page: NAME.html", hint="`--out compare.html`"
            )
        found = read_runs(runs)
        open_console().print(runs_table(found))
        if out is not None:
            write_atomically(out, compare_page(found))
            open_console().print(f"Page: {out}", markup=False)


def adapter(
    run_dir: Annotated[Path, typer.Argument(help="A finished run's directory.")],
    *,
    layout: Annotated[
        str, typer.Option("--format", help="Who is to read it: vllm. (peft reads it as it is.)")
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
) -> None:
    """Write a finished run's adapter in another layout."""
    with explained(str(run_dir)):
        if layout != "vllm":
            raise ConfigError(
                f"--format {layout}",
                limit="an adapter is written for vllm; peft reads RUN_DIR/adapter as it is",
                hint="`--format vllm`",
            )
        from finetune.export.vllm import write_vllm_adapter
        from finetune.model.config import read_config
        from finetune.run.run_dir import RunDir

        run = RunDir(run_dir)
        for note in run.require_adapter():
            warn(note)
        model = run.recipe().model
        config = read_config(model)
        readers = write_vllm_adapter(run.adapter, out, model_config=config)
        print_text("\n".join([f"{out}", *readers]))


def merge(
    run_dir: Annotated[Path, typer.Argument(help="A finished run's directory.")],
    *,
    out: Annotated[Path, typer.Option(help="The directory to write; it must not be there.")],
) -> None:
    """Write the trained model as plain weights, a few tensors in memory at a time."""
    with explained(str(run_dir)):
        from finetune.data.stops import template_kwargs_in
        from finetune.data.switch import server_flags
        from finetune.export.merge_run import merge_run
        from finetune.report.screen import Screen

        console = open_console()
        screen = Screen(console, is_verbose=False)
        with screen.working("Writing weights", "bytes") as progress:
            merged = merge_run(run_dir, out, progress=progress)
        print_notes(console, merged.notes)
        console.print(f"Model: {merged.folder}", markup=False)
        kwargs = template_kwargs_in(merged.folder)
        print_notes(console, server_flags(kwargs, model=str(merged.folder)))


def export(
    source: Annotated[Path, typer.Argument(help="A finished run, or a merged model.")],
    *,
    gguf: Annotated[Path, typer.Option(help="The file to write; it must not be there.")],
    llama_cpp: Annotated[
        Path | None,
        typer.Option(help="A clone of llama.cpp; without it, its converter on the PATH."),
    ] = None,
) -> None:
    """Write the trained model as a GGUF file, by llama.cpp's converter."""
    with explained(str(source)):
        from finetune.export.gguf import export_gguf
        from finetune.report.screen import Screen

        console = open_console()
        screen = Screen(console, is_verbose=False)
        with screen.working("Writing weights", "bytes") as progress:
            exported = export_gguf(source, gguf, llama_cpp=llama_cpp, progress=progress)
        print_notes(console, exported.notes)
        console.print(f"GGUF: {exported.file}", markup=False)
