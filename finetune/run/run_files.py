"""What the files of a run hold: every key and type that `explain`, a report or a resume reads.

Other keys of a file are kept and not validated, so a later version may write more.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from finetune.errors import CheckpointError
from finetune.files.atomic import JsonFile
from finetune.files.manifest import is_sealed_json
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.timeline import DATA_WAIT, OPTIMIZER, is_part

MAX_S, MAX_BYTES, MAX_COUNT = 1e12, 2**60, 2**40


def _is_lane(value: str) -> str:
    return Lane(value).value


def _is_kind(value: str) -> str:
    return Kind(value).value


def _has_all_phases(phases: dict[str, float]) -> dict[str, float]:
    for name in PHASES:
        if name not in phases:
            raise ValueError(f"should name {name}")
    if not phases["step"]:
        raise ValueError("should have a step above 0")
    return phases


def _are_parts(parts: dict[str, float | list[float]]) -> dict[str, float | list[float]]:
    for name in parts:
        if not is_part(name):
            raise ValueError(f"should name no {name[:40]}")
    return parts


PHASES = (
    *("step", "forward", "decode", "head and loss", "backward", "h2d", "d2h", "reads", "stall"),
    *(OPTIMIZER, DATA_WAIT),
)

Number = Annotated[float, Field(ge=-MAX_S, le=MAX_S, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=MAX_S, allow_inf_nan=False)]
SomeSeconds = Annotated[float, Field(gt=0, le=MAX_S, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Joules = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
EnergyPart = Literal["GPU", "CPU"]
Step = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Phases = Annotated[dict[str, Seconds], AfterValidator(_has_all_phases)]
Parts = Annotated[dict[str, Number | list[Number]], AfterValidator(_are_parts)]


class _Content(BaseModel):
    model_config = ConfigDict(extra="ignore", populate_by_name=False)


class SpanContent(_Content):
    """An op of a timeline, as `Timeline.to_json` writes it, and nothing else."""

    model_config = ConfigDict(extra="forbid")

    lane: Annotated[str, AfterValidator(_is_lane)]
    kind: Annotated[str, AfterValidator(_is_kind)]
    layer: Count | None
    micro_batch: Count | None
    num_bytes: Bytes
    start_s: Seconds
    end_s: Seconds
    waits: list[Count]


class TimelineContent(_Content):
    """A file with a timeline."""

    timeline: list[SpanContent]

    @model_validator(mode="after")
    def _wait_for_ops_that_are_there(self) -> "TimelineContent":
        for number, span in enumerate(self.timeline):
            if any(other >= len(self.timeline) for other in span.waits):
                raise ValueError(f"should have no span that waits for none, as {number} does")
        return self


class PredictedContent(_Content):
    """The step of a plan."""

    step_s: SomeSeconds
    bound_s: Seconds
    phases_s: Phases
    device_memory: dict[str, Bytes]
    host_memory: dict[str, Bytes]


class ScheduleContent(_Content):
    """The ops of a plan, counted."""

    num_loads: Count


class EnergyContent(_Content):
    """What a plan's cards can take."""

    board_w: Count | None
    at_most_j_per_token: Joules | None


class PlanContent(_Content):
    """A plan as `plan_json` writes it."""

    machine: str
    grade: str
    schedule: ScheduleContent
    predicted: PredictedContent
    energy: EnergyContent


class PredictionContent(TimelineContent):
    """predicted.json and its successors."""

    first_step: Count
    num_steps: Step
    previous_sha256: str | None
    memory_grade: str
    machine: dict[str, Any]
    num_ranks: Step
    num_runs: Step
    before_measuring: PlanContent = Field(alias="before measuring")
    calibrated: PlanContent


class TermContent(_Content):
    """Memory that was found."""

    name: str
    num_bytes: Bytes
    how: str
    is_on_host: bool


class MeasuredContent(TimelineContent):
    """measured.json."""

    step: Step
    step_s: SomeSeconds
    optimizer_s: Seconds
    bound_s: Seconds
    device: Literal["cpu", "cuda"]
    device_name: str
    peak_bytes: Bytes
    peak_reserved_bytes: Bytes | None = None
    peak_host_bytes: Bytes | None = None
    memory: list[TermContent]
    versions: dict[str, str] = {}
    energy_missing: dict[EnergyPart, str] = {}

    @model_validator(mode="after")
    def _reserve_on_a_gpu(self) -> "MeasuredContent":
        if self.device == "cuda" and None in (self.peak_reserved_bytes, self.peak_host_bytes):
            raise ValueError("should have peak_reserved_bytes and peak_host_bytes, on a GPU")
        return self


class RowContent(_Content):
    """A line of metrics.jsonl; a loss may be no number."""

    step: Step
    loss: float
    num_loads: Count
    phases_s: Phases
    parts_s: Parts
    energy_j: dict[EnergyPart, Joules] = {}
    energy_window_s: Seconds = 0.0
    prediction_sha256: str | None = None


class SamplesContent(_Content):
    """samples_before.json and samples_after.json."""

    exact_match: Number
    prompts: dict[str, Count]


class EvaluationContent(_Content):
    """evaluation_before.json: figures by their names in metrics.jsonl."""

    eval_loss: float


def read_sealed(kind: JsonFile, file: Path) -> Any:
    """Return what a file holds that a run has sealed.

    Raises:
        CheckpointError: It is damaged, or not what was written.
    """
    content = kind.content(file)
    value = kind.parsed(content, source=str(file))
    if not is_sealed_json(content.decode()):
        raise kind.refusal(str(file), "it is not what was written")
    return value


