"""What `init` makes of four answers: a recipe for a model, rows, a card and a goal; its plan."""

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import RenderableType

from finetune.commands.look import Look, look_at, seq_len_for
from finetune.commands.plan import HostOptions, planned, probed
from finetune.commands.recipes import Asked, require_new, run_name, target_of
from finetune.errors import ConfigError
from finetune.exits import warn
from finetune.planning.candidates import Goal, goal_named, uncollected
from finetune.planning.recipe_text import recipe_text
from finetune.planning.subject import WantedModel
from finetune.planning.suggestion import (
    SEQ_LEN,
    TOKENS_PER_STEP,
    Settings,
    Suggestion,
    Target,
    first_settings,
    suggest,
)
from finetune.recipe.recipe import whole_units
from finetune.report.format import gib_in, shown_time
from offload.errors import DoesNotFitError, SluiceError

HERE = "here"
FEW_ROWS, MANY_ROWS = 200, 5_000
NUM_STEPS, FEW_STEPS = 50, 30
"""Steps of an epoch: as many as few rows are shared out to, and the least that is enough."""
MOST_EVERY, NUM_EVALUATIONS = 50, 4
_NUMBERS_FROM = 1000  # from here on numbers are those of cards, such as 3060, and no GiB
Note = Callable[[str], None]
Typed = Callable[[str], Iterator[str]]
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The four answers."""

    model: WantedModel  # what is trained
    rows: Look  # what it learns from
    asked: Asked  # the card and the goal


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What was written."""

    files: tuple[Path, ...]  # the recipe, its plan, and the machine if it was measured
    lines: tuple[str, ...]  # what to know of them
    plan: RenderableType  # the plan, as `sluice plan` shows it


def answered(
    question: str,
    flag: str,
    given: str | None,
    read: Callable[[str], _Answer],
    *,
    typed: Typed | None,
    default: str | None = None,
) -> _Answer:
    """Return the value of a flag, or of what is typed; what cannot be read is asked for again.

    Args:
        question: The question, without a default and a colon.
        flag: The options that answer it.
        given: The value of one of them.
        read: Makes a value of an answer.
        typed: Lines that are typed after a prompt; None where nobody can be asked.
        default: The answer where none is given.

    Raises:
        ConfigError: Nothing is given, and nobody can be asked.
    """
    if given is not None:
        return read(given)
    if typed is None:
        if default is not None:
            return read(default)
        raise ConfigError(
            f"{flag} is missing",
            limit="it is asked for on a terminal, and not with --yes",
            hint=f"`sluice init {flag.partition(' ')[0]} ...`",
        )
    for text in typed(f"{question} [{default}]: " if default else f"{question}: "):
        try:
            return read(text.strip() or default or "")
        except SluiceError as error:
            warn(f"{error}\n")
    raise ConfigError(f"{flag} is missing", limit="the input has ended", hint=f"`{flag} ...`")


def card_of(text: str, *, ram_gib: float | None) -> Asked:
    """Return the card that an answer means: a name, its GiB, a machine file, or `here`.

    Args:
        text: With the GiB of RAM after a comma, if need be.
        ram_gib: RAM that was given apart.

    Raises:
        ConfigError: It is no card, or RAM is given twice.
    """
    name, comma, ram = (part.strip() for part in text.partition(","))
    if comma:
        if ram_gib is not None:
            raise ConfigError(f"--ram {ram_gib:g} and {text}", hint="give RAM once")
        ram_gib = gib_in(ram)
        if ram_gib is None:
            raise ConfigError(f"{ram!r} is no number of GiB of RAM", hint="`12, 64`")
    if name.lower() == HERE:
        if ram_gib is not None:
            raise ConfigError(
                f"{HERE} with {ram_gib:g} GiB of RAM",
                limit="the memory of this machine is measured",
                hint=f"`{HERE}` alone",
            )
        return Asked(machine=HERE, vram_gib=None, ram_gib=None, goal="")
    vram_gib = gib_in(name)
    if vram_gib is not None and vram_gib >= _NUMBERS_FROM:
        vram_gib = None
    machine = name if vram_gib is None else None
    asked = Asked(machine=machine, vram_gib=vram_gib, ram_gib=ram_gib, goal="")
    target_of(asked, dtype=None)  # which refuses what is no card
    return asked


