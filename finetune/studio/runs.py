"""The Runs room: what the runs of a folder are doing, from their files alone.

A run may be written to meanwhile, may have died before its first step, or may be damaged: each is
shown with what there is, and never keeps the others from being shown.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.report.pages import charts
from finetune.report.pages.page import Chart
from finetune.report.pages.run_page import answers, run_page
from finetune.report.prediction import FIRST, read_predictions
from finetune.run.evaluations import EVAL_LOSS
from finetune.run.metrics import read_rows
from finetune.run.run_dir import RunDir
from finetune.run.run_lock import holder
from finetune.studio.guard import inside
from offload.errors import SluiceError

DEPTH = 2  # the runs of a sweep are in a folder of their own
MOST_RUNS = 200
NUM_LAST = 20  # steps whose time tells when the run will end
Json = dict[str, Any]
Row = Mapping[str, Any]


def run_names(folder: Path) -> list[str]:
    """Return the runs of a folder, the one written last first; no link leads out of it."""
    root = folder.resolve()
    found = (
        recipe.parent
        for depth in range(DEPTH)
        for recipe in root.glob("/".join(["*"] * (depth + 1)) + "/recipe.yaml")
    )
    named = [(run.relative_to(root).as_posix(), _written_s(run)) for run in found]
    inner = [pair for pair in named if inside(folder, f"{pair[0]}/recipe.yaml") is not None]
    return [name for name, _ in sorted(inner, key=lambda pair: (-pair[1], pair[0]))][:MOST_RUNS]


def runs_json(folder: Path) -> Json:
    """Return each run in a line: its state, its steps, its last loss, when it will end."""
    lines = [{"name": name, **_line(folder / name)} for name in run_names(folder)]
    return {"folder": str(folder), "runs": lines}


def run_json(folder: Path, name: str) -> Json:
    """Return one run: its line, its curves, its samples.

    Raises:
        CheckpointError: No run of the folder is called so.
    """
    run = folder / require_run(folder, name)
    found = {"name": name, **_line(run), "charts": {}, "samples": [], "settings": []}
    try:
        recipe = RunDir(run).recipe()
        found["settings"] = [
            ["model", str(recipe.model.path or recipe.model.config)],
            ["learns by", recipe.objective.method],
            ["tokens per step", f"{recipe.train.global_batch_size * recipe.train.seq_len:,}"]
            if recipe.train.micro_batch_size != "auto"
            else ["tokens per step", f"{recipe.train.tokens_per_step:,}"],
        ]
        rows = read_rows(RunDir(run).metrics_file)
        found["charts"] = {chart.name: chart.complete_spec for chart in _charts(rows)}
        found["samples"] = [asdict(answer) for answer in answers(run)]
    except (SluiceError, OSError) as error:
        found["problem"] = str(error)
    return found


def report_of(folder: Path, name: str) -> str:
    """Return a run's report page as its files are now, finished or not.

    Raises:
        CheckpointError: No run of the folder is called so, or a file of it is damaged.
    """
    return run_page(folder / require_run(folder, name))


def require_run(folder: Path, name: str) -> str:
    """Return the name of a run that is in the folder.

    Raises:
        CheckpointError: None is called so.
    """
    if name not in run_names(folder):
        raise CheckpointError(
            f"{name!r} is no run of {folder}",
            limit="only runs of this folder are shown",
            hint="choose one of the list, or `sluice studio DIR` with another folder",
        )
    return name


def _line(run: Path) -> Json:
    """Return how far a run is; what is damaged is said and not raised."""
    found: Json = {"state": "stopped", "steps": 0, "of": None, "loss": None, "eta_s": None}
    try:
        rows = read_rows(RunDir(run).metrics_file)
        if (run / FIRST).exists():
            found["of"] = read_predictions(run)[-1].num_steps
    except (SluiceError, OSError) as error:
        return {**found, "state": "damaged", "problem": str(error)}
    is_written = holder(run) is not None
    if rows:
        found |= {
            "steps": rows[-1]["step"],
            "loss": rows[-1]["loss"],
            "tokens_per_s": rows[-1]["tokens_per_s"],
        }
        evaluated = [row[EVAL_LOSS] for row in rows if EVAL_LOSS in row]
        found["eval_loss"] = evaluated[-1] if evaluated else None
    if is_written:
        found["state"] = "training" if rows else "starting"
        found["eta_s"] = _eta_s(rows, found["of"])
    elif RunDir(run).adapter.is_dir() or RunDir(run).model.is_dir():
        found["state"] = "finished"
    elif not rows:
        found["state"] = "died before step 1"
    return found


def _eta_s(rows: Sequence[Row], num_steps: int | None) -> float | None:
    """Return the seconds of the steps to come, at the pace of the last ones."""
    if not rows or num_steps is None:
        return None
    last = [row["phases_s"]["step"] + row["phases_s"]["data wait"] for row in rows[-NUM_LAST:]]
    return float(sum(last) / len(last) * max(0, num_steps - rows[-1]["step"]))


def _charts(rows: Sequence[Row]) -> Iterator[Chart]:
    if not rows:
        return
    for name, title, key, y in (
        ("run-loss", "Training loss", "loss", "loss"),
        ("run-rate", "Tokens per second", "tokens_per_s", "tokens/s"),
    ):
        yield charts.curves(
            name,
            title,
            [{"step": row["step"], y: row[key]} for row in rows],
            y=y,
            summary=f"{title}: {rows[-1][key]:.5g} in step {rows[-1]['step']}.",
        )
    evaluated = [{"step": row["step"], "loss": row[EVAL_LOSS]} for row in rows if EVAL_LOSS in row]
    if evaluated:
        yield charts.curves(
            "run-eval",
            "Held-out loss",
            evaluated,
            y="loss",
            summary=f"Held-out loss: {evaluated[-1]['loss']:.5g} at last.",
            has_points=True,
        )


def _written_s(run: Path) -> float:
    """Return when a run was last written, for the order of the list."""
    times = [0.0]
    for name in ("metrics.jsonl", "recipe.yaml"):
        with suppress(OSError):  # it may be removed meanwhile
            times.append((run / name).stat().st_mtime)
    return max(times)
