"""Several rows in one sequence, none of which sees another: their arguments and their attention.

Transformers looks attention up by the name in a config, at each call. While a layer computes packed
rows, the name is that of the function below. It cuts queries, keys and values at the rows' ends and
calls, for each row, what the name meant before, with the mask that the row would have alone. So a
fused kernel sees a causal row without a mask, a window or a sink is the model's own, and nothing of
T x T exists but a row's own mask, where its model makes one.

On CUDA one kernel computes all rows at once where it gives the same, as
`offload.engine.safety.packed_trial` says.
"""

import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from offload.engine.model.recorders import Call, Leaves
from offload.engine.visit_cache import patched
from offload.plan.facts.linears import can_join_rows

# ---------------------------------------------------------------------------------------------
# Attention of all packed rows in one call, by torch's operator for rows of any lengths.
#
# Problem. Row by row, attention of n rows is n calls of a kernel, each too small for a GPU, and a
# row longer than a sliding window brings a mask of its tokens squared, which rules flash attention
# out.
#
# Idea. `torch.nn.attention.varlen.varlen_attn` is passed the tokens of all rows end to end, where
# each row ends, and a window as a number. It is flash attention: it keeps its output and a
# log-sum-exp, has no mask, and takes keys and values of fewer heads as they are. Whether it
# computes the same is known before a call: in 16 bits on CUDA, with heads that flash attention
# supports, rows that are causal or see one window, and without dropout, biases, soft caps or sinks.
# All else is computed row by row, float32 too. Whether rows are causal is read off each row's own
# mask, once for each micro-batch: a mask is compared with that of a window, and no other is joined.
#
# The operator takes different keywords in different versions of torch, so its signature is asked.

_NEEDED = {"scale", "window_size"}
_UNSUPPORTED = ("dropout", "position_bias", "softcap", "s_aux", "cache", "output_attentions")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedRows:
    """Rows end to end, as the operator takes them."""

    ends: torch.Tensor  # where rows begin, and the end of the last one: int32, (rows + 1,)
    longest: int  # tokens of the longest row
    window: int | None  # tokens that a token sees, itself included; None for all before it

    @classmethod
    def of(cls, lens: Sequence[int], device: torch.device) -> "JoinedRows":
        """Return causal rows; copies where they end to the device."""
        starts = [sum(lens[:number]) for number in range(len(lens) + 1)]
        is_pinned = device.type == "cuda"  # the host need not wait for the copy
        ends = torch.tensor(starts, dtype=torch.int32, pin_memory=is_pinned)
        ends = ends.to(device, non_blocking=True)
        return cls(ends=ends, longest=max(lens), window=None)

    def seeing(self, lens: Sequence[int], masks: Sequence[Any]) -> "JoinedRows | None":
        """Return the rows as their masks let them see; None if the operator cannot.

        Waits for the device if a row has a mask.
        """
        both = zip(lens, masks, strict=True)
        pairs = [(length, _seen_tokens(mask, length)) for length, mask in both]
        windows = {seen for length, seen in pairs if seen is not None and seen < length}
        window = min(windows, default=self.longest)
        if any(seen is None or (seen != window and length > window) for length, seen in pairs):
            return None
        return replace(self, window=window) if windows else self


def _seen_tokens(mask: Any, length: int) -> int | None:
    """Return how many tokens each token of a row sees, itself included; None if not all the same.

    Args:
        mask: (1, 1, T, T), where True is seen; None where all tokens before one are.
        length: Tokens of the row.
    """
    if mask is None:
        return length
    if not (isinstance(mask, torch.Tensor) and mask.dtype == torch.bool):
        return None
    if mask.shape != (1, 1, length, length):
        return None
    num = int(mask[0, 0, -1].sum())
    causal = torch.ones_like(mask[0, 0]).tril()
    return num if torch.equal(mask[0, 0], causal.triu(1 - num)) else None