def rows_of(path: str, model: WantedModel, note: Note) -> Look:
    """Look at rows, with the tokenizer of a model.

    Raises:
        DataError: There is nothing there, or a row cannot be used.
        ConfigError: The model has no tokenizer.
    """
    if "path" not in model.settings:
        raise ConfigError(
            f"{model.name} is a shape without weights and without a tokenizer",
            limit="rows are learned as the tokens of a model",
            hint="`--model qwen3-0.6b`; `sluice finetune quickstart` tries the program",
        )
    return look_at(path, tokenizer=model.settings.get("path"), note=note)


def default_out(model: WantedModel, rows: Look) -> Path:
    """Return where the recipe is written if nothing else is said."""
    return Path(f"{run_name(f'{model.name}-{Path(rows.path).stem}')}.yaml")


def make(answers: Answers, *, out: Path, note: Note) -> Made:
    """Plan and write a recipe, and write its plan next to it.

    Raises:
        ConfigError: A file exists.
        DoesNotFitError: Nothing fits.
    """
    plan_file, machine_file = out.with_suffix(".plan.json"), out.with_suffix(".machine.json")
    require_new(out)
    asked, is_here = answers.asked, answers.asked.machine == HERE
    for file in (plan_file, machine_file) if is_here else (plan_file,):
        if file.exists():
            raise ConfigError(f"{file} exists", hint="`--out` with another name, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    if is_here:
        machine_file.write_text(probed(None, note=note).to_json())
        asked = replace(asked, machine=str(machine_file))
    target, notes = target_of(asked, dtype=None)
    found, more = _suggested(answers, target, goal_named(asked.goal), out)
    num_steps = _num_steps(answers.rows, found)
    steps = f"{num_steps:,} step{'s' * (num_steps != 1)} an epoch{_why_few(num_steps, found)}"
    written = recipe_text(found, name=shlex.quote(str(out)), of_step=steps)
    out.write_text(written, encoding="utf-8")
    name = asked.machine or target.machine.name
    text, plan = (_plan(out, name, asked, form, note) for form in ("json", "table"))
    plan_file.write_text(f"{text}\n")
    files = (out, plan_file, machine_file) if is_here else (out, plan_file)
    epoch_s = num_steps * found.chosen.plan.step_s
    num_tokens = answers.rows.num_tokens(found.chosen.seq_len)
    epoch = f"an epoch is about {num_tokens:,} tokens: {shown_time(epoch_s)}, predicted"
    if num_steps < FEW_STEPS:
        steps += "; `train.epochs: 3` takes three times as many"
    return Made(files=files, lines=(*notes, epoch, steps, *more), plan=plan)


def _plan(out: Path, machine: str, asked: Asked, form: Any, note: Note) -> RenderableType:
    return planned(
        str(out),
        [],
        machine=machine,
        host=HostOptions(ram_gib=asked.ram_gib, link_gb_per_s=None),
        wants_ways=False,
        form=form,
        note=note,
    )


def _suggested(
    answers: Answers, target: Target, goal: Goal, out: Path
) -> tuple[Suggestion, list[str]]:
    """Return a suggestion with sequences that the rows fit into, or half of that and so on."""
    rows, model = answers.rows, answers.model
    settings = _settings(answers, out, dtype=target.machine.dtype)
    wanted = settings["train"]["seq_len"]
    for seq_len in _halves(wanted):
        settings["train"]["seq_len"] = seq_len
        by_rows = rows.num_tokens(seq_len) // NUM_STEPS
        _share_out(settings, rows, TOKENS_PER_STEP if goal.is_longest else by_rows)
        try:
            with uncollected():
                found = suggest(model, target, goal, settings=settings)
                while (tokens := _hiding(found, seq_len)) > settings["train"]["tokens_per_step"]:
                    _share_out(settings, rows, tokens)
                    found = suggest(model, target, goal, settings=settings)
        except DoesNotFitError:
            if seq_len <= SEQ_LEN:
                raise
            continue
        length = found.chosen.seq_len
        cut = len(rows.cut_at(length))
        share = cut / len(rows.lengths)
        lines = [f"{share:.1%} of the rows are longer than {length:,} tokens and are cut"]
        return found, lines if cut else []
    raise AssertionError("the shortest raises")


def _share_out(settings: Settings, rows: Look, tokens: int) -> None:
    """Set the tokens of a step, in whole sequences, and after how many steps it is evaluated.

    Args:
        settings: The recipe's, changed in place.
        rows: The rows that it trains on.
        tokens: The wanted tokens; a step has no more than the usual one.
    """
    train, output = settings["train"], settings["output"]
    nearest = min(tokens + train["seq_len"] // 2, TOKENS_PER_STEP)
    train["tokens_per_step"] = whole_units(nearest, train["seq_len"])
    num_steps = rows.num_tokens(train["seq_len"]) // train["tokens_per_step"]
    every = max(1, min(MOST_EVERY, num_steps // NUM_EVALUATIONS))
    output |= dict.fromkeys({"checkpoint_every", "eval_every"} & output.keys(), every)


def _hiding(found: Suggestion, seq_len: int) -> int:
    """Return the tokens of a step that hide the copies of layers, up to the usual ones."""
    hiding = found.chosen.plan.break_even_tokens
    most = TOKENS_PER_STEP if hiding is None else min(hiding, TOKENS_PER_STEP)
    return whole_units(most, seq_len)


def _num_steps(rows: Look, found: Suggestion) -> int:
    """Return the optimizer steps of an epoch."""
    return math.ceil(rows.num_tokens(found.chosen.seq_len) / found.chosen.plan.tokens_per_step)


def _why_few(num_steps: int, found: Suggestion) -> str:
    """Return why an epoch has few steps, in words after their number; empty if it has more."""
    if num_steps >= FEW_STEPS:
        return ""
    if found.chosen.plan.tokens_per_step == found.chosen.seq_len:
        return ": a step has one sequence, the least"
    return ": fewer tokens do not hide the copies of layers"


def _halves(seq_len: int) -> Iterator[int]:
    """Yield a length and its halves, down to the usual one."""
    while seq_len > SEQ_LEN:
        yield seq_len
        seq_len = max(SEQ_LEN, seq_len // 2)
    yield seq_len


def _settings(answers: Answers, out: Path, *, dtype: str) -> Settings:
    """Return the settings for rows: their path, sequences, objective, and what is held out."""
    rows = answers.rows
    settings = first_settings(answers.model, name=run_name(out.stem), dtype=dtype)
    settings["data"] = {"path": _path_from(out, rows.path), "format": rows.data_format}
    settings["train"]["seq_len"] = seq_len_for(rows, least=SEQ_LEN)
    if rows.num_rows >= FEW_ROWS:
        settings["data"]["eval_frac"] = 0.01 if rows.num_rows >= MANY_ROWS else 0.05
    else:
        del settings["output"]["eval_every"]
    if rows.objective:
        settings["objective"] = rows.objective
        settings["train"] |= {"lr": 5e-6, "warmup_ratio": 0.1}
    return settings


def _path_from(out: Path, path: str) -> str:
    """Return a path of rows as the recipe finds it: a file elsewhere by its whole path."""
    file = Path(path)
    is_near = out.parent.absolute() == Path.cwd() and not file.is_absolute()
    return path if is_near or not file.exists() else str(file.absolute())
