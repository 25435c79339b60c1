"""A run's directory: what it holds, and which of its files the run has written."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from finetune.errors import CheckpointError
from finetune.files.atomic import PARTIAL, flush, naming, remove, write_atomically
from finetune.files.manifest import (
    MANIFEST,
    clear_partial,
    damage,
    has_manifest,
    is_sealed_yaml,
    sealed_yaml,
)
from finetune.recipe.capabilities import REVISIONS, setting
from finetune.recipe.load import RUN_CHECKPOINTS, RUN_METRICS, RUN_RECIPE, load_recipe
from finetune.recipe.recipe import (
    Recipe,
    differences,
    is_longer,
    resolved_yaml,
    with_settings,
)
from finetune.recipe.sections import TrainSection
from finetune.run.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, require_adapter_files
from finetune.run.checkpoint import Checkpoints
from finetune.run.probe_folder import FEATURES, FILES, PROBE
from finetune.run.references import REFERENCES
from finetune.run.run_files import (
    EVALUATION_BEFORE,
    IMAGE_FIGURES,
    Evaluations,
    line_of,
    read_rows,
)
from finetune.run.run_lock import LOCK_FILE, holder
from offload.plan.machine.machine import ExpertsImplementation

_EXPERTS = "experts.json"
RUN_LOG, RUN_STOP = "log.txt", "stop.txt"  # of a run that the page has started
# In a recipe with DoRA, unless the run was begun before: then peft computes it, in float32.
# Temporary names, which a kill may leave.
_REPLACED = (
    *("adapter", "model", RUN_METRICS, "measured.json", "predicted", "report.", "samples_"),
    *(RUN_RECIPE, _EXPERTS, PROBE, FEATURES, IMAGE_FIGURES, "trace.json", "gantt.svg"),
)
_MARKS = (RUN_CHECKPOINTS, RUN_METRICS, "predicted.json", "adapter", "model")
# What a run writes in addition to its recipe; checkpoints first, so that remains are never resumed.
_WRITTEN = (
    *(
        f"{RUN_CHECKPOINTS}/*step-[0-9]*/{name}"
        for name in ("state.json", "trained.safetensors", "optimizer.pt", f"*{MANIFEST}")
    ),
    *(
        RUN_METRICS,
        _EXPERTS,
        FEATURES,
        "predicted.json",
        "predicted-[0-9]*.json",
        "measured.json",
    ),
    *("report.json", "report.html", "trace.json", "gantt.svg", "shared.json"),
    *("samples_before.json", "samples_after.json"),
    *("rounds/open.json", "rounds/[0-9]*.jsonl"),
    *(EVALUATION_BEFORE, REFERENCES, IMAGE_FIGURES),
    *(
        f"{folder}/{name}"
        for folder in ("adapter", "partial-adapter-*")
        for name in (CONFIG_FILE, WEIGHTS_FILE, "README.md", "generation_config.json")
    ),
    *(f"{folder}/*{MANIFEST}" for folder in ("adapter", "partial-adapter-*")),
    *(
        f"{folder}/{name}"
        for folder in ("model", "partial-model-*")
        for name in ("*.safetensors", "*.json", "README.md", "*.jinja", "merges.txt")
    ),
    *(f"{folder}/{name}" for folder in (PROBE, f"{PARTIAL}{PROBE}-*") for name in FILES),
    *(f"{folder}/*{MANIFEST}" for folder in (PROBE, f"{PARTIAL}{PROBE}-*")),
    *("profile/trace.json", "profile/memory.pickle"),
    "tensorboard/events.out.tfevents.*",
    *("wandb/run-*", "wandb/offline-run-*", "wandb/latest-run", "wandb/debug*.log"),
)


class RunDir:
    """The paths of one run and what is in them."""

    def __init__(self, path: Path) -> None:
        """Name the directory; nothing is created."""
        self.path = path
        self.recipe_file = path / RUN_RECIPE
        self.experts_file = path / _EXPERTS
        self.metrics_file = path / RUN_METRICS
        self.adapter = path / "adapter"
        self.model = path / "model"
        self.checkpoints = Checkpoints(path / RUN_CHECKPOINTS)

    def require_startable(self, *, may_overwrite: bool) -> None:
        """Check that a new run may be written here: nothing is there, or a run to be replaced.

        Raises:
            CheckpointError: There is a run already, or something that is no run.
        """
        found = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        is_run = RUN_RECIPE in found and not found.isdisjoint(_MARKS)
        if is_run and not may_overwrite:
            raise CheckpointError(
                f"{self.path} holds a run already",
                limit="a run is not overwritten unasked",
                hint="`--resume` continues it, `--overwrite` replaces it,"
                " `output.name=...` names another",
            )
        if not is_run and not self._is_unused(found):
            raise CheckpointError(
                f"{self.path} is there and holds no run",
                limit="a run is written to a new or empty directory",
                hint="`output.dir=...` or `output.name=...` with a name that is free",
            )

    def _is_unused(self, found: set[str]) -> bool:
        """Return whether nothing is there, or only the remains of a start that was killed."""
        is_begun = not self.checkpoints.steps() and RUN_CHECKPOINTS in found
        torn = (f"{PARTIAL}{_EXPERTS}", f"{PARTIAL}{RUN_RECIPE}")
        found = {
            name for name in found - {LOCK_FILE, RUN_LOG, RUN_STOP} if not name.startswith(torn)
        }
        return not found or (is_begun and found <= {RUN_CHECKPOINTS, _EXPERTS})

    def start(self, recipe: Recipe, *, experts_implementation: str | None) -> None:
        """Begin a new run; of a previous run here, only the files that a run writes are removed.

        Args:
            recipe: What is to be done.
            experts_implementation: Its expert backend; None if the model has no experts.
        """
        self._remove_written()
        self.checkpoints.path.mkdir(parents=True, exist_ok=True)
        if experts_implementation is not None:
            values = {"experts_implementation": experts_implementation}
            write_atomically(self.experts_file, json.dumps(values))
        write_atomically(self.recipe_file, _recorded(recipe))
        flush(self.path)

    def _remove_written(self) -> None:
        """Remove the files that runs write, and folders that are empty without them.

        Of links only the link is removed, not its target.
        """
        emptied: set[Path] = set()
        for pattern in _WRITTEN:
            for path in list(self.path.glob(pattern)):
                between = [p for p in reversed(path.parents) if self.path in p.parents]
                links = [p for p in between if p.is_symlink()]
                remove(links[0] if links else path)
                emptied.update(between)
        emptied.discard(self.checkpoints.path)  # shows, with the recipe, that this is a run
        for folder in sorted(emptied, key=lambda path: len(path.parts), reverse=True):
            with suppress(OSError):  # something else is in it
                folder.rmdir()

    def clear_torn(self) -> int | None:
        """Remove half-written files that a kill has left; return the newest checkpoint's step."""
        self.checkpoints.clear_torn()
        for name in _REPLACED:
            clear_partial(self.path, name=name)
        return self.checkpoints.newest()

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
        before = with_settings(
            self.recipe(), {"train.shares": recipe.train.shares}
        )  # free, as the number of ranks is
        changed = _that_count(before, recipe)
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
        """Refuse more steps for a run that would not run them.

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
        write_atomically(self.recipe_file, _recorded(recipe))
        os.utime(self.recipe_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # see `wandb_id`

    def experts_implementation(self) -> ExpertsImplementation | None:
        """Return the run's expert backend; None if the run has not recorded it.

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

    def begun(self) -> Recipe | None:
        """Return the recipe that the run began with; None if there is no run."""
        return self.recipe() if self.recipe_file.exists() else None

    def wandb_id(self) -> str:
        """Return a name for this run that a resume finds again and no other run has."""
        started = f"{self.path.resolve()} {self.recipe_file.stat().st_mtime_ns}"
        return hashlib.sha256(started.encode()).hexdigest()[:16]

    def require_adapter(self) -> tuple[str, ...]:
        """Check that a run is finished, and that its adapter is unchanged since it was written.

        Returns:
            What the user should know: that the adapter cannot be verified, or is being replaced.

        Raises:
            CheckpointError: There is no run, no adapter yet, or a damaged one; or the run has
                trained the model's own weights.
            ModelError: The adapter's weights are damaged.
        """
        if self.model.exists():
            raise CheckpointError(
                f"{self.path} trained the model's own weights: there is no adapter",
                limit=f"{self.model} is the trained model, in plain weights: merge is not needed",
                hint=f"load {self.model} with transformers, or `sluice export {self.model}`",
            )
        if not self.recipe_file.exists() or not self.adapter.exists():
            raise CheckpointError(
                f"{self.path} holds no finished run",
                limit="a finished run holds recipe.yaml and adapter/",
                hint=f"`sluice finetune {self.recipe_file} --resume` ends it"
                if self.recipe_file.exists()
                else "name the directory that `sluice finetune` printed",
            )
        notes = require_whole_adapter(self.adapter)
        writer = holder(self.path)
        if writer is not None:
            notes += (f"{self.path} is in use by {writer}: its adapter is of before",)
        return notes

    def require_model(self) -> None:
        """Check that the trained model of a finished run is unchanged since it was written.

        Raises:
            CheckpointError: It is not there yet, or damaged.
        """
        found = damage(self.model, needs=("config.json",)) if self.model.exists() else "missing"
        if found is not None:
            raise CheckpointError(
                f"{self.model} is damaged or not there: {found}",
                limit="the trained model is written at the end of a run, whole",
                hint=f"`sluice finetune {self.recipe_file} --resume` writes it from the last"
                " checkpoint",
            )

    def recipe(self) -> Recipe:
        """Return the recipe that the run was started with.

        Raises:
            CheckpointError: It was changed since.
        """
        recipe = load_recipe(str(self.recipe_file), [], check_files=False)
        text = self.recipe_file.read_text()
        if not is_sealed_yaml(text):
            raise CheckpointError(
                f"{self.recipe_file} is not what was written when the run began",
                limit="it says what the run trains, and does not change",
                hint="restore it from a copy; if you have changed it on purpose, remove its first"
                " and its last line",
            )
        return recipe

    # ------------------------------------------------------------------------------------ metrics

    def evaluations(self, train: TrainSection) -> Evaluations:
        """Return the summary of the losses on held-out rows so far."""
        none = Evaluations(
            patience=train.early_stopping_patience, min_delta=train.early_stopping_min_delta
        )
        return none.after_rows(self.read_metrics(), saved=self.checkpoints.steps())

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with naming(self.metrics_file), self.metrics_file.open("a") as file:
            file.write(line_of(row))

    def flush_metrics(self) -> None:
        """Force the lines to the disk, before a checkpoint says that their steps are done."""
        with naming(self.metrics_file):
            flush(self.metrics_file)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl; a last line that a kill has torn is left out."""
        return read_rows(self.metrics_file)

    def drop_metrics_after(self, step: int) -> tuple[str, ...]:
        """Drop the lines of steps that a resumed run will run again.

        Returns:
            What the user should know: that lines of steps before are missing.
        """
        kept = [row for row in self.read_metrics() if row["step"] <= step]
        write_atomically(self.metrics_file, "".join(map(line_of, kept)))
        num_missing = step - len({row["step"] for row in kept})
        if not num_missing:
            return ()
        return (f"{self.metrics_file} lacks {num_missing} of {step} steps that were trained",)


def _recorded(recipe: Recipe) -> str:
    """Return what a run's directory says of its recipe."""
    return sealed_yaml(resolved_yaml(recipe))


