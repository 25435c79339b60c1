"""Rows of all ranks that some of them add up, in rounds: those of one token are in the same round.

A rank that adds them up needs no more memory than for the rounds that are on their way, and adds
those of each token in the order of the ranks. All ranks know the tokens of all, and so cut alike.

Rows are in host memory and go over gloo, whatever the device. It moves a large message in one
direction at a time, and several small ones in both: so rounds are small, and some move at a time.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from offload.plan.facts.embedding import ROW_ROUNDS_BYTES

NUM_RUNNING = 4

Tokens = NDArray[np.int64]


class RowRounds:
    """The memory of the rounds that are on their way at a time."""

    def __init__(
        self,
        rows_ND: torch.Tensor,
        *,
        index: int,
        num: int,
        to: Collection[int],
        dtype: torch.dtype,
    ) -> None:
        """Allocate it.

        Args:
            rows_ND: Of this rank, on the host.
            index: This rank.
            num: Of the ranks.
            to: The ranks that get the rows.
            dtype: That rows are sent in.
        """
        self._rows_ND, self._index, self._num, self._to = rows_ND, index, num, frozenset(to)
        width = rows_ND.shape[1]
        self._num_rows = rows_per_round(
            width * dtype.itemsize, num_ranks=num, num_targets=len(self._to)
        )
        most = self._num_rows + num - 1
        self._received_NRD = torch.empty((NUM_RUNNING, most, width), dtype=dtype)
        self._sent_NRD = torch.empty((NUM_RUNNING, len(self._to) * most, width), dtype=dtype)

    def run(
        self,
        every: Sequence[Tokens],
        *,
        add: Callable[[torch.Tensor, torch.Tensor], None],
        wait: Callable[[Any], None],
    ) -> None:
        """Send this rank's rows to those that get them.

        Args:
            every: By rank, the tokens of its rows, ascending, each once.
            add: Called on these ranks with tokens and rows of one rank at a time.
            wait: Waits for a collective of torch.distributed.
        """
        running = deque[tuple[Any, Callable[[], None]]]()
        for number, one in enumerate(rounds_of(every, num_rows=self._num_rows)):
            if len(running) == NUM_RUNNING:
                _end(running, wait)
            sizes = [part.stop - part.start for part in one]
            received_RD = self._received_NRD[number % NUM_RUNNING]
            received_RD = received_RD[: sum(sizes) if self._index in self._to else 0]
            work = self._issued(number, sizes, one[self._index], received_RD)
            ids = [torch.from_numpy(own[part]) for own, part in zip(every, one, strict=True)]
            running.append((work, _adding(add, ids, received_RD)))
        while running:
            _end(running, wait)

    def _issued(
        self, number: int, sizes: Sequence[int], own: slice, received_RD: torch.Tensor
    ) -> Any:
        """Begin a round: all ranks send their rows of it to each that gets them."""
        num = sizes[self._index]
        sent_RD = self._sent_NRD[number % NUM_RUNNING][: len(self._to) * num]
        for some_RD in sent_RD.split(num) if num else ():
            some_RD.copy_(self._rows_ND[own])
        return dist.all_to_all_single(
            received_RD.view(torch.uint8),
            sent_RD.view(torch.uint8),
            list(sizes) if self._index in self._to else [0] * self._num,
            [num if rank in self._to else 0 for rank in range(self._num)],
            async_op=True,
        )


def _adding(
    add: Callable[[torch.Tensor, torch.Tensor], None],
    ids: Sequence[torch.Tensor],
    received_RD: torch.Tensor,
) -> Callable[[], None]:
    """Return what adds the rows of a round once they are there, if this rank gets them."""

    def act() -> None:
        if len(received_RD):
            for some_N, rows_ND in zip(ids, received_RD.split(list(map(len, ids))), strict=True):
                add(some_N, rows_ND)

    return act


def _end(running: deque[tuple[Any, Callable[[], None]]], wait: Callable[[Any], None]) -> None:
    work, act = running.popleft()
    wait(work)
    act()


def rows_per_round(row_bytes: int, *, num_ranks: int, num_targets: int) -> int:
    """Return after how many rows of all ranks a round ends, so that all that run fit their memory.

    A round has at most one row more of each other rank. It is received once, and sent to each
    rank that gets rows.

    Args:
        row_bytes: Of a row, as it is sent.
        num_ranks: Of the ranks.
        num_targets: Of those that get rows.
    """
    most = ROW_ROUNDS_BYTES // NUM_RUNNING // (row_bytes * (1 + num_targets))
    return max(1, most - num_ranks + 1)


def rounds_of(every: Sequence[Tokens], *, num_rows: int) -> list[tuple[slice, ...]]:
    """Return for each round which of its rows each rank sends.

    Args:
        every: By rank, the tokens of its rows, ascending, each once.
        num_rows: After how many rows of all ranks a round ends.
    """
    together = np.sort(np.concatenate(list(every)))
    if not len(together):
        return []
    last = np.unique(np.append(together[num_rows - 1 :: num_rows], together[-1]))
    ends = [np.searchsorted(tokens_N, last, side="right").tolist() for tokens_N in every]
    cuts = [map(slice, [0, *own], own) for own in ends]
    return list(zip(*cuts, strict=True))
