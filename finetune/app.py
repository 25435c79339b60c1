"""The commands. The one module that prints and exits."""

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from finetune.commands.recipes import recipes_app
from finetune.env import columns, launch, quiet_libraries, stores_dir
from finetune.errors import ConfigError
from finetune.exits import EXIT_USER
from finetune.exits import explained as _explained
from finetune.interrupts import exit_code
from finetune.training.ranks import is_joined

if TYPE_CHECKING:
    from rich.console import RenderableType

    from finetune.sweep.variants import Variants

PROBE_HOST_S = 2.0
PIPE_COLUMNS = 120  # of a file or pipe: tables stay whole
CHATTY_MODULES = r"(transformers|peft|accelerate|datasets|bitsandbytes|huggingface_hub)(\.|$)"

app = typer.Typer(
    name="sluice",
    help="Fine-tune language models larger than the GPU, and know the step time beforehand.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(recipes_app, name="recipes")

Source = Annotated[str, typer.Argument(help="A recipe's path, or a shipped name.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings over the recipe's.")
]
Machine = Annotated[
    str | None,
    typer.Option(help="A named card such as rtx5090, or a file of `sluice probe --save`."),
]


def _finite(value: float | None) -> float | None:
    if value is not None and math.isnan(value):  # which is in every range
        raise typer.BadParameter("nan is no number")
    return value


Resume = Annotated[bool, typer.Option("--resume", help="Continue where it stopped.")]
MachineFile = Annotated[
    Path | None, typer.Option(help="What `sluice probe --save` wrote, in place of measuring again.")
]
Ram = Annotated[
    float | None,
    typer.Option(
        min=1, max=1_000_000, callback=_finite, help="GiB of RAM in the machine of a named card."
    ),
]
Link = Annotated[
    float | None,
    typer.Option(min=0.1, max=1_000_000, callback=_finite, help="GB/s of a named card's link."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print figures for programs.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print every table.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]


@app.command()
def finetune(
    recipe: Source,
    overrides: Overrides = None,
    *,
    resume: Resume = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an old run.")] = False,
    machine: MachineFile = None,
    is_verbose: Verbose = False,
) -> None:
    """Train an adapter, and show predicted against measured step time.

    Several recipes train over one stream of the base that they share.
    """
    from finetune.recipe.load import is_recipe, load_recipe
    from finetune.training.rendezvous import join

    with _explained(recipe):
        if resume and overwrite:
            raise ConfigError(
                "both --resume and --overwrite",
                hint="`--resume` continues it, `--overwrite` begins it again",
            )
        more = [word for word in overrides or [] if is_recipe(word)]
        if more:
            from finetune.sweep.variants import recipes_together

            variants = recipes_together([recipe, *more], overrides or [])
            _sweep(variants, machine, (resume, overwrite), most=None, is_verbose=is_verbose)
            return
        console = _console()
        with join(launch()) as ranks:
            settings = load_recipe(recipe, overrides or [])
            run_dir = settings.output.run_dir
            console.print(f"Recipe {recipe}, run directory {run_dir}", markup=False)
            from finetune.report.screen import Screen
            from finetune.train import finetune as run

            outcome = run(
                settings,
                ranks=ranks,
                screen=Screen(console, is_verbose=is_verbose),
                machine_file=machine,
                is_resume=resume,
                may_overwrite=overwrite,
            )
        if outcome.signal is not None:
            console.print(
                f"Stopped after step {outcome.num_steps}; continue with `--resume`.",
                markup=False,
            )
            raise typer.Exit(exit_code(outcome.signal))
        kind, folder = ("Model", "model") if settings.train.is_full else ("Adapter", "adapter")
        console.print(f"{kind}: {outcome.run_dir / folder}", markup=False)
        console.print(f"Report:  {outcome.run_dir / 'report.html'}", markup=False)
        if not is_verbose:
            console.print(f"Details: `sluice explain {outcome.run_dir}`", markup=False)


@app.command()
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
) -> None:
    """Train variants of a recipe over one stream of the base, each as if it were alone."""
    from finetune.sweep.variants import variants_of, variants_to_resume

    with _explained(source):
        variants = (
            variants_to_resume(source, settings or [], is_zipped=is_zipped)
            if resume
            else variants_of(source, settings or [], is_zipped=is_zipped, max_runs=max_runs)
        )
        _sweep(variants, machine, (resume, overwrite), most=together, is_verbose=is_verbose)


def _sweep(
    variants: "Variants",
    machine: Path | None,
    resume_or_overwrite: tuple[bool, bool],
    *,
    most: int | None,
    is_verbose: bool,
) -> None:
    """Run a sweep; a run that failed makes the command fail."""
    from finetune.report.screen import Screen
    from finetune.sweep.sweep import How
    from finetune.sweep.sweep import sweep as run
    from finetune.training.rendezvous import join

    how = How.of(machine, *resume_or_overwrite, most=most)
    with join(launch()) as ranks:
        outcome = run(variants, how, ranks=ranks, screen=Screen(_console(), is_verbose=is_verbose))
    if outcome.signal is not None:
        raise typer.Exit(exit_code(outcome.signal))
    if outcome.has_failures:
        raise typer.Exit(EXIT_USER)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A recipe, a shape, a config.json or variants.")],
    overrides: Overrides = None,
    *,
    machine: Machine = None,
    machines: Annotated[
        str | None, typer.Option(help="`all`, or cards with commas: a table of them all.")
    ] = None,
    ram: Ram = None,
    link: Link = None,
    wants_ways: Annotated[
        bool, typer.Option("--what-if", help="Price other ways to hold, move and share the model.")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="`train.lr=1e-4,2e-4`: runs that share their steps; may be repeated."),
    ] = None,
    runs: Annotated[
        int | None, typer.Option(min=2, max=256, help="So many equal runs that share their steps.")
    ] = None,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    is_verbose: Verbose = False,
) -> None:
    """Predict step time and memory, without weights and without the card."""
    with _explained(model):
        from finetune.commands.plan import HostOptions, form_of, planned, planned_runs
        from finetune.recipe.grid import named_variants

        if sweep or runs is not None or named_variants(model) is not None:
            flag = "--machines" if machines else "--what-if" if wants_ways else None
            if flag is not None:
                raise ConfigError(
                    f"{flag} with several runs",
                    limit="runs are planned together for one machine",
                    hint=f"leave out `{flag}`, or `--sweep` and `--runs`",
                )
            shown = planned_runs(
                model,
                overrides or [],
                grid=sweep or [],
                num_runs=runs,
                machine=machine,
                host=HostOptions(ram_gib=ram, link_gb_per_s=link),
                form=form_of(as_json=as_json, as_markdown=as_markdown, is_verbose=is_verbose),
                note=_warn,
            )
            _show(shown)
            return
        shown = planned(
            model,
            overrides or [],
            machine=machine,
            machines=machines,
            host=HostOptions(ram_gib=ram, link_gb_per_s=link),
            wants_ways=wants_ways,
            form=form_of(as_json=as_json, as_markdown=as_markdown, is_verbose=is_verbose),
            note=_warn,
        )
        _show(shown)


