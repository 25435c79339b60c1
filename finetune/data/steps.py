"""The steps of a run: which rows each trains on, and its batches.

Which step. Row p of an endless stream of reshuffled epochs belongs to step p // rows_per_step: any
step is known without the ones before it, and an epoch's last rows share a step with the next epoch.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self, overload

import numpy as np
import numpy.typing as npt
import torch

from finetune.data.compared.step_layout import (
    Comparison,
    Layout,
    end_of,
    made_up,
    rehearsed_pieces,
)
from finetune.data.dataset import ExampleSet, Rows, shuffled
from finetune.data.packing import PackedOrder
from finetune.data.tokenize import IGNORE_INDEX, Example
from finetune.objective.step_rows import StepRows
from finetune.recipe.sections import TrainSection

PAD_TO_MULTIPLE_OF = 8
NUM_STEPS_LOOKED_AT, NUM_TYPICAL = 50, 12
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
        group_size: Rows of a group; those of one are next to each other, and in one step.
    """

    lengths: tuple[int, ...]
    micro_batch_size: int
    num_micro_batches: int
    num_steps: int
    seed: int
    group_size: int = 1

    @classmethod
    def of(
        cls, train: TrainSection, rows: ExampleSet, *, comparison: Comparison | None = None
    ) -> Self:
        """Return the order that these settings make of the rows.

        Raises:
            DataError: Groups of rows do not fill steps of this size.
        """
        group_size = 1
        if comparison is not None:
            per_step = train.global_batch_size
            comparison.require_within(tokens_per_step=None, rows_per_step=per_step)
            group_size = comparison.groups.size_in(per_step)
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
            group_size=group_size,
        )

    @property
    def rows_per_step(self) -> int:
        """Return the number of sequences in a step (the global batch size)."""
        return self.micro_batch_size * self.num_micro_batches

    def rows(self, index: int) -> tuple[int, ...]:
        """Return the rows of step `index`, counted from 0, in the order of their epochs."""
        assert 0 <= index < self.num_steps
        num_groups = len(self.lengths) // self.group_size
        per_step = self.rows_per_step // self.group_size
        rows = list[int]()
        for position in range(index * per_step, (index + 1) * per_step):
            epoch, place = divmod(position, num_groups)
            group = int(shuffled(num_groups, seed=self.seed, epoch=epoch)[place])
            rows += range(group * self.group_size, (group + 1) * self.group_size)
        return tuple(rows)

    def step(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Return the rows of each micro-batch of step `index`, counted from 0."""
        return self._grouped(self.rows(index))

    def parts(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return which of some rows share each micro-batch: rows of similar length, longest first.

        Args:
            lengths: Tokens of each of the rows.
        """
        ordered = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        size = self.micro_batch_size
        return tuple(tuple(ordered[at : at + size]) for at in range(0, len(ordered), size))

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
        """Group rows of similar length into micro-batches, to reduce padding."""
        parts = self.parts([self.lengths[row] for row in rows])
        return tuple(tuple(rows[place] for place in part) for part in parts)


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
        rows_per_step: Rows of the first of the typical steps.
        packing: How rows share a sequence; None where they do not.
        num_top: A teacher's likeliest tokens at a token, at most; 0 without a teacher.
    """

    typical_steps: tuple[int, ...]
    typical_width: int
    label_tokens: int
    largest_width: int
    most_label_tokens: int
    num_micro_batches: int
    rows_per_step: int
    packing: "Packing | None" = None
    num_top: int = 0

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
            rows_per_step=order.rows_per_step,
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
            rows_per_step=len(lengths),
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
        scored: This rank's micro-batches of rows that are only scored.
        rows: What this rank's rows are to each other; None where none are compared.
    """

    micro_batches: tuple[MicroBatch, ...]
    micro_batch_ids: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int
    scored: tuple[MicroBatch, ...] = ()
    rows: StepRows | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """All steps of a run, as one rank sees them.

    Attributes:
        rows: What is trained on.
        order: Which rows each step trains on.
        sizes: How large micro-batches are.
        own: Which of so many micro-batches of a step are this rank's.
        pad_token_id: Token that pads rows.
        comparison: What an objective compares; None where each row is learned by itself.
    """

    rows: ExampleSet
    order: BatchOrder | PackedOrder
    sizes: StepSizes
    own: Callable[[int], tuple[int, ...]]
    pad_token_id: int
    comparison: Comparison | None = None

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
            order = replace(self.order, lengths=tuple(lengths.tolist()))
        return replace(self, rows=rows, order=order, own=_all, comparison=comparison)

    def lasting(self, num_steps: int) -> Self:
        """Return the steps of a run of another length; each depends on its number alone."""
        return replace(self, order=replace(self.order, num_steps=num_steps))

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

    @property
    def _fields(self) -> tuple[str, ...]:
        return _PACKED_FIELDS if isinstance(self.order, PackedOrder) else _FIELDS

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
        return [collate(part, pad_token_id=self.pad_token_id) for part in parts]

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
    """Examples with virtual tokens in front of each; `input_ids` and `labels` are without them.

    Attributes:
        first_id: The first virtual token: the size of the vocabulary.
        num: Virtual tokens of each example.
    """

    first_id: int
    num: int

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

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
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
