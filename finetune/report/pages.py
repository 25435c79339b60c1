"""The page of a run: what it predicted, measured and learned."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path

from finetune.errors import CheckpointError
from finetune.files.atomic import write_atomically
from finetune.recipe.recipe import Recipe
from finetune.report.charts import (
    Chart,
    Row,
    gantt,
    memory,
    metric_charts,
    misses,
    page,
    step_times,
)
from finetune.report.explain import (
    IMAGES,
    METRICS,
    Explanation,
    changes,
    compared,
    details_of,
    explain,
    rows_of,
)
from finetune.report.format import shown_time
from finetune.report.rows import Part, Table, as_html, as_tiles, tables
from finetune.report.rows import Row as FactRow
from finetune.report.verdict import ANSWERS, verdict
from finetune.run.run_dir import RunDir
from finetune.run.run_files import SAMPLES, read_rows, read_sealed

REPORT_PAGE = "report.html"
NUM_SAMPLES = 5
_TRAINED = {"adapter": "an adapter", "head": "a new head alone, on features of the frozen layers"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a model answers to a held-out row."""

    prompt: str  # the prompt of the row
    wanted: str  # the row's own answer
    before: str | None  # the model's before training; None if it was not asked
    after: str | None  # what was answered after training
    images: Sequence[str]  # small copies of the row's images, as `data:` URIs


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

    def charts(*names: str) -> str:
        found = "".join(drawn[name].html for name in names if name in drawn)
        return f'<div class="pair">{found}</div>' if found and names[1:] else found

    body = [as_html(_notes(recipe, rows, run_dir, goes_on=goes_on))]
    more: list[Part] = []
    if explanation is not None:
        if explanation.rounds is not None:
            more = explanation.rounds.answers()
        body += [as_html(changes(explanation)), as_tiles(verdict(run_dir, rows, explanation))]
    body += [as_html([*_samples(run_dir), *more]), charts("reward", "lengths")]
    body += [charts("functions"), charts("shares", "kl", "eval", "loss")]
    if explanation is not None:
        body += [
            *(as_html(compared(explanation)), charts("times", "parts")),
            *(charts("rate", "lr"), charts("gantt")),
            *(charts("memory"), as_html(details_of(explanation))),
        ]
    text = escape(RunDir(run_dir).recipe_file.read_text("utf-8"))
    recipe_part = f"<details><summary><b>Recipe</b></summary>\n<pre>{text}</pre></details>"
    seals = [] if explanation is None else [[one.sha256] for one in explanation.sections]
    sealed = [Table("Seals of what was predicted", [""], seals)] if seals else []
    body += [as_html(_facts(recipe, explanation)), recipe_part, as_html(sealed)]
    return page(f"Run {recipe.output.run_dir.name}", "\n".join(body), list(drawn.values()))


def _notes(recipe: Recipe, rows: Sequence[Row], run_dir: Path, *, goes_on: bool) -> list[str]:
    """Return what the run is, without paths, and how far it is."""
    data = " and ".join(Path(source.path).name for source in recipe.data.sources)
    name = Path(str(recipe.model.path)).name
    trained = _TRAINED.get(str(recipe.train.what), "weights of the model")
    found = [f"{name}: {trained}, learned by {recipe.objective.method} from {data}."]
    if not rows:
        return [*found, "The run has done no step yet."]
    if not goes_on:
        return found
    return [
        *found,
        f"Written after step {rows[-1]['step']:,}, when the run went on; `sluice explain"
        f" {run_dir} --html` writes this page again.",
    ]


def _facts(recipe: Recipe, explanation: Explanation | None) -> list[Table]:
    """Return where the run has all from, and what it ran on."""
    facts = [
        FactRow("", "model", str(recipe.model.path)),
        FactRow("", "data", ", ".join(source.path for source in recipe.data.sources)),
    ]
    return tables("The run", [*facts, *(rows_of(explanation, recipe) if explanation else ())])


def _charts(rows: Sequence[Row], explanation: Explanation) -> dict[str, Chart]:
    section, run = explanation.sections[-1], {"": rows}
    timelines = {"predicted": explanation.predicted}
    which = f"Predicted: a step of {shown_time(explanation.predicted.step_s)}."
    if (own := explanation.measured_step) is not None:
        timelines["measured"] = own.timeline
        which += (
            f" Measured: step {own.step:,}, which took {shown_time(own.step_s)};"
            ' the time at "a step took" is the mean of the middle steps.'
        )
    found = [
        *(explanation.rounds.charts() if explanation.rounds else metric_charts(run, ("eval",))),
        *metric_charts(run, ("loss", "lr", "rate")),
        step_times(rows, predicted_s=section.predicted_s),
        misses(section.misses),
        *([memory(explanation.memory)] if explanation.memory else []),
        gantt(timelines, which),
    ]
    return {chart.name: chart for chart in found}


def answers(run_dir: Path) -> list[Answer]:
    """Return the first answers to held-out rows, of a run that has none yet an empty list.

    Raises:
        CheckpointError: A file of them is damaged.
    """
    before, after = (
        read_sealed(SAMPLES, file)["rows"][:NUM_SAMPLES] if file.exists() else []
        for file in (run_dir / name for name in ANSWERS.values())
    )
    return [
        Answer(
            prompt=(old or new)["prompt"],
            wanted=(old or new)["wanted"],
            before=old and (old["got"] or "(nothing)"),
            after=new and (new["got"] or "(nothing)"),
            images=(old or new).get("images", ()),
        )
        for old, new in itertools.zip_longest(before, after)
    ]


def _samples(run_dir: Path) -> list[Part]:
    """Return the first answers, and after which prompts they were drawn."""
    lines = [
        (
            import_module(IMAGES).pictured(one.prompt, one.images) if one.images else one.prompt,
            *(one.wanted, one.before, one.after),
        )
        for one in answers(run_dir)
    ]
    if not lines:
        return []
    files = [run_dir / name for name in ANSWERS.values()]
    found = next(read_sealed(SAMPLES, file) for file in files if file.exists())
    said = [
        f"{num:,} after "
        + (f"the prompt with {given}" if given else "the chat template's default prompt")
        for given, num in found["prompts"].items()
    ]
    columns = ("prompt", "wanted", "before training", "after")
    note = f"Answers were drawn: {', '.join(said)}."
    return [Table("Answers to held-out rows", columns, lines, note, level="brief")]
