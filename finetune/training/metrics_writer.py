"""Writes a run's figures to metrics.jsonl, TensorBoard and Weights & Biases."""

import textwrap
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from finetune.recipe.recipe import Recipe, resolved_yaml
from finetune.report.explain import LOAD
from finetune.run.run_dir import RunDir
from offload.probe.load import load_per_cpu


class MetricsWriter:
    """Writes each row of figures to every configured destination."""

    def __init__(self, run_dir: RunDir, recipe: Recipe, *, is_main: bool, first_step: int) -> None:
        """Open the destinations and give each the recipe; their packages were checked before."""
        log_to = recipe.report.log_to if is_main else ()
        self._run_dir = run_dir
        self._board: Any = None
        self._wandb: Any = None
        if "tensorboard" in log_to:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(
                log_dir=str(run_dir.path / "tensorboard"), purge_step=first_step + 1
            )
            indented = textwrap.indent(resolved_yaml(recipe), "    ")  # Markdown, shown as it is
            self._board.add_text("recipe", indented, global_step=first_step + 1)
        if "wandb" in log_to:
            import wandb

            self._wandb = wandb.init(
                name=recipe.output.name,
                id=run_dir.wandb_id(),
                dir=str(run_dir.path),
                resume="allow",
                config=recipe.model_dump(mode="json"),
                allow_val_change=True,  # `train.steps` may be raised when a run is resumed
            )

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush and close."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row, which has a `step`, with the load that the machine is under."""
        row = {**row, LOAD: load_per_cpu()}
        self._run_dir.append_metrics(row)
        figures = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float)}
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(name, value, row["step"])
        if self._wandb is not None:
            self._wandb.log(figures, step=row["step"])


def profiled(folder: Path | None) -> AbstractContextManager[object]:
    """Record what runs inside with torch.profiler, and with a memory snapshot on a GPU.

    Args:
        folder: Where trace.json and memory.pickle go; None records nothing.
    """
    return nullcontext() if folder is None else _Profile(folder)


class _Profile:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profiler = torch.profiler.profile(profile_memory=True)

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history()
        with warnings.catch_warnings():
            # torch 2.11 warns about the first cycle too. `acc_events` would silence it, but makes
            # objects of all events when the step ends: half a minute for 50,000 operations
            warnings.filterwarnings("ignore", "Warning: Profiler clears events at the end of each")
            self._profiler.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profiler.__exit__(kind, error, trace)
        self._profiler.export_chrome_trace(str(self._folder / "trace.json"))
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self._folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
