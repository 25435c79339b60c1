"""What the files of a run hold: every key and type that `explain`, a report or a resume reads.

Other keys of a file are kept and not validated, so a later version may write more.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from finetune.errors import CheckpointError
from finetune.files.json import JsonFile
from finetune.files.seal import is_sealed_json
from offload.plan.schedule.breakdown import DATA_WAIT, OPTIMIZER, is_part
from offload.plan.schedule.op import Kind, Lane

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

    at_most_j_per_token: Joules | None = None


class PlanContent(_Content):
    """A plan as `plan_json` writes it."""

    machine: str
    grade: str
    schedule: ScheduleContent
    predicted: PredictedContent
    energy: EnergyContent = EnergyContent()


class PredictionContent(TimelineContent):
    """predicted.json and its successors."""

    first_step: Count
    num_steps: Step
    previous_sha256: str | None
    memory_grade: str
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
