"""What `plan` and `fit` show: one plan, a table of machines, or a table of models."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import RenderableType
from rich.text import Text

from finetune.errors import ConfigError
from finetune.planning.candidates import chooser, full_requests, uncollected
from finetune.planning.compare import (
    CARD_WIDTHS,
    LEGEND,
    MODEL_WIDTHS,
    UNITS,
    Group,
    budgeted,
    compare_on_cards,
    compare_within_memory,
    comparisons_json,
    fit_table,
    fitting,
    machine_names,
    machines_table,
    slowest_card,
    trained_models,
)
from finetune.planning.parallel import compare_ways, own_choice, share_out, ways_json, ways_table
from finetune.planning.ranks import GPUS, require_gpus
from finetune.planning.request import find_machine, with_backend
from finetune.planning.runs import plan_variants, variants_of
from finetune.planning.subject import (
    Subject,
    is_model,
    model_subject,
    subject_of,
    with_image_tokens,
    with_num_images,
)
from finetune.recipe.recipe import with_settings
from finetune.recipe.sections import TrainSection
from finetune.report.choice import host_map, plan_figures, plan_parts
from finetune.report.format import shown_gib
from finetune.report.plan import gpus_json, ranks_json
from finetune.report.rows import Part, Table, as_markdown, as_text
from finetune.report.runs import runs_json, runs_tables
from finetune.report.what_if import what_if_json, what_if_table
from offload.plan.machine.cards import CARDS
from offload.plan.machine.machine import (
    EAGER_FRAC,
    FP32_FRAC,
    GEMM_FRACS,
    GIB,
    GIVEN,
    Dtype,
    Machine,
    half_dtype,
    with_interconnect,
)
from offload.plan.what_if import NUM_CARDS, what_if
from offload.probe.load import shown_load

Form = Literal["table", "verbose", "json", "markdown"]
MACHINE = "--machine"


def form_of(*, as_json: bool, as_markdown: bool, is_verbose: bool) -> Form:
    """Return the form that flags ask for.

    Raises:
        ConfigError: They ask for two.
    """
    asked: dict[Form, bool] = {"json": as_json, "markdown": as_markdown, "verbose": is_verbose}
    forms = [form for form, is_asked in asked.items() if is_asked]
    if len(forms) > 1:
        flags = " and ".join(f"--{form}" for form in forms)
        raise ConfigError(f"both {flags}", hint=f"`--{forms[0]}` alone")
    return forms[0] if forms else "table"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostOptions:
    """What a card is planned with."""

    ram_gib: float | None  # host memory of a named card; None means the assumed value
    link_gb_per_s: float | None  # the link of a named card; None: as published
    # Cards of the machine, which share a step; None plans for one, and says so nowhere.
    num_gpus: int | None = None
    interconnect: str | None = None  # what connects them; None is the link that loads weights too
    is_headless: bool = False  # whether no desktop uses a named card
    vram_gib: float | None = None  # device memory that may be used; None: all of the card's

    def machine(self, name: str | None, *, dtype: Dtype) -> Machine:
        """Return a named card with this memory and link, or the machine of a file.

        Without a name it is the slowest desktop card with the device memory.
        """
        link = self.link_gb_per_s
        machine = find_machine(
            name or slowest_card(self.vram_gib),
            dtype=dtype,
            ram_bytes=None if self.ram_gib is None else int(self.ram_gib * GIB),
            link_bytes_per_s=None if link is None else link * 1e9,
            is_headless=self.is_headless,
        )
        machine = budgeted(machine, vram_gib=self.vram_gib)
        if self.interconnect is None:
            return machine
        if (self.num_gpus or 1) == 1:
            raise ConfigError(
                f"--interconnect {self.interconnect} with one GPU",
                limit="it connects the GPUs of a machine with each other",
                hint="`--gpus 2`, or leave out `--interconnect`",
            )
        return with_interconnect(machine, self.interconnect, world_size=self.num_gpus or 1)


def planned(
    model: str,
    overrides: Sequence[str],
    *,
    machine: str | None,
    host: HostOptions,
    wants_ways: bool,
    form: Form,
    note: Callable[[str], None],
    num_images: int | None = None,
) -> RenderableType:
    """Return the plan of a recipe or shape for one machine, or for several that share a step.

    Args:
        model: A recipe, a shipped shape or a config.json.
        overrides: Settings over the recipe's.
        machine: A named card or a file, or several with commas; None measures this machine.
        host: Host memory and link of named cards.
        wants_ways: Whether other ways to hold and move the model are priced alongside the plan.
        form: Output format.
        note: Reports what takes time.
        num_images: Distinct images of the rows; None if that is not known, or there are none.

    Raises:
        ConfigError: A flag that could have no effect.
        DoesNotFitError: The plan needs more memory than there is.
    """
    if host.num_gpus is not None and wants_ways:
        raise ConfigError(
            f"--gpus {host.num_gpus} with --what-if",
            limit="other ways are priced for one GPU, and for several alongside",
            hint="leave out `--gpus`, or `--what-if`",
        )
    named = several_machines(machine)
    overrides, notes = _in_half_dtype(model, overrides, cards=named or [machine or ""])
    subject = subject_of(model, overrides, note=note)
    subject = replace(subject, notes=(*subject.notes, *notes))
    dtype = subject.recipe.model.dtype
    if num_images is not None:
        subject = with_image_tokens(subject)
    if named:
        given = {"--gpus": host.num_gpus, "--what-if": wants_ways or None, "--images": num_images}
        for flag, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{flag} with --machine {machine}",
                    limit="each of several machines has one GPU, and they share a step",
                    hint=f"leave out `{flag}`; a machine may be named twice",
                )
        cards = [host.machine(name, dtype=dtype) for name in named]
        return _of_ranks(subject, cards, form=form, setting=MACHINE)
    here = _one_machine(machine, host, dtype=dtype, note=note)
    return _one_plan(
        subject,
        here,
        num_gpus=host.num_gpus,
        wants_ways=wants_ways,
        form=form,
        num_images=num_images,
    )


def _in_half_dtype(
    model: str, overrides: Sequence[str], *, cards: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return overrides with float16 for a model on a card that has no bfloat16, and a note on it.

    A recipe is planned in its own type, in which it trains.
    """
    old = [card for card in cards if half_dtype(card) == "float16"]
    is_asked = any(text.startswith("model.dtype=") for text in overrides)
    if not old or is_asked or not is_model(model):
        return [*overrides], []
    note = f"{old[0]} does not compute in bfloat16: planned with model.dtype=float16"
    return ["model.dtype=float16", *overrides], [note]


