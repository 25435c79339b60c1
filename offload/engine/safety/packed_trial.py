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

from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from warnings import warn

import torch
from torch import nn

from offload.engine.closeness import is_near, rounding_of
from offload.engine.internals import bare, refer
from offload.engine.model.layers import LayeredModel
from offload.engine.model.packed_rows import PackedCall
from offload.engine.safety.tail_trial import subsets_apart
from offload.engine.visit_cache import patched

LENS = (5, 3, 7, 2)  # tokens of the rows that are tried
ROUNDINGS, ROUNDINGS_FP32 = 1, 8  # of a norm; 8 of float32 are 1e-6
JOINED_ROUNDINGS = 2  # another kernel may compute each row alone
DOUBTFUL_FP32 = 64  # beyond 8 and within these, float64 decides
LONG_ROUNDINGS = 4  # of 16 bits, where many tokens are tried; 64 of float32
FLOAT32_BYTES, EXPERTS = 4, "_experts_implementation_internal"
_ERRORS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError)


class _Rows:
    """Some packed rows on their way through the layers of a model."""

    def __init__(
        self,
        model: LayeredModel,
        input_ids_BT: torch.Tensor,
        lens: Sequence[int],
        together: Set[int],
        unjoined: set[int],
    ) -> None:
        """Run the part before the layers.

        Args:
            model: The model.
            input_ids_BT: Tokens to take some of, over and over if they are few.
            lens: Tokens of each row.
            together: Layers that may compute rows together, as far as is known at their visit.
            unjoined: Layers in which the attention of all rows may not be one call, as known then.
        """
        ids_N = input_ids_BT.flatten()
        some_N = ids_N[torch.arange(sum(lens), device=ids_N.device) % ids_N.numel()]
        front = model.front({"input_ids": some_N.unsqueeze(0), "row_lens": torch.tensor(lens)})
        self._model, self._calls = model, front.packed
        self._hidden_BTD = front.hidden_BTD.detach()
        self._together, self._unjoined = together, unjoined
        self._kinds: dict[object, bool] = {}


class PackedTrial(_Rows):
    """A few rows, which find out whether a layer may compute them together, and in one call."""

    def visit(self, layer: int) -> bool:
        """Try a layer, whose weights are in place; return whether it may compute rows together.

        Where attention in one call is not the same, it is tried row by row.
        """
        model, call = self._model, self._calls[layer]
        hidden_BTD = self._hidden_BTD
        with _without_dropout(model.layers[layer]):
            self._hidden_BTD = model.rows_alone(layer, hidden_BTD, call)
            self._unjoined.discard(layer)
            is_exact_for = partial(_is_exact, model, layer, hidden_BTD, call)
            is_exact = call.joined is not None and is_exact_for(
                roundings=JOINED_ROUNDINGS, joins=True
            )
            if not (is_exact and layer in model.joined):
                self._unjoined.add(layer)
                is_exact = is_exact_for(roundings=ROUNDINGS, joins=False)
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
                    self._kinds[kind] = _is_exact_wide(
                        model,
                        layer,
                        hidden_BTD.float(),
                        wide_call,
                        joins=layer not in self._unjoined,
                    )
            except _ERRORS as error:  # torch's lack of memory is one
                self._kinds[kind] = True
                warn(
                    f"packed rows of layer {layer} were tried in {hidden_BTD.dtype} alone, as they"
                    f" cannot be in float32: {str(error).partition(chr(10))[0]}",
                    stacklevel=2,
                )
        return self._kinds[kind]


