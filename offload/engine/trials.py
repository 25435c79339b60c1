"""The sizes at which a model's code is tried, and which tokens are made NaN.

A trial of few tokens does not show what code does with many: a layer may read a token far back, or
work in blocks that few tokens do not fill. So trials have the sizes of the steps. Sizes are rounded
up, so that micro-batches of ever new sizes cost few trials.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, count, islice

import torch

from offload.engine.batch import ROW_LENS, Batch

_CLASSES = 4  # sizes between two powers of two


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSize:
    """The tokens of a trial."""

    num_tokens: int  # tokens of a micro-batch
    row_tokens: int  # tokens of its longest row

    @classmethod
    def of(cls, batches: Sequence[Batch], *, max_row_tokens: int) -> "TrialSize":
        """Return a size that no micro-batch exceeds.

        Args:
            batches: Micro-batches.
            max_row_tokens: Tokens of a row that the model knows positions for.
        """
        ids = [batch["input_ids"] for batch in batches]
        rows = [
            int(batch[ROW_LENS].max()) if ROW_LENS in batch else batch["input_ids"].shape[1]
            for batch in batches
        ]
        longest = max(rows)
        return cls(
            num_tokens=_rounded_up(max(x.numel() for x in ids)),
            row_tokens=max(longest, min(_rounded_up(longest), max_row_tokens)),
        )

    def covers(self, other: "TrialSize") -> bool:
        """Return whether a trial of this size also shows what one of another size would."""
        return self.num_tokens >= other.num_tokens and self.row_tokens >= other.row_tokens

    def join(self, other: "TrialSize") -> "TrialSize":
        """Return the smallest size that covers both."""
        return TrialSize(
            num_tokens=max(self.num_tokens, other.num_tokens),
            row_tokens=max(self.row_tokens, other.row_tokens),
        )

    @property
    def num_rows(self) -> int:
        """Rows of equal length that have as many tokens."""
        return -(-self.num_tokens // self.row_tokens)

    @property
    def row_lens(self) -> tuple[int, ...]:
        """Packed rows of as many tokens, whose ends no block of tokens is aligned to.

        The first row has one token, so each block of more tokens crosses the end of a row.
        """
        others = max(1, self.num_tokens - 1)
        longest = min(self.row_tokens, others)
        num_full, rest = divmod(others, longest)
        return (1, *[longest] * num_full, *([rest] if rest else []))


def subsets_apart(num: int) -> torch.Tensor:
    """Return subsets of some things: of any two, one subset has the first and not the second.

    So if code is run once for each subset, with its members made NaN, and no other becomes NaN,
    then none depends on any other. Each thing is in half of the subsets, and no two are in the same
    ones: n subsets are enough for n choose n/2 things, so 15 for 4,096.

    Returns:
        A row for each subset, True for its members: (subsets, num).
    """
    size = next(n for n in count(2) if math.comb(n, n // 2) >= num)
    members = torch.tensor(list(islice(combinations(range(size), size // 2), num)))
    return torch.zeros(size, num, dtype=torch.bool).scatter_(0, members.T, value=True)


def _rounded_up(num: int) -> int:
    step = max(1, (1 << (num - 1).bit_length()) // (2 * _CLASSES))
    return -(-num // step) * step