def _one_machine(
    name: str | None, host: HostOptions, *, dtype: Dtype, note: Callable[[str], None]
) -> Machine:
    if name is not None or host.vram_gib is not None:
        machine = host.machine(name, dtype=dtype)
        if name is None:
            note(assumed(machine))
        return machine
    numbers = {"--ram": host.ram_gib, "--link": host.link_gb_per_s}
    given = {flag: "" if value is None else f"{value:g}" for flag, value in numbers.items()}
    given["--interconnect"] = host.interconnect or ""
    asked = [f"{flag} {value}" for flag, value in given.items() if value]
    for flag in [*asked, *(["--headless"] if host.is_headless else [])]:
        raise ConfigError(
            f"{flag} without a named card",
            limit="without --machine this machine's own memory and link are measured",
            hint="`--machine rtx4090`, or another card, or its memory, `--vram 24`",
        )
    return probed(dtype, note=note)


@uncollected()
def _one_plan(
    subject: Subject,
    machine: Machine,
    *,
    num_gpus: int | None,
    wants_ways: bool,
    form: Form,
    num_images: int | None,
) -> RenderableType:
    recipe, facts, num = subject.recipe, subject.facts, num_gpus or 1
    require_gpus(recipe.train, machine, num_gpus=num, setting=GPUS)
    if not isinstance(recipe.train.shares, str):
        return _of_ranks(subject, [machine] * num, form=form, setting=GPUS)
    notes = [*subject.notes, *machine_notes(machine, dtype=recipe.model.dtype)]
    here = with_backend(recipe, facts, machine)
    ways = None
    if num > 1:
        ways = compare_ways(recipe, facts, here, num_ranks=num, setting=GPUS)
    if recipe.train.parallel == "auto" and ways is not None:
        recipe = with_settings(recipe, {"train.parallel": ways.faster.name})
    requests = full_requests(recipe, facts, num_ranks=num)
    if num_images is not None:
        requests = with_num_images(requests, recipe, num_images)
    choice = chooser(recipe)(facts, here, requests)
    made = choice.plan
    others = what_if(made, num_cards=NUM_CARDS) if wants_ways else None
    figures = plan_figures(choice, recipe) | {"notes": notes}
    figures |= {} if num_gpus is None else {"gpus": gpus_json(made)}
    parts: list[Part] = [*notes, *plan_parts(choice, recipe, is_verbose=form == "verbose")]
    if form == "verbose":
        parts.append(host_map(here, made))
    if ways is not None:
        figures["parallel"] = ways_json(ways)
        ways_shown = ways_table(ways)
        parts.append(ways_shown if form == "verbose" else ways_shown.note)
    if others is not None:
        figures |= what_if_json(others)
        parts.append(what_if_table(others, machine=here))
    return _shown(form, figures, parts)


