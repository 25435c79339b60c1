"""Commands that read rows or prompts: what a model sees, answers and scores."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.arguments import (
    AsJson,
    DrawSeed,
    MachineFile,
    Overrides,
    Source,
    Temperature,
    TopK,
    TopP,
)
from finetune.cli.console import (
    open_console,
    open_errors,
    print_part,
    print_text,
    show,
    typed_lines,
    warn,
)
from finetune.errors import ConfigError
from finetune.exits import explained

if TYPE_CHECKING:
    from finetune.model.sampling import Choose


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
        from finetune.report.data_html import data_html
        from finetune.report.data_view import data_json, data_tables
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
        console.print(data_tables(view, has_colour=has_colour))


def generate(
    run_dir: Annotated[Path, typer.Argument(help="A finished run's directory.")],
    *,
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: DrawSeed = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer.")] = None,
) -> None:
    """Answer a prompt with a finished run's adapter."""
    with explained(str(run_dir)):
        from finetune.commands.generate import answer_prompt
        from finetune.model.sampling import chosen_by

        choose = chosen_by(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        answer = answer_prompt(
            run_dir,
            prompt,
            max_new_tokens=max_new_tokens,
            choose=choose,
            stop_strings=stop or [],
            note=warn,
        )
        print_text(answer)
        if not answer:
            warn("The answer is empty: the first token that the model chose ends it.")


def chat(
    run_dir: Annotated[Path, typer.Argument(help="A finished run's directory.")],
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
    """Talk with a finished run's model; it remembers what was said."""
    with explained(str(run_dir)):
        from finetune.commands.chat import Chat
        from finetune.model.sampling import chosen_by

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

        asked = Asked(
            adapters=tuple(adapter or ()),
            checkpoints=checkpoints,
            has_base=has_base,
            machine=machine,
            out=out,
        )
        show(score_rows(model, rows, overrides or [], asked, as_json=as_json, note=warn))
