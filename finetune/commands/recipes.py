"""What `recipes for` writes: a recipe for a model and a card, with its predicted figures."""

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from finetune.commands.plan import HostOptions, assumed, machine_notes, shared_by
from finetune.errors import ConfigError
from finetune.planning.candidates import goal_named, uncollected
from finetune.planning.compare import budgeted, slowest_card
from finetune.planning.ranks import GPUS
from finetune.planning.recipe_text import recipe_text
from finetune.planning.subject import wanted_model
from finetune.planning.suggestion import Target, first_settings, suggest
from finetune.recipe.load import shipped_shapes
from finetune.recipe.recipe import shipped_recipes
from finetune.report.rows import Table
from offload.plan.machine.machine import Dtype, half_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The machine and the goal that a recipe is asked for."""

    # A named card or a machine file; None takes the slowest card with the memory.
    machine: str | None
    vram_gib: float | None  # device memory that may be used; None takes all of the card's
    ram_gib: float | None  # host memory; None takes what is assumed for the card
    goal: str  # name of the goal
    num_gpus: int | None = None  # such cards in the machine, which share a step; None plans for one
    is_headless: bool = False  # whether no desktop uses the card


def recipe_for(
    model: str, overrides: Sequence[str], asked: Asked, *, out: Path | None
) -> tuple[str, list[str]]:
    """Return a recipe as text, written to a file if there is one, and notes on it.

    Raises:
        ConfigError: There is no such model, card or goal, the file exists, or the GPUs cannot
            share a step.
        DoesNotFitError: Nothing fits.
    """
    require_new(out)
    wanted, goal = wanted_model(model), goal_named(asked.goal)
    asked_types = [kind for kind in get_args(Dtype) if f"model.dtype={kind}" in overrides]
    target, notes = target_of(asked, dtype=asked_types[0] if asked_types else None)
    several = f"-x{target.num_gpus}" if target.num_gpus > 1 else ""
    name = run_name(f"{wanted.name}-{target.machine.name}{several}")
    with uncollected():
        settings = first_settings(wanted, name=name, dtype=target.machine.dtype)
        found = suggest(wanted, target, goal, settings=settings, overrides=overrides)
    text = recipe_text(found, name=f"{name}.yaml" if out is None else shlex.quote(str(out)))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    return text, notes


def require_new(out: Path | None) -> None:
    """Refuse to write over a file.

    Raises:
        ConfigError: It exists, or is not named as a recipe.
    """
    if out is None:
        return
    if out.exists():
        raise ConfigError(f"{out} exists", hint=f"`--out {out.stem}-2.yaml`, or remove it")
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"--out {out}", limit="a recipe ends in .yaml", hint=f"`--out {out.name}.yaml`"
        )


def target_of(asked: Asked, *, dtype: Dtype | None) -> tuple[Target, list[str]]:
    """Return the machine to plan for, and notes on what was assumed of it.

    Args:
        asked: Settings of the machine.
        dtype: Type that layers compute in; None takes the 16-bit type of the card.

    Raises:
        ConfigError: Neither a card nor its memory is given, or the card has less than that.
        MachineError: There is no such card.
    """
    if asked.machine is None and asked.vram_gib is None:
        raise ConfigError(
            "neither --vram nor --machine is given",
            limit="a recipe is made for the memory and the rates of a card",
            hint="`--vram 12 --ram 64`, or `--machine rtx3060`",
        )
    name = asked.machine or slowest_card(asked.vram_gib)
    host = HostOptions(ram_gib=asked.ram_gib, link_gb_per_s=None, is_headless=asked.is_headless)
    machine = host.machine(name, dtype=dtype or half_dtype(name))
    if dtype is None:
        dtype = "float16" if machine.dtype == "float16" else "bfloat16"
    notes = machine_notes(machine, dtype=dtype)
    if asked.machine is None:
        notes.append(assumed(machine))
    notes += shared_by(asked.num_gpus or 1)
    has_budget = budgeted(machine, vram_gib=asked.vram_gib).vram_bytes < machine.vram_bytes
    options = f"--machine {shlex.quote(name)}"
    options += "" if asked.ram_gib is None else f" --ram {asked.ram_gib:g}"
    options += " --headless" if asked.is_headless else ""
    options += "" if asked.num_gpus is None else f" {GPUS} {asked.num_gpus}"
    budget, num_gpus = asked.vram_gib if has_budget else None, asked.num_gpus or 1
    target = Target(machine=machine, options=options, vram_gib=budget, num_gpus=num_gpus)
    return target, notes


def run_name(text: str) -> str:
    """Return a text as the name of a run."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "run"


def shipped_tables() -> list[Table]:
    """Return the shipped recipes, each with its first sentence, and the shipped shapes."""
    recipes = [(name, _first_sentence(path)) for name, path in shipped_recipes().items()]
    shapes = [[", ".join(shipped_shapes())]]
    return [
        Table("Recipes, for `sluice plan NAME` and `sluice finetune NAME`", [""] * 2, recipes),
        Table("Shapes, for `sluice plan NAME` or `model.config`", [""], shapes),
    ]


def _first_sentence(path: Path) -> str:
    """Return the first sentence of the comment that a recipe begins with."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), path.read_text().splitlines())
    text = " ".join(line.removeprefix("# ") for line in lines)
    return text.partition(". ")[0].removesuffix(".")