def several_machines(names: str | None) -> list[str]:
    """Return the names of machines with commas; none if it is a single one, or a file."""
    if names is None or "," not in names or Path(names).is_file():
        return []
    return [name.strip() for name in names.split(",")]


@uncollected()
def _of_ranks(
    subject: Subject, machines: Sequence[Machine], *, form: Form, setting: str
) -> RenderableType:
    """Return the plan of ranks whose cards or shares differ: that of rank 0, and each one's share.

    Args:
        subject: What is planned.
        machines: Of each rank.
        form: Output format.
        setting: The option or command that sets their number: machines, or GPUs of one.
    """
    recipe, facts, num = subject.recipe, subject.facts, len(machines)
    notes = list(subject.notes)
    for machine in dict.fromkeys(machines):
        require_gpus(recipe.train, machine, num_gpus=num, setting=setting)
        notes += machine_notes(machine, dtype=recipe.model.dtype)
    here = [with_backend(recipe, facts, machine) for machine in machines]
    reduction = {"sends_update": len(set(here)) > 1}
    requests = [
        replace(
            one,
            most_local_ranks=1 if setting == MACHINE else None,
            reduction=replace(one.reduction, **reduction),
        )
        for one in full_requests(recipe, facts, num_ranks=num)
    ]
    shares = share_out(facts, here, requests, wanted=recipe.train.shares)
    choices = [own_choice(facts, one, shares, rank=rank) for rank, one in enumerate(here)]
    others = tuple(choice.plan.as_other for choice in choices[1:])
    made = replace(choices[0].plan, others=others)
    choice = replace(choices[0], plan=made)
    figures = plan_figures(choice, recipe) | {"ranks": ranks_json(made), "notes": notes}
    parts = plan_parts(choice, recipe, is_verbose=form == "verbose")
    return _shown(form, figures, [*notes, *parts])


def planned_runs(
    model: str,
    overrides: Sequence[str],
    *,
    grid: Sequence[str],
    num_runs: int | None,
    machine: str | None,
    host: HostOptions,
    form: Form,
    note: Callable[[str], None],
) -> RenderableType:
    """Return what several runs of a model take in shared steps, and in which waves they train.

    Args:
        model: A recipe, a shipped shape or a config.json.
        overrides: Settings of all runs.
        grid: Settings with several values, e.g. `train.lr=1e-4,2e-4`.
        num_runs: The number of equal runs, in place of a grid.
        machine: A named card or a file; None measures this machine.
        host: Host memory and link of a named card.
        form: Output format.
        note: Reports what takes time.

    Raises:
        ConfigError: A flag that could have no effect, or runs that cannot share their steps.
        OffloadError: A run does not fit alone.
    """
    if form == "verbose":
        raise ConfigError(
            "--verbose with several runs",
            limit="a table of runs has no details",
            hint="leave out `--verbose`, or `--json`",
        )
    if several_machines(machine):
        raise ConfigError(
            f"--machine {machine} with several runs",
            limit="runs are planned together for one machine",
            hint="name one, or leave out `--sweep` and `--runs`",
        )
    variants = variants_of(model, overrides, grid=grid, num_runs=num_runs)
    first = variants.subjects[0]
    dtype = first.recipe.model.dtype
    named = _one_machine(machine, host, dtype=dtype, note=note)
    here, num = with_backend(first.recipe, first.facts, named), host.num_gpus or 1
    for recipe in variants.recipes:
        _require_no_shares(recipe.train, "several runs")
        require_gpus(recipe.train, here, num_gpus=num, setting=GPUS)
    with uncollected():
        found = plan_variants(variants, here, num_ranks=num)
    known = {"are_steps_known": variants.num_steps is not None}
    notes = [*first.notes, *machine_notes(here, dtype=dtype)]
    figures = {"machine": here.name, **runs_json(found, variants.names, **known)}
    figures |= {**_asked_gpus(host.num_gpus), "notes": notes}
    parts = runs_tables(found, variants.names, **known)
    return _shown(form, figures, [*notes, *shared_by(num), *parts])


