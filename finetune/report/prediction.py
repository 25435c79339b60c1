"""What was predicted before the first step, stored so that a later change is detected.

Each start of a run writes its prediction before its first step, into a file of its own that is
read-only: `predicted.json`, and `predicted-2.json` and so on for runs that are resumed. The file's
SHA-256 is its seal. Every row of metrics.jsonl carries the seal of the prediction that was there
before the row's step was run, and each later prediction carries that of the one before it. To
change a prediction after a step, one would have to forge every later row; nothing here prevents a
user from forging them all.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.files.atomic import write_atomically
from finetune.report.plan import plan_json
from finetune.run.run_files import PREDICTION
from offload.plan.machine.machine import Machine
from offload.plan.plan import Plan
from offload.plan.schedule.timeline import Timeline

FIRST, LATER = "predicted.json", "predicted-[0-9]*.json"
SEAL = "prediction_sha256"
READ_ONLY = 0o444


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What one start of a run predicted."""

    number: int  # which start, counted from 1
    sha256: str  # its seal: of the file as it is now
    previous_sha256: str | None  # the seal of the one before it, as it was then
    first_step: int  # steps that were done before it
    num_steps: int  # steps of the whole run
    memory_grade: str  # how memory was predicted
    before_measuring: Mapping[str, Any]  # the prediction by price, before a step was timed
    calibrated: Mapping[str, Any]  # what the run is compared with
    timeline: Timeline  # the timeline of the pass, without the optimizer
    machine: Machine  # the machine that it was made for
    num_ranks: int  # processes that share a step
    num_runs: int  # runs that share a step


def write_prediction(
    run_dir: Path,
    plan: Plan,
    *,
    priced: Mapping[str, Any],
    steps: tuple[int, int],
    choice: Mapping[str, Any],
) -> str:
    """Write what is predicted for the steps to come; no prediction is ever replaced.

    Args:
        run_dir: Of the run.
        plan: As it was calibrated by timed steps.
        priced: The same plan before that, as `plan_json` writes it.
        steps: How many are done, and how many the whole run has.
        choice: The alternatives considered, by formulas, before the model was loaded.

    Returns:
        The file's seal.
    """
    files = _files(run_dir)
    first_step, num_steps = steps
    content = {
        "first_step": first_step,
        "num_steps": num_steps,
        "previous_sha256": _seal(files[-1].read_bytes()) if files else None,
        "memory_grade": plan.memory_grade,
        "machine": json.loads(plan.machine.to_json()),
        "num_ranks": plan.request.num_ranks,
        "num_runs": len(plan.request.runs),
        "choice": {"memory_grade": "formula", **choice},
        "before measuring": priced,
        "calibrated": plan_json(plan),
    }
    file = run_dir / (f"predicted-{_number(files[-1]) + 1}.json" if files else FIRST)
    text = with_timeline(content, plan.predict())
    write_atomically(file, text, mode=READ_ONLY)
    return _seal(text.encode())


def with_timeline(content: Mapping[str, Any], timeline: Timeline) -> str:
    """Return JSON that people can read, and a timeline in its last line."""
    head = json.dumps(content, indent=1).removesuffix("\n}")
    return f'{head},\n "timeline": {timeline.to_json()}\n}}\n'


def read_predictions(run_dir: Path) -> list[Prediction]:
    """Return the predictions of all starts.

    Raises:
        CheckpointError: There is none, or one cannot be read.
    """
    files = _files(run_dir)
    if not files:
        raise CheckpointError(
            f"{run_dir} holds no {FIRST}",
            limit="a run writes its prediction before step 1",
            hint="name the directory that `sluice finetune` wrote, which holds recipe.yaml and"
            f" {FIRST}",
        )
    return [_read(file, _number(file)) for file in files]


def _read(file: Path, number: int) -> Prediction:
    content = PREDICTION.content(file)
    row = PREDICTION.parsed(content, source=str(file))
    return Prediction(
        number=number,
        sha256=_seal(content),
        previous_sha256=row["previous_sha256"],
        first_step=row["first_step"],
        num_steps=row["num_steps"],
        memory_grade=row["memory_grade"],
        before_measuring=row["before measuring"],
        calibrated=row["calibrated"],
        timeline=Timeline.from_json(json.dumps(row["timeline"])),
        machine=Machine.from_json(json.dumps(row["machine"])),
        num_ranks=row["num_ranks"],
        num_runs=row["num_runs"],
    )


def start_of(predictions: Sequence[Prediction], row: Mapping[str, Any]) -> Prediction:
    """Return the prediction after which a step was run; of a changed one, the last start's."""
    by_seal = [one for one in predictions if one.sha256 == row.get(SEAL)]
    started = [one for one in predictions if one.first_step < row["step"]]
    return (by_seal or started or predictions)[-1]


def changes(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Report which predictions were changed since steps were run; empty if none.

    Args:
        run_dir: Of the run.
        rows: Lines of metrics.jsonl.
    """
    files = _files(run_dir)
    contents = {file.name: PREDICTION.content(file) for file in files}
    seals = {_seal(content): name for name, content in contents.items()}
    found = []
    for seal, count in Counter(row.get(SEAL) for row in rows).items():
        if seal is None:
            found.append(f"{count} steps name no prediction")
        elif seal not in seals:
            found.append(
                f"{count} steps were run after a prediction with SHA-256 {seal[:12]}...,"
                f" which none of {', '.join(contents) or 'the files here'} has"
            )
    before, seal_before = FIRST, None
    for name, content in contents.items():
        if _previous(content) != seal_before:
            found.append(f"{before} is not what {name} was written after")
        before, seal_before = name, _seal(content)
    return found


def require_unchanged(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that a run may be continued: with a changed prediction, comparisons are meaningless.

    Raises:
        CheckpointError: A prediction was changed.
    """
    found = changes(run_dir, rows)
    if found:
        raise CheckpointError(
            f"in {run_dir} a prediction was changed: {'; '.join(found)}",
            limit="a prediction cannot be changed after a step was run",
            hint=f"restore {FIRST} from a copy, or start a new run with `output.name=...`",
        )


def _files(run_dir: Path) -> list[Path]:
    first = run_dir / FIRST
    return [*([first] if first.exists() else []), *sorted(run_dir.glob(LATER), key=_number)]


def _number(file: Path) -> int:
    return 1 if file.name == FIRST else int(file.stem.removeprefix("predicted-"))


def _previous(content: bytes) -> str | None:
    try:
        row = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return row.get("previous_sha256") if isinstance(row, dict) else None


def _seal(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
