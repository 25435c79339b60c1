"""The commands: their arguments, and the function that each calls, imported when it is called."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.console import (
    AsJson,
    AsMarkdown,
    DrawSeed,
    Gpus,
    Headless,
    JsonLogs,
    Link,
    Machine,
    MachineFile,
    Overrides,
    Quiet,
    Ram,
    Resume,
    Source,
    Temperature,
    TopK,
    TopP,
    Verbose,
    Vram,
    open_console,
    open_errors,
    print_lines,
    print_notes,
    print_part,
    print_text,
    show,
    typed_lines,
)
from finetune.env import launch
from finetune.errors import ConfigError
from finetune.exits import EXIT_USER, explained, warn
from finetune.interrupts import exit_code, shown_signal

if TYPE_CHECKING:
    from finetune.model.tokenizer import Choose
    from finetune.report.screen import Screen
    from finetune.sweep.variants import Variants


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
        from finetune.commands.init import Answers, answered, card_of, default_out, make, rows_of
        from finetune.commands.recipes import Asked, require_new, target_of
        from finetune.planning.candidates import DEFAULT_GOAL, GOALS, goal_named
        from finetune.planning.subject import wanted_model

        require_new(out)
        typed = typed_lines if sys.stdin.isatty() and not is_unasked else None
        wanted = answered(
            "Model (such as qwen3-8b, a folder or a hub id)",
            "--model",
            model,
            wanted_model,
            typed=typed,
        )
        rows = answered(
            "Rows (a file, a folder or a hub id)",
            "--data",
            data,
            lambda text: rows_of(text, wanted, warn),
            typed=typed,
        )
        for line in rows.lines():
            print_lines(line)
        if machine is not None or vram is not None:
            asked = Asked(machine=machine, vram_gib=vram, ram_gib=ram, goal=DEFAULT_GOAL)
            if machine != "here":
                target_of(asked, dtype=None)
        else:
            asked = answered(
                "Card (a name, its GiB, or `here`; GiB of RAM after a comma: 12, 64)",
                "--vram or --machine",
                None,
                lambda text: card_of(text, ram_gib=ram),
                typed=typed,
            )
        chosen = answered(
            f"Goal ({', '.join(GOALS)})",
            "--goal",
            goal,
            goal_named,
            default=DEFAULT_GOAL,
            typed=typed,
        )
        answers = Answers(model=wanted, rows=rows, asked=replace(asked, goal=chosen.name))
        made = make(answers, out=out or default_out(wanted, rows), note=warn)
        show(made.plan)
        for line in (*made.lines, *(f"Written: {file}" for file in made.files)):
            print_lines(line)


def plan(
    model: Annotated[str, typer.Argument(help="A recipe, a shape, a config.json or variants.")],
    overrides: Overrides = None,
    *,
    machine: Annotated[
        str | None,
        typer.Option(help="A card such as rtx5090, or a file; several with commas share a step."),
    ] = None,
    machines: Annotated[
        str | None, typer.Option(help="`all`, or cards with commas: a table of them all.")
    ] = None,
    vram: Vram = None,
    ram: Ram = None,
    headless: Headless = False,
    link: Link = None,
    gpus: Gpus = None,
    interconnect: Annotated[
        str | None,
        typer.Option(help="Between GPUs: `nvlink`, `pcie`, or GB/s each way; `pcie` without it."),
    ] = None,
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
    images: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="Distinct images of the rows: their pass and bytes."),
    ] = None,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    is_verbose: Verbose = False,
) -> None:
    """Predict step time and memory, without weights and without the card."""
    with explained(model):
        from finetune.commands.plan import (
            HostOptions,
            form_of,
            planned,
            planned_on_cards,
            planned_runs,
        )
        from finetune.recipe.grid import named_variants

        host = HostOptions(
            ram_gib=ram,
            link_gb_per_s=link,
            num_gpus=gpus,
            interconnect=interconnect,
            is_headless=headless,
            vram_gib=vram,
        )
        if sweep or runs is not None or named_variants(model) is not None:
            flag = "--machines" if machines else "--what-if" if wants_ways else None
            flag = "--images" if images is not None else flag
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
                host=host,
                form=form_of(as_json=as_json, as_markdown=as_markdown, is_verbose=is_verbose),
                note=warn,
            )
            show(shown)
            return
        form = form_of(as_json=as_json, as_markdown=as_markdown, is_verbose=is_verbose)
        if machines is not None:
            if machine is not None or wants_ways or is_verbose or images is not None:
                flag = "--machine" if machine else "--what-if" if wants_ways else "--verbose"
                flag = "--images" if images is not None else flag
                raise ConfigError(
                    f"{flag} with --machines",
                    limit="a table of machines has a line for each, and no more",
                    hint=f"leave out `{flag}`, or `--machines`",
                )
            on_cards = planned_on_cards(
                model, overrides or [], machines=machines, host=host, form=form, note=warn
            )
            for part in on_cards:
                show(part)
            return
        shown = planned(
            model,
            overrides or [],
            machine=machine,
            host=host,
            wants_ways=wants_ways,
            form=form,
            note=warn,
            num_images=images,
        )
        show(shown)


def fit(
    model: Annotated[
        str | None, typer.Argument(help="A shape or config.json; all shipped shapes without it.")
    ] = None,
    *,
    vram: Vram = None,
    ram: Ram = None,
    headless: Headless = False,
    link: Link = None,
    gpus: Gpus = None,
    machine: Machine = None,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """List what trains, with LoRA, in given memory."""
    with explained(model or "all shapes"):
        from finetune.commands.plan import HostOptions, form_of, models_that_fit

        fitting = models_that_fit(
            model,
            machine=machine,
            host=HostOptions(
                ram_gib=ram,
                link_gb_per_s=link,
                num_gpus=gpus,
                is_headless=headless,
                vram_gib=vram,
            ),
            form=form_of(as_json=as_json, as_markdown=as_markdown, is_verbose=False),
        )
        for part in fitting:
            show(part)


def probe(
    *,
    dtype: Annotated[
        str, typer.Option(help="What layers compute in: bfloat16, float16 or float32.")
    ] = "bfloat16",
    as_json: AsJson = False,
    save: Annotated[
        Path | None, typer.Option(help="Write it to a file for `plan --machine`.")
    ] = None,
    is_anyway: Annotated[
        bool, typer.Option("--anyway", help="Write it even if other programs ran meanwhile.")
    ] = False,
) -> None:
    """Measure this machine and, with several processes, the network between them."""
    from finetune.training.rendezvous import join

    with explained("this machine"), join(launch()) as ranks:
        from finetune.commands.probe import probed_with_network, save_machine
        from finetune.report.choice import host_map
        from finetune.report.plan import machine_table
        from finetune.report.rows import as_text
        from offload.probe.load import shown_load

        if is_anyway and save is None:
            raise ConfigError("--anyway without --save", hint="`--save FILE --anyway`")
        machine = probed_with_network(dtype, ranks, note=warn)
        if not ranks.is_main:
            return
        if machine.others_frac is not None:
            warn(shown_load(f"{machine.name} was measured", machine.others_frac))
        if as_json:
            print_text(machine.to_json())
        else:
            open_console().print(as_text([host_map(machine, None), machine_table(machine)]))
        if save is not None:
            save_machine(machine, save, is_anyway=is_anyway)


def doctor(*, as_json: AsJson = False) -> None:
    """Check this machine, and say how to fix what stops or slows training."""
    with explained("this machine"):
        from finetune.commands.doctor import can_train, examined, findings_json, findings_table

        warn("Looking at this machine ...")
        findings = examined()
        show(findings_json(findings) if as_json else findings_table(findings))
        if not can_train(findings):
            raise typer.Exit(EXIT_USER)


def validate(recipe: Source, overrides: Overrides = None) -> None:
    """Check a recipe and print it with all defaults."""
    from finetune.recipe.load import load_recipe
    from finetune.recipe.recipe import resolved_yaml
    from finetune.training.pins import check

    with explained(recipe):
        checked = load_recipe(recipe, overrides or [])
        notes: list[str] = []
        check(checked, note=notes.append)
        print_text(resolved_yaml(checked).rstrip())
        for one in notes:
            warn(one)


GoalName = Annotated[
    str, typer.Option(help="What comes first: balanced, fastest, quality or context.")
]

recipes_app = typer.Typer(
    help="List, show and copy the shipped recipes, and write one for a model and a card.",
    no_args_is_help=True,
)


@recipes_app.command("list")
def recipes_list() -> None:
    """List the shipped recipes and shapes."""
    from finetune.commands.recipes import shipped_tables
    from finetune.report.rows import as_text

    show(as_text(shipped_tables()))


@recipes_app.command("show")
def recipes_show(name: Annotated[str, typer.Argument(help="A shipped name.")]) -> None:
    """Print a shipped recipe with its comments."""
    with explained(name):
        from finetune.recipe.recipe import shipped_recipe

        print_text(shipped_recipe(name).read_text().rstrip())


@recipes_app.command("copy")
def recipes_copy(
    name: Annotated[str, typer.Argument(help="A shipped name.")],
    to: Annotated[Path, typer.Argument(help="The file to write.")],
) -> None:
    """Copy a shipped recipe, and the files that it names, to be edited."""
    with explained(name):
        from finetune.recipe.load import copy_recipe

        for written in copy_recipe(name, to):
            print_text(f"{written}")


@recipes_app.command("for")
def recipes_for(
    model: Annotated[
        str, typer.Argument(help="A shipped shape, loosely named, a model directory or a hub id.")
    ],
    overrides: Overrides = None,
    *,
    vram: Vram = None,
    ram: Ram = None,
    headless: Headless = False,
    gpus: Gpus = None,
    machine: Machine = None,
    goal: GoalName = "balanced",
    out: Annotated[
        Path | None, typer.Option(help="Write it to this file, which must be new.")
    ] = None,
) -> None:
    """Write a recipe for a model and a card, with the predicted figures on top."""
    with explained(model):
        from finetune.commands.recipes import Asked, recipe_for

        asked = Asked(
            machine=machine,
            vram_gib=vram,
            ram_gib=ram,
            num_gpus=gpus,
            goal=goal,
            is_headless=headless,
        )
        text, notes = recipe_for(model, overrides or [], asked, out=out)
        for note in notes:
            warn(note)
        print_text(text.rstrip() if out is None else f"Written: {out}")


@recipes_app.command("schema")
def recipes_schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from finetune.recipe.recipe import json_schema

    print_text(json_schema().rstrip())


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
        from finetune.report.explain import compared, details_of, draw
        from finetune.report.explain import explain as explanation
        from finetune.report.rows import as_text

        if html:
            from finetune.report.pages import write_run_page

            print_text(str(write_run_page(run_dir)))
            return
        found = explanation(run_dir)
        if as_json:
            print_text(json.dumps(found.to_json(), indent=2))
            return
        open_console().print(as_text(compared(found), is_compact=True))
        open_console().print(as_text(details_of(found)))
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
        from finetune.report.compare_pages import compare_page
        from finetune.report.compared_runs import read_runs, runs_tables
        from finetune.report.rows import as_text

        if out is not None and out.suffix != ".html":
            raise ConfigError(
                f"--out {out}", limit="it is a page: NAME.html", hint="`--out compare.html`"
            )
        found = read_runs(runs)
        open_console().print(as_text(runs_tables(found)))
        if out is not None:
            write_atomically(out, compare_page(found))
            open_console().print(f"Page: {out}", markup=False)


def share(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory, finished or not.")],
) -> None:
    """Print a row of a run for others: predicted, measured, hardware; no names, nothing is sent."""
    with explained(str(run_dir)):
        from finetune.report.share import shared_row, write_shared

        row = shared_row(run_dir)
        print_text(row.model_dump_json())
        warn(f"Saved: {write_shared(run_dir, row)}. Nothing was sent.")


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
        from finetune.export.merge import base_and_tokenizer
        from finetune.export.vllm import write_vllm_adapter
        from finetune.run.run_dir import RunDir

        run = RunDir(run_dir)
        for note in run.require_adapter():
            warn(note)
        fetch_base(run_dir)
        base, _ = base_and_tokenizer(run_dir)
        readers = write_vllm_adapter(run.adapter, out, base=base, served=run.recipe().model.path)
        print_text("\n".join([f"{out}", *readers]))


def fetch_base(run_dir: Path) -> None:
    """Fetch the base of a run if it is not in the hub's cache, at the run's commit."""
    from finetune.model.config import fetch_model
    from finetune.report.screen import Screen
    from finetune.run.run_dir import RunDir

    run = RunDir(run_dir)
    if not run.recipe_file.exists() or run.model.exists():
        return
    screen = Screen(open_errors(), is_verbose=False)
    fetch_model(run.recipe().model, working=screen.working, note=warn)


def merge(
    run_dir: Annotated[Path, typer.Argument(help="A finished run's directory.")],
    *,
    out: Annotated[Path, typer.Option(help="The directory to write; it must not be there.")],
    as_published: Annotated[
        bool,
        typer.Option("--as-published", help="Quantise weights again as those of the base are."),
    ] = False,
) -> None:
    """Write the trained model as plain weights, a few tensors in memory at a time."""
    with explained(str(run_dir)):
        from finetune.data.chat_template import serving, template_kwargs_in
        from finetune.export.merge import merge_run
        from finetune.report.screen import Screen

        fetch_base(run_dir)
        console = open_console()
        screen = Screen(console, is_verbose=False)
        with screen.working("Writing weights", "bytes") as progress:
            merged = merge_run(run_dir, out, as_published=as_published, progress=progress)
        print_notes(console, merged.notes)
        console.print(f"Model: {merged.folder}", markup=False)
        kwargs = template_kwargs_in(merged.folder)
        print_notes(
            console, serving(kwargs, model=str(merged.folder), programs=("vLLM", "transformers"))
        )


def export(
    source: Annotated[Path, typer.Argument(help="A finished run, or a merged model.")],
    *,
    gguf: Annotated[
        str, typer.Option(metavar="FORM", help="How weights are written: bf16, q8_0, q4_k_m, ...")
    ] = "q4_k_m",
    for_ollama: Annotated[
        bool, typer.Option("--ollama", help="Write a folder with a Modelfile too.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The file or folder to write; without it, named after the source."),
    ] = None,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(help="The folder of llama.cpp; without it, it is looked for."),
    ] = None,
) -> None:
    """Write the trained model as a GGUF file, by llama.cpp's converter and quantiser."""
    with explained(str(source)):
        from finetune.commands.export import exported
        from finetune.report.screen import Screen

        fetch_base(source)
        console = open_console()
        lines = exported(
            source,
            gguf,
            out=out,
            llama_cpp=llama_cpp,
            is_for_ollama=for_ollama,
            working=Screen(console, is_verbose=False).working,
        )
        print_notes(console, lines)


