"""How many rows of each source an epoch has, and which: exact shares, the same in every epoch.

An epoch is as short as it can be with every row of every source in it: the source that is largest
for its weight is seen once, others as often as their share takes. `max_rows` makes it shorter.
Counts are the shares of the epoch rounded by largest remainder, so that none is off by a row. A
source that is seen 2.3 times is twice whole, and three tenths of it, drawn by the seed, once more.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from finetune.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_EPOCH_ROWS = 100_000_000
_STREAM = 1
"""Keeps these draws apart from those of `shuffled`, which are of (seed, epoch)."""


def rows_per_source(
    sizes: Sequence[int], weights: Sequence[float], *, max_rows: int | None
) -> tuple[int, ...]:
    """Return how many rows of each source an epoch has.

    Args:
        sizes: Rows of each source, at least one.
        weights: The share of each is its weight over their sum; above 0.
        max_rows: Of the epoch; None: all are in it.

    Raises:
        DataError: The weights make an epoch of more rows than can be listed.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    num_rows = max(math.floor(size / share) for size, share in zip(sizes, shares, strict=True))
    while any(n < size for n, size in zip(_rounded(shares, num_rows), sizes, strict=True)):
        num_rows += 1
    num_chosen = num_rows if max_rows is None else min(num_rows, max_rows)
    if num_chosen > max(MAX_EPOCH_ROWS, sum(sizes)):
        most = max(range(len(sizes)), key=lambda n: shares[n] * num_chosen / sizes[n])
        raise DataError(
            f"the weights of data.mix make an epoch of {num_chosen:,} rows, entry {most + 1} seen"
            f" {float(shares[most] * num_chosen / sizes[most]):,.0f} times",
            limit=f"an epoch has each row of all sources, and at most {MAX_EPOCH_ROWS:,} rows",
            hint="bring the weights nearer to the sources' sizes, or set `data.max_rows`",
        )
    return _rounded(shares, num_chosen)


def _rounded(shares: Sequence[Fraction], num_rows: int) -> tuple[int, ...]:
    """Round the shares of a number by largest remainder, the first of equal ones up."""
    whole = [math.floor(share * num_rows) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda n: (whole[n] - shares[n] * num_rows, n))
    for n in by_rest[: num_rows - sum(whole)]:
        whole[n] += 1
    return tuple(whole)


def drawn(num_rows: int, size: int, *, seed: int, source: int) -> "NDArray[np.int64]":
    """Return which of a source's rows an epoch has, in order; rows may be in it several times.

    Args:
        num_rows: How many.
        size: Rows of the source.
        seed: Of the run.
        source: Its number in the mix.
    """
    times, rest = divmod(num_rows, size)
    bits = np.random.MT19937(np.random.SeedSequence([seed, source, _STREAM]))
    once_more = np.random.RandomState(bits).permutation(size)[:rest]
    counts = np.full(size, times)
    counts[once_more] += 1
    return np.repeat(np.arange(size, dtype=np.int64), counts)
