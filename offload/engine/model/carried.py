"""Values that one layer computes and later layers read, from visit to visit.

Problem. Some layers do not compute all that they need. Most layers of Gemma 4 E2B and E4B read the
keys and values of the last layer of their type that has its own. In GLM-5 a layer reads which
tokens one below has chosen to attend to. A router of ZAYA adds the state of the router below to its
own. Visited alone, a reader would find nothing, and the gradient by what it read would end there.

Idea. Each micro-batch has its values by name, made in the forward visit of their producer and kept
until its backward visit: they are leaves, so that the visits of their readers read the same bits
however often, and add to their `.grad`. The producer's backward visit then starts from the
gradients of its output and of the values. Readers are visited from the highest layer down, so the
gradients are added up in autograd's own order, to the bit. What is recomputed is used for its graph
alone, and the values of the forward visit stay. Integers have no gradient, and are kept all the
same: in a recompute a tie may be broken otherwise.

A model passes values in one of two ways. It passes one mapping to all layers: then a layer is
passed one of its own, with what the layers below it wrote, and what it writes is collected. Or a
layer returns a value after the hidden state, which the model passes to the next: then a stand-in
returns a `FromBelow`, which can be passed on alone, and a layer that reads nothing is passed a
tensor that cannot be read. Either way a layer sees in each visit what it saw in the first.

Packed rows have values of their own. Keys and values are passed end to end to a layer that computes
all rows at once, and are cut where it writes them. In the trial of that (`offload.engine.safety`) a
token whose hidden state is NaN has such values too, so no other row may read them. Layers that
return values take one row after the other: an indexer compares all tokens that it is given.

Gemma 3n has several hidden states of a token, (S, B, T, D), which are (B, T, S, D) here. Where it
trains it clamps a weight of each layer in place. Of a frozen weight within the bounds that changes
nothing, and any other is refused: plain training would change it for good.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import torch
from torch import nn

from offload.engine.host.layer_table import layer_table
from offload.engine.internals import FakeTensor
from offload.engine.model.packed_rows import PackedCall
from offload.engine.model.recorders import Call, Form, Note, between
from offload.engine.visit_cache import patched
from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.linears import SoftmaxAttention

_MAPPING = "shared_kv_states"
_INDICES = "prev_topk_indices"
_NAME = "layer_type"  # of a value in a mapping, by the attribute of the module that stores it
_STATES = "prev_router_hidden_states"
_ROLES: Mapping[str, tuple[str, Sequence[bool], str, Sequence[bool]]] = {
    _MAPPING: ("is_kv_shared_layer", (True,), "store_full_length_kv", (True,)),
    _INDICES: ("skip_topk", (True,), "skip_topk", (False,)),
    _STATES: ("use_eda", (True,), "use_eda", (True, False)),
}
"""By argument of a layer: an attribute of a module inside it, with its values in layers that read;
and the same in layers that make what is read."""
_SIZES = {_INDICES: "index_topk", _STATES: "router_hidden_size"}
"""Attributes that say how many numbers of a token a layer returns."""
_SHARED = "layers may share values, which one of them makes and later ones read"
_CLAMPED = "prediction_coefs"
_UNCHANGED = "weights may be clamped where that changes none of them, so frozen ones within bounds"
_FIRST_READER = "first_kv_shared_layer_idx"
_TOKENS_DIM, _NUM_DIMS = 2, 4  # of keys and values (B, H, T, K)
Values = tuple[torch.Tensor, ...]
Made = dict[int, dict[str, Values]]
"""The values of one micro-batch, or of one packed row, by the layer that made them, and by name."""


class FromBelow(Mapping[str, Values]):
    """What one layer may read of such values: the newest of each name from the layers below it."""

    def __init__(self, made: Made, layer: int) -> None:
        """Look at all values from a layer."""
        self.made, self.layer = made, layer

    @property
    def _visible(self) -> dict[str, Values]:
        below = sorted(producer for producer in self.made if producer < self.layer)
        return {name: x for producer in below for name, x in self.made[producer].items()}

    def __getitem__(self, name: str) -> Values:
        return self._visible[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._visible)

    def __len__(self) -> int:
        return len(self._visible)

    def keep(self, layer: int, new: Mapping[str, Values]) -> list[torch.Tensor]:
        """Keep what a layer made, unless it is there from its first visit.

        Returns:
            Those of its tensors that have a gradient.
        """
        leaves = {
            name: tuple(x.detach().requires_grad_(x.is_floating_point()) for x in values)
            for name, values in new.items()
        }
        self.made.setdefault(layer, leaves)
        return [x for values in new.values() for x in values if x.is_floating_point()]


class RowsBelow(Mapping[str, Values]):
    """The values of packed rows, end to end."""

    def __init__(self, rows: Sequence[FromBelow], lens: Sequence[int]) -> None:
        """Look at those of all rows, which have so many tokens, from a layer."""
        self._rows, self._lens = rows, list(lens)

    def __getitem__(self, name: str) -> Values:
        parts = zip(*(row[name] for row in self._rows), strict=True)
        return tuple(torch.cat(some, dim=_TOKENS_DIM) for some in parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows[0])

    def __len__(self) -> int:
        return len(self._rows[0])

    def values(self) -> Any:
        """Return what there is in memory: the values of each row."""
        return [x for row in self._rows for x in row.values()]

    def keep(self, layer: int, new: Mapping[str, Values]) -> list[torch.Tensor]:
        """Keep what a layer wrote for each row, as `FromBelow.keep`.

        Raises:
            LookupError: It wrote something else than keys and values of all tokens.
        """
        shapes = [x.shape for values in new.values() for x in values]
        if any(len(s) != _NUM_DIMS or s[_TOKENS_DIM] != sum(self._lens) for s in shapes):
            raise LookupError(f"layer {layer} writes values of {shapes}")
        cut = {n: [x.split(self._lens, _TOKENS_DIM) for x in one] for n, one in new.items()}
        kept: list[torch.Tensor] = []
        for i, row in enumerate(self._rows):
            own = {n: tuple(parts[i] for parts in one) for n, one in cut.items()}
            kept += row.keep(layer, own)
        return kept


class ForProducer(FromBelow):
    """The same of a layer that makes values: no layer is like it."""


class _Passed(dict[str, Values]):
    """A mapping of a layer's own, which may write to it."""

    def __init__(self, before: Mapping[str, Values]) -> None:
        super().__init__(before)
        self.before = before

    @property
    def new(self) -> dict[str, Values] | None:
        """What was written; None if anything was taken out."""
        if not self.before.keys() <= self.keys():
            return None
        return {name: x for name, x in self.items() if self.before.get(name) is not x}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Handing(Form):
    """How a stand-in returns the hidden state and, if the next layer reads one, a value."""

    layer: int
    is_read: bool

    def wrap(self, hidden: torch.Tensor) -> object:
        if self.extras is None:
            return hidden
        first = (FromBelow({}, self.layer) if self.is_read else None,)
        return (hidden, *first[: len(self.extras)], *(None for _ in self.extras[1:]))


