"""Which rows each step of a run trains on, and how large that makes micro-batches.

Row p of a stream of reshuffled epochs belongs to step p // rows_per_step: any step is known without
the ones before it, and an epoch's last rows share a step with the next epoch. The stream of a run
that is given in epochs ends with the rows of the last one, and so does its last step.
"""

import heapq
import math
import statistics
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

import numpy as np
import numpy.typing as npt

from finetune.data.compared import Comparison
from finetune.data.dataset import ExampleSet, shuffled
from finetune.recipe.sections import TrainSection
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.linears import Attention

# ---------------------------------------------------------------------------------------------
# Which rows share a packed sequence: best fit, then sequences that take equally long.
#
# Rows of a step are packed longest first, each to the sequence with the least room that it fits
# into (best-fit decreasing), which gives how many sequences are needed. Attention grows with the
# square of a row, so full sequences do not take equally long. The same rows are then dealt out
# again, the costliest first, each to the sequence that has least to do so far and has room. Where
# some row finds no room so, the best fit stays.
#
# The cost of a row is arithmetic of the model, not time on a machine: each machine packs alike.

Bins = tuple[tuple[int, ...], ...]
MOST_ROWS_LOOKED_AT = 20_000  # of all steps of a run, to find the largest: a fraction of a second


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCost:
    """The arithmetic of a row's forward."""

    flops_per_token: float  # products of all layers, for one token
    # How each layer mixes tokens, and how many layers do so.
    mixing: tuple[tuple[Attention, int], ...] = ()

    @classmethod
    def of(cls, facts: ModelFacts) -> Self:
        """Return the cost of rows of a model."""
        products = sum(2.0 * x.active * x.d_in * x.d_out for y in facts.layers for x in y.linears)
        kinds = [layer.attention for layer in facts.layers]
        mixing = tuple((kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))
        return cls(flops_per_token=products, mixing=mixing)

    def __call__(self, num_tokens: int) -> float:
        """Return the flops of a row of so many tokens."""
        mixed = sum(num * kind.flops_per_token(num_tokens) for kind, num in self.mixing)
        return num_tokens * (self.flops_per_token + mixed)