def joined_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    rows: JoinedRows,
    options: Mapping[str, Any],
) -> torch.Tensor | None:
    """Compute attention of all rows in one call; None if the operator does not compute it.

    Args:
        module: The attention, which calls `sdpa` if rows are not packed.
        query: (1, H, T, K), as are `key` and `value` with their heads.
        key: Of all tokens.
        value: Of all tokens.
        rows: Where rows end.
        options: What the model's attention is passed besides.

    Returns:
        Its output (1, T, H, K).
    """
    num_heads, num_kv_heads, features = query.shape[1], key.shape[1], query.shape[3]
    is_possible = (
        not any(isinstance(x, torch.Tensor) or x for x in map(options.get, _UNSUPPORTED))
        and options.get("is_causal") in (None, True)
        and getattr(module, "is_causal", True)
        and features == key.shape[3] == value.shape[3]
        and num_heads % num_kv_heads == 0
        and query.dtype == key.dtype == value.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
        and can_join_rows(features)
        and _has_kernel(query.device, query.dtype, num_heads, num_kv_heads, features)
    )
    if not is_possible:
        return None
    return call_operator(query, key, value, rows=rows, scale=options.get("scaling"))


def call_operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    rows: JoinedRows,
    scale: float | None,
) -> torch.Tensor:
    """Call torch's operator; for the arguments see `joined_attention`."""
    from torch.nn.attention.varlen import varlen_attn

    q_THK, k_THK, v_THK = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    left = -1 if rows.window is None else rows.window - 1
    more: dict[str, Any] = {}
    if "enable_gqa" in _keywords():  # other versions detect fewer key heads themselves
        more["enable_gqa"] = query.shape[1] != key.shape[1]
    output_THK = varlen_attn(
        q_THK,
        k_THK,
        v_THK,
        rows.ends,
        rows.ends,
        rows.longest,
        rows.longest,
        scale=scale,
        window_size=(left, 0),
        **more,
    )
    assert isinstance(output_THK, torch.Tensor)
    return output_THK.unsqueeze(0)


@cache
def _keywords() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


@cache
def _has_kernel(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, features: int
) -> bool:
    """Return whether flash attention computes such heads on a device, with gradients."""
    if not _keywords() >= _NEEDED:
        return False
    if device.type != "cuda":  # a kernel may have been registered for it
        return True
    q, k = (
        torch.empty(1, num, 8, features, device=device, dtype=dtype, requires_grad=True)
        for num in (num_heads, num_kv_heads)
    )
    is_causal, is_grouped = True, num_heads != num_kv_heads
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, is_causal, is_grouped)
    return torch.backends.cuda.can_use_flash_attention(params)


# ---------------------------------------------------------------------------------------------
# The arguments of layers for a sequence of several rows, from those of each row alone.
#
# Problem. Rows of a packed sequence must not see each other. A model's own code keeps them apart
# only in some architectures, and only by masks of T x T; others build masks without positions,
# count positions themselves, or carry a state from token to token.
#
# Idea. The part before the layers runs on each row alone, so positions, masks, windows and biases
# are the model's own. What a layer is passed for each token is joined: the dimension that counts
# tokens is the one in which rows of different length differ. Masks between pairs of tokens are not
# joined. They go to attention, which is computed row by row (`attention_by_rows`). The
# rest of a layer gets all tokens at once. A layer for which this is not right, as
# `offload.engine.safety.packed_trial` finds, is called once for each row: a row is then computed to
# the bit as it is alone.

MASK = "attention_mask"
_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, type(None))


