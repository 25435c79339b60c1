"""One row of a run for others to compare: what was predicted, what was measured, on what.

It has no names: no path, user or host, no name of the run or its data, no text of the user's. A
model has its id on the hub or its shape's name, and none if it is a folder. So each field is listed
here and filled by hand, the settings by a list of their own; nothing is copied whole.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from finetune.errors import CheckpointError
from finetune.files.atomic import write_atomically
from finetune.recipe.capabilities import setting
from finetune.report.explain import MEASURED, explain
from finetune.report.memory import PEAKS
from finetune.report.model_card import without_paths
from finetune.report.prediction import read_predictions
from finetune.run import run_files
from finetune.run.run_dir import RunDir
from finetune.run.run_files import Bytes, Count, Seconds, SomeSeconds, Step
from offload.plan.machine.machine import MEASURED as PROBED

SHARED = "shared.json"
SETTINGS = (
    *("model.dtype", "model.layer_kernels", "model.head"),
    *("adapter.method", "adapter.rank", "adapter.experts", "adapter.dtype", "objective.method"),
    *("data.packing", "train.what", "train.seq_len", "train.micro_batch_size", "train.optimizer"),
    *("train.parallel", "train.compile", "train.gradient_checkpointing"),
    *("offload.codec", "offload.tier", "offload.num_slots", "offload.stash"),
    *("offload.head_chunk", "offload.mlp_chunk", "offload.embeddings", "offload.head"),
)
"""The settings that decide what a step takes. None is a text that a user makes up."""

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hardware(_Part):
    """The machine, as the run's prediction had it; of several ranks, the slowest."""

    name: str  # of the card, or of the processor that it computed on
    device: Literal["cuda", "cpu"]
    num_ranks: Annotated[int, Field(ge=1)]
    is_probed: bool  # whether the rates were measured there, and not taken from a list
    vram_bytes: Bytes  # that a process may use
    ram_bytes: Bytes
    h2d_bytes_per_s: Rate
    h2d_duplex_bytes_per_s: Rate  # while the other direction is busy
    d2h_bytes_per_s: Rate
    host_memory_bytes_per_s: Rate
    disk_bytes_per_s: Rate | None


class Model(_Part):
    """The model; no more than its shape if it is in a folder."""

    id: str | None  # on the hub, or of a shipped shape
    type: str
    num_layers: Count
    num_parameters: Count
    num_active_parameters: Count
    num_trained_parameters: Count


class StepTime(_Part):
    """The time of a step: the mean of the middle ones, and percentiles of all, in seconds."""

    num_steps: Step  # that were compared
    num_tokens: Count  # of the planned step
    num_runs: Annotated[int, Field(ge=1)]  # that shared it
    first_predicted_s: SomeSeconds  # before a step was timed
    first_grade: str  # how that was predicted
    predicted_s: SomeSeconds  # before step 1
    grade: str
    measured_s: SomeSeconds
    p20_s: Seconds
    p50_s: Seconds
    p80_s: Seconds
    is_disturbed: bool  # whether other programs, or clock rates, affected it


class Peak(_Part):
    """The peak of one memory."""

    name: str
    predicted_bytes: Bytes | None
    measured_bytes: Bytes | None


class SharedRow(_Part):
    """A run, predicted and measured."""

    form: Literal[1] = 1  # of this row; another one if a field changes
    versions: dict[str, str]
    hardware: Hardware
    model: Model
    settings: dict[str, str | int | float | bool | None]
    step: StepTime
    peaks: tuple[Peak, ...]


def shared_row(run_dir: Path) -> SharedRow:
    """Return the row of a run, finished or not.

    Raises:
        CheckpointError: It has no checkpoint yet, a file is damaged, or a prediction was changed.
    """
    found, promised = explain(run_dir), read_predictions(run_dir)
    recipe = RunDir(run_dir).recipe()
    section = found.sections[-1]
    if found.changes:
        raise CheckpointError(
            f"{run_dir} has another prediction than it began with: {found.changes[0]}",
            limit="a row compares steps with what was predicted before them",
            hint="restore predicted.json from a copy",
        )
    if not found.versions:
        raise CheckpointError(
            f"{run_dir} holds no {MEASURED} yet",
            limit="memory and versions are written at the first checkpoint",
            hint=f"`sluice finetune {run_dir / 'recipe.yaml'} --resume` goes on",
        )
    promise = next(one for one in promised if one.number == section.prediction)
    plan, machine, step = promise.calibrated, promise.machine, section.comparison[0]
    disk = machine.disk_bytes_per_s
    public, shape = without_paths(recipe).model, plan["model"]
    is_named = (public.path, public.config) == (recipe.model.path, recipe.model.config)
    return SharedRow(
        versions=dict(found.versions),
        hardware=Hardware(
            name=run_files.MEASURED.read(run_dir / MEASURED)["device_name"],
            num_ranks=promise.num_ranks,
            is_probed=machine.h2d_bytes_per_s.source == PROBED,
            device=machine.device,
            vram_bytes=machine.vram_bytes,
            ram_bytes=machine.ram_bytes,
            h2d_bytes_per_s=machine.h2d_bytes_per_s.value,
            h2d_duplex_bytes_per_s=machine.h2d_duplex_bytes_per_s.value,
            d2h_bytes_per_s=machine.d2h_bytes_per_s.value,
            host_memory_bytes_per_s=machine.host_memory_bytes_per_s.value,
            disk_bytes_per_s=None if disk is None else disk.value,
        ),
        model=Model(
            id=public.path or public.config if is_named else None,
            type=shape["type"],
            num_layers=shape["num_layers"],
            num_parameters=shape["num_parameters"],
            num_active_parameters=shape["num_active_parameters"],
            num_trained_parameters=shape["num_adapter_parameters"] + shape["num_module_parameters"],
        ),
        settings={path: setting(recipe, path) for path in SETTINGS},
        step=StepTime(
            num_steps=section.pace.num_steps,
            num_tokens=plan["schedule"]["tokens_per_step"],
            num_runs=promise.num_runs,
            first_predicted_s=section.first_step_s,
            first_grade=section.first_grade,
            predicted_s=section.pace.predicted_s,
            grade=section.grade,
            measured_s=section.pace.measured_s,
            p20_s=step.p20,
            p50_s=step.p50,
            p80_s=step.p80,
            is_disturbed=section.is_disturbed,
        ),
        peaks=tuple(
            Peak(name=row.name, predicted_bytes=row.predicted, measured_bytes=row.measured)
            for row in found.memory
            if row.name in PEAKS
        ),
    )


def write_shared(run_dir: Path, row: SharedRow) -> Path:
    """Write a row into its run's directory, in one line, and return the file."""
    file = run_dir / SHARED
    write_atomically(file, row.model_dump_json() + "\n")
    return file