@app.command()
def fit(
    model: Annotated[
        str | None, typer.Argument(help="A shape or config.json; all shipped shapes without it.")
    ] = None,
    *,
    vram: Annotated[
        float | None,
        typer.Option(min=1, max=1_000_000, callback=_finite, help="GiB of VRAM to use."),
    ] = None,
    ram: Ram = None,
    link: Link = None,
    machine: Machine = None,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """List what trains, with LoRA, in given memory."""
    with _explained(model or "all shapes"):
        from finetune.commands.plan import HostOptions, form_of, models_that_fit

        shown = models_that_fit(
            model,
            machine=machine,
            vram_gib=vram,
            host=HostOptions(ram_gib=ram, link_gb_per_s=link),
            form=form_of(as_json=as_json, as_markdown=as_markdown, is_verbose=False),
        )
        _show(shown)


@app.command()
def probe(
    *,
    dtype: Annotated[
        str, typer.Option(help="What layers compute in: bfloat16 or float32.")
    ] = "bfloat16",
    as_json: AsJson = False,
    save: Annotated[
        Path | None, typer.Option(help="Write it to a file for `plan --machine`.")
    ] = None,
) -> None:
    """Measure this machine."""
    with _explained("this machine"):
        from finetune.commands.plan import probed
        from finetune.report.host_map import host_map
        from finetune.report.plan import machine_table
        from offload.probe.host import with_host

        machine = with_host(probed(dtype, note=_warn), folder=stores_dir(), seconds=PROBE_HOST_S)
        if save is not None:
            save.write_text(machine.to_json())
        if as_json:
            _print(machine.to_json())
        else:
            _console().print(host_map(machine, None), machine_table(machine), sep="\n")


@app.command()
def doctor(*, as_json: AsJson = False) -> None:
    """Check this machine, and say how to fix what stops or slows training."""
    with _explained("this machine"):
        from finetune.commands.doctor import can_train, examined, findings_json, findings_table

        _warn("Looking at this machine ...")
        findings = examined()
        _show(findings_json(findings) if as_json else findings_table(findings))
        if not can_train(findings):
            raise typer.Exit(EXIT_USER)


@app.command()
def validate(recipe: Source, overrides: Overrides = None) -> None:
    """Check a recipe and print it with all defaults."""
    from finetune.recipe.load import load_recipe
    from finetune.recipe.recipe import resolved_yaml

    with _explained(recipe):
        _print(resolved_yaml(load_recipe(recipe, overrides or [])).rstrip())


@app.command()
def data(
    recipe: Source,
    overrides: Overrides = None,
    *,
    rows: Annotated[int, typer.Option(min=0, help="Rows of each source to show.")] = 3,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Write it as a page to this file.")] = None,
) -> None:
    """Show what the model will see: rows with their loss, lengths, and what is left out and why."""
    with _explained(recipe):
        from finetune.commands.data import data_view
        from finetune.report.data_html import data_html
        from finetune.report.data_view import data_json, data_tables

        if as_json and html is not None:
            raise ConfigError("both --json and --html", hint="`--json` alone, or `--html` alone")
        view = data_view(recipe, overrides or [], num_rows=rows, note=_warn)
        if html is not None:
            html.write_text(data_html(view), encoding="utf-8")
            _print(f"Written: {html}")
            return
        if as_json:
            _print(data_json(view))
            return
        console = _console()
        has_colour = console.is_terminal and not console.no_color
        console.print(data_tables(view, has_colour=has_colour))


@app.command("explain")
def explain_run(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory, finished or not.")],
    *,
    as_json: AsJson = False,
    html: Annotated[
        bool, typer.Option("--html", help="Write report.html, a page to look at, and nothing else.")
    ] = False,
) -> None:
    """Show predicted against measured again, and draw both, from a run's files alone."""
    with _explained(str(run_dir)):
        from finetune.report.explain import draw, explain
        from finetune.report.explain_tables import explanation_tables

        if html:
            from finetune.report.pages.run_page import write_run_page

            _print(str(write_run_page(run_dir)))
            return
        found = explain(run_dir)
        if as_json:
            _print(json.dumps(found.to_json(), indent=2))
            return
        _console().print(explanation_tables(found))
        _console().print(f"Drawn: {' and '.join(map(str, draw(run_dir, found)))}", markup=False)


@app.command()
def generate(
    run_dir: Annotated[Path, typer.Argument(help="A finished run's directory.")],
    *,
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the most probable token, more draws one.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from so many tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Draw from tokens of this probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the draws; 0 if not given.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer.")] = None,
) -> None:
    """Answer a prompt with a finished run's adapter."""
    with _explained(str(run_dir)):
        from finetune.commands.generate import answer_prompt
        from finetune.model.sampling import chosen_by

        choose = chosen_by(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        answer = answer_prompt(
            run_dir,
            prompt,
            max_new_tokens=max_new_tokens,
            choose=choose,
            stop_strings=stop or [],
            note=_warn,
        )
        _print(answer)


@app.command()
def score(
    model: Annotated[str, typer.Argument(help="A recipe, or a model directory: the base.")],
    rows: Annotated[str, typer.Argument(help="Rows: a file, as `data.path` of a recipe.")],
    overrides: Overrides = None,
    *,
    adapter: Annotated[
        list[Path] | None, typer.Option(help="An adapter's folder or a finished run; repeatable.")
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="A run's directory: rank all of its checkpoints.")
    ] = None,
    has_base: Annotated[bool, typer.Option("--base", help="Score the base too.")] = False,
    machine: MachineFile = None,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="Write each row's scores to this file.")] = None,
) -> None:
    """Score rows under a base, adapters and checkpoints, all in one pass over the layers."""
    with _explained(model):
        from finetune.commands.score import Asked, score_rows

        asked = Asked(
            adapters=tuple(adapter or ()),
            checkpoints=checkpoints,
            has_base=has_base,
            machine=machine,
            out=out,
        )
        _show(score_rows(model, rows, overrides or [], asked, as_json=as_json, note=_warn))


