"""The arguments of layers for a sequence of several rows, from those of each row alone.

Problem. Rows of a packed sequence must not see each other. A model's own code keeps them apart only
in some architectures, and only by masks of T x T; others build masks without positions, count
positions themselves, or carry a state from token to token.

Idea. The part before the layers runs on each row alone, so positions, masks, windows and biases are
the model's own. What a layer is passed for each token is joined: the dimension that counts tokens
is the one in which rows of different length differ. Masks between pairs of tokens are not joined.
They go to attention, which is computed row by row (`offload.engine.packing.attention`). The rest of
a layer gets all tokens at once. A layer for which this is not right, as `check` finds, is called
once for each row: a row is then computed to the bit as it is alone.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from offload.engine.packing.joined import JoinedRows

if TYPE_CHECKING:
    from offload.engine.model.recorded_args import Call, Leaves

MASK = "attention_mask"
_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, type(None))


class ApartError(Exception):
    """An argument of a layer cannot be joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCall:
    """One layer's arguments for packed rows.

    Attributes:
        lens: Tokens of each row.
        rows: Its arguments for each row alone.
        together: Its arguments for all tokens at once, without a mask; None if there are none.
        joined: Its rows for attention in one call; None if attention takes row after row.
    """

    lens: tuple[int, ...]
    rows: "tuple[Call, ...]"
    together: "Call | None"
    joined: JoinedRows | None = None

    @property
    def masks(self) -> tuple[Any, ...]:
        """Each row's own mask."""
        return tuple(row.kwargs.get(MASK) for row in self.rows)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of all arguments."""
        for one in (*self.rows, *([self.together] if self.together else [])):
            yield from one.tensors()
        if self.joined is not None:
            yield self.joined.ends

    def cut(self, leaves: "Leaves") -> "PackedCall":
        """Return the call with leaves in place of tensors that require grad."""
        return replace(
            self,
            rows=tuple(map(leaves.cut, self.rows)),
            together=self.together and leaves.cut(self.together),
        )

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PackedCall":
        """Return the call with other tensors."""
        return replace(
            self,
            rows=tuple(row.changed(change) for row in self.rows),
            together=self.together and self.together.changed(change),
        )

    def split(self, hidden_BTD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tokens of each row."""
        return torch.split(hidden_BTD, list(self.lens), dim=1)


def packed_calls(
    rows: "Sequence[Sequence[Call]]", lens: Sequence[int], joined: JoinedRows | None = None
) -> tuple[PackedCall, ...]:
    """Return each layer's call for packed rows; layers in a row that are passed the same share one.

    Args:
        rows: Of each row, the calls of all layers. Not all may have the same number of tokens; a
            row after those of `lens` only shows which dimensions count tokens.
        lens: Tokens of each row that is joined.
        joined: The rows for attention in one call, if it may be that.
    """
    joiner = _Joiner(lens=[*lens, *(None for _ in rows[len(lens) :])])
    seen: dict[tuple[int, ...], JoinedRows | None] = {}  # layers share masks

    def joined_of(call: PackedCall) -> JoinedRows | None:
        key = tuple(map(id, call.masks))
        if joined is not None and key not in seen:
            seen[key] = joined.seeing(lens, call.masks)
        return seen.get(key)

    def packed(some: "Sequence[Call]") -> PackedCall:
        call = PackedCall(
            lens=tuple(lens), rows=tuple(some[: len(lens)]), together=joiner.call(some)
        )
        return replace(call, joined=joined_of(call))

    by_layer = list(zip(*rows, strict=True))
    calls = [packed(by_layer[0])]
    for before, some in pairwise(by_layer):  # most layers are passed what the one before was
        calls.append(calls[-1] if all(map(operator.is_, before, some)) else packed(some))
    return tuple(calls)


class _Joiner:
    """Joins arguments; what several layers are passed is joined once."""

    def __init__(self, *, lens: Sequence[int | None]) -> None:
        self._lens = lens
        self._num = sum(length is not None for length in lens)
        self._joined: dict[tuple[int, ...], torch.Tensor] = {}

    def call(self, calls: "Sequence[Call]") -> "Call | None":
        """Return one call for the tokens of all; None if an argument cannot be joined."""
        first = calls[0]
        if any(one.kwargs.keys() != first.kwargs.keys() for one in calls):
            return None
        try:
            kwargs = {
                name: self._mask(values) if name == MASK else self._value(values)
                for name in first.kwargs
                for values in [[one.kwargs[name] for one in calls]]
            }
            args = self._value([one.args for one in calls])
        except ApartError:
            return None
        return replace(first, args=args, kwargs=kwargs)

    def _mask(self, values: Sequence[Any]) -> Any:
        is_between_pairs = [
            value is None or (isinstance(value, torch.Tensor) and value.ndim >= 4)
            for value in values
        ]
        return None if all(is_between_pairs) else self._value(values)

    def _value(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise ApartError
        if isinstance(first, torch.Tensor):
            key = tuple(map(id, values))
            if key not in self._joined:
                self._joined[key] = self._tensor(values)
            return self._joined[key]
        if isinstance(first, Mapping):
            if any(value.keys() != first.keys() for value in values):
                raise ApartError
            return {key: self._value([value[key] for value in values]) for key in first}
        if isinstance(first, tuple | list):
            if any(len(value) != len(first) for value in values):
                raise ApartError
            return type(first)(self._value(parts) for parts in zip(*values, strict=True))
        if not isinstance(first, _CONSTANTS) or any(value != first for value in values):
            raise ApartError
        return first

    def _tensor(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        first, joined = tensors[0], tensors[: self._num]
        if any(x.ndim != first.ndim or x.dtype != first.dtype for x in tensors):
            raise ApartError
        dims = [d for d in range(first.ndim) if len({x.shape[d] for x in tensors}) > 1]
        if not dims:
            if not all(torch.equal(x, first) for x in joined):
                raise ApartError
            return first
        if len(dims) > 1 or any(
            x.shape[dims[0]] != length for x, length in zip(joined, self._lens, strict=False)
        ):
            raise ApartError
        return torch.cat(list(joined), dim=dims[0])
