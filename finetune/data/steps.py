"""The steps of a run: which rows each trains on, and its batches, prepared ahead of the step.

Which step. Row p of an endless stream of reshuffled epochs belongs to step p // rows_per_step: any
step is known without the ones before it, and an epoch's last rows share a step with the next epoch.
"""

import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from finetune.data.dataset import ExampleSet, shuffled
from finetune.data.packing import PackedOrder
from finetune.data.tokenize import IGNORE_INDEX, Example
from finetune.data.workers import prepare_worker, process_context, worker_died
from finetune.interrupts import SIGNALS
from finetune.recipe.sections import TrainSection

PAD_TO_MULTIPLE_OF = 8
NUM_STEPS_LOOKED_AT, NUM_TYPICAL = 50, 12
_PREFETCH_STEPS = 2
_FIELDS = ("input_ids", "labels", "attention_mask")
_PACKED_FIELDS = ("input_ids", "labels")
MicroBatch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOrder:
    """Which rows each step trains on; a step depends on its number alone.

    Each epoch visits each row once, in an order drawn from (seed, epoch). Every step has the same
    number of rows: the last rows of an epoch share a step with the first rows of the next.

    Attributes:
        lengths: Tokens of each row.
        micro_batch_size: Rows of a micro-batch.
        num_micro_batches: Micro-batches of a step.
        num_steps: Steps of the run.
        seed: Of the orders.
    """

    lengths: tuple[int, ...]
    micro_batch_size: int
    num_micro_batches: int
    num_steps: int
    seed: int

    @classmethod
    def of(cls, train: TrainSection, rows: ExampleSet) -> Self:
        """Return the order that these settings make of the rows."""
        num_steps = train.steps
        if num_steps is None:
            assert train.epochs is not None
            num_steps = math.ceil(train.epochs * len(rows) / train.global_batch_size)
        return cls(
            lengths=rows.lengths,
            micro_batch_size=train.sequences,
            num_micro_batches=train.num_micro_batches,
            num_steps=num_steps,
            seed=train.seed,
        )

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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """How large micro-batches are.

    Attributes:
        typical_steps: A step whose tokens, padding included, are the median, and then those nearest
            to it by size, larger and smaller ones in turn.
        typical_width: Mean width of the first one's micro-batches, in tokens.
        label_tokens: Mean number of its tokens with a loss, per micro-batch.
        largest_width: Width of the widest micro-batch of the run.
        most_label_tokens: Most tokens with a loss that a micro-batch can have.
        num_micro_batches: Of the first of the typical steps.
        packing: How rows share a sequence; None where they do not.
    """

    typical_steps: tuple[int, ...]
    typical_width: int
    label_tokens: int
    largest_width: int
    most_label_tokens: int
    num_micro_batches: int
    packing: "Packing | None" = None

    @classmethod
    def of(cls, order: "BatchOrder | PackedOrder", examples: ExampleSet) -> "StepSizes":
        """Measure the first steps of an order."""
        return (
            cls._packed(order, examples)
            if isinstance(order, PackedOrder)
            else cls._padded(order, examples)
        )

    @classmethod
    def _padded(cls, order: BatchOrder, examples: ExampleSet) -> "StepSizes":
        looked_at = range(min(order.num_steps, NUM_STEPS_LOOKED_AT))
        widths = {step: _widths(order, order.step(step)) for step in looked_at}
        by_size = sorted(looked_at, key=lambda step: sum(widths[step]))
        middle = (len(by_size) - 1) // 2
        typical = by_size[middle]
        labels_of_rows = examples.loss_tokens
        labels = [int(labels_of_rows[i]) for part in order.step(typical) for i in part]
        return cls(
            typical_steps=_outwards(by_size, middle)[:NUM_TYPICAL],
            typical_width=round(statistics.mean(widths[typical])),
            label_tokens=round(sum(labels) / order.num_micro_batches),
            largest_width=max(_widths(order, order.longest_step())),
            most_label_tokens=int(np.sort(labels_of_rows)[::-1][: order.micro_batch_size].sum()),
            num_micro_batches=order.num_micro_batches,
        )

    @classmethod
    def _packed(cls, order: PackedOrder, examples: ExampleSet) -> "StepSizes":
        looked_at = range(min(order.num_steps, NUM_STEPS_LOOKED_AT))
        steps = {step: order.step(step) for step in looked_at}
        tokens = {
            step: int(order.lengths[[i for part in steps[step] for i in part]].sum())
            for step in looked_at
        }
        by_size = sorted(looked_at, key=tokens.__getitem__)
        middle = (len(by_size) - 1) // 2
        typical = by_size[middle]
        bins = steps[typical]
        lengths = order.lengths[[i for part in bins for i in part]]
        labels = [int(examples.loss_tokens[i]) for part in bins for i in part]
        num_sequences = sum(map(len, steps.values()))
        most_tokens, widest = order.largest
        return cls(
            typical_steps=_outwards(by_size, middle)[:NUM_TYPICAL],
            typical_width=round(tokens[typical] / len(bins)),
            label_tokens=round(sum(labels) / len(bins)),
            largest_width=widest,
            most_label_tokens=widest,
            num_micro_batches=len(bins),
            packing=Packing(
                row_tokens=round(float((lengths**2).sum() / lengths.sum())),
                longest_row=int(order.lengths.max()),
                rows_per_step=len(lengths),
                fill=sum(tokens.values()) / (num_sequences * order.capacity),
                most_tokens=most_tokens,
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How the rows of a run share sequences.

    Attributes:
        row_tokens: Tokens of a row, averaged over the tokens of a typical step: attention's work is
            that of rows of this length.
        longest_row: Tokens of the longest.
        rows_per_step: Rows of the typical step.
        fill: Tokens of the steps looked at, of all that their sequences have room for.
        most_tokens: Tokens that no step exceeds.
    """

    row_tokens: int
    longest_row: int
    rows_per_step: int
    fill: float
    most_tokens: int


def _outwards(ordered: Sequence[int], middle: int) -> tuple[int, ...]:
    """Return the middle element, then its neighbours on alternating sides."""
    places = sorted(range(len(ordered)), key=lambda place: (abs(place - middle), -place))
    return tuple(ordered[place] for place in places)


def _widths(order: BatchOrder, step: Sequence[Sequence[int]]) -> list[int]:
    return [padded(max(order.lengths[i] for i in part), PAD_TO_MULTIPLE_OF) for part in step]


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


def collate_packed(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Put rows one after the other: input_ids and labels (1, T), row_lens (rows,), each int64.

    The first token of a row has no label, as in a row alone, where none comes before it.
    """
    input_ids = np.concatenate([example.input_ids for example in examples], dtype=np.int64)
    labels = np.concatenate([example.labels for example in examples], dtype=np.int64)
    row_lens = np.array([len(example.input_ids) for example in examples], dtype=np.int64)
    labels[row_lens.cumsum() - row_lens] = IGNORE_INDEX
    return {
        "input_ids": torch.from_numpy(input_ids[None]),
        "labels": torch.from_numpy(labels[None]),
        "row_lens": torch.from_numpy(row_lens),
    }


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

    micro_batches: tuple[MicroBatch, ...]
    micro_batch_ids: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepBatch:
    """This rank's share of one step, and how long the step waited for it."""

    step: int
    share: StepShare
    wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """All steps of a run, as one rank sees them.

    Attributes:
        rows: What is trained on.
        order: Which rows each step trains on.
        sizes: How large micro-batches are.
        own: Which of so many micro-batches of a step are this rank's.
        pad_token_id: Token that pads rows.
    """

    rows: ExampleSet
    order: BatchOrder | PackedOrder
    sizes: StepSizes
    own: Callable[[int], tuple[int, ...]]
    pad_token_id: int

    @classmethod
    def of(
        cls,
        order: BatchOrder | PackedOrder,
        rows: ExampleSet,
        *,
        own: Callable[[int], tuple[int, ...]],
        pad_token_id: int,
    ) -> Self:
        """Return the steps of an order of the rows."""
        sizes = StepSizes.of(order, rows)
        return cls(rows=rows, order=order, sizes=sizes, own=own, pad_token_id=pad_token_id)

    @property
    def num(self) -> int:
        """How many there are."""
        return self.order.num_steps

    @property
    def largest_tokens(self) -> int:
        """Tokens of the largest micro-batch, padding included."""
        if isinstance(self.order, PackedOrder):
            return self.sizes.largest_width
        return self.order.micro_batch_size * self.sizes.largest_width

    def longest(self) -> StepShare:
        """Return this rank's share of a step with all the widest micro-batches."""
        if not isinstance(self.order, PackedOrder):
            return self._share(self.order.longest_step())
        bins = [
            [_cut(self.rows[row], num_tokens) for row, num_tokens in part]
            for part in self.order.longest_step()
        ]
        examples = [example for part in bins for example in part]
        ids = self.own(len(bins))
        return _share_of(examples, [collate_packed(bins[i]) for i in ids], ids)

    def typical(self) -> list[StepShare]:
        """Return this rank's shares of steps of the median size, and those nearest to it."""
        return [self._share(self.order.step(step)) for step in self.sizes.typical_steps]

    def as_array(self, step: int) -> npt.NDArray[np.int64]:
        """Return the batches of this rank's share as one array, (fields, tokens of the share)."""
        batches = self._batches(self.order.step(step))
        fields = [torch.cat([batch[name].flatten() for batch in batches]) for name in self._fields]
        return torch.stack(fields).numpy()

    def from_array(self, step: int, array: npt.NDArray[np.int64]) -> StepShare:
        """Cut the array of a step into micro-batches, without a copy."""
        rows, whole = self.order.step(step), torch.from_numpy(array)
        batches, at = [], 0
        for own in self._own(rows):
            lens = torch.tensor([int(self.order.lengths[row]) for row in own])
            is_packed = isinstance(self.order, PackedOrder)
            shape = (1, int(lens.sum())) if is_packed else (len(own), padded(int(lens[0])))
            part = whole[:, at : at + math.prod(shape)].view(len(self._fields), *shape)
            batch = dict(zip(self._fields, part, strict=True))
            batches.append(batch | {"row_lens": lens} if is_packed else batch)
            at += math.prod(shape)
        return self._share(rows, batches)

    @property
    def _fields(self) -> tuple[str, ...]:
        return _PACKED_FIELDS if isinstance(self.order, PackedOrder) else _FIELDS

    def _own(self, step: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [step[i] for i in self.own(len(step))]

    def _batches(self, step: Sequence[Sequence[int]]) -> list[MicroBatch]:
        parts = [[self.rows[row] for row in own] for own in self._own(step)]
        if isinstance(self.order, PackedOrder):
            return [collate_packed(part) for part in parts]
        return [collate(part, pad_token_id=self.pad_token_id) for part in parts]

    def _share(
        self, step: Sequence[Sequence[int]], batches: Sequence[MicroBatch] | None = None
    ) -> StepShare:
        examples = [self.rows[row] for micro_batch in step for row in micro_batch]
        batches = self._batches(step) if batches is None else batches
        return _share_of(examples, batches, self.own(len(step)))


def _share_of(
    examples: Sequence[Example], batches: Sequence[MicroBatch], ids: tuple[int, ...]
) -> StepShare:
    return StepShare(
        micro_batches=tuple(batches),
        micro_batch_ids=ids,
        num_tokens=sum(len(row.input_ids) for row in examples),
        num_label_tokens=sum(row.num_loss_tokens for row in examples),
    )


def _cut(example: Example, num_tokens: int) -> Example:
    return replace(
        example, input_ids=example.input_ids[:num_tokens], labels=example.labels[:num_tokens]
    )


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