def push(
    source: Annotated[Path, typer.Argument(help="A finished run, or a merged model.")],
    *,
    repo: Annotated[str, typer.Option(help="OWNER/NAME, or NAME of your own account.")],
    is_public: Annotated[
        bool, typer.Option("--public", help="Let everybody read it; otherwise it is private.")
    ] = False,
) -> None:
    """Upload the adapter or the model, with its card, to the Hugging Face hub."""
    with explained(str(source)):
        from finetune.commands.push import pushed
        from finetune.report.screen import Screen

        screen = Screen(open_console(), is_verbose=False)
        address = pushed(
            source, repo, is_public=is_public, working=screen.working, note=screen.note
        )
        screen.note(f"Pushed: {address} ({'public' if is_public else 'private'})")


def data(
    recipe: Source,
    overrides: Overrides = None,
    *,
    rows: Annotated[int, typer.Option(min=0, help="Rows of each source to show.")] = 3,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Write it as a page to this file.")] = None,
) -> None:
    """Show what the model will see: rows with their loss, lengths, and what is left out and why."""
    with explained(recipe):
        from finetune.commands.data import data_view
        from finetune.report.data_view import data_html, data_json, data_text
        from finetune.report.screen import Screen

        if as_json and html is not None:
            raise ConfigError("both --json and --html", hint="`--json` alone, or `--html` alone")
        working = Screen(open_errors(), is_verbose=False).working
        view = data_view(recipe, overrides or [], num_rows=rows, working=working)
        if html is not None:
            html.write_text(data_html(view), encoding="utf-8")
            print_text(f"Written: {html}")
            return
        if as_json:
            print_text(data_json(view))
            return
        console = open_console()
        has_colour = console.is_terminal and not console.no_color
        console.print(data_text(view, has_colour=has_colour))


