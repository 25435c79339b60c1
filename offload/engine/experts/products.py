"""Products of rows with their own expert's matrix: two implementations.

S rows, sorted by expert (`routing.py`) so that each expert's are one slice; E experts; K and N
features; T tokens.

- `Loop`: one product per expert, for a CPU. It needs the ends of the slices on the host; with a GPU
  the host would have to wait for them. Rows are gathered from their tokens, and added to them, one
  slice at a time: S rows at once would be new memory, whose page faults cost more than the copies.
- `Grouped`: `torch.nn.functional.grouped_mm`, which reads the ends on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from offload.engine.experts.routing import Routing


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taken:
    """Rows that are gathered from their tokens on demand, one expert at a time."""

    hidden_TK: torch.Tensor
    tokens: Sequence[torch.Tensor]

    def __getitem__(self, expert: int) -> torch.Tensor:
        """Return an expert's rows."""
        return self.hidden_TK.index_select(0, self.tokens[expert])


FEW_SIZES = 32  # rows: a slice is padded to a multiple of it, a smaller one to a power of two
Rows = torch.Tensor | Taken
Pair = tuple[Rows, torch.Tensor]
Slices = Sequence[torch.Tensor] | Taken


class Products(Protocol):
    """An implementation of products of rows that are sorted by expert.

    Attributes:
        num_tokens: Whose rows these are.
    """

    num_tokens: int

    def __init__(self, routing: Routing) -> None:
        """Keep the routing of the rows."""

    def rows(self, hidden_TK: torch.Tensor) -> Rows:
        """Return the rows of the tokens: each row is its token's features."""

    def sum(self, *pairs: Pair, to_tokens: bool = False) -> torch.Tensor:
        """Return the sum of rows (S, K) @ their expert's matrix of (E, K, N), for all pairs.

        The smaller pair should come first: the next is added to it, which rounds only once where a
        library can accumulate in place.

        Args:
            pairs: Rows and matrices.
            to_tokens: Whether to add up each token's rows: (T, N) rather than (S, N).
        """

    def outer(self, left: Rows, right: Rows) -> torch.Tensor:
        """Return left^T @ right over each expert's rows, (E, K, N); zero where it has none."""


class Loop:
    """One product per expert."""

    def __init__(self, routing: Routing) -> None:
        """Read how many rows each expert has."""
        self._sizes = self._read_sizes(routing)
        self._used = [i for i, size in enumerate(self._sizes) if size]
        self._tokens = routing.token_S.split(self._sizes)
        self._shape = routing.row_TC.shape
        self.num_tokens = len(routing.row_TC)

    @staticmethod
    def _read_sizes(routing: Routing) -> list[int]:
        end_E = routing.end_E
        sizes: list[int] = torch.diff(end_E, prepend=end_E.new_zeros(1)).tolist()
        return sizes

    def rows(self, hidden_TK: torch.Tensor) -> Rows:
        """Copy nothing; rows are gathered expert by expert."""
        return Taken(hidden_TK=hidden_TK, tokens=self._tokens)

    def sum(self, *pairs: Pair, to_tokens: bool = False) -> torch.Tensor:
        """Add in place; tokens at least in float32 because several experts add to one."""
        slices = [(self._split(rows), matrix_EKN.unbind()) for rows, matrix_EKN in pairs]
        like, num_features = pairs[0][1], pairs[0][1].shape[2]
        if to_tokens:
            dtype = torch.promote_types(like.dtype, torch.float32)
            out_TN = like.new_zeros((self._shape[0], num_features), dtype=dtype)
            for i in self._used:
                product = _sum_of(slices, i)[: self._sizes[i]]
                out_TN.index_add_(0, self._tokens[i], product.to(dtype))
            return out_TN.to(like.dtype)
        out_SN = like.new_empty((self._shape.numel(), num_features))
        outs = out_SN.split(self._sizes)
        for i in self._used:
            product = _sum_of(slices, i, out=outs[i])
            if product is not outs[i]:
                outs[i].copy_(product[: self._sizes[i]])
        return out_SN

    def outer(self, left: Rows, right: Rows) -> torch.Tensor:
        """Multiply both sides expert by expert."""
        shape = (len(self._sizes), _tensor(left).shape[1], _tensor(right).shape[1])
        out_EKN = _tensor(left).new_zeros(shape)
        lefts, rights, outs = self._split(left), self._split(right), out_EKN.unbind()
        for i in self._used:
            torch.mm(_filled(lefts[i]).t(), _filled(rights[i]), out=outs[i])
        return out_EKN

    def _split(self, rows: Rows) -> Slices:
        return rows if isinstance(rows, Taken) else rows.split(self._sizes)


class Grouped:
    """torch's grouped products."""

    def __init__(self, routing: Routing) -> None:
        """Keep where each expert's rows end, on the device."""
        self._routing = routing
        self.num_tokens = len(routing.row_TC)

    def rows(self, hidden_TK: torch.Tensor) -> Rows:
        """Copy each token's features to its rows."""
        return self._routing.spread(hidden_TK)

    def sum(self, *pairs: Pair, to_tokens: bool = False) -> torch.Tensor:
        """Add the results: grouped products cannot accumulate in place."""
        first, *others = (
            F.grouped_mm(_tensor(rows), matrix_EKN, offs=self._routing.end_E)
            for rows, matrix_EKN in pairs
        )
        for other in others:
            first += other
        return self._routing.gather(first) if to_tokens else first

    def outer(self, left: Rows, right: Rows) -> torch.Tensor:
        """Sum over the rows.

        On Blackwell the result of an expert without rows is not always zero, see
        https://github.com/pytorch/pytorch/issues/172439, so it is overwritten with zeros.
        """
        end_E = self._routing.end_E
        out_EKN = F.grouped_mm(_tensor(left).t(), _tensor(right), offs=end_E)
        has_rows_E = torch.diff(end_E, prepend=end_E.new_zeros(1)) > 0
        return out_EKN.masked_fill_(~has_rows_E[:, None, None], 0)


def _sum_of(
    slices: Sequence[tuple[Slices, Sequence[torch.Tensor]]],
    expert: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of an expert's products; written to `out` if no row was padded."""
    (first, first_EKN), *others = slices
    filled = _filled(first[expert])
    is_whole = out is not None and len(out) == len(filled)
    product = torch.mm(filled, first_EKN[expert], out=out if is_whole else None)
    for rows, matrix_EKN in others:
        product.addmm_(_filled(rows[expert]), matrix_EKN[expert])
    return product


def takes_few_sizes(tensor: torch.Tensor) -> bool:
    """Return whether each row count that a tensor is multiplied with compiles its own program."""
    return tensor.is_cpu and tensor.element_size() < torch.float32.itemsize


def _filled(rows_SK: torch.Tensor) -> torch.Tensor:
    """Return rows padded to one of few sizes, if `takes_few_sizes`."""
    num = len(rows_SK)
    missing = -num % min(FEW_SIZES, 1 << (num - 1).bit_length())
    if not missing or not takes_few_sizes(rows_SK):
        return rows_SK
    return F.pad(rows_SK, (0, 0, 0, missing))


def _tensor(rows: Rows) -> torch.Tensor:
    """Return the tensor of rows, or the one they are gathered from."""
    return rows.hidden_TK if isinstance(rows, Taken) else rows