def planned_on_cards(
    model: str,
    overrides: Sequence[str],
    *,
    machines: str,
    host: HostOptions,
    form: Form,
    note: Callable[[str], None],
) -> Iterator[RenderableType]:
    """Yield a table of machines on which a recipe or shape is planned, each as soon as it is.

    Args:
        model: A recipe, a shipped shape or a config.json.
        overrides: Settings over the recipe's.
        machines: Named cards or files with commas, or `all`.
        host: Host memory and link of named cards, and the number of GPUs.
        form: Output format; JSON and Markdown come as a whole.
        note: Reports what takes time.

    Raises:
        ConfigError: GPUs that cannot share a step, or shares of them.
    """
    subject = subject_of(model, overrides, note=note)
    dtype = subject.recipe.model.dtype
    cards = [host.machine(name, dtype=dtype) for name in machine_names(machines, dtype=dtype)]
    num = host.num_gpus or 1
    _require_no_shares(subject.recipe.train, "--machines")
    if subject.recipe.train.parallel != "stream":
        raise ConfigError(
            f"--machines with train.parallel: {subject.recipe.train.parallel}",
            limit="a table of machines is of layers that are streamed",
            hint="`train.parallel=stream`, or one `--machine` with `--gpus`",
        )
    for machine in cards:
        require_gpus(subject.recipe.train, machine, num_gpus=num, setting=GPUS)
    of_cards = (note for machine in cards for note in machine_notes(machine, dtype=dtype))
    yield from _by_groups(
        [*subject.notes, *of_cards, *shared_by(num)],
        compare_on_cards(replace(subject, num_ranks=num), cards),
        lambda group: machines_table(f"{subject.name}: {_of_step(group)}", group),
        CARD_WIDTHS,
        num_gpus=host.num_gpus,
        form=form,
    )


def _of_step(group: Group) -> str:
    one = group[0]
    return f"{one.tokens_per_step:,} tokens per step in sequences of {one.seq_len:,}; {UNITS}"


def _by_groups(
    notes: Sequence[str],
    groups: Iterator[Group],
    table: Callable[[Group], Table],
    widths: Sequence[int],
    *,
    num_gpus: int | None,
    form: Form,
) -> Iterator[RenderableType]:
    """Yield notes, and a table of which each group of lines is yielded as soon as it is known."""
    if form == "table":
        yield from map(Text, notes)
        yield from in_groups(map(table, groups), widths)
        return
    found = [one for group in groups for one in group]
    figures = [one | _asked_gpus(num_gpus) for one in comparisons_json(found)]
    yield _shown(form, figures, [*notes, table(found)])


def in_groups(groups: Iterable[Table], widths: Sequence[int]) -> Iterator[Text]:
    """Yield a table that comes in groups of lines: title and heads, then each group at once.

    The first cell of a group's lines is written once above them, with the note of its table.

    Args:
        groups: Tables of the same columns, each with a group of lines.
        widths: Characters of each column at least; a group with a longer cell is wider.
    """
    is_first = True
    for group in groups:
        heads = group.heads
        if is_first:
            yield Text(group.title, style="italic")
            yield Text(_aligned(heads, heads, group.are_figures, widths), style="bold")
        is_first = False
        lines = [_aligned(cells, heads, group.are_figures, widths) for cells in group.cells]
        head = f" {group.cells[0][0]}" + (f": {group.note}" if group.note else "")
        yield Text("\n".join([head, *lines]))


def _aligned(
    cells: Sequence[str], heads: Sequence[str], are_figures: Sequence[bool], widths: Sequence[int]
) -> str:
    """Return the cells of a line, but for the first, as wide as their columns."""
    columns = list(zip(cells, heads, are_figures, widths, strict=True))[1:]
    written = (
        f"{cell:{'>' if is_figure else '<'}{max(width, len(head))}}"
        for cell, head, is_figure, width in columns
    )
    return f"   {'  '.join(written)}".rstrip()


def _require_no_shares(train: TrainSection, planned: str) -> None:
    """Refuse shares for tables, in which GPUs share steps equally.

    Raises:
        ConfigError: There are shares.
    """
    if not isinstance(train.shares, str):
        raise ConfigError(
            f"train.shares: {list(train.shares)} with {planned}",
            limit="in a table GPUs share each step equally",
            hint="`train.shares=auto`, or one plan with `--gpus` or several of `--machine`",
        )


