"""Commands that predict, measure and check before anything trains."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.arguments import (
    AsJson,
    AsMarkdown,
    Gpus,
    Link,
    Machine,
    Overrides,
    Ram,
    Source,
    Verbose,
    finite,
)
from finetune.cli.console import open_console, print_text, show, warn
from finetune.env import launch
from finetune.errors import ConfigError
from finetune.exits import EXIT_USER, explained


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
    ram: Ram = None,
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
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    is_verbose: Verbose = False,
) -> None:
    """Predict step time and memory, without weights and without the card."""
    with explained(model):
        from finetune.commands.plan import HostOptions, form_of, planned, planned_runs
        from finetune.recipe.grid import named_variants

        host = HostOptions(
            ram_gib=ram, link_gb_per_s=link, num_gpus=gpus, interconnect=interconnect
        )
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
                host=host,
                form=form_of(as_json=as_json, as_markdown=as_markdown, is_verbose=is_verbose),
                note=warn,
            )
            show(shown)
            return
        shown = planned(
            model,
            overrides or [],
            machine=machine,
            machines=machines,
            host=host,
            wants_ways=wants_ways,
            form=form_of(as_json=as_json, as_markdown=as_markdown, is_verbose=is_verbose),
            note=warn,
        )
        show(shown)


def fit(
    model: Annotated[
        str | None, typer.Argument(help="A shape or config.json; all shipped shapes without it.")
    ] = None,
    *,
    vram: Annotated[
        float | None,
        typer.Option(min=1, max=1_000_000, callback=finite, help="GiB of VRAM to use."),
    ] = None,
    ram: Ram = None,
    link: Link = None,
    gpus: Gpus = None,
    machine: Machine = None,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """List what trains, with LoRA, in given memory."""
    with explained(model or "all shapes"):
        from finetune.commands.plan import HostOptions, form_of, models_that_fit

        shown = models_that_fit(
            model,
            machine=machine,
            vram_gib=vram,
            host=HostOptions(ram_gib=ram, link_gb_per_s=link, num_gpus=gpus),
            form=form_of(as_json=as_json, as_markdown=as_markdown, is_verbose=False),
        )
        show(shown)


def probe(
    *,
    dtype: Annotated[
        str, typer.Option(help="What layers compute in: bfloat16, float16 or float32.")
    ] = "bfloat16",
    as_json: AsJson = False,
    save: Annotated[
        Path | None, typer.Option(help="Write it to a file for `plan --machine`.")
    ] = None,
) -> None:
    """Measure this machine and, with several processes, the network between them."""
    from finetune.training.rendezvous import join

    with explained("this machine"), join(launch()) as ranks:
        from finetune.commands.probe import probed_with_network
        from finetune.report.host_map import host_map
        from finetune.report.plan import machine_table

        machine = probed_with_network(dtype, ranks, note=warn)
        if not ranks.is_main:
            return
        if save is not None:
            save.write_text(machine.to_json())
        if as_json:
            print_text(machine.to_json())
        else:
            open_console().print(host_map(machine, None), machine_table(machine), sep="\n")


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

    with explained(recipe):
        print_text(resolved_yaml(load_recipe(recipe, overrides or [])).rstrip())
