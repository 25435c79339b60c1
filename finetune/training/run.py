"""One run, as a value: its recipe, its directory, its ranks, and its screen."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune.errors import FinetuneError
from finetune.planning.ranks import (
    require_micro_batch_per_rank,
    require_ranks_for,
    require_shares,
)
from finetune.recipe.recipe import Recipe
from finetune.report.prediction import require_unchanged
from finetune.report.screen import Screen
from finetune.run.run_dir import RunDir, as_begun
from finetune.run.run_lock import locked
from finetune.training import preflight
from finetune.training.ranks import Ranks, require_same_settings
from offload.errors import SluiceError


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What every phase of a run needs."""

    recipe: Recipe  # the recipe; its open settings are chosen with the plan
    dir: RunDir  # the directory that it is kept in
    ranks: Ranks  # the processes that do it together
    device: torch.device  # the device that this rank computes on
    screen: Screen  # the screen that shows it
    is_resumed: bool  # whether it continues what is in its directory
    are_cards_alike: bool = True  # whether all ranks compute on cards of one kind
    # Name of its adapter in a model that it shares with other runs; None where it has the model for
    # itself.
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended."""

    run_dir: Path  # the run's directory
    num_steps: int  # steps done
    signal: int | None = None  # the signal that stopped it; None if none did
    signalled: tuple[int, ...] = ()  # the ranks that got a signal
    stopped: str | None = None  # why a rule stopped it; None if none did
    error: SluiceError | OSError | None = None  # the error that it failed with; None if it did not

    @property
    def is_complete(self) -> bool:
        """Whether all its steps are done, or enough of them by its own recipe."""
        return self.signal is None and self.stopped is None and self.error is None


@contextmanager
def opened(
    recipe: Recipe,
    *,
    ranks: Ranks,
    screen: Screen,
    is_resume: bool,
    may_overwrite: bool,
    adapter: str | None = None,
) -> Iterator[Run]:
    """Lock a run's directory in this context, and check all that needs nothing measured or loaded.

    Args:
        recipe: The recipe to run.
        ranks: The processes that do it together.
        screen: The screen that shows it.
        is_resume: Continue the run in the recipe's directory.
        may_overwrite: Replace a run that is there.
        adapter: See `Run`.

    Raises:
        SluiceError: The run cannot be begun, or continued.
    """
    run_dir = RunDir(recipe.output.run_dir)
    with locked(run_dir.path) if ranks.is_main else nullcontext(()) as notes:
        for note in notes:
            screen.note(note)
        ranks.exchange(None)
        require_same_settings(ranks, {"": recipe}, is_resume=is_resume)
        if is_resume:
            recipe = as_begun(recipe, ranks.from_main(run_dir.begun), num_ranks=ranks.num)
        require_micro_batch_per_rank(recipe.train, num_ranks=ranks.num)
        require_ranks_for(recipe.train, num_ranks=ranks.num)
        require_shares(recipe.train, num_ranks=ranks.num)
        preflight.require_loggers(recipe.report.log_to)
        preflight.require_weights(recipe.model)
        if preflight.reads_hub(recipe):
            from finetune.training.pins import pinned

            recipe = pinned(recipe, ranks=ranks, note=screen.note)
        preflight.require_tokenizer(recipe.model)
        if ranks.num == 1 and recipe.train.reduce_dtype != "fp32":
            dtype = recipe.train.reduce_dtype
            screen.note(f"train.reduce_dtype: {dtype} has no effect: there is one process")
        if (begun := recipe.adapter.as_lora.init_from) is not None:
            _, notes = preflight.adapter_to_go_on_from(Path(begun), model=recipe.model)
            for note in notes:
                screen.note(note)
        if ranks.is_main and is_resume:
            _require_resumable(run_dir, recipe, screen)
        elif ranks.is_main:
            run_dir.require_startable(may_overwrite=may_overwrite)
        yield Run(
            recipe=recipe,
            dir=run_dir,
            ranks=ranks,
            device=preflight.torch_device(recipe.offload, ranks),
            screen=screen,
            is_resumed=is_resume,
            adapter=adapter,
        )


def _require_resumable(run_dir: RunDir, recipe: Recipe, screen: Screen) -> None:
    """Check all that a resume reads, before the machine is measured and the model loaded."""
    run_dir.require_same_recipe(recipe)
    require_unchanged(run_dir.path, run_dir.read_metrics())
    newest = run_dir.checkpoints.newest()
    if newest is None:
        screen.note("There is no checkpoint yet: the run begins with step 1 again")
        return
    run_dir.checkpoints.require_whole(newest)
    screen.note(f"Continuing from {run_dir.checkpoints.folder(newest)}")


@contextmanager
def shortage_named(ranks: Ranks) -> Iterator[None]:
    """Give a shortage of memory the rank, the memory and a way out.

    Raises:
        FinetuneError: The device or the host has no more memory.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        memory = "device" if isinstance(error, torch.OutOfMemoryError) else "host"
        rank = f"rank {ranks.index} " if ranks.num > 1 else "the run "
        said = str(error).partition("\n")[0]
        raise FinetuneError(
            f"{rank}ran out of {memory} memory in a step{f': {said}' if said else ''}",
            limit="the plan had counted on what was free when the run began; checkpoints are good",
            hint="close what else takes it, then `--resume`: the step is planned again",
        ) from error
