"""Which rows a step trains on, and its batches, prepared ahead of the step.

Which step. Row p of an endless stream of reshuffled epochs belongs to step p // rows_per_step: any
step is known without the ones before it, and an epoch's last rows share a step with the next epoch.
"""

import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from finetune.data.dataset import ExampleSet, shuffled
from finetune.data.tokenize import IGNORE_INDEX, Example
from finetune.data.workers import prepare_worker, process_context, worker_died
from finetune.interrupts import SIGNALS

PAD_TO_MULTIPLE_OF = 8
_PREFETCH_STEPS = 2
_FIELDS = ("input_ids", "labels", "attention_mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOrder:
    """Which rows each step trains on; a step depends on its number alone."""

    lengths: tuple[int, ...]
    micro_batch_size: int
    num_micro_batches: int
    num_steps: int
    seed: int

    @property
    def rows_per_step(self) -> int:
        """Return the number of sequences in a step (the global batch size)."""
        return self.micro_batch_size * self.num_micro_batches

    def step(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Return the rows of each micro-batch of step `index`, counted from 0."""
        assert 0 <= index < self.num_steps
        num_rows = len(self.lengths)
        first = index * self.rows_per_step
        rows = []
        for position in range(first, first + self.rows_per_step):
            epoch, place = divmod(position, num_rows)
            rows.append(int(shuffled(num_rows, seed=self.seed, epoch=epoch)[place]))
        return self._grouped(rows)

    def longest_step(self) -> tuple[tuple[int, ...], ...]:
        """Return a step at least as large as any other: the longest rows of the data.

        Its first micro-batch has the most padded tokens that a micro-batch can have. A row appears
        in it as often as a step can span epochs.
        """
        num_rows = len(self.lengths)
        copies = -(-self.rows_per_step // num_rows)
        if num_rows % self.rows_per_step:
            copies += 1  # the end of one epoch and the start of the next
        by_length = sorted(range(num_rows), key=lambda row: -self.lengths[row])
        return self._grouped(
            [row for row in by_length for _ in range(copies)][: self.rows_per_step]
        )

    def _grouped(self, rows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Group rows of similar length into micro-batches, longest first, to reduce padding."""
        ordered = sorted(rows, key=lambda row: -self.lengths[row])
        size = self.micro_batch_size
        return tuple(tuple(ordered[at : at + size]) for at in range(0, len(ordered), size))


def plan_batches(
    lengths: Sequence[int],
    *,
    micro_batch_size: int,
    num_micro_batches: int,
    num_steps: int,
    seed: int,
) -> BatchOrder:
    """Return the order of the rows over all steps.

    Each epoch visits each row once, in an order drawn from (seed, epoch). Every step has the same
    number of rows: the last rows of an epoch share a step with the first rows of the next.
    """
    assert lengths
    assert micro_batch_size > 0
    assert num_micro_batches > 0
    return BatchOrder(
        lengths=tuple(lengths),
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        num_steps=num_steps,
        seed=seed,
    )


def collate(
    examples: Sequence[Example], *, pad_token_id: int, pad_to_multiple_of: int = PAD_TO_MULTIPLE_OF
) -> dict[str, torch.Tensor]:
    """Pad rows at the right into input_ids, labels and attention_mask, each int64 (B, T).

    The mask is all ones only if no row is padded. Rounding up to the multiple may make the width
    larger than seq_len.
    """
    longest = max(len(example.input_ids) for example in examples)
    width = padded(longest, pad_to_multiple_of)
    shape = (len(examples), width)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids[row, :length] = example.input_ids
        labels[row, :length] = example.labels
        attention_mask[row, :length] = 1
    arrays = {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def padded(length: int, multiple: int = PAD_TO_MULTIPLE_OF) -> int:
    """Round a length up to a multiple."""
    return -(-length // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepShare:
    """One rank's share of a step; with a single rank, all of it.

    Attributes:
        micro_batches: Those of this rank.
        micro_batch_ids: Their numbers in the whole step.
        num_tokens: Tokens of all the step's rows, padding left out.
        num_label_tokens: Those with a loss.
    """

    micro_batches: tuple[dict[str, torch.Tensor], ...]
    micro_batch_ids: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int

    @classmethod
    def of(
        cls,
        step: Sequence[Sequence[int]],
        examples: ExampleSet,
        *,
        micro_batches: Iterable[dict[str, torch.Tensor]],
        micro_batch_ids: tuple[int, ...],
    ) -> Self:
        """Return these micro-batches as a share of a step with these rows."""
        rows = [examples[row] for micro_batch in step for row in micro_batch]
        return cls(
            micro_batches=tuple(micro_batches),
            micro_batch_ids=micro_batch_ids,
            num_tokens=sum(len(row.input_ids) for row in rows),
            num_label_tokens=sum(row.num_loss_tokens for row in rows),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepBatch:
    """This rank's share of one step, and how long the step waited for it."""

    step: int
    share: StepShare
    wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Steps(Dataset[npt.NDArray[np.int64]]):
    """The steps as a map-style data set; each is one array of shape (3, tokens of the share).

    An array, because a worker sends its bytes through a pipe. A tensor's memory would be shared
    instead, by a socket in the folder for temporary files. The worker cannot make one there if the
    path is longer than 107 bytes, and the run would wait for it forever.
    """

    examples: ExampleSet
    order: BatchOrder
    micro_batch_ids: tuple[int, ...]
    pad_token_id: int

    def __getitem__(self, step: int) -> npt.NDArray[np.int64]:
        rows = self.order.step(step)
        batches = [
            collate([self.examples[row] for row in rows[i]], pad_token_id=self.pad_token_id)
            for i in self.micro_batch_ids
        ]
        share = [torch.cat([batch[name].flatten() for batch in batches]) for name in _FIELDS]
        return torch.stack(share).numpy()


class StepLoader:
    """Iterate over a rank's batches of steps `start_step` .. `order.num_steps`, made by workers.

    The batches of a step depend on its number alone, so a resumed run sees the same ones. The
    loader has its own random generator; torch's default one is not touched.
    """

    def __init__(
        self,
        examples: ExampleSet,
        order: BatchOrder,
        *,
        micro_batch_ids: tuple[int, ...],
        start_step: int,
        pad_token_id: int,
        num_workers: int,
    ) -> None:
        self._examples = examples
        self._order = order
        self._micro_batch_ids = micro_batch_ids
        self._start_step = start_step
        steps = _Steps(
            examples=examples,
            order=order,
            micro_batch_ids=micro_batch_ids,
            pad_token_id=pad_token_id,
        )
        self._loader = DataLoader(
            steps,
            batch_size=None,
            collate_fn=_unchanged,
            sampler=range(start_step, order.num_steps),
            num_workers=num_workers,
            prefetch_factor=_PREFETCH_STEPS if num_workers else None,
            multiprocessing_context=process_context() if num_workers else None,
            worker_init_fn=_prepare_loader_worker,
            generator=torch.Generator(),
        )
        self._packed: Iterator[npt.NDArray[np.int64]] | None = None

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
        self._packed = None

    def __iter__(self) -> Iterator[StepBatch]:
        # Ctrl-C and similar signals reach workers too, and would kill one that is still starting:
        # workers start with these signals blocked, and ignore them as soon as they can.
        resource_tracker.ensure_running()  # it would unblock signals when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._packed = iter(self._loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for step in range(self._start_step, self._order.num_steps):
            start_s = time.perf_counter()
            packed = torch.from_numpy(self._next())
            wait_s = time.perf_counter() - start_s
            yield StepBatch(step=step, share=self._unpacked(step, packed), wait_s=wait_s)
        self.close()

    def _next(self) -> npt.NDArray[np.int64]:
        """Wait for the next step; torch checks on its workers every few seconds."""
        assert self._packed is not None, "the loader is closed"
        try:
            return next(self._packed)
        except RuntimeError as error:
            if "DataLoader worker (pid" not in str(error):
                raise
            raise worker_died("preparing batches", error) from error

    def _unpacked(self, step: int, packed: torch.Tensor) -> StepShare:
        """Cut a step's tensor into micro-batches, without a copy."""
        rows_of_step = self._order.step(step)
        batches, at = [], 0
        for rows in (rows_of_step[i] for i in self._micro_batch_ids):
            width = padded(self._order.lengths[rows[0]], PAD_TO_MULTIPLE_OF)
            part = packed[:, at : at + len(rows) * width].view(3, len(rows), width)
            batches.append(dict(zip(_FIELDS, part, strict=True)))
            at += len(rows) * width
        return StepShare.of(
            rows_of_step,
            self._examples,
            micro_batches=batches,
            micro_batch_ids=self._micro_batch_ids,
        )


def _unchanged(share: object) -> object:
    """Return a share as it is; torch would make a tensor of it, in the worker."""
    return share


def _prepare_loader_worker(_: int) -> None:
    torch.set_num_threads(1)
    prepare_worker()