def packed(
    lengths: Sequence[int], *, capacity: int, cost: Callable[[int], float], min_bins: int = 1
) -> Bins:
    """Return the numbers of the rows of each sequence, the costliest sequence first.

    Args:
        lengths: Tokens of each row, at most `capacity`.
        capacity: Tokens of a sequence.
        cost: Of a row of so many tokens.
        min_bins: Sequences to make at least, where there are as many rows.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    costs = {length: cost(length) for length in set(lengths)}
    bins = _best_fit(lengths, order, capacity)
    num = min(max(len(bins), min_bins), len(lengths))
    balanced = _balanced(lengths, order, costs, capacity=capacity, num=num)
    if balanced is None:
        balanced = bins
        while len(balanced) < num:
            fullest = max(balanced, key=len)
            balanced.append([fullest.pop() for _ in range(len(fullest) // 2)])
    by_cost = sorted(balanced, key=lambda rows: -sum(costs[lengths[row]] for row in rows))
    return tuple(map(tuple, by_cost))


def _best_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each row where least room is left; found by bisection of the rooms."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, its bin), sorted
    for row in order:
        at = bisect_left(rooms, (lengths[row], 0))
        if at < len(rooms):
            room, index = rooms.pop(at)
        else:
            room, index = capacity, len(bins)
            bins.append([])
        bins[index].append(row)
        if room > lengths[row]:
            insort(rooms, (room - lengths[row], index))
    return bins


def _balanced(
    lengths: Sequence[int],
    order: Sequence[int],
    costs: dict[int, float],
    *,
    capacity: int,
    num: int,
) -> list[list[int]] | None:
    """Put each row where there is least to do; None if one finds no room."""
    bins: list[list[int]] = [[] for _ in range(num)]
    rooms = [capacity] * num
    heap = [(0.0, index) for index in range(num)]
    for row in order:
        full = []
        while heap and rooms[heap[0][1]] < lengths[row]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        done, index = heapq.heappop(heap)
        bins[index].append(row)
        rooms[index] -= lengths[row]
        for one in [(done + costs[lengths[row]], index), *full]:
            if rooms[one[1]]:
                heapq.heappush(heap, one)
    return bins


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedOrder:
    """Which rows each step trains on, and which of them share a sequence.

    Rows come in the order that they have unpacked: each epoch visits each row once, in an order
    drawn from (seed, epoch). A step that is given in rows has as many as it would have unpacked. Of
    one that is given in tokens, step k has the rows whose first token is one of its
    `tokens_per_step`, of all epochs' tokens in this order. So steps have as many tokens on average,
    and each differs by less than a row. A step depends on its number alone.

    Rows of a group are next to each other in this order, and all in the step that its first token
    (or row) is in: then a step differs by less than a group. A run that is given in epochs ends
    with the rows of the last one, and so does its last step.
    """

    lengths: npt.NDArray[np.int64]  # tokens of each row
    capacity: int  # tokens of a sequence
    rows_per_step: int | None  # rows of a step; None where it is given in tokens
    tokens_per_step: int | None  # tokens of a step; None where it is given in rows
    num_steps: int  # steps of the run
    seed: int  # the seed of the orders
    min_bins: int  # sequences of a step, at least: one for each rank
    cost: RowCost  # the cost of a row
    # (groups + 1) Where each group of rows begins, and where the last one ends; None where each row
    # is by itself.
    groups: npt.NDArray[np.int64] | None = None
    end: int | None = None  # rows, or tokens, of all steps together; None where each step is full

    @classmethod
    def of(
        cls,
        train: TrainSection,
        rows: ExampleSet,
        *,
        min_parts: int = 1,
        cost: RowCost,
        comparison: Comparison | None = None,
    ) -> Self:
        """Return the order that these settings make of the rows.

        Raises:
            DataError: A step has not the rows or tokens to compare.
        """
        lengths = np.asarray(rows.lengths, dtype=np.int64)
        in_tokens = train.tokens_per_step
        if comparison is not None:
            comparison.require_within(
                tokens_per_step=in_tokens,
                rows_per_step=None if in_tokens else train.global_batch_size,
            )
        order = cls(
            lengths=lengths,
            capacity=train.sequences * train.seq_len,
            rows_per_step=train.global_batch_size if in_tokens is None else None,
            tokens_per_step=in_tokens,
            num_steps=train.steps or 0,
            seed=train.seed,
            min_bins=min_parts,
            cost=cost,
            groups=None if comparison is None else comparison.groups.offsets,
        )
        return order if train.steps is not None else order._of_epochs(train.exact_epochs)

    def _of_epochs(self, num_epochs: Fraction) -> Self:
        """Return the order of so many epochs; its last step is the one that the last row is in."""
        sizes = self._sizes
        end = math.ceil(num_epochs * int(sizes.sum()))
        epoch = (end - 1) // int(sizes.sum())
        order = shuffled(len(sizes), seed=self.seed, epoch=epoch)
        starts = sizes[order].cumsum() - sizes[order] + epoch * int(sizes.sum())
        last = int(starts[np.searchsorted(starts, end) - 1])
        return replace(self, end=end, num_steps=last // self._unit + 1)

    @property
    def num_epochs(self) -> float:
        """Return how often the run visits each row."""
        end = self.num_steps * self._unit if self.end is None else self.end
        return end / int(self._sizes.sum())

    @property
    def _unit(self) -> int:
        """Rows or tokens of a step, as it is given."""
        unit = self.tokens_per_step or self.rows_per_step
        assert unit is not None
        return unit

    def rows(self, index: int) -> tuple[int, ...]:
        """Return the rows of step `index`, counted from 0, in the order of their epochs."""
        assert 0 <= index < self.num_steps
        offsets, sizes = self._offsets, self._sizes
        size = int(sizes.sum())
        rows: list[int] = []
        first, last = index * self._unit, (index + 1) * self._unit
        if self.end is not None:
            last = min(last, self.end)
        for epoch in range(first // size, (last - 1) // size + 1):
            order = shuffled(len(sizes), seed=self.seed, epoch=epoch)
            starts = sizes[order].cumsum() - sizes[order] + epoch * size
            begin, end = np.searchsorted(starts, [first, last])
            rows += [
                row
                for group in order[begin:end].tolist()
                for row in range(offsets[group], offsets[group + 1])
            ]
        return tuple(rows)

    def step(self, index: int) -> Bins:
        """Return the rows of each sequence of step `index`, the costliest sequence first."""
        rows = self.rows(index)
        bins = self.parts([int(self.lengths[row]) for row in rows])
        return tuple(tuple(rows[i] for i in part) for part in bins)

    def parts(self, lengths: Sequence[int]) -> Bins:
        """Return which of some rows share each sequence, the costliest sequence first.

        Args:
            lengths: Tokens of each of the rows.
        """
        return packed(lengths, capacity=self.capacity, cost=self.cost, min_bins=self.min_bins)

    @property
    def _offsets(self) -> npt.NDArray[np.int64]:
        """Where each group begins; of rows by themselves, each."""
        return np.arange(len(self.lengths) + 1) if self.groups is None else self.groups

    @property
    def _sizes(self) -> npt.NDArray[np.int64]:
        """Rows or tokens of each group, by which a step is given."""
        sizes = np.ones_like(self.lengths) if self.tokens_per_step is None else self.lengths
        return np.asarray(np.add.reduceat(sizes, self._offsets[:-1]))

    @property
    def largest(self) -> tuple[int, int]:
        """Return how many tokens no step, and no sequence, exceeds.

        These are exact if the run has few rows, else bounds.
        """
        mean = int(self.lengths.sum()) / len(self.lengths) if self.tokens_per_step else 1
        if self.num_steps * self._unit / mean > MOST_ROWS_LOOKED_AT:
            return self.most_tokens, self.capacity
        steps = [
            [int(self.lengths[list(part)].sum()) for part in self.step(index)]
            for index in range(self.num_steps)
        ]
        return max(map(sum, steps)), max(map(max, steps))

    @property
    def most_tokens(self) -> int:
        """Return how many tokens no step exceeds."""
        if self.tokens_per_step is not None:
            return self.tokens_per_step - 1 + int(self._sizes.max())
        assert self.rows_per_step is not None
        longest = np.sort(self.lengths)[::-1]
        num = self.rows_per_step - 1 + int(self._sizes.max())  # a group may begin at the end
        copies = -(-num // len(longest)) + bool(len(longest) % num)  # of a row in one step
        return int(np.resize(longest.repeat(copies), num).sum())

    def longest_step(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return a step at least as large as any other: of each sequence, rows and their tokens.

        All of its sequences but the last are as wide as one can be, of the longest rows, which are
        cut where a sequence ends.
        """
        order = [int(row) for row in np.argsort(-self.lengths, kind="stable")]
        bins: list[list[tuple[int, int]]] = [[]]
        left, widest = self.largest
        room, at = widest, 0
        while left:
            row = order[at % len(order)]
            if not room:
                bins.append([])
                room = widest
            num = min(int(self.lengths[row]), room, left)
            bins[-1].append((row, num))
            left, room, at = left - num, room - num, at + 1
        bins += [[(order[0], int(self.lengths[order[0]]))]] * (self.min_bins - len(bins))
        return tuple(map(tuple, bins))