@app.command()
def adapter(
    run_dir: Annotated[Path, typer.Argument(help="A finished run's directory.")],
    *,
    layout: Annotated[
        str, typer.Option("--format", help="Who is to read it: vllm. (peft reads it as it is.)")
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
) -> None:
    """Write a finished run's adapter in another layout."""
    with _explained(str(run_dir)):
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
            _warn(note)
        model = run.recipe().model
        config = read_config(model)
        readers = write_vllm_adapter(run.adapter, out, model_config=config)
        _print("\n".join([f"{out}", *readers]))


@app.command()
def merge(
    run_dir: Annotated[Path, typer.Argument(help="A finished run's directory.")],
    *,
    out: Annotated[Path, typer.Option(help="The directory to write; it must not be there.")],
) -> None:
    """Write the trained model as plain weights, a few tensors in memory at a time."""
    with _explained(str(run_dir)):
        from finetune.export.merge_run import merge_run
        from finetune.report.screen import bytes_bar

        console = _console()
        with bytes_bar(console, "merge") as progress:
            merged = merge_run(run_dir, out, progress=progress)
        _notes(console, merged.notes)
        console.print(f"Model: {merged.folder}", markup=False)


@app.command()
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
    with _explained(str(source)):
        from finetune.export.gguf import export_gguf
        from finetune.report.screen import bytes_bar

        console = _console()
        with bytes_bar(console, "merge") as progress:
            exported = export_gguf(source, gguf, llama_cpp=llama_cpp, progress=progress)
        _notes(console, exported.notes)
        console.print(f"GGUF: {exported.file}", markup=False)


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
        if not is_joined():
            raise
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---------------------------------------------------------------------------------------- printing


def _console() -> Console:
    """Return the terminal, or a stream as wide as COLUMNS says: 120 if it is not set.

    With several processes only the first one prints.
    """
    is_quiet = launch().index > 0
    console = Console(highlight=False, quiet=is_quiet)
    if console.is_terminal:
        return console
    return Console(highlight=False, width=columns() or PIPE_COLUMNS, quiet=is_quiet)


def _notes(console: Console, notes: Sequence[str]) -> None:
    console.print(*notes, sep="\n", end="\n" if notes else "", markup=False)


def _print(text: str) -> None:
    print(text)


def _warn(text: str) -> None:
    """Print a note that is not part of the answer."""
    print(text, file=sys.stderr)


def _show(content: "RenderableType") -> None:
    """Print tables as wide as the terminal, and text unchanged."""
    if isinstance(content, str):
        _print(content)
    else:
        _console().print(content)


def _quiet_libraries() -> None:
    """Silence library messages meant for their developers; errors are still shown.

    torch's warnings are kept: a driver that is too old concerns the user.
    """
    import logging
    import warnings

    quiet_libraries()
    for name in ("bitsandbytes", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    warnings.filterwarnings("ignore", category=UserWarning, module=CHATTY_MODULES)