def require_whole_adapter(adapter: Path) -> tuple[str, ...]:
    """Check that an adapter is unchanged since it was written, before anything reads it.

    Returns:
        What the user should know: that it has no manifest to be checked by.

    Raises:
        CheckpointError: It is damaged, or not whole.
        ModelError: Its weights are damaged.
    """
    found = damage(adapter, needs=(CONFIG_FILE, WEIGHTS_FILE)) if has_manifest(adapter) else None
    if found is not None:
        raise CheckpointError(
            f"{adapter} is damaged: {found}",
            limit="an adapter is whole when it is written, so something changed it since",
            hint=f"`sluice finetune {adapter.parent / RUN_RECIPE} --resume` writes it again from"
            f" the last checkpoint; if you have changed it on purpose, remove {adapter / MANIFEST}",
        )
    require_adapter_files(adapter)
    if has_manifest(adapter):
        return ()
    return (f"{adapter} cannot be verified: it has no {MANIFEST}",)


HOW = ("train.parallel:", "offload.")
FREE = (HOW[0], "offload.embeddings:", "offload.head:")
PLACE = ("output.name:", "output.dir:", "report.notify:", "objective.sampler:")
WHAT = ("offload.codec:", "offload.device:")


def _that_count(before: Recipe, after: Recipe) -> list[str]:
    """List the settings in which a run differs from what was begun, and that it must not change.

    How processes share a step may change, and with it where they hold the layers; and so may the
    places of input embedding and output head. These change no bit. The run itself may be moved and
    renamed, `report.notify` may be another command, and a server may have another address.
    """
    found = [one for one in differences(before, after) if not one.startswith(PLACE)]
    if before.train.is_sharded == after.train.is_sharded:
        return [one for one in found if not one.startswith(FREE)]
    return [one for one in found if one.startswith(WHAT) or not one.startswith(HOW)]