class ApartError(Exception):
    """An argument of a layer cannot be joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCall:
    """One layer's arguments for packed rows."""

    lens: tuple[int, ...]  # tokens of each row
    rows: tuple[Call, ...]  # its arguments for each row alone
    # Its arguments for all tokens at once, without a mask; None if there are none.
    together: Call | None
    # Its rows for attention in one call; None if attention takes row after row.
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

    def cut(self, leaves: Leaves) -> "PackedCall":
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
    rows: Sequence[Sequence[Call]], lens: Sequence[int], joined: JoinedRows | None = None
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

    def packed(some: Sequence[Call]) -> PackedCall:
        together, own = joiner.call(some), some[: len(lens)]
        if together is not None:
            own = [joiner.without_copies(call) for call in own]
        call = PackedCall(lens=tuple(lens), rows=tuple(own), together=together)
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
        self._parts: dict[int, torch.Tensor] = {}  # of what was joined, by what they were before

    def without_copies(self, call: Call) -> Call:
        """Return a row's call whose tensors are parts of the joined ones, so that each is once."""
        own = {name: self._parts.get(id(value), value) for name, value in call.kwargs.items()}
        return replace(call, kwargs=own)

    def call(self, calls: Sequence[Call]) -> Call | None:
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
        whole = torch.cat(list(joined), dim=dims[0])
        if not whole.requires_grad:
            parts = whole.split([x.shape[dims[0]] for x in joined], dim=dims[0])
            self._parts.update(zip(map(id, joined), parts, strict=True))
        return whole


# ---------------------------------------------------------------------------------------------
# Attention row by row, or in one call, while a layer computes packed rows.

NAME = "sluice_packed_rows"
JOINING = "sdpa"  # whose mask and scale are all that it reads
_FIELD = "_attn_implementation_internal"  # the public property sets sub-configs too


@dataclass(kw_only=True, slots=True)
class _Rows:
    """The rows of the layer that is being computed, and how attention took them."""

    lens: tuple[int, ...]  # tokens of each row
    masks: tuple[Any, ...]  # each row's mask as it is alone; None for none
    joined: JoinedRows | None  # the rows for one call; None to take them one by one
    names: dict[int, str | None]  # what a config called the layer's attention
    # Whether all calls so far took them at once; None before the first.
    has_joined: bool | None = None


class _Current(threading.local):
    rows: _Rows | None = None


_current = _Current()


@contextmanager
def rows_apart(layer: nn.Module, call: PackedCall, *, joins: bool) -> Iterator[_Rows]:
    """Let a layer's attention keep rows apart meanwhile; yields how it did.

    Args:
        layer: The layer.
        call: Its rows.
        joins: Whether one call may compute all rows, where it can.
    """
    _register()
    parts = (getattr(module, "config", None) for module in layer.modules())
    configs = {id(config): config for config in parts if hasattr(config, _FIELD)}
    names = {key: getattr(config, _FIELD) for key, config in configs.items()}
    joined = call.joined if joins else None
    rows = _Rows(lens=call.lens, masks=call.masks, joined=joined, names=names)
    named = [(vars(config), {_FIELD: NAME}) for config in configs.values()]
    with patched((vars(_current), {"rows": rows}), *named):
        yield rows


def attention_by_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of packed rows; an attention function of transformers.

    Args:
        module: The attention.
        query: (1, H, T, K), as are `key` and `value` with their heads and features.
        key: Of all tokens.
        value: Of all tokens.
        attention_mask: Left aside: each row has its own.
        options: What the model's attention is passed besides.

    Returns:
        Its output (1, T, H, K), and no weights.
    """
    del attention_mask
    rows = _current.rows
    assert rows is not None, "only `rows_apart` names this function"
    name = rows.names[id(module.config)]
    if name == JOINING and rows.joined is not None:
        output = joined_attention(module, query, key, value, rows=rows.joined, options=options)
        if output is not None:
            rows.has_joined = rows.has_joined is not False
            return output, None
    rows.has_joined = False
    own = _own(module, name)
    parts = zip(*(x.split(rows.lens, dim=2) for x in (query, key, value)), rows.masks, strict=True)
    outputs = [own(module, q, k, v, mask, **options)[0] for q, k, v, mask in parts]
    return torch.cat(outputs, dim=1), None


def _own(module: nn.Module, name: str | None) -> Callable[..., Sequence[torch.Tensor]]:
    """Return the function that a module calls if rows are not packed."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    code = sys.modules[type(module).__module__]
    eager: Any = getattr(code, "eager_attention_forward", None)
    own: Any = ALL_ATTENTION_FUNCTIONS.get_interface(name or "eager", eager)
    if own is None:
        raise NotImplementedError(f"{type(module).__name__} has no attention function to call")
    return own  # type: ignore[no-any-return]


def _register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attention_by_rows)