_UNREAD = between(torch.empty(0), "what a layer made for others, in one that has its own")


class Carried:
    """The values that a model's layers share.

    Attributes:
        sources: The layer whose values each reader reads.
        producers: The layers that make values which others read.
        num_streams: Hidden states of a token, if the model has the first ones of all tokens first.
    """

    def __init__(self, name: str, owner: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Find the layers that make values, and those that read.

        Args:
            name: The name of the model, for errors.
            owner: The module that calls the layers.
            layers: The layers, without a loss by their routers.
        """
        self._name, self._owner, self._layers = name, owner, layers
        self.num_streams: int = getattr(owner.config, "altup_num_inputs", 1)
        found = {argument: _roles(layers, argument) for argument in _ROLES}
        self._argument = next((one for one, (_, makes) in found.items() if makes), _MAPPING)
        self._is_returned = self._argument != _MAPPING
        self._order = [*inspect.signature(type(layers[0]).forward).parameters][2:]
        self.sources, makes = found[self._argument]
        self.producers = frozenset(self.sources.values())
        # some versions of transformers store what no layer reads
        self._unread = makes - self.producers
        self._heard: list[torch.Tensor] = []
        self._bound: float = getattr(owner.config, "altup_coef_clip", None) or math.inf
        self._within = set[int]()

    def clamped(self, layer: int) -> list[torch.Tensor]:
        """Return the weights of a layer that it clamps in place, where it trains."""
        parts: Any = self._layers[layer].modules() if self._bound < math.inf else ()
        return [part.prediction_coefs.weight for part in parts if _CLAMPED in part._modules]

    def refuse_trained(self) -> None:
        """Refuse weights that train and that a layer clamps.

        Raises:
            UnsupportedModelError: There are some.
        """
        for layer in range(len(self._layers)):
            if any(weight.requires_grad for weight in self.clamped(layer)):
                self._refuse(
                    f"clamps `{_CLAMPED}` of layer {layer} in place, which trains", _UNCHANGED
                )

    def handing(self, form: Form, layer: int) -> Form:
        """Return how a stand-in for a layer returns what the layer does."""
        if not self._is_returned or form.extras is None:
            return form
        return _Handing(extras=form.extras, layer=layer, is_read=layer + 1 in self.sources)

    def given(self, notes: Sequence[Note]) -> list[Note]:
        """Return the notes of one pass before the layers, each with a view of the pass's values.

        Raises:
            UnsupportedModelError: The model does not pass one empty mapping to all layers, or to
                each layer what the one below returned.
        """
        notes = [replace(notes[0], hidden=self.inside(notes[0].hidden)), *notes[1:]]
        if not (self.producers or self._is_returned):
            return notes
        calls = [self._by_name(note.call) for note in notes]
        passed = [call.kwargs.get(self._argument) for call in calls]
        if self._is_returned and any(map(self._is_other, passed, notes)):
            self._refuse(f"passes its layers another `{self._argument}` than the last one's")
        is_one = all(x is passed[0] for x in passed)
        is_empty = isinstance(passed[0], Mapping) and not passed[0]
        if not (self._is_returned or (is_one and is_empty)):
            self._refuse(f"does not pass one empty `{self._argument}` to all of its layers")
        made: Made = {}
        return [
            replace(note, call=call.with_more({self._argument: view(made, note.layer)}))
            for note, call in zip(notes, calls, strict=True)
            for view in [ForProducer if note.layer in self.producers else FromBelow]
        ]

    def inside(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the model's as (B, T, ...)."""
        return hidden if self.num_streams == 1 else hidden.movedim(0, 2)

    def outside(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Return hidden states as the model has them: several of a token are (S, B, T, D)."""
        return hidden_BTD if self.num_streams == 1 else hidden_BTD.movedim(2, 0).contiguous()

    def whole_rows(self) -> AbstractContextManager[None]:
        """Have readers compute all tokens: where it generates, the model may leave some out."""
        own = vars(self._owner)
        return patched(*([(own, {_FIRST_READER: None})] if own.get(_FIRST_READER) else []))

    def joined(self, calls: Sequence[PackedCall]) -> tuple[PackedCall, ...]:
        """Return calls that pass the values of all rows to a layer that computes them at once."""
        if self._is_returned:
            return tuple(replace(call, together=None) for call in calls)
        if not self.producers:
            return tuple(calls)
        return tuple(
            replace(call, together=call.together and call.together.with_more({_MAPPING: below}))
            for call in calls
            for below in [RowsBelow([row.kwargs[_MAPPING] for row in call.rows], call.lens)]
        )

    def passed(self, layer: int, call: Call, tried_BTD: torch.Tensor | None) -> Call:
        """Return a call with what a layer reads, and room for what it writes.

        Args:
            layer: The layer.
            call: Its arguments.
            tried_BTD: Its input, if it is not known to keep packed rows apart.
        """
        if layer not in self._within:  # before its first call, which would clamp them
            self._require_within(layer)
        given = call.kwargs.get(self._argument)
        if given is None:
            return call
        before = dict(given)
        if self._is_returned:
            is_own = layer not in self.sources
            own = (_UNREAD if layer else None) if is_own else before[self._argument][0]
            return call.with_more({self._argument: own})
        if tried_BTD is not None and not isinstance(given, FromBelow):
            before = {name: _as_lost(values, tried_BTD) for name, values in before.items()}
        return call.with_more({self._argument: _Passed(before)})

    def keep(self, layer: int, call: Call, passed: Call, output: object) -> None:
        """Keep what a producer has made.

        Args:
            layer: The layer, which was called.
            call: Its arguments.
            passed: The same, as `passed` returned them.
            output: What it returned.

        Raises:
            UnsupportedModelError: Another layer makes values, or a producer makes something else.
        """
        given, own = (one.kwargs.get(self._argument) for one in (call, passed))
        if given is None or layer in self._unread:
            return
        if isinstance(own, _Passed):
            new = own.new
        else:
            _, value, *_ = (*output, None) if isinstance(output, tuple | list) else (output, None)
            is_new = value is not None and value is not own
            new = {self._argument: (cast("torch.Tensor", value),)} if is_new else {}
        if new is None or bool(new) is not (layer in self.producers):
            self._refuse(f"has a layer {layer} that changes its arguments")
        tensors = [x for values in new.values() for x in values]
        if not all(isinstance(x, torch.Tensor) for x in tensors):
            self._refuse(f"has a layer {layer} that hands on more than tensors")
        if new and isinstance(given, FromBelow | RowsBelow):  # not in a trial of a wider type
            self._heard += given.keep(layer, new)

    @contextmanager
    def listen(self, _layer: int) -> Iterator[list[torch.Tensor]]:
        """Collect the values with a gradient that a layer makes in one visit, with their graph."""
        self._heard = heard = list[torch.Tensor]()
        try:
            yield heard
        finally:
            self._heard = []

    def gradients(self, layer: int, call: Call | PackedCall) -> list[torch.Tensor | None]:
        """Return the gradients by what `listen` collects of a layer, and let go of the values.

        Args:
            layer: The layer, whose readers had their backward visits.
            call: Its arguments.
        """
        if layer not in self.producers:
            return []
        rows: Sequence[Any] = call.rows if isinstance(call, PackedCall) else (call,)
        made = [row.kwargs[self._argument].made.pop(layer) for row in rows]
        leaves = [leaf for one in made for values in one.values() for leaf in values]
        return [leaf.grad for leaf in leaves if leaf.requires_grad]

    def with_carried(self, facts: ModelFacts) -> ModelFacts:
        """Return facts with what is carried, whose readers have the keys and values they read.

        Args:
            facts: Facts read off the layers alone, in which readers have no keys and values.
        """
        made = [_size(self._layers[source], self._argument) for source in self.producers]
        if self._argument == _INDICES:
            return replace(facts, num_carried_indices=len(made), index_top_k=max(made, default=0))
        if self._argument == _STATES:
            return replace(
                facts,
                has_fp32_inputs=True,
                carried_features=sum(made),
                carried_gradient_features=sum(made[:2]),  # one is let go of when the next is there
            )
        kinds = [cast("SoftmaxAttention", layer.attention) for layer in facts.layers]
        layers = list(facts.layers)
        for reader, source in self.sources.items():
            own, num_heads = kinds[reader], kinds[source].num_kv_heads
            layers[reader] = replace(
                layers[reader],
                attention=replace(
                    own,
                    num_kv_heads=num_heads,
                    num_rotated_heads=own.num_heads,
                    reads_shared=True,
                ),
            )
        made = [
            x.num_kv_heads * (x.qk_dim + x.v_dim) for x in map(kinds.__getitem__, self.producers)
        ]
        table = layer_table(self._owner)
        return replace(
            facts,
            layers=tuple(layers),
            carried_features=sum(made),
            carried_gradient_features=sum(made),
            layer_table_parameters=0 if table is None else table.weight.numel(),
        )

    def _require_within(self, layer: int) -> None:
        """Check that no call of a layer changes a weight that it clamps, as it does not train.

        The weights are in place, and torch is waited for.
        """
        self.refuse_trained()
        weights = [weight.detach().abs() for weight in self.clamped(layer)]
        known = [x for x in weights if not (isinstance(x, FakeTensor) or x.is_meta)]
        if any(bool((x > self._bound).any()) for x in known):
            self._refuse(
                f"clamps `{_CLAMPED}` of layer {layer} in place, to {self._bound}, and has"
                " larger ones",
                _UNCHANGED,
            )
        self._within.add(layer)

    def _by_name(self, call: Call) -> Call:
        """Return a call without arguments by position, where a value may be one of them."""
        if not (self._is_returned and call.args):
            return call
        by_place = dict(zip(self._order, call.args, strict=False))
        return replace(call, args=(), kwargs={**by_place, **call.kwargs})

    def _is_other(self, passed: object, note: Note) -> bool:
        """Return whether a layer is passed another value than the one below returned for it."""
        if note.layer not in self.sources:
            return passed is not None
        return not (isinstance(passed, FromBelow) and passed.layer == note.layer - 1)

    def _refuse(self, what: str, limit: str = _SHARED) -> NoReturn:
        raise UnsupportedModelError(
            f"{self._name} {what}",
            limit=limit,
            hint="train this model resident, with another tool",
        )


def _roles(layers: Sequence[nn.Module], argument: str) -> tuple[dict[int, int], frozenset[int]]:
    """Return the layer whose values each reader of them reads, and all layers that make some."""
    reads, in_readers, makes, in_producers = _ROLES[argument]
    newest, sources, made = dict[object, int](), dict[int, int](), set[int]()
    for index, layer in enumerate(layers):
        for own in map(vars, layer.modules()):
            name = own.get(_NAME) if argument == _MAPPING else argument
            if own.get(reads) in in_readers and name in newest:
                sources[index] = newest[name]
            if own.get(makes) in in_producers:
                newest[name] = index
                made.add(index)
    return sources, frozenset(made)


def _size(layer: nn.Module, argument: str) -> int:
    sizes = (vars(module).get(_SIZES.get(argument, "")) for module in layer.modules())
    return next((size for size in sizes if isinstance(size, int)), 0)


def _as_lost(values: Values, hidden_BTD: torch.Tensor) -> Values:
    """Return values that are NaN at the tokens whose hidden states are."""
    is_lost_BT = hidden_BTD.isnan().flatten(2).any(-1)
    return tuple(x.masked_fill(is_lost_BT[:, None, :, None], torch.nan) for x in values)