_CHOSEN = (
    "train.micro_batch_size",
    "train.parallel",
    "offload.head_chunk",
    "offload.mlp_chunk",
    "adapter.compute_dtype",
    "data.packing",
    "model.layer_kernels",
)
"""Settings whose `auto` is decided when a run begins, and then kept."""


def as_begun(recipe: Recipe, begun: Recipe | None, *, num_ranks: int = 1) -> Recipe:
    """Return the recipe with what was open when the run began as it was chosen then.

    Another machine, or this one measured again, might choose other sizes of micro-batch, head
    chunk and tile of an MLP, other layer kernels, shares of the ranks or another place of the input
    embedding or output head, pack rows, or choose another precision of adapters. Shares of another
    number of ranks are chosen again.
    """
    if begun is None:
        return recipe
    for path in _CHOSEN:
        found = setting(begun, path)  # None where it was begun with another method of adapters
        if setting(recipe, path) == "auto" and found is not None:
            recipe = with_settings(recipe, {path: found})
    recipe = _at_commits_of(recipe, begun)
    shares = begun.train.shares
    if recipe.train.shares == "auto" and (isinstance(shares, str) or len(shares) == num_ranks):
        recipe = with_settings(recipe, {"train.shares": shares})
    return _placed_as_begun(recipe, begun)


