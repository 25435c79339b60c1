"""Which rows each step of a run trains on, and how large that makes micro-batches.

Row p of a stream of reshuffled epochs belongs to step p // rows_per_step: any step is known without
the ones before it, and an epoch's last rows share a step with the next epoch. The stream of a run
that is given in epochs ends with the rows of the last one, and so does its last step.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from finetune.data.compared.step_layout import Comparison
from finetune.data.dataset import ExampleSet, shuffled
from finetune.data.packing import PackedOrder
from finetune.recipe.sections import TrainSection

PAD_TO_MULTIPLE_OF = 8
NUM_STEPS_LOOKED_AT, NUM_TYPICAL = 50, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOrder:
    """Which rows each step trains on; a step depends on its number alone.

    Each epoch visits each row once, in an order drawn from (seed, epoch). Every step but the last
    has the same number of rows: the last rows of an epoch share a step with the first of the next.

    Attributes:
        lengths: Tokens of each row.
        micro_batch_size: Rows of a micro-batch.
        num_micro_batches: Micro-batches of a step.
        num_steps: Steps of the run.
        seed: Seed of the epochs' orders.
        min_parts: Fewest micro-batches of a step: one for each rank.
        group_size: Rows of a group; those of one are next to each other, and in one step.
        end: Rows of all steps together; None where each step is full.
    """

    lengths: tuple[int, ...]
    micro_batch_size: int
    num_micro_batches: int
    num_steps: int
    seed: int
    min_parts: int = 1
    group_size: int = 1
    end: int | None = None

    @classmethod
    def of(
        cls,
        train: TrainSection,
        rows: ExampleSet,
        *,
        num_ranks: int,
        comparison: Comparison | None = None,
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
        num_steps, end = train.steps, None
        if num_steps is None:
            num_groups = len(rows) // group_size
            end = math.ceil(train.exact_epochs * num_groups) * group_size
            num_steps = math.ceil(end / train.global_batch_size)
        return cls(
            lengths=rows.lengths,
            micro_batch_size=train.sequences,
            num_micro_batches=train.num_micro_batches,
            num_steps=num_steps,
            seed=train.seed,
            min_parts=num_ranks,
            group_size=group_size,
            end=end,
        )

    @property
    def rows_per_step(self) -> int:
        """Return the number of sequences in a step (the global batch size)."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def num_epochs(self) -> float:
        """Return how often the run visits each row."""
        end = self.num_steps * self.rows_per_step if self.end is None else self.end
        return end / len(self.lengths)

    def rows(self, index: int) -> tuple[int, ...]:
        """Return the rows of step `index`, counted from 0, in the order of their epochs."""
        assert 0 <= index < self.num_steps
        num_groups = len(self.lengths) // self.group_size
        first, last = index * self.rows_per_step, (index + 1) * self.rows_per_step
        if self.end is not None:
            last = min(last, self.end)
        rows = list[int]()
        for position in range(first // self.group_size, last // self.group_size):
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
        size = max(1, min(self.micro_batch_size, len(lengths) // self.min_parts))
        return tuple(tuple(ordered[at : at + size]) for at in range(0, len(ordered), size))

    def longest_step(self) -> tuple[tuple[int, ...], ...]:
        """Return a step at least as large as any other: the longest rows of the data.

        Its first micro-batch has the most padded tokens that a micro-batch can have. A row appears
        in it as often as a step can span epochs.
        """
        num_rows, num = len(self.lengths), self.rows_per_step
        copies = -(-num // num_rows)
        if num_rows % num:
            copies += 1  # the end of one epoch and the start of the next
        if self.end is not None:
            num, copies = min(num, self.end), min(copies, -(-self.end // num_rows))
        by_length = sorted(range(num_rows), key=lambda row: -self.lengths[row])
        return self._grouped([row for row in by_length for _ in range(copies)][:num])

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
        """Measure the first steps of an order; the last one, which may be short, only if alone."""
        return (
            cls._packed(order, examples)
            if isinstance(order, PackedOrder)
            else cls._padded(order, examples)
        )

    @classmethod
    def _padded(cls, order: BatchOrder, examples: ExampleSet) -> "StepSizes":
        looked_at = _looked_at(order)
        widths = {step: _widths(order, order.step(step)) for step in looked_at}
        by_size = sorted(looked_at, key=lambda step: sum(widths[step]))
        middle = (len(by_size) - 1) // 2
        typical = by_size[middle]
        labels_of_rows = examples.loss_tokens
        parts = order.step(typical)
        labels = [int(labels_of_rows[i]) for part in parts for i in part]
        return cls(
            typical_steps=_outwards(by_size, middle)[:NUM_TYPICAL],
            typical_width=round(statistics.mean(widths[typical])),
            label_tokens=round(sum(labels) / len(parts)),
            largest_width=max(_widths(order, order.longest_step())),
            most_label_tokens=int(np.sort(labels_of_rows)[::-1][: order.micro_batch_size].sum()),
            num_micro_batches=len(parts),
            rows_per_step=len(labels),
        )

    @classmethod
    def _packed(cls, order: PackedOrder, examples: ExampleSet) -> "StepSizes":
        looked_at = _looked_at(order)
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


def _looked_at(order: BatchOrder | PackedOrder) -> range:
    num_full = order.num_steps if order.end is None else max(1, order.num_steps - 1)
    return range(min(num_full, NUM_STEPS_LOOKED_AT))


def _outwards(ordered: Sequence[int], middle: int) -> tuple[int, ...]:
    """Return the middle element, then its neighbours on alternating sides."""
    places = sorted(range(len(ordered)), key=lambda place: (abs(place - middle), -place))
    return tuple(ordered[place] for place in places)


def _widths(order: BatchOrder, step: Sequence[Sequence[int]]) -> list[int]:
    return [padded(max(order.lengths[i] for i in part), PAD_TO_MULTIPLE_OF) for part in step]


def padded(length: int, multiple: int = PAD_TO_MULTIPLE_OF) -> int:
    """Round a length up to a multiple."""
    return -(-length // multiple) * multiple