def shared_by(num_gpus: int) -> list[str]:
    """Return the notes on figures of so many GPUs."""
    if num_gpus == 1:
        return []
    return [f"{num_gpus} GPUs of a machine share each step: VRAM is of each, RAM is of all"]


def _asked_gpus(num_gpus: int | None) -> dict[str, int]:
    """Return what JSON says of a number of GPUs: nothing where none was asked for."""
    return {} if num_gpus is None else {"num_gpus": num_gpus}


def models_that_fit(
    model: str | None,
    *,
    machine: str | None,
    host: HostOptions,
    form: Form,
) -> Iterator[RenderableType]:
    """Yield a table of what trains in given memory, each model as soon as it is planned.

    Args:
        model: A shipped shape or a config.json; None takes all shipped shapes.
        machine: The card whose rates are used; None takes the slowest desktop card with the memory.
        host: Memory that may be used, link and number of GPUs.
        form: Output format.

    Raises:
        ConfigError: No budget, or more than the machine has; or GPUs that cannot share a step.
        DoesNotFitError: Nothing fits.
    """
    dtype = half_dtype(machine or "")
    here = host.machine(machine, dtype=dtype)
    notes = machine_notes(here, dtype=dtype)
    notes += [assumed(here)] if machine is None else []
    num = host.num_gpus or 1
    subjects = [
        replace(model_subject(x, [f"model.dtype={dtype}"]), num_ranks=num)
        for x in trained_models(model)
    ]
    for subject in subjects:
        require_gpus(subject.recipe.train, here, num_gpus=num, setting=GPUS)
    title = (
        f"LoRA in {shown_gib(here.vram_bytes)} of VRAM and {shown_gib(here.ram_bytes)} of RAM, at"
        f" the rates of {here.name}{'' if machine else ' (assumed)'}: "
    )
    yield from _by_groups(
        [*notes, *shared_by(num)],
        fitting(compare_within_memory(subjects, here), here),
        lambda group: fit_table(title + _of_step(group) + LEGEND, group),
        MODEL_WIDTHS,
        num_gpus=host.num_gpus,
        form=form,
    )


def assumed(machine: Machine) -> str:
    """Return what is said of a card that was taken for its memory."""
    return (
        f"the rates are those of {machine.name}, the slowest known desktop card with"
        f" {shown_gib(CARDS[machine.name].memory_gib * GIB)}; `--machine NAME` takes another's"
    )


def machine_notes(machine: Machine, *, dtype: Dtype) -> list[str]:
    """Return notes on a machine: what is assumed of it, or was wrong when it was measured."""
    notes = []
    if machine.gemm_flops_per_s.source.startswith(GIVEN):
        disk = machine.disk_bytes_per_s
        assert disk is not None
        notes.append(
            f"{machine.name} is a card of four numbers, with"
            f" {shown_gib(machine.installed_bytes)} of RAM (--ram). Assumed are"
            f" {GEMM_FRACS['workstation']:.0%} of its 16-bit rate in large products, in fp32"
            f" {FP32_FRAC:g} of that, {EAGER_FRAC:.0%} of the memory's rate, and"
            f" {disk.value / 1e9:g} GB/s from disk"
        )
    if machine.others_frac is not None:
        notes.append(shown_load(f"{machine.name} was measured", machine.others_frac))
    if machine.dtype != dtype:
        notes.append(
            f"{machine.name} was measured in {machine.dtype}, and this computes in {dtype}"
        )
    return notes


def probed(dtype: str | None, *, note: Callable[[str], None]) -> Machine:
    """Measure this machine; this loads torch.

    Args:
        dtype: Type that layers compute in; None takes the 16-bit type of the GPU.
        note: Reports what takes time.
    """
    note("Measuring this machine ...")
    import torch

    from offload.probe.machine import NO_GPU, PROBE_S, half_dtype_of, probe

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        note(
            f"{NO_GPU}, so its CPU is measured: `sluice doctor` says why, and `--machine rtx4090`"
            " plans for a card"
        )
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    return probe(device=device, seconds=PROBE_S, dtype=dtype or half_dtype_of(capability))


def _shown(form: Form, figures: object, parts: Sequence[Part]) -> RenderableType:
    """Return figures for programs, or their parts as people asked for them."""
    if form == "json":
        return json.dumps(figures, indent=2)
    return as_markdown(parts) if form == "markdown" else as_text(parts)