def _at_commits_of(recipe: Recipe, begun: Recipe) -> Recipe:
    """Return the recipe at the commits of the hub that the run began with, unless it names some."""
    for path, owner in REVISIONS:
        if setting(recipe, path) is None and setting(recipe, owner) == setting(begun, owner):
            recipe = with_settings(recipe, {path: setting(begun, path)})
    if [one.path for one in recipe.data.mix] != [one.path for one in begun.data.mix]:
        return recipe
    mix = (
        now.model_copy(update={"revision": now.revision or then.revision})
        for now, then in zip(recipe.data.mix, begun.data.mix, strict=True)
    )
    return with_settings(recipe, {"data.mix": tuple(mix)})


def _placed_as_begun(recipe: Recipe, begun: Recipe) -> Recipe:
    """Return the recipe with embedding and head where they were, unless one is moved now.

    Both may be one weight, so if one is moved the other is not kept. Processes that each hold a
    part of the model have both on their devices.
    """
    now, then = recipe.offload, begun.offload
    asked = ((now.embeddings, then.embeddings), (now.head, then.head))
    is_moved = any(new != "auto" and (new == "host") != (old == "host") for new, old in asked)
    if is_moved or "fsdp2" in (recipe.train.parallel, begun.train.parallel):
        return recipe
    places = {"offload.embeddings": then.embeddings, "offload.head": then.head}
    is_open = {path: place for path, place in places.items() if setting(recipe, path) == "auto"}
    return with_settings(recipe, is_open)
