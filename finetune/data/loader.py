"""The batches of a run's steps, made by workers ahead of the step."""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from finetune.data.steps import Steps, StepShare
from finetune.data.workers import worker_died
from finetune.interrupts import SIGNALS
from finetune.processes import prepare_worker, process_context

_PREFETCH_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepBatch:
    """This rank's share of one step, and how long the step waited for it."""

    step: int
    share: StepShare
    wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _StepArrays(Dataset[npt.NDArray[np.int64]]):
    """The steps as a map-style data set of arrays.

    Arrays, because a worker sends their bytes through a pipe. A tensor's memory would be shared
    instead, by a socket in the folder for temporary files. The worker cannot make one there if the
    path is longer than 107 bytes, and the run would wait for it forever.
    """

    steps: Steps

    def __getitem__(self, step: int) -> npt.NDArray[np.int64]:
        return self.steps.as_array(step)


class StepLoader:
    """Iterate over a rank's batches of a run's steps, from one on, made by workers.

    The batches of a step depend on its number alone, so a resumed run sees the same ones. The
    loader has its own random generator; torch's default one is not touched.
    """

    def __init__(self, steps: Steps, *, first_step: int, num_workers: int) -> None:
        """Prepare to start the workers.

        Args:
            steps: Of the run, as this rank sees them.
            first_step: The first to give.
            num_workers: Processes that make batches; 0 makes them in this one.
        """
        self._steps, self._numbers = steps, range(first_step, steps.num)
        self._loader = DataLoader(
            _StepArrays(steps=steps),
            batch_size=None,
            collate_fn=_unchanged,
            sampler=self._numbers,
            num_workers=num_workers,
            prefetch_factor=_PREFETCH_STEPS if num_workers else None,
            multiprocessing_context=process_context() if num_workers else None,
            worker_init_fn=_prepare_loader_worker,
            generator=torch.Generator(),
        )
        self._arrays: Iterator[npt.NDArray[np.int64]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers; the iterator ends them when it is deleted."""
        self._arrays = None

    def __iter__(self) -> Iterator[StepBatch]:
        # Ctrl-C and similar signals reach workers too, and would kill one that is still starting:
        # workers start with these signals blocked, and ignore them as soon as they can.
        resource_tracker.ensure_running()  # it would unblock signals when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._arrays = iter(self._loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for step in self._numbers:
            start_s = time.perf_counter()
            array = self._next()
            wait_s = time.perf_counter() - start_s
            yield StepBatch(step=step, share=self._steps.from_array(step, array), wait_s=wait_s)
        self.close()

    def _next(self) -> npt.NDArray[np.int64]:
        """Wait for the next step; torch checks on its workers every few seconds."""
        assert self._arrays is not None, "the loader is closed"
        try:
            return next(self._arrays)
        except RuntimeError as error:
            if "DataLoader worker (pid" not in str(error):
                raise
            raise worker_died("preparing batches", error) from error


def _unchanged(share: object) -> object:
    """Return a share as it is; torch would make a tensor of it, in the worker."""
    return share


def _prepare_loader_worker(_: int) -> None:
    torch.set_num_threads(1)
    prepare_worker()
