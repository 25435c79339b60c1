"""A run as a page: what ran, what it learned, and how its prediction held, from its files alone."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.files.atomic import write_atomically
from finetune.recipe.recipe import Recipe
from finetune.report.explain import (
    METRICS,
    Explanation,
    explain,
    features_took,
    probe_learned,
    probe_took,
)
from finetune.report.format import shown_time
from finetune.report.pages import charts
from finetune.report.pages.page import Chart, page, table
from finetune.run.evaluations import EVAL_LOSS
from finetune.run.metrics import read_rows
from finetune.run.run_dir import RunDir
from finetune.run.run_files import SAMPLES, read_sealed
from offload.plan.machine.machine import GIB

REPORT_PAGE = "report.html"
NUM_SAMPLES = 5
_TRAINED = {"adapter": "an adapter", "head": "a new head alone, on features of the frozen layers"}
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a model answers to a held-out row.

    Attributes:
        prompt: Of the row.
        wanted: The row's own answer.
        before: The model's before training; None if it was not asked.
        after: The same after training.
    """

    prompt: str
    wanted: str
    before: str | None
    after: str | None


def write_run_page(run_dir: Path, *, goes_on: bool = False) -> Path:
    """Write report.html from the files of a run, finished or not, and return it.

    Args:
        run_dir: Of the run.
        goes_on: Whether the run is in progress, which the page then says.

    Raises:
        CheckpointError: There is no run, or a file is damaged.
    """
    file = run_dir / REPORT_PAGE
    write_atomically(file, run_page(run_dir, goes_on=goes_on))
    return file


def run_page(run_dir: Path, *, goes_on: bool = False) -> str:
    """Return the page of a run; one that did no step shows what there is.

    Raises:
        CheckpointError: There is no run, or a file is damaged.
    """
    if not RunDir(run_dir).recipe_file.exists():
        raise CheckpointError(
            f"{run_dir} holds no run",
            limit="a run's directory has its recipe.yaml",
            hint="give the directory that `sluice finetune` wrote",
        )
    recipe, rows = RunDir(run_dir).recipe(), read_rows(run_dir / METRICS)
    explanation = explain(run_dir) if rows else None
    drawn = _charts(rows, explanation) if explanation is not None else {}
    notes = (f"<p>{escape(note)}</p>" for note in _notes(rows, run_dir, goes_on=goes_on))
    parts = [*notes, _facts(recipe, rows, explanation)]
    for pair in (("loss", "eval"), ("lr", "rate"), ("times", "parts"), ("memory",), ("gantt",)):
        found = "".join(drawn[name].html for name in pair if name in drawn)
        parts.append(f'<div class="pair">{found}</div>' if len(pair) > 1 else found)
    if explanation is not None:
        parts += [_comparison(explanation), _memory(explanation)]
    parts += [_samples(run_dir), _recipe(run_dir, explanation)]
    return page(f"Run {recipe.output.run_dir.name}", "\n".join(parts), list(drawn.values()))


def _notes(rows: Sequence[Row], run_dir: Path, *, goes_on: bool) -> list[str]:
    if not rows:
        return ["The run has done no step yet."]
    if not goes_on:
        return []
    return [
        f"Written after step {rows[-1]['step']:,}, when the run went on; `sluice explain"
        f" {run_dir} --html` writes this page again."
    ]


def _facts(recipe: Recipe, rows: Sequence[Row], explanation: Explanation | None) -> str:
    found: list[tuple[str, str]] = [
        ("model", str(recipe.model.path)),
        ("trains", _TRAINED.get(str(recipe.train.what), "weights of the model")),
        ("learns by", recipe.objective.method),
        ("data", ", ".join(source.path for source in recipe.data.sources)),
    ]
    if rows:
        tokens = sum(row["num_tokens"] for row in rows)
        found += [
            ("loss", f"{rows[0]['loss']:.4f} at first, {rows[-1]['loss']:.4f} at last"),
            ("tokens", f"{tokens:,} in {len(rows):,} steps"),
        ]
    evaluated = [row for row in rows if EVAL_LOSS in row]
    if evaluated:
        best = min(evaluated, key=lambda row: float(row[EVAL_LOSS]))
        found.append(("best held-out loss", f"{best[EVAL_LOSS]:.4f} after step {best['step']}"))
    if explanation is not None:
        section, probe = explanation.sections[-1], explanation.probe
        if explanation.features is not None:
            found.append(("features", features_took(explanation.features)))
        if probe is not None:
            found += [("probe", probe_took(probe)), ("head of the probe", probe_learned(probe))]
        found += [
            ("steps", f"{explanation.num_done:,} of {explanation.num_steps:,} done"),
            ("machine", section.machine),
            (
                "a step",
                f"{shown_time(section.predicted_s)} predicted ({section.grade}),"
                f" {shown_time(section.wall_s)} measured",
            ),
        ]
        found += [("energy", line) for line in explanation.energy.lines(recipe.report)]
        if explanation.versions:
            versions = (f"{name} {version}" for name, version in explanation.versions.items())
            found.append(("versions", ", ".join(versions)))
        for change in explanation.changes:
            found.append(("changed since", change))
    return table("The run", ("", ""), found)


