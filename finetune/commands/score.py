"""What `score` does: rows under a base, adapters and checkpoints, in one pass over the layers."""

import gc
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.tokenize import require_known_ids
from finetune.errors import ConfigError
from finetune.files.atomic import write_atomically
from finetune.images.live import LiveImages
from finetune.model.config import fetch_model
from finetune.model.tokenizer import load_tokenizer
from finetune.planning.subject import Subject
from finetune.report.format import shown_gib, shown_time
from finetune.report.rows import as_text
from finetune.report.screen import Working
from finetune.scoring.contenders import Contender, contenders_of, waves
from finetune.scoring.report import ContenderScore, row_lines, scores_json, scores_table
from finetune.scoring.rows import RowsToScore, read_rows
from finetune.scoring.scorer import attaching, base_to_score, machine_here, plan_wave
from finetune.training import preflight
from offload.plan.machine.machine import Machine
from offload.plan.scoring import ScorePlan

if TYPE_CHECKING:
    from rich.console import RenderableType

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is scored."""

    adapters: tuple[Path, ...]  # folders in peft's format, or directories of finished runs
    checkpoints: Path | None  # a run's directory
    has_base: bool  # whether the base is scored too
    machine: Path | None  # a machine that was measured before; None measures this one
    out: Path | None  # the file for the scores of each row


def score_rows(
    model: str,
    rows: str,
    overrides: Sequence[str],
    asked: Asked,
    *,
    as_json: bool,
    note: Note,
    working: Working,
) -> "RenderableType":
    """Score rows, and return the table or the figures.

    Args:
        model: A recipe, or a model.
        rows: What `data.path` of a recipe takes.
        overrides: Settings over the recipe's.
        asked: What rows are scored with.
        as_json: Whether to return figures for programs.
        note: Reports what takes time, what is predicted and what was measured.
        working: Shows the progress of a download.

    Raises:
        SluiceError: Anything that a user or the machine can cause.
    """
    if asked.out is not None and not asked.out.absolute().parent.is_dir():
        raise ConfigError(
            f"--out {asked.out}: there is no directory {asked.out.absolute().parent}",
            hint=f"`mkdir -p {asked.out.absolute().parent}`",
        )
    subject = base_to_score(model, overrides)
    recipe = subject.recipe
    contenders, notes = contenders_of(
        recipe,
        adapters=asked.adapters,
        checkpoints=asked.checkpoints,
        has_base=asked.has_base,
    )
    for one in (*subject.notes, *notes):
        note(one)
    fetch_model(recipe.model, working=working, note=note)
    tokenizer = load_tokenizer(recipe.model)
    images = LiveImages.of(
        recipe,
        tokenizer,
        num_tokens=subject.facts.vocab_size,
        device=torch.device(preflight.torch_device_name(recipe.offload)),
    )
    read = read_rows(rows, recipe.data, tokenizer, seq_len=recipe.train.seq_len, images=images)
    for one in read.notes:
        note(one)
    ids = [line.ids if images is None else images.without(line.ids) for line in read.lines]
    if images is not None:
        images.let_go()
        images = None if images.are_none else images
    require_known_ids(ids, tokenizer, subject.facts.vocab_size, where=rows)
    if asked.machine is None:
        note("Measuring this machine ...")
    machine = machine_here(subject, asked.machine)
    assert isinstance(tokenizer.pad_token_id, int)
    found, runs = _in_waves(
        subject, machine, contenders, read, tokenizer.pad_token_id, note, images=images
    )
    scores = [found[one.name] for one in contenders]
    if asked.out is not None:
        write_atomically(asked.out, "".join(row_lines(scores)))
        note(f"Written: {asked.out}")
    return scores_json(scores, read, run=runs) if as_json else as_text([scores_table(scores, read)])


def _in_waves(
    subject: Subject,
    machine: Machine,
    contenders: Sequence[Contender],
    rows: RowsToScore,
    pad_id: int,
    note: Note,
    *,
    images: LiveImages | None,
) -> tuple[dict[str, ContenderScore], dict[str, Any]]:
    """Score all waves; return the scores by contender, and what was predicted and measured."""
    together = waves(contenders, subject.facts)
    if len(together) > 1:
        shown = "; ".join(", ".join(one.name for one in wave) for wave in together)
        note(
            f"peft cannot hold all of these adapters in one model: {len(together)} passes, each"
            f" over the base anew: {shown}"
        )
    has_images = images is not None
    plans = [
        plan_wave(subject, machine, wave, rows.lines, has_images=has_images) for wave in together
    ]
    note(shown_plan(plans, num_layers=subject.facts.num_layers))
    found, measured_s, num_loads = dict[str, ContenderScore](), 0.0, 0
    for wave, made in zip(together, plans, strict=True):
        base = attaching(subject, machine, num_slots=made.num_slots, images=images)
        with closing(base.open(wave, pad_id=pad_id)) as scorer:
            scored = scorer.score(rows.lines, made.sweeps)
        measured_s += scored.sweep_s
        num_loads += scored.num_loads
        for one, lines in zip(wave, scored.lines, strict=True):
            found[one.name] = ContenderScore.of(one.name, rows, lines)
        del scorer
        gc.collect()  # the base of one wave is let go before the next is loaded
    predicted_s = sum(made.sweep_s for made in plans)
    note(
        f"Scored in {shown_time(measured_s)}, predicted {shown_time(predicted_s)};"
        f" {num_loads} layers loaded"
    )
    return found, {
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "num_loads": num_loads,
        "num_layers": subject.facts.num_layers,
        "waves": [[one.name for one in wave] for wave in together],
        "sweeps": [len(made.sweeps) for made in plans],
        "peak_bytes": [made.peak_bytes for made in plans],
    }


def shown_plan(plans: Sequence[ScorePlan], *, num_layers: int) -> str:
    """Return what the plans of all waves promise, in a line."""
    num_sweeps, num_loads = (
        sum(len(made.sweeps) for made in plans),
        sum(made.num_loads for made in plans),
    )
    largest = max(plans, key=lambda made: made.peak_bytes)
    return (
        f"Plan: {num_sweeps} {'pass' if num_sweeps == 1 else 'passes'} over the {num_layers}"
        f" layers, {largest.num_slots} slots, {num_loads} loads,"
        f" {sum(made.num_micro_batches for made in plans)} micro-batches,"
        f" {shown_gib(largest.peak_bytes)} of device memory,"
        f" about {shown_time(sum(made.sweep_s for made in plans))}"
    )