PREDICTION = JsonFile(
    holds=PredictionContent,
    error=CheckpointError,
    limit="it is written whole before step 1, and read-only",
    hint="it was changed since, or another version wrote it: restore it from a copy",
)
MEASURED = JsonFile(
    holds=MeasuredContent,
    error=CheckpointError,
    limit="it is written whole after each checkpoint",
    hint="remove it: a resumed run writes it again, and the rest is in metrics.jsonl",
)
ROW = JsonFile(
    holds=RowContent,
    error=CheckpointError,
    limit="a step's line is written once and whole; only the last one may be torn",
    hint="restore metrics.jsonl from a copy, or start a new run with `output.name=...`",
)
EVALUATION_BEFORE = "evaluation_before.json"
IMAGE_FIGURES = "images.json"  # what the pass over images took
EVALUATION = JsonFile(
    holds=EvaluationContent,
    error=CheckpointError,
    limit="it is written whole, before step 1",
    hint="remove it: the report then leaves it out",
)
SAMPLES = JsonFile(
    holds=SamplesContent,
    error=CheckpointError,
    limit="it is written whole",
    hint="remove it: the report then leaves it out",
)


CHECKSUM = ', "crc32": "'
_ENDED = re.compile(rb'"crc32": "[0-9a-f]{8}"\}')


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row as a line, its checksum last."""
    text = json.dumps(row).removesuffix("}")
    return f'{text}{CHECKSUM}{_checksum(text)}"}}\n'


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; a last line that a kill has torn is left out.

    Rows of older versions have no checksum and are taken as they are.

    Raises:
        CheckpointError: A line is damaged.
    """
    if not os.path.lexists(file):
        return []
    content = ROW.content(file)
    *lines, torn = content.split(b"\n")
    is_checked = CHECKSUM.encode() in content  # all lines of a file have it, or none
    rows = [
        row_of(line, source=f"{file}:{number}", is_checked=is_checked)
        for number, line in enumerate(lines, start=1)
    ]
    try:  # whole but for its end of line
        rows.append(row_of(torn, source=f"{file}:{len(lines) + 1}", is_checked=is_checked))
    except CheckpointError:
        if _ENDED.search(torn):  # not torn: it was written completely
            raise
    return rows


def row_of(line: bytes, *, source: str, is_checked: bool) -> dict[str, Any]:
    """Return a line's row.

    Raises:
        CheckpointError: The line is damaged.
    """
    row: dict[str, Any] = ROW.parsed(line, source=source)
    text, _, checksum = line.decode().rpartition(CHECKSUM)
    if is_checked and checksum != f'{_checksum(text)}"}}':
        raise ROW.refusal(source, "its figures have another checksum")
    row.pop("crc32", None)
    return row


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


EVAL_LOSS = "eval_loss"
EVAL_PREFIX = "eval_"
_SHOWN = (
    "reward",
    "accuracy",
    "f1",
    "rewards/accuracies",
    "rewards/margins",
    "logps/accuracies",
    "logps/margins",
    "kl",
)


def shown_evaluation(row: Mapping[str, Any]) -> str:
    """Return the loss on held-out rows, and what else was measured on them, in a line.

    Args:
        row: Of metrics.jsonl, with that loss.
    """
    names = (name for name in _SHOWN if EVAL_PREFIX + name in row)
    more = (f", {name} {row[EVAL_PREFIX + name]:.4f}" for name in names)
    return f"loss on held-out rows {row[EVAL_LOSS]:.4f}{''.join(more)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What held-out rows say."""

    loss: float  # the mean over their groups
    metrics: Mapping[str, float]  # the metrics of the loss, by name
    # Rows, pairs or tokens that a metric is a mean over, where that is not what the loss is a mean
    # over.
    counts: Mapping[str, int] = field(default_factory=dict)
    nll_weight: float = 0.0  # weight of the metric `nll_loss` in the loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluations:
    """A summary of a run's losses on held-out rows.

    It follows transformers' `EarlyStoppingCallback`: any lower loss is the new lowest, but only one
    that is lower by more than `min_delta` resets the count.
    """

    # Losses in a row that may fail to be lower before the run stops; None: any number.
    patience: int | None
    min_delta: float  # a loss counts as lower if it is lower by more than this
    lowest: float = math.inf  # the lowest of all losses
    num_without: int = 0  # losses since the last one that counted as lower
    best_step: int = 0  # the step with the lowest loss of those that have a checkpoint; 0 for none
    best_loss: float = math.inf  # its loss

    @property
    def are_enough(self) -> bool:
        """Whether the run is to stop: `patience` losses in a row were not lower."""
        return self.patience is not None and self.num_without >= self.patience

    def after(self, step: int, loss: float, *, is_saved: bool = True) -> "Evaluations":
        """Return the summary after one more loss; a best step is saved before the next one."""
        is_best = is_saved and loss < self.best_loss
        return replace(
            self,
            lowest=min(self.lowest, loss),
            num_without=0 if self.lowest - loss > self.min_delta else self.num_without + 1,
            best_step=step if is_best else self.best_step,
            best_loss=loss if is_best else self.best_loss,
        )

    def after_rows(
        self, rows: Iterable[Mapping[str, Any]], *, saved: Container[int]
    ) -> "Evaluations":
        """Return the summary after rows of metrics.jsonl.

        Args:
            rows: In their order; those without a loss on held-out rows are passed over.
            saved: Steps with a checkpoint.
        """
        found = self
        for row in rows:
            if EVAL_LOSS in row:
                step = row["step"]
                found = found.after(step, row[EVAL_LOSS], is_saved=step in saved)
        return found
