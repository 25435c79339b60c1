"""A teacher's likeliest tokens at each token of an answer, and their log-probabilities.

A row has them as two lists of lists, `top_ids` and `top_logprobs`, with one list for each token of
the answer, its end included: what the teacher would have said in its place, the token itself or
another. Lists may differ in length, and in the order of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from finetune.errors import RowError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_MASS = 1.01
"""Probabilities that were rounded to 16 bits may add up to a little more than 1."""
_NONE = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopTokens:
    """The likeliest tokens at each of T tokens."""

    counts: "NDArray[np.int32]"  # (T,) int32: how many each has
    ids: "NDArray[np.int32]"  # token ids, end to end, int32, at each token the likeliest first
    logprobs: "NDArray[np.float32]"  # log-probabilities of these tokens, in nats, float32

    @classmethod
    def read(cls, ids: Sequence[object], logprobs: Sequence[object], names: Sequence[str]) -> Self:
        """Read the two lists of a row.

        Args:
            ids: For each token a list of tokens.
            logprobs: For each token a list of numbers.
            names: The two columns.

        Raises:
            RowError: They do not fit each other, or are no log-probabilities of different tokens.
        """
        ids_of, logprobs_of = (_lists(x, n) for x, n in zip((ids, logprobs), names, strict=True))
        counts = np.array([len(one) for one in ids_of], dtype=np.int32)
        others = np.array([len(one) for one in logprobs_of], dtype=np.int32)
        if len(counts) != len(others):
            raise RowError(f"{names[0]!r} has {len(counts)} lists, {names[1]!r} {len(others)}")
        for at in np.flatnonzero((counts != others) | (counts == 0))[:1].tolist():
            raise RowError(
                f"{names[0]}[{at}] has {counts[at]} tokens, {names[1]}[{at}] {others[at]} numbers;"
                " each needs as many, and one or more"
            )
        flat_ids = _flat(ids_of, names[0], "iu", "tokens")
        flat_logprobs = _flat(logprobs_of, names[1], "iuf", "numbers").astype(np.float64)
        token = np.repeat(np.arange(len(counts)), counts)
        by_id = np.lexsort((flat_ids, token))
        is_twice = (np.diff(token[by_id]) == 0) & (np.diff(flat_ids[by_id]) == 0)
        for at in token[by_id][:-1][is_twice][:1].tolist():
            raise RowError(f"{names[0]}[{at}] has a token twice")
        for at in token[(flat_ids < 0) | (flat_ids >= 2**31)][:1].tolist():
            raise RowError(f"{names[0]}[{at}] has a number that is no token")
        for at in token[~np.isfinite(flat_logprobs)][:1].tolist():
            raise RowError(f"{names[1]}[{at}] has a number that is not finite")
        mass = np.bincount(token, np.exp(np.minimum(flat_logprobs, 1.0)), len(counts))
        for at in np.flatnonzero(mass > _MOST_MASS)[:1].tolist():
            raise RowError(
                f"{names[1]}[{at}] adds up to a probability of {mass[at]:.3g}: it needs natural"
                " logarithms of probabilities, at temperature 1"
            )
        order = np.lexsort((-flat_logprobs, token))
        return cls(
            counts=counts,
            ids=flat_ids[order].astype(np.int32),
            logprobs=flat_logprobs[order].astype(np.float32),
        )

    def at(self, places: "NDArray[np.int64]", num_tokens: int) -> "TopTokens":
        """Return the same at some of so many tokens, as many as there are places; others have none.

        Args:
            places: Indices of the first of the tokens.
            num_tokens: Tokens of the example.
        """
        counts = np.zeros(num_tokens, dtype=np.int32)
        counts[places] = self.counts[: len(places)]
        num = int(counts.sum())
        return TopTokens(counts=counts, ids=self.ids[:num], logprobs=self.logprobs[:num])

    def table(
        self, is_read: "NDArray[np.bool_]", width: int
    ) -> "tuple[NDArray[np.int64], NDArray[np.float32]]":
        """Return tokens and log-probabilities (N, width) of some tokens, the likeliest first.

        Where there are fewer, the rest is -1 and 0.

        Args:
            is_read: (T,): Whose.
            width: Most of each.
        """
        first = np.cumsum(self.counts) - self.counts
        rank = np.arange(len(self.ids)) - np.repeat(first, self.counts)
        row = np.repeat(np.cumsum(is_read) - 1, self.counts)
        is_taken = np.repeat(is_read, self.counts) & (rank < width)
        shape = int(np.count_nonzero(is_read)), width
        ids = np.full(shape, _NONE, dtype=np.int64)
        logprobs = np.zeros(shape, dtype=np.float32)
        ids[row[is_taken], rank[is_taken]] = self.ids[is_taken]
        logprobs[row[is_taken], rank[is_taken]] = self.logprobs[is_taken]
        return ids, logprobs


def _lists(values: Sequence[object], name: str) -> list[Sequence[object]]:
    for at, one in enumerate(values):
        if not isinstance(one, list):
            raise RowError(f"{name}[{at}] must be a list, this is {type(one).__name__}")
    return [one for one in values if isinstance(one, list)]


def _flat(lists: Sequence[Sequence[object]], name: str, kinds: str, what: str) -> "NDArray[Any]":
    try:
        found = np.array(list(chain.from_iterable(lists)))
    except (ValueError, OverflowError):
        found = np.empty(0, dtype=object)
    if found.dtype.kind not in kinds or found.ndim != 1:
        raise RowError(f"{name!r} must be lists of {what}")
    return found
