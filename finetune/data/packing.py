"""Which rows share a packed sequence: best fit, then sequences that take equally long.

Rows of a step are packed longest first, each to the sequence with the least room that it fits into
(best-fit decreasing), which gives how many sequences are needed. Attention grows with the square of
a row, so full sequences do not take equally long. The same rows are then dealt out again, the
costliest first, each to the sequence that has least to do so far and has room. Where some row finds
no room so, the best fit stays.

The cost of a row is arithmetic of the model, not time on a machine: each machine packs alike.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

import numpy as np
import numpy.typing as npt

from finetune.data.compared.step_layout import Comparison
from finetune.data.dataset import ExampleSet, shuffled
from finetune.recipe.sections import TrainSection
from offload.plan.facts.attention import Attention
from offload.plan.facts.facts import ModelFacts

Bins = tuple[tuple[int, ...], ...]
MOST_ROWS_LOOKED_AT = 20_000  # of all steps of a run, to find the largest: a fraction of a second


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCost:
    """The arithmetic of a row's forward.

    Attributes:
        flops_per_token: Products of all layers, for one token.
        mixing: How each layer mixes tokens, and how many layers do so.
    """

    flops_per_token: float
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

    Attributes:
        lengths: Tokens of each row.
        capacity: Tokens of a sequence.
        rows_per_step: Rows of a step; None where it is given in tokens.
        tokens_per_step: Tokens of a step; None where it is given in rows.
        num_steps: Steps of the run.
        seed: Of the orders.
        min_bins: Sequences of a step, at least: one for each rank.
        cost: Of a row.
        groups: (groups + 1) Where each group of rows begins, and where the last one ends; None
            where each row is by itself.
        end: Rows, or tokens, of all steps together; None where each step is full.
    """

    lengths: npt.NDArray[np.int64]
    capacity: int
    rows_per_step: int | None
    tokens_per_step: int | None
    num_steps: int
    seed: int
    min_bins: int
    cost: RowCost
    groups: npt.NDArray[np.int64] | None = None
    end: int | None = None

    @classmethod
    def of(
        cls,
        train: TrainSection,
        rows: ExampleSet,
        *,
        num_ranks: int,
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
            min_bins=num_ranks,
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
