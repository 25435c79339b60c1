"""A run's directory: what it holds, and checkpoints that a kill at any moment cannot tear.

A checkpoint is written under a temporary name, flushed to disk, and renamed in one step; only
then are older ones removed. Data order, learning rate and dropout are pure functions of the
recipe and the step, so weights, optimizer state and the step's number are all that has to be
kept.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from finetune.adapter_files import require_adapter_files
from finetune.best import Evaluations
from finetune.errors import CheckpointError
from finetune.explain import read_rows
from finetune.files import PARTIAL, flush, write_atomically
from finetune.prediction import LATER
from finetune.recipe import (
    Recipe,
    differences,
    is_longer,
    resolved_yaml,
    with_micro_batch_size,
    with_offload,
)
from finetune.recipe_file import load_recipe
from finetune.recipe_sections import TrainSection
from offload.plan.machine import ExpertsImplementation

_OWNED = (
    "recipe.yaml",
    "experts.json",
    "metrics.jsonl",
    "report.json",
    "trace.json",
    "gantt.svg",
    "predicted.json",
    "measured.json",
    "samples_before.json",
    "samples_after.json",
    "adapter",
    "checkpoints",
    "profile",
    "tensorboard",
    "wandb",
)


class RunDir:
    """The paths of one run and what is in them."""

    def __init__(self, path: Path) -> None:
        """Name the directory; nothing is created."""
        self.path = path
        self.recipe_file = path / "recipe.yaml"
        self.experts_file = path / "experts.json"
        self.metrics_file = path / "metrics.jsonl"
        self.report_file = path / "report.json"
        self.adapter = path / "adapter"
        self.checkpoints = path / "checkpoints"

    def require_startable(self, *, may_overwrite: bool) -> None:
        """Check that a new run may be written here: nothing is there, or a run to be replaced.

        Raises:
            CheckpointError: There is a run already, or something that is no run.
        """
        if self.recipe_file.exists() and not may_overwrite:
            raise CheckpointError(
                f"{self.path} holds a run already",
                limit="a run is not overwritten unasked",
                hint="`--resume` continues it, `--overwrite` replaces it,"
                " `output.name=...` names another",
            )
        is_empty = not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir()))
        if not is_empty and not self.recipe_file.exists():
            raise CheckpointError(
                f"{self.path} is there and holds no run",
                limit="a run is written to a new or empty directory",
                hint="`output.dir=...` or `output.name=...` with a name that is free",
            )
        places = (self.path, *self.path.resolve().parents)
        nearest = next(place for place in places if place.exists())
        if not os.access(nearest, os.W_OK):
            raise CheckpointError(
                f"{self.path} cannot be written: {nearest} is read-only",
                limit="a run writes checkpoints, metrics and its adapter",
                hint="`output.dir=...` where you may write",
            )

    def start(self, recipe: Recipe, *, experts_implementation: str | None) -> None:
        """Begin a new run; of one that was here, what a run writes is removed and nothing else.

        Args:
            recipe: What is to be done.
            experts_implementation: How its experts are multiplied; None if there are none.
        """
        later = (file.name for file in self.path.glob(LATER))
        for owned in (*_OWNED, *later):
            path = self.path / owned
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self.checkpoints.mkdir(parents=True)
        if experts_implementation is not None:
            values = {"experts_implementation": experts_implementation}
            write_atomically(self.experts_file, json.dumps(values))
        write_atomically(self.recipe_file, resolved_yaml(recipe))

    def require_same_recipe(self, recipe: Recipe) -> None:
        """Check that a run can be continued with this recipe.

        Raises:
            CheckpointError: There is no run, or it was started with other settings.
        """
        if not self.recipe_file.exists():
            raise CheckpointError(
                f"{self.path} holds no run",
                limit="only a run that was started can be resumed",
                hint="leave `--resume` away",
            )
        before = self.recipe()
        changed = differences(before, recipe)
        if is_longer(before, recipe) and len(changed) == 1:
            self._require_going_on(recipe)
            return
        if changed:
            raise CheckpointError(
                f"the recipe is not the one that {self.path} was started with: "
                + "; ".join(changed),
                limit="a resumed run continues to the bit, so its settings cannot change, but for"
                " train.steps, which may be raised",
                hint="undo the change, or start a new run with `output.name=...`",
            )

    def _require_going_on(self, recipe: Recipe) -> None:
        """Refuse more steps for a run that would not take them.

        Raises:
            CheckpointError: It has stopped early.
        """
        evaluations = self.evaluations(recipe.train)
        if evaluations.are_enough:
            raise CheckpointError(
                f"train.steps is raised to {recipe.train.steps}, and {self.path} has stopped early",
                limit=f"its last {evaluations.num_without} losses on held-out rows were no lower"
                f" than {evaluations.lowest:.4f}, so it would stop again at once",
                hint="leave `train.steps` as it was, or start a new run with `output.name=...`",
            )

    def lengthen(self, recipe: Recipe) -> None:
        """Note that the run has more steps than it was begun with."""
        stat = self.recipe_file.stat()
        write_atomically(self.recipe_file, resolved_yaml(recipe))
        os.utime(self.recipe_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # see `wandb_id`

    def experts_implementation(self) -> ExpertsImplementation | None:
        """Return how the run multiplies experts; None if it has not written that down.

        Raises:
            CheckpointError: The file is damaged.
        """
        if not self.experts_file.exists():
            return None
        text = self.experts_file.read_bytes().decode(errors="replace")
        for way in get_args(ExpertsImplementation):
            if text == json.dumps({"experts_implementation": way}):
                return way  # type: ignore[no-any-return]
        raise CheckpointError(
            f"{self.experts_file} holds {text[:80]!r}",
            limit="it is written when a run starts, so something changed it since",
            hint='`{"experts_implementation": "eager"}` in it if the run was begun on a CPU',
        )

    def as_begun(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the sizes of micro-batch and head chunk that the run began with.

        Another machine, or this one measured again, might choose others.
        """
        if not self.recipe_file.exists():
            return recipe
        begun = self.recipe()
        if recipe.train.micro_batch_size == "auto":
            recipe = with_micro_batch_size(recipe, begun.train.sequences)
        if recipe.offload.head_chunk == "auto":
            recipe = with_offload(recipe, head_chunk=begun.offload.head_chunk)
        return recipe

    def wandb_id(self) -> str:
        """Return a name for this run that a resume finds again and no other run has."""
        started = f"{self.path.resolve()} {self.recipe_file.stat().st_mtime_ns}"
        return hashlib.sha256(started.encode()).hexdigest()[:16]

    def require_adapter(self) -> None:
        """Check that a run has come to its end, and that its adapter is whole.

        Raises:
            CheckpointError: There is no run, no adapter yet, or a damaged one.
            ModelError: The adapter's weights are damaged.
        """
        if not self.recipe_file.exists() or not self.adapter.exists():
            raise CheckpointError(
                f"{self.path} holds no finished run",
                limit="a finished run holds recipe.yaml and adapter/",
                hint=f"`sluice finetune {self.recipe_file} --resume` ends it"
                if self.recipe_file.exists()
                else "name the directory that `sluice finetune` printed",
            )
        require_adapter_files(self.adapter)

    def recipe(self) -> Recipe:
        """Return the recipe that the run was started with."""
        return load_recipe(str(self.recipe_file), [], check_files=False)

    # -------------------------------------------------------------------------------- checkpoints

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint; clear away torn ones."""
        for torn in self.checkpoints.glob(PARTIAL + "*"):
            shutil.rmtree(torn)
        steps = self._steps()
        return steps[-1] if steps else None

    def save(
        self,
        step: int,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        data_hash: str,
        num_kept: int,
        best: int | None = None,
    ) -> Path:
        """Write the checkpoint after `step` steps; keep the newest `num_kept` and the `best`."""
        final = self._folder(step)
        partial = final.with_name(PARTIAL + final.name)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tensors = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
        save_file(tensors, partial / "trained.safetensors")
        torch.save(optimizer.state_dict(), partial / "optimizer.pt")
        (partial / "state.json").write_text(json.dumps({"step": step, "data_hash": data_hash}))
        for file in partial.iterdir():
            flush(file)
        flush(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        flush(self.checkpoints)
        for old in self._steps()[:-num_kept]:
            if old == best:
                continue
            discarded = self._folder(old).with_name(PARTIAL + self._folder(old).name)
            self._folder(old).rename(discarded)  # a torn removal must not look complete
            shutil.rmtree(discarded)
        return final

    def load(
        self,
        step: int,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        data_hash: str,
    ) -> None:
        """Put a checkpoint's tensors into the parameters and the optimizer.

        Raises:
            CheckpointError: The training rows are not those that the run was started with, or the
                checkpoint is damaged.
        """
        folder = self._folder(step)
        try:
            state = json.loads((folder / "state.json").read_text())
            tensors = load_file(folder / "trained.safetensors")
            optimizer_state = torch.load(folder / "optimizer.pt", weights_only=True)
        except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
            raise CheckpointError(
                f"{folder} is damaged: {str(error).splitlines()[0]}",
                limit="a checkpoint is whole when it is written, so something changed it since",
                hint=f"remove {folder}; `--resume` then continues from the one before it",
            ) from error
        if state["data_hash"] != data_hash:
            raise CheckpointError(
                "the training rows are not those that the run was started with",
                limit="a resumed run continues to the bit, so its data cannot change",
                hint="restore the data file, or start a new run with `output.name=...`",
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])
        optimizer.load_state_dict(optimizer_state)

    def evaluations(self, train: TrainSection) -> Evaluations:
        """Return what the losses on held-out rows come to so far."""
        none = Evaluations(
            patience=train.early_stopping_patience, min_delta=train.early_stopping_min_delta
        )
        return none.after_rows(self.read_metrics(), saved=self._steps())

    def _steps(self) -> list[int]:
        return sorted(
            int(folder.name.removeprefix("step-")) for folder in self.checkpoints.glob("step-*")
        )

    def _folder(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:07d}"

    # ------------------------------------------------------------------------------------ metrics

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl; a last line that a kill has torn is left out."""
        return read_rows(self.metrics_file)

    def drop_metrics_after(self, step: int) -> None:
        """Forget the lines of steps that a resumed run will run again."""
        kept = [row for row in self.read_metrics() if row["step"] <= step]
        write_atomically(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept))
