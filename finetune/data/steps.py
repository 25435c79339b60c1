"""The steps of a run: the batches of each, made by workers ahead of the step."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from finetune.data.compared import (
    Comparison,
    Layout,
    end_of,
    made_up,
    rehearsed_pieces,
)
from finetune.data.dataset import ExampleSet, Rows
from finetune.data.encode_source import worker_died
from finetune.data.order import PAD_TO_MULTIPLE_OF, BatchOrder, PackedOrder, StepSizes, padded
from finetune.data.step_rows import StepRows
from finetune.data.tokenize import IGNORE_INDEX, Example
from finetune.interrupts import SIGNALS
from finetune.processes import prepare_worker, process_context

_PREFETCH_STEPS = 2
_FIELDS = ("input_ids", "labels")
MicroBatch = dict[str, torch.Tensor]


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepShare:
    """One rank's share of a step; with a single rank, all of it."""

    micro_batches: tuple[MicroBatch, ...]  # the micro-batches of this rank
    micro_batch_ids: tuple[int, ...]  # their numbers in the whole step
    num_tokens: int  # tokens of all the step's rows, padding left out
    num_label_tokens: int  # the number of its tokens with a loss
    scored: tuple[MicroBatch, ...] = ()  # this rank's micro-batches of rows that are only scored
    # What this rank's rows are to each other; None where none are compared.
    rows: StepRows | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """All steps of a run, as one rank sees them."""

    rows: ExampleSet  # what is trained on
    order: BatchOrder | PackedOrder  # which rows each step trains on
    sizes: StepSizes  # how large micro-batches are
    # Which of so many micro-batches of a step are this rank's.
    own: Callable[[int], tuple[int, ...]]
    pad_token_id: int  # token that pads rows
    # What an objective compares; None where each row is learned by itself.
    comparison: Comparison | None = None
    is_masked: bool = False  # whether the model gets an attention mask for padding

    @classmethod
    def of(
        cls,
        order: BatchOrder | PackedOrder,
        rows: ExampleSet,
        *,
        own: Callable[[int], tuple[int, ...]],
        pad_token_id: int,
        comparison: Comparison | None = None,
    ) -> Self:
        """Return the steps of an order of the rows."""
        sizes = StepSizes.of(order, rows)
        return cls(
            rows=rows,
            order=order,
            sizes=sizes if comparison is None else replace(sizes, num_top=comparison.num_top),
            own=own,
            pad_token_id=pad_token_id,
            comparison=comparison,
        )

    def held_out(self, rows: ExampleSet, comparison: Comparison) -> Self:
        """Return steps of other rows, all of which are this rank's; they are cut alike."""
        lengths = np.asarray(rows.lengths, dtype=np.int64)
        order: BatchOrder | PackedOrder
        if isinstance(self.order, PackedOrder):
            order = replace(self.order, lengths=lengths, min_bins=1)
        else:
            order = replace(self.order, lengths=tuple(lengths.tolist()), min_parts=1)
        return replace(self, rows=rows, order=order, own=_all, comparison=comparison)

    def lasting(self, num_steps: int) -> Self:
        """Return so many full steps; each depends on its number alone."""
        return replace(self, order=replace(self.order, num_steps=num_steps, end=None))

    def with_references(self, references: npt.NDArray[np.float64]) -> Self:
        """Return the steps with the reference's log-probability of each row, in nats."""
        assert self.comparison is not None
        groups = replace(self.comparison.groups, references=references)
        return replace(self, comparison=replace(self.comparison, groups=groups))

    @property
    def num(self) -> int:
        """How many there are."""
        return self.order.num_steps

    @property
    def num_rows(self) -> int:
        """How many rows an epoch has; answers to one prompt are of one row."""
        return len(self.rows) if self.comparison is None else len(self.comparison.groups)

    def num_rows_in(self, step: int) -> int:
        """Return how many rows a step has, counted as `num_rows` does."""
        rows = np.asarray(self.order.rows(step), dtype=np.int64)
        if self.comparison is None:
            return len(rows)
        return int(self.comparison.groups.numbers(rows)[-1]) + 1

    @property
    def largest_tokens(self) -> int:
        """Tokens of the largest micro-batch, padding included."""
        if isinstance(self.order, PackedOrder):
            return self.sizes.largest_width
        return self.order.micro_batch_size * self.sizes.largest_width

    def longest(self) -> StepShare:
        """Return this rank's share of a step with all the widest micro-batches."""
        comparison = self.comparison
        parts = self._longest_parts()
        ids = self.own(len(parts))
        examples = [example for part in parts for example in part]
        share = _share_of(examples, self._collated([parts[part] for part in ids]), ids)
        if comparison is None:
            return share
        return replace(
            share,
            scored=share.micro_batches if comparison.prompt_lens is not None else (),
            rows=made_up(parts, ids, comparison),
        )

    def _longest_parts(self) -> list[list[Example]]:
        """Return the rows of the widest micro-batches, which are cut where they are packed."""
        if not isinstance(self.order, PackedOrder):
            return [[self.rows[row] for row in part] for part in self.order.longest_step()]
        bins = self.order.longest_step()
        if self.comparison is None:
            return [[_cut(self.rows[row], num) for row, num in part] for part in bins]
        pieces = rehearsed_pieces(bins, group_size=self.comparison.group_size)
        return [[end_of(self.rows[row], num) for row, num in part] for part in pieces]

    def typical(self) -> list[StepShare]:
        """Return this rank's shares of steps of the median size, and those nearest to it."""
        return [self.share_of(self.order.rows(step)) for step in self.sizes.typical_steps]

    def share_of(self, rows: tuple[int, ...]) -> StepShare:
        """Return this rank's share of a step of some rows, which are whole groups."""
        layout = self._layout(rows)
        return self._share(layout, self._batches(layout))

    def in_order(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Return rows of a step in the order of its micro-batches."""
        return tuple(rows[place] for part in self._layout(rows).parts for place in part)

    def as_array(self, step: int) -> npt.NDArray[np.int64]:
        """Return the batches of this rank's share as one array, (fields, tokens of the share)."""
        batches = self._batches(self._layout(self.order.rows(step)))
        fields = [torch.cat([batch[name].flatten() for batch in batches]) for name in self._fields]
        return torch.stack(fields).numpy()

    def from_array(self, step: int, array: npt.NDArray[np.int64]) -> StepShare:
        """Cut the array of a step into micro-batches, without a copy."""
        layout, whole = self._layout(self.order.rows(step)), torch.from_numpy(array)
        batches, at = [], 0
        for own in layout.own_lens(self.own(len(layout.parts)), self._own_scored(layout)):
            lens = torch.tensor(own)
            is_packed = isinstance(self.order, PackedOrder)
            shape = (1, int(lens.sum())) if is_packed else (len(own), padded(own[0]))
            part = whole[:, at : at + math.prod(shape)].view(len(self._fields), *shape)
            batch = dict(zip(self._fields, part, strict=True))
            batches.append(batch | {"row_lens": lens} if is_packed else batch)
            at += math.prod(shape)
        return self._share(layout, batches)

    def padded_batch(self, examples: Sequence[Example]) -> MicroBatch:
        """Return rows as a micro-batch, with an attention mask only if the model needs it.

        Rows are padded on the right and padding has no label, so with causal attention the mask
        cannot change the loss. It would only have to be materialised and select a slower kernel.
        """
        batch = collate(examples, pad_token_id=self.pad_token_id)
        return {name: batch[name] for name in self._padded_fields}

    @property
    def _padded_fields(self) -> tuple[str, ...]:
        return (*_FIELDS, "attention_mask") if self.is_masked else _FIELDS

    @property
    def _fields(self) -> tuple[str, ...]:
        return _FIELDS if isinstance(self.order, PackedOrder) else self._padded_fields

    def _layout(self, rows: tuple[int, ...]) -> Layout:
        lens = tuple(int(self.order.lengths[row]) for row in rows)
        scored_lens = () if self.comparison is None else self.comparison.scored_lens(rows)
        return Layout(
            rows=rows,
            lens=lens,
            parts=self.order.parts(lens),
            scored_lens=scored_lens,
            scored=self.order.parts(scored_lens) if scored_lens else (),
        )

    def _own_scored(self, layout: Layout) -> tuple[int, ...]:
        return self.own(len(layout.scored)) if layout.scored else ()

    def _batches(self, layout: Layout) -> list[MicroBatch]:
        """Return the micro-batches of this rank's share, those that are only scored last."""
        rows, own = layout.rows, self.own(len(layout.parts))
        parts = [[self.rows[rows[place]] for place in layout.parts[part]] for part in own]
        if self.comparison is not None and layout.scored:
            parts += [
                [self.comparison.scored(self.rows, rows, place) for place in layout.scored[part]]
                for part in self._own_scored(layout)
            ]
        return self._collated(parts)

    def _collated(self, parts: Sequence[Sequence[Example]]) -> list[MicroBatch]:
        if isinstance(self.order, PackedOrder):
            return [collate_packed(part) for part in parts]
        return [self.padded_batch(part) for part in parts]

    def _share(self, layout: Layout, batches: Sequence[MicroBatch]) -> StepShare:
        own, own_scored = self.own(len(layout.parts)), self._own_scored(layout)
        share = _share_of([self.rows[row] for row in layout.rows], batches[: len(own)], own)
        if self.comparison is None:
            return share
        return replace(
            share,
            scored=tuple(batches[len(own) :]),
            rows=self.comparison.step_rows(self.rows, layout, (own, own_scored)),
        )


def _all(num: int) -> tuple[int, ...]:
    return tuple(range(num))


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
class InFront(ExampleSet):
    """Examples with virtual tokens in front of each; `input_ids` and `labels` are without them."""

    first_id: int  # the first virtual token: the size of the vocabulary
    num: int  # virtual tokens of each example

    @property
    def loss_tokens(self) -> npt.NDArray[np.int64]:
        """Count the tokens with a loss; the first one of a row's own is predicted too."""
        firsts = [
            part.tokens.store.labels[part.tokens.store.offsets[part.examples]]
            for part in self.parts
        ]
        others: npt.NDArray[np.int64] = ExampleSet.loss_tokens.__get__(self)
        found: npt.NDArray[np.int64] = others + (np.concatenate(firsts) != IGNORE_INDEX)
        return found

    def __getitem__(self, index: int) -> Example:
        found = ExampleSet.__getitem__(self, index)
        ids = np.arange(self.first_id, self.first_id + self.num, dtype=np.int32)
        none = np.full(self.num, IGNORE_INDEX, np.int32)
        return replace(
            found,
            input_ids=np.concatenate([ids, found.input_ids]),
            labels=np.concatenate([none, found.labels]),
        )

    def _lengths(self) -> npt.NDArray[np.int64]:
        return ExampleSet._lengths(self) + self.num


def with_virtual_tokens(rows: Rows, *, first_id: int, num: int) -> Rows:
    """Return rows with virtual tokens in front of each; the same rows if there are none."""
    if not num:
        return rows

    def of(examples: ExampleSet) -> InFront:
        return InFront(parts=examples.parts, notes=examples.notes, first_id=first_id, num=num)

    held_out = None if rows.held_out is None else of(rows.held_out)
    return replace(rows, train=of(rows.train), held_out=held_out)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepBatch:
    """This rank's share of one step, and how long the step waited for it."""

    step: int
    share: StepShare
    wait_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # what is known of its rows


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


def parts_of(steps: Steps) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Give all rows in parts of about a step, each with its number of groups.

    Args:
        steps: Of rows that are compared.
    """
    assert steps.comparison is not None
    offsets = steps.comparison.groups.offsets
    for part in np.array_split(np.arange(len(offsets) - 1), num_parts_of(steps)):
        yield len(part), tuple(range(int(offsets[part[0]]), int(offsets[part[-1] + 1])))


def num_parts_of(steps: Steps) -> int:
    """Return in how many parts `parts_of` gives the rows."""
    assert steps.comparison is not None
    offsets = steps.comparison.groups.offsets
    num_groups = len(offsets) - 1
    per_part = max(1, steps.sizes.rows_per_step * num_groups // int(offsets[-1]))
    return num_parts(num_groups, per_part)


def num_parts(num_groups: int, per_part: int) -> int:
    """Return in how many parts, equal but for one group, none has more groups than a step.

    Where a part would then have a single group and a step has more, there are fewer parts: KTO
    compares each row with another.
    """
    fewest = -(-num_groups // per_part)
    if per_part > 1 and num_groups < 2 * fewest:
        return max(1, num_groups // 2)
    return fewest