PAD_TO_MULTIPLE_OF = 8
NUM_STEPS_LOOKED_AT, NUM_TYPICAL = 50, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOrder:
    """Which rows each step trains on; a step depends on its number alone.

    Each epoch visits each row once, in an order drawn from (seed, epoch). Every step but the last
    has the same number of rows: the last rows of an epoch share a step with the first of the next.
    """

    lengths: tuple[int, ...]  # tokens of each row
    micro_batch_size: int  # rows of a micro-batch
    num_micro_batches: int  # micro-batches of a step
    num_steps: int  # steps of the run
    seed: int  # seed of the epochs' orders
    min_parts: int = 1  # fewest micro-batches of a step: one for each rank
    group_size: int = 1  # rows of a group; those of one are next to each other, and in one step
    end: int | None = None  # rows of all steps together; None where each step is full

    @classmethod
    def of(
        cls,
        train: TrainSection,
        rows: ExampleSet,
        *,
        min_parts: int = 1,
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
            min_parts=min_parts,
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
    """How large micro-batches are."""

    # A step whose tokens, padding included, are the median, and then those nearest to it by size,
    # larger and smaller ones in turn.
    typical_steps: tuple[int, ...]
    typical_width: int  # mean width of the first one's micro-batches, in tokens
    label_tokens: int  # mean number of its tokens with a loss, per micro-batch
    largest_width: int  # width of the widest micro-batch of the run
    most_label_tokens: int  # most tokens with a loss that a micro-batch can have
    num_micro_batches: int  # the number of micro-batches of the first of the typical steps
    rows_per_step: int  # rows of the first of the typical steps
    packing: "Packing | None" = None  # how rows share a sequence; None where they do not
    num_top: int = 0  # a teacher's likeliest tokens at a token, at most; 0 without a teacher

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
    """How the rows of a run share sequences."""

    # Tokens of a row, averaged over the tokens of a typical step: attention's work is that of rows
    # of this length.
    row_tokens: int
    longest_row: int  # tokens of the longest
    rows_per_step: int  # rows of the typical step
    fill: float  # tokens of the steps looked at, of all that their sequences have room for
    most_tokens: int  # tokens that no step exceeds


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
