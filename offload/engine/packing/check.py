"""Finds the layers that may compute packed rows together, before the first packed step.

A layer may if, on a few rows,

1. its output is what it gives for each row alone, but for rounding;
2. a row that is NaN leaves all others finite, whichever row it is: NaN propagates along every path,
   however small the number that it is multiplied by;
3. other tokens in all other rows change a row by no more than rounding.

A rounding of 16 bits hides much, so one layer of each kind is tried in float32 as well, by the
model's own code, with its weights widened for the time. Where float32 is a little beyond the limit,
as it is for some layers on some processors only, float64 says whether that is rounding.

What it does with many tokens is tried with many: as many as a micro-batch has, in rows whose ends
no block of tokens is aligned to. There, NaN in some of the rows must leave the others as they are
alone, for enough subsets of rows that each pair is apart in one. Half of a row's tokens must be
near: in 16 bits a router that is undecided sends a few to other experts.

Any other layer is called once for each row, where each of these holds by construction.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from warnings import warn

import torch
from torch import nn

from offload.engine.closeness import is_near, rounding_of
from offload.engine.trials import TrialSize, subsets_apart
from offload.plan.facts.linears import can_join_rows

if TYPE_CHECKING:
    from offload.engine.model.layers import Front, LayeredModel
    from offload.engine.model.recorders import Call, Leaves


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
    """Rows end to end, as the operator takes them.

    Attributes:
        ends: Where rows begin, and the end of the last one: int32, (rows + 1,).
        longest: Tokens of the longest row.
        window: Tokens that a token sees, itself included; None for all before it.
    """

    ends: torch.Tensor
    longest: int
    window: int | None

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
        not any(_is_set(options.get(name)) for name in _UNSUPPORTED)
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


def _is_set(option: object) -> bool:
    return isinstance(option, torch.Tensor) or bool(option)


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
# joined. They go to attention, which is computed row by row (`offload.engine.packing.attention`).
# The rest of a layer gets all tokens at once. A layer for which this is not right, as `check`
# finds, is called once for each row: a row is then computed to the bit as it is alone.

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


LENS = (5, 3, 7, 2)  # tokens of the rows that are tried
ROUNDINGS, ROUNDINGS_FP32 = 1, 8  # of a norm; 8 of float32 are 1e-6
JOINED_ROUNDINGS = 2  # another kernel may compute each row alone
DOUBTFUL_FP32 = 64  # beyond 8 and within these, float64 decides
LONG_ROUNDINGS = 4  # of 16 bits, where many tokens are tried; 64 of float32
FLOAT32_BYTES, EXPERTS = 4, "_experts_implementation_internal"
_ERRORS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError)


class PackedTrial:
    """A few packed rows on their way through the layers of a model."""

    def __init__(self, model: "LayeredModel", input_ids_BT: torch.Tensor) -> None:
        """Run the part before the layers.

        Args:
            model: The model.
            input_ids_BT: Tokens to take some of.
        """
        front = _packed_front(model, input_ids_BT, LENS)
        self._model, self._calls = model, front.packed
        self._hidden_BTD = front.hidden_BTD.detach()
        self._kinds: dict[object, bool] = {}

    def visit(self, layer: int) -> bool:
        """Try a layer, whose weights are in place; return whether it may compute rows together.

        Where attention in one call is not the same, it is tried row by row.
        """
        model, call = self._model, self._calls[layer]
        hidden_BTD = self._hidden_BTD
        with _without_dropout(model.layers[layer]):
            self._hidden_BTD = model.rows_alone(layer, hidden_BTD, call)
            model.unjoined.discard(layer)
            is_exact_for = partial(_is_exact, model, layer, hidden_BTD, call)
            is_exact = call.joined is not None and is_exact_for(roundings=JOINED_ROUNDINGS)
            if not (is_exact and layer in model.joined):
                model.unjoined.add(layer)
                is_exact = is_exact_for(roundings=ROUNDINGS)
            is_joined = layer in model.joined
            is_exact = is_exact and self._is_exact_in_float32(layer, hidden_BTD)
            (model.joined.add if is_exact and is_joined else model.joined.discard)(layer)
            return is_exact

    def _is_exact_in_float32(self, layer: int, hidden_BTD: torch.Tensor) -> bool:
        """Try the first layer of each kind in float32; return what came of its kind."""
        model, call = self._model, self._calls[layer]
        module = model.layers[layer]
        kind = repr(module), tuple((x.shape, x.dtype) for x in module.state_dict().values())
        if hidden_BTD.dtype.itemsize >= FLOAT32_BYTES:
            return True
        if kind not in self._kinds:
            try:
                with _widened(model, layer, call, torch.float32) as wide_call:
                    self._kinds[kind] = _is_exact_wide(model, layer, hidden_BTD.float(), wide_call)
            except _ERRORS as error:  # torch's lack of memory is one
                self._kinds[kind] = True
                warn(
                    f"packed rows of layer {layer} were tried in {hidden_BTD.dtype} alone, as they"
                    f" cannot be in float32: {str(error).partition(chr(10))[0]}",
                    stacklevel=2,
                )
        return self._kinds[kind]


class LongTrial:
    """As many packed tokens as a micro-batch has, on their way through the layers of a model."""

    def __init__(self, model: "LayeredModel", input_ids_BT: torch.Tensor, size: TrialSize) -> None:
        """Run the part before the layers.

        Args:
            model: The model.
            input_ids_BT: Tokens to take some of.
            size: How many tokens, and of the longest row.
        """
        front = _packed_front(model, input_ids_BT, size.row_lens)
        self._model, self._calls = model, front.packed
        self._hidden_BTD = front.hidden_BTD.detach()

    def visit(self, layer: int) -> bool:
        """Try a layer, whose weights are in place; return whether it may compute rows together."""
        model, call, hidden_BTD = self._model, self._calls[layer], self._hidden_BTD
        with _without_dropout(model.layers[layer]):
            self._hidden_BTD = model.rows_alone(layer, hidden_BTD, call)
            if layer not in model.together:
                return False
            try:
                return self._is_apart(layer, hidden_BTD, self._hidden_BTD)
            except torch.OutOfMemoryError:
                raise
            except _ERRORS:
                return False

    def _is_apart(self, layer: int, hidden_BTD: torch.Tensor, alone_BTD: torch.Tensor) -> bool:
        call = self._calls[layer]
        if call.together is None:
            return False
        rows = call.split(alone_BTD)
        nobody = torch.zeros(1, len(rows), dtype=torch.bool)
        for is_poisoned in torch.cat([nobody, subsets_apart(len(rows))]).tolist():
            given = [
                torch.full_like(row, torch.nan) if is_nan else row
                for row, is_nan in zip(call.split(hidden_BTD), is_poisoned, strict=True)
            ]
            found_BTD = self._model.rows_together(layer, torch.cat(given, dim=1), call)
            both = zip(rows, call.split(found_BTD), is_poisoned, strict=True)
            if not all(is_nan or _is_mostly_near(*pair) for *pair, is_nan in both):
                return False
        return True


def _packed_front(
    model: "LayeredModel", input_ids_BT: torch.Tensor, lens: Sequence[int]
) -> "Front":
    """Run the part before the layers on packed rows of some tokens, over and over if few."""
    ids_N = input_ids_BT.flatten()
    some_N = ids_N[torch.arange(sum(lens), device=ids_N.device) % ids_N.numel()]
    return model.front({"input_ids": some_N.unsqueeze(0), "row_lens": torch.tensor(lens)})


def _is_exact(
    model: "LayeredModel",
    layer: int,
    hidden_BTD: torch.Tensor,
    call: PackedCall,
    *,
    roundings: int,
) -> bool:
    """Return whether rows may be computed together; not if the layer cannot take several."""
    try:
        if hidden_BTD.dtype.itemsize >= FLOAT32_BYTES:
            return _is_exact_wide(model, layer, hidden_BTD, call)
        return is_exact_together(model, layer, hidden_BTD, call, roundings=roundings)
    except torch.OutOfMemoryError:
        raise
    except _ERRORS:
        return False


def _is_exact_wide(
    model: "LayeredModel", layer: int, hidden_BTD: torch.Tensor, call: PackedCall
) -> bool:
    """Return whether rows may be computed together, by float32, and by float64 where in doubt."""
    if is_exact_together(model, layer, hidden_BTD, call, roundings=ROUNDINGS_FP32):
        return True
    if not is_exact_together(model, layer, hidden_BTD, call, roundings=DOUBTFUL_FP32):
        return False
    try:
        with _widened(model, layer, call, torch.float64) as wide_call:
            return is_exact_together(
                model, layer, hidden_BTD.double(), wide_call, roundings=ROUNDINGS_FP32
            )
    except _ERRORS:  # no memory for it, or no kernel
        return False


@contextmanager
def _widened(
    model: "LayeredModel", layer: int, call: PackedCall, dtype: torch.dtype
) -> Iterator[PackedCall]:
    """Widen what a layer holds, and compute it by the model's own code meanwhile.

    Yields:
        Its call, whose tensors are widened too.
    """
    from offload.engine.experts.lora import SUFFIX  # imports transformers

    def widen(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype.itemsize < dtype.itemsize else x

    module, fused = model.layers[layer], model.fused
    held = [*module.parameters(), *module.buffers()]
    before = [x.data for x in held]
    configs = {id(c): c for c in (getattr(m, "config", None) for m in module.modules()) if c}
    experts = [(c, getattr(c, EXPERTS)) for c in configs.values() if hasattr(c, EXPERTS)]
    model.fused = None
    try:
        for config, own in experts:
            setattr(config, EXPERTS, "eager" + SUFFIX * str(own).endswith(SUFFIX))
        for x in held:
            x.data = widen(x.data)
        yield call.changed(widen)
    finally:
        for x, data in zip(held, before, strict=True):
            x.data = data
        for config, implementation in experts:
            setattr(config, EXPERTS, implementation)
        model.fused = fused


@contextmanager
def _without_dropout(layer: nn.Module) -> Iterator[None]:
    kinds = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)
    dropouts = [m for m in layer.modules() if m.training and isinstance(m, kinds)]
    try:
        for module in dropouts:
            module.training = False
        yield
    finally:
        for module in dropouts:
            module.training = True


def is_exact_together(
    model: "LayeredModel",
    layer: int,
    hidden_BTD: torch.Tensor,
    call: PackedCall,
    *,
    roundings: int,
) -> bool:
    """Return whether a layer computes packed rows together as it does each alone.

    Args:
        model: The model.
        layer: The layer, whose weights are in place.
        hidden_BTD: The layer's input, of all rows.
        call: Its other arguments.
        roundings: How many of them results may be apart, of a norm.
    """
    if call.together is None:
        return False
    alone, together = (partial(f, layer) for f in (model.rows_alone, model.rows_together))
    expected_BTD = alone(hidden_BTD, call)
    rows = zip(call.split(expected_BTD), call.split(together(hidden_BTD, call)), strict=True)
    if not all(_is_near(*row, roundings=roundings) for row in rows):
        return False
    for index, own_BTD in enumerate(call.split(expected_BTD)):
        others = [row.flip(-1) * 0.5 for row in call.split(hidden_BTD)]
        others[index] = call.split(hidden_BTD)[index]
        moved_BTD = call.split(together(torch.cat(others, dim=1), call))[index]
        if not _is_near(own_BTD, moved_BTD, roundings=roundings):
            return False
        poisoned = list(call.split(hidden_BTD))
        poisoned[index] = torch.full_like(poisoned[index], torch.nan)
        outputs = list(call.split(together(torch.cat(poisoned, dim=1), call)))
        del outputs[index]
        if not all(bool(row.isfinite().all()) for row in outputs):
            return False
    return True


def _is_near(one: torch.Tensor, other: torch.Tensor, *, roundings: int) -> bool:
    """Return whether two results of a row differ by rounding."""
    return is_near(other.float(), one.float(), roundings * rounding_of(one.dtype))


def _is_mostly_near(one_1TD: torch.Tensor, other_1TD: torch.Tensor) -> bool:
    """Return whether a row is finite, and half of its tokens differ by rounding."""
    is_wide = one_1TD.dtype.itemsize >= FLOAT32_BYTES
    roundings = DOUBTFUL_FP32 if is_wide else LONG_ROUNDINGS
    one_TK, other_TK = (x[0].flatten(1).float() for x in (one_1TD, other_1TD))
    apart_T, norm_T = (other_TK - one_TK).norm(dim=1), one_TK.norm(dim=1)
    is_near = bool(apart_T.median() <= roundings * rounding_of(one_1TD.dtype) * norm_T.median())
    return is_near and bool(other_TK.isfinite().all())