def generate(
    run_dir: Annotated[
        Path, typer.Argument(help="A run's directory, finished or with a checkpoint.")
    ],
    *,
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    image: Annotated[
        list[Path] | None,
        typer.Option(help="An image to ask about, which comes before the prompt; repeatable."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: DrawSeed = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer.")] = None,
) -> None:
    """Answer a prompt with a run's adapter, or that of its newest checkpoint."""
    with explained(str(run_dir)):
        from finetune.commands.generate import answer_prompt
        from finetune.model.tokenizer import chosen_by

        choose = chosen_by(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        fetch_base(run_dir)
        answer = answer_prompt(
            run_dir,
            prompt,
            images=image or [],
            max_new_tokens=max_new_tokens,
            choose=choose,
            stop_strings=stop or [],
            note=warn,
        )
        print_text(answer)
        if not answer:
            warn("The answer is empty: the first token that the model chose ends it.")


def chat(
    run_dir: Annotated[
        Path, typer.Argument(help="A run's directory, finished or with a checkpoint.")
    ],
    *,
    has_base: Annotated[
        bool, typer.Option("--compare", help="Let the base answer too, without the adapter.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: DrawSeed = None,
) -> None:
    """Talk with a run's model, or its newest checkpoint's; it remembers what was said."""
    with explained(str(run_dir)):
        from finetune.commands.chat import Chat
        from finetune.model.tokenizer import chosen_by

        def chooser() -> "Choose":
            return chosen_by(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)

        chooser()  # options that do not go together are refused before the model is loaded
        held = Chat(
            max_new_tokens=max_new_tokens,
            chooser=chooser,
            has_base=has_base,
            say=print_part,
            note=warn,
        )
        fetch_base(run_dir)
        held.hold(run_dir, typed_lines("> "))


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
    with explained(model):
        from finetune.commands.score import Asked, score_rows
        from finetune.report.screen import Screen

        asked = Asked(
            adapters=tuple(adapter or ()),
            checkpoints=checkpoints,
            has_base=has_base,
            machine=machine,
            out=out,
        )
        working = Screen(open_errors(), is_verbose=False).working
        show(
            score_rows(
                model, rows, overrides or [], asked, as_json=as_json, note=warn, working=working
            )
        )


PORT = 8765


def studio(
    folder: Annotated[Path, typer.Argument(help="The folder whose runs are shown.")] = Path("runs"),
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes any that is free.")
    ] = PORT,
    machine: Machine = None,
) -> None:
    """Serve a page on this machine alone: plan by sliders; start, stop and watch runs."""
    with explained("sluice studio"):
        try:
            from finetune.studio.server import serve
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the page needs {error.name}, which is not installed",
                limit="it is in the extra `studio`",
                hint="`pip install 'sluice-finetune[studio]'`",
            ) from error
        from tempfile import TemporaryDirectory

        from finetune.commands.plan import probed
        from finetune.planning.request import find_machine
        from finetune.studio.answer import Planner
        from finetune.studio.launcher import Launcher
        from finetune.studio.server import Background
        from offload.plan.machine.machine import half_dtype

        known = None if machine is None else find_machine(machine, dtype=half_dtype(machine))
        with (
            TemporaryDirectory(prefix="sluice-studio-") as configs,
            Background(Path(configs), root=Path.cwd()) as background,
        ):
            measured = Path(machine).absolute() if machine and Path(machine).is_file() else None
            planner = Planner(
                here=lambda: known or probed(None, note=warn),
                folder=Path(configs),
                root=Path.cwd(),
                other=machine if measured is None else None,
                background=background.answer,
            )
            launcher = Launcher(folder, root=Path.cwd(), machine_file=measured)
            serve(planner, launcher, folder=folder, port=port, announce=print_address)


SERVE_PORT = 8766


def serve(
    model: Annotated[str, typer.Argument(help="A recipe, or a model directory: the base.")],
    overrides: Overrides = None,
    *,
    machine: Machine = None,
    ram: Ram = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients that train at a time.")] = 4,
    samplers: Annotated[
        int, typer.Option(min=1, help="Frozen adapters in device memory at a time.")
    ] = 4,
    rank: Annotated[int, typer.Option(min=1, help="The largest rank of an adapter.")] = 32,
    row_tokens: Annotated[
        int, typer.Option(min=2, help="The longest row, and the longest prompt with its answer.")
    ] = 2048,
    cached_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of all answers at a time; planned without it.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call the base, in place of its name here; repeatable."),
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Where the key and the checkpoints of clients are.")
    ] = Path("runs/serve"),
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes any that is free.")
    ] = SERVE_PORT,
) -> None:
    """Serve a base to clients of the Tinker SDK, each with an adapter of its own."""
    with explained("sluice serve"):
        from finetune.commands.serve import planned, serve_planned, shown
        from finetune.report.screen import Screen
        from finetune.serve.planned import Capacity

        capacity = Capacity(
            num_clients=clients,
            num_samplers=samplers,
            max_rank=rank,
            row_tokens=row_tokens,
            cached_tokens=cached_tokens,
        )
        plan, is_here = planned(
            model,
            overrides or [],
            capacity,
            machine=machine,
            ram_gib=ram,
            note=warn,
            working=Screen(open_errors(), is_verbose=False).working,
        )
        show(shown(plan))
        if not is_here:
            print_lines(f"This is the plan for {plan.machine.name}: nothing is served here.")
            return
        try:
            serve_planned(plan, names=name or [], port=port, folder=folder, note=warn)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the server needs {error.name}, which is not installed",
                limit="it is in the extra `serve`",
                hint="`pip install 'sluice-finetune[serve]'`",
            ) from error


def print_address(address: str) -> None:
    """Print what to open."""
    print_text(f"Open {address}\nIt is for you alone: the token in it is new at each start.")


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
            by = shown_signal(outcome.signal, outcome.signalled, of=ranks.num)
            again = f"`sluice finetune {outcome.run_dir / 'recipe.yaml'} --resume`"
            note = f"Stopped after step {outcome.num_steps}{by}; continue with {again}."
            if ranks.is_first_here and not ranks.is_main:
                warn(note)  # on its machine nothing else is shown
            screen.note(note)
            raise typer.Exit(exit_code(outcome.signal))
        kind, folder = ("Model", "model") if settings.train.is_full else ("Adapter", "adapter")
        screen.note(f"{kind}: {outcome.run_dir / folder}")
        screen.note(f"Report:  {outcome.run_dir / 'report.html'}")
        if not is_verbose:
            screen.note(f"Details: `sluice explain {outcome.run_dir}`")
        if settings.model.head == "tokens":
            screen.note(f"Try it: `sluice chat {outcome.run_dir}`")


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