def _charts(rows: Sequence[Row], explanation: Explanation) -> dict[str, Chart]:
    first, last = rows[0], rows[-1]
    evaluated = [{"step": row["step"], "loss": row[EVAL_LOSS]} for row in rows if EVAL_LOSS in row]
    found = [
        charts.curves(
            "loss",
            "Training loss",
            [{"step": row["step"], "loss": row["loss"]} for row in rows],
            y="loss",
            summary=f"Loss from {first['loss']:.4f} to {last['loss']:.4f} in {last['step']} steps.",
        ),
        charts.curves(
            "lr",
            "Learning rate",
            [{"step": row["step"], "rate": row["lr"]} for row in rows],
            y="rate",
            summary=f"Learning rate, {last['lr']:.3g} at last.",
        ),
        charts.curves(
            "rate",
            "Tokens per second",
            [{"step": row["step"], "tokens/s": row["tokens_per_s"]} for row in rows],
            y="tokens/s",
            summary=f"Tokens per second, {last['tokens_per_s']:.4g} in the last step.",
        ),
        charts.step_times(rows, predicted_s=explanation.sections[-1].predicted_s),
        charts.misses(explanation.sections[-1].misses),
    ]
    if evaluated:
        found.append(
            charts.curves(
                "eval",
                "Held-out loss",
                evaluated,
                y="loss",
                summary=f"Held-out loss, {evaluated[-1]['loss']:.4f} at last.",
                has_points=True,
            )
        )
    if explanation.memory:
        found.append(charts.memory(explanation.memory))
    timelines = {"predicted": explanation.predicted}
    if explanation.measured_step is not None:
        timelines["measured"] = explanation.measured_step.timeline
    found.append(charts.gantt(timelines))
    return {chart.name: chart for chart in found}


def _comparison(explanation: Explanation) -> str:
    rows = [
        (row.name, row.lane, row.predicted * 1e3, row.measured * 1e3, _error(row.error))
        for row in explanation.sections[-1].comparison
    ]
    heads = ("phase", "lane", "predicted ms", "measured ms", "error")
    return _details("Predicted and measured, phase by phase", heads, rows)


def _memory(explanation: Explanation) -> str:
    rows = [
        (
            row.name,
            None if row.predicted is None else row.predicted / GIB,
            None if row.measured is None else row.measured / GIB,
            None if row.limit is None else row.limit / GIB,
            _error(row.error),
            row.how,
        )
        for row in explanation.memory
    ]
    heads = ("term", "predicted GiB", "measured GiB", "limit GiB", "error", "how it was measured")
    return _details("Memory, term by term", heads, rows) if rows else ""


def answers(run_dir: Path) -> list[Answer]:
    """Return the first answers to held-out rows, of a run that has none yet an empty list.

    Raises:
        CheckpointError: A file of them is damaged.
    """
    before, after = (
        read_sealed(SAMPLES, file)["rows"][:NUM_SAMPLES] if file.exists() else []
        for file in (run_dir / "samples_before.json", run_dir / "samples_after.json")
    )
    return [
        Answer(
            prompt=(old or new)["prompt"],
            wanted=(old or new)["wanted"],
            before=old and old["got"],
            after=new and new["got"],
        )
        for old, new in itertools.zip_longest(before, after)
    ]


def _samples(run_dir: Path) -> str:
    rows = [(one.prompt, one.wanted, one.before, one.after) for one in answers(run_dir)]
    title, heads = "Answers to held-out rows", ("prompt", "wanted", "before training", "after")
    if not rows:
        return ""
    return f"<h2>{title}</h2>\n<p>{escape(_drawn(run_dir))}</p>\n{table(title, heads, rows)}"


def _drawn(run_dir: Path) -> str:
    """Return after which prompts the answers to held-out rows were drawn."""
    files = (run_dir / "samples_before.json", run_dir / "samples_after.json")
    found = next(read_sealed(SAMPLES, file) for file in files if file.exists())
    said = [
        f"{num:,} after "
        + (f"the prompt with {given}" if given else "the chat template's default prompt")
        for given, num in found["prompts"].items()
    ]
    return f"Answers were drawn: {', '.join(said)}."


def _recipe(run_dir: Path, explanation: Explanation | None) -> str:
    text = RunDir(run_dir).recipe_file.read_text("utf-8")
    seals = "".join(
        f"<p class=soft>Prediction {one.prediction}: <code>{escape(one.sha256)}</code></p>"
        for one in (explanation.sections if explanation else ())
    )
    recipe = _unfolded("Recipe", f"<pre>{escape(text)}</pre>")
    return recipe + (f"<h2>Seals of what was predicted</h2>{seals}" if seals else "")


def _details(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return _unfolded(title, table(title, heads, rows))


def _unfolded(title: str, body: str) -> str:
    return f"<details><summary><b>{escape(title)}</b></summary>\n{body}</details>"


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"