class LongTrial(_Rows):
    """As many tokens as a micro-batch has."""

    def visit(self, layer: int) -> bool:
        """Try a layer, whose weights are in place; return whether it may compute rows together."""
        model, call, hidden_BTD = self._model, self._calls[layer], self._hidden_BTD
        with _without_dropout(model.layers[layer]):
            self._hidden_BTD = model.rows_alone(layer, hidden_BTD, call)
            if layer not in self._together:
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
            found_BTD = self._model.rows_together(
                layer, torch.cat(given, dim=1), call, joins=layer not in self._unjoined
            )
            both = zip(rows, call.split(found_BTD), is_poisoned, strict=True)
            if not all(is_nan or _is_mostly_near(*pair) for *pair, is_nan in both):
                return False
        return True


def _is_exact(
    model: LayeredModel,
    layer: int,
    hidden_BTD: torch.Tensor,
    call: PackedCall,
    *,
    roundings: int,
    joins: bool,
) -> bool:
    """Return whether rows may be computed together; not if the layer cannot take several."""
    try:
        if hidden_BTD.dtype.itemsize >= FLOAT32_BYTES:
            return _is_exact_wide(model, layer, hidden_BTD, call, joins=joins)
        return is_exact_together(model, layer, hidden_BTD, call, roundings=roundings, joins=joins)
    except torch.OutOfMemoryError:
        raise
    except _ERRORS:
        return False


def _is_exact_wide(
    model: LayeredModel, layer: int, hidden_BTD: torch.Tensor, call: PackedCall, *, joins: bool
) -> bool:
    """Return whether rows may be computed together, by float32, and by float64 where in doubt."""
    is_exact = partial(is_exact_together, model, layer, joins=joins)
    if is_exact(hidden_BTD, call, roundings=ROUNDINGS_FP32):
        return True
    if not is_exact(hidden_BTD, call, roundings=DOUBTFUL_FP32):
        return False
    try:
        with _widened(model, layer, call, torch.float64) as wide_call:
            return is_exact(hidden_BTD.double(), wide_call, roundings=ROUNDINGS_FP32)
    except _ERRORS:  # no memory for it, or no kernel
        return False


@contextmanager
def _widened(
    model: LayeredModel, layer: int, call: PackedCall, dtype: torch.dtype
) -> Iterator[PackedCall]:
    """Widen what a layer holds, and compute it by the model's own code meanwhile.

    Yields:
        Its call, whose tensors are widened too.
    """
    from offload.engine.experts.lora import SUFFIX  # imports transformers

    def widen(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype.itemsize < dtype.itemsize else x

    module = model.layers[layer]
    held = [*module.parameters(), *module.buffers()]
    before = list(map(bare, held))
    configs = {id(c): c for c in (getattr(m, "config", None) for m in module.modules()) if c}
    experts = [(c, str(getattr(c, EXPERTS))) for c in configs.values() if hasattr(c, EXPERTS)]
    own_code = [
        (vars(config), {EXPERTS: "eager" + SUFFIX * name.endswith(SUFFIX)})
        for config, name in experts
    ]
    try:
        with patched((vars(model), {"fused": None}), *own_code):
            for x in held:
                refer(x, widen(bare(x)))
            yield call.changed(widen)
    finally:
        for x, data in zip(held, before, strict=True):
            refer(x, data)


def _without_dropout(layer: nn.Module) -> AbstractContextManager[None]:
    kinds = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)
    dropouts = [module for module in layer.modules() if isinstance(module, kinds)]
    return patched(*((vars(module), {"training": False}) for module in dropouts))


def is_exact_together(
    model: LayeredModel,
    layer: int,
    hidden_BTD: torch.Tensor,
    call: PackedCall,
    *,
    roundings: int,
    joins: bool,
) -> bool:
    """Return whether a layer computes packed rows together as it does each alone.

    Args:
        model: The model.
        layer: The layer, whose weights are in place.
        hidden_BTD: The layer's input, of all rows.
        call: Its other arguments.
        roundings: How many of them results may be apart, of a norm.
        joins: Whether attention of all rows may be one call.
    """
    if call.together is None:
        return False
    alone = partial(model.rows_alone, layer)
    together = partial(model.rows_together, layer, joins=joins)
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
