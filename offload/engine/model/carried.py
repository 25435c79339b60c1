"""Keys and values that one layer computes and later layers read, from visit to visit.

Problem. In Gemma 4 E2B and E4B most layers have no keys and values of their own: they read those of
the last layer of their type that has. The model passes a mapping to all layers, one writes to it,
and others read. Visited alone, a reader would find nothing, and the gradient by what it read would
end there.

Idea. Each micro-batch has its values by name, made in the forward visit of their producer and kept
until its backward visit: they are leaves, so that the visits of their readers read the same bits
however often, and add to their `.grad`. The producer's backward visit then starts from the
gradients of its output and of the values. Readers are visited from the highest layer down, so the
gradients are added up in autograd's own order, to the bit. What is recomputed is used for its graph
alone, and the values of the forward visit stay.

A layer is passed a mapping of its own, with what the layers below it wrote. So it sees in each
visit what it saw in the first, and what it writes is collected.

Packed rows have values of their own, which a layer that computes all rows at once is passed end to
end, and which are cut where it writes them. In the trial of that (`offload.engine.safety`) a token
whose hidden state is NaN has such values too, so no other row may read them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch import nn

from offload.engine.host.layer_table import layer_table
from offload.engine.model.packed_rows import PackedCall
from offload.engine.model.recorders import Call, Note
from offload.engine.visit_cache import patched
from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.linears import SoftmaxAttention

_ARGUMENT = "shared_kv_states"
_STORES, _READS, _NAME = "store_full_length_kv", "is_kv_shared_layer", "layer_type"
_FIRST_READER = "first_kv_shared_layer_idx"
_TOKENS_DIM, _NUM_DIMS = 2, 4  # of keys and values (B, H, T, K)
Values = tuple[torch.Tensor, ...]
Made = dict[int, dict[str, Values]]
"""The values of one micro-batch, or of one packed row, by the layer that made them, and by name."""


class FromBelow(Mapping[str, Values]):
    """What one layer may read of such values: the newest of each name from the layers below it."""

    def __init__(self, made: Made, layer: int) -> None:
        """Look at all values from a layer."""
        self.made, self._layer = made, layer

    @property
    def _visible(self) -> dict[str, Values]:
        below = sorted(producer for producer in self.made if producer < self._layer)
        return {name: x for producer in below for name, x in self.made[producer].items()}

    def __getitem__(self, name: str) -> Values:
        return self._visible[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._visible)

    def __len__(self) -> int:
        return len(self._visible)

    def keep(self, layer: int, new: Mapping[str, Values]) -> list[torch.Tensor]:
        """Keep what a layer wrote, unless it is there from its first visit; return its tensors."""
        leaves = {
            name: tuple(x.detach().requires_grad_() for x in values) for name, values in new.items()
        }
        self.made.setdefault(layer, leaves)
        return [x for values in new.values() for x in values]


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


class Carried:
    """The keys and values that a model's layers share, through a mapping that all are passed.

    Attributes:
        sources: The layer whose keys and values each reader reads.
    """

    def __init__(self, name: str, owner: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Find the layers that write to it, and those that read.

        Args:
            name: The name of the model, for errors.
            owner: The module that calls the layers.
            layers: The layers, without a loss by their routers.
        """
        self._name, self._owner = name, owner
        stored, self.sources = dict[str, int](), dict[int, int]()
        storing = set()
        for index, layer in enumerate(layers):
            for own in map(vars, layer.modules()):
                if own.get(_READS) and own[_NAME] in stored:
                    self.sources[index] = stored[own[_NAME]]
                if own.get(_STORES):
                    stored[own[_NAME]] = index
                    storing.add(index)
        self.producers = frozenset(self.sources.values())
        # some versions of transformers store what no layer reads
        self._unread = frozenset(storing) - self.producers
        self._heard: list[torch.Tensor] = []

    def given(self, notes: Sequence[Note]) -> list[Note]:
        """Return the notes of one pass before the layers, each with a view of the pass's values.

        Raises:
            UnsupportedModelError: The model does not pass one empty mapping to all layers.
        """
        if not self.producers:
            return list(notes)
        passed = [note.call.kwargs.get(_ARGUMENT) for note in notes]
        is_one = all(x is passed[0] for x in passed)
        if not (is_one and isinstance(passed[0], Mapping) and not passed[0]):
            self._refuse(f"does not pass one empty `{_ARGUMENT}` to all of its layers")
        made: Made = {}
        return [
            replace(note, call=note.call.with_more({_ARGUMENT: view(made, note.layer)}))
            for note in notes
            for view in [ForProducer if note.layer in self.producers else FromBelow]
        ]

    def whole_rows(self) -> AbstractContextManager[None]:
        """Have readers compute all tokens: where it generates, the model may leave some out."""
        own = vars(self._owner)
        return patched(*([(own, {_FIRST_READER: None})] if own.get(_FIRST_READER) else []))

    def joined(self, calls: Sequence[PackedCall]) -> tuple[PackedCall, ...]:
        """Return calls that pass the values of all rows to a layer that computes them at once."""
        if not self.producers:
            return tuple(calls)
        return tuple(
            replace(call, together=call.together and call.together.with_more({_ARGUMENT: below}))
            for call in calls
            for below in [RowsBelow([row.kwargs[_ARGUMENT] for row in call.rows], call.lens)]
        )

    @contextmanager
    def passing(self, layer: int, call: Call, tried_BTD: torch.Tensor | None) -> Iterator[Call]:
        """Yield a call with a mapping of its own, and keep what a producer writes to it.

        Args:
            layer: The layer, which is called meanwhile.
            call: Its arguments.
            tried_BTD: Its input, if it is not known to keep packed rows apart.

        Raises:
            UnsupportedModelError: Another layer writes, or a producer writes something else.
        """
        given = call.kwargs.get(_ARGUMENT)
        if given is None:
            yield call
            return
        before = dict(given)
        if tried_BTD is not None and not isinstance(given, FromBelow):
            before = {name: _as_lost(values, tried_BTD) for name, values in before.items()}
        left = dict(before)
        yield call.with_more({_ARGUMENT: left})
        new = {name: values for name, values in left.items() if before.get(name) is not values}
        if layer in self._unread:
            return
        if not before.keys() <= left.keys() or bool(new) is not (layer in self.producers):
            self._refuse(f"has a layer {layer} that changes its arguments")
        tensors = [x for values in new.values() for x in values]
        if not all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in tensors):
            self._refuse(f"has a layer {layer} that writes more than keys and values")
        if new and isinstance(given, FromBelow | RowsBelow):  # not in a trial of a wider type
            self._heard += given.keep(layer, new)

    @contextmanager
    def listen(self, _layer: int) -> Iterator[list[torch.Tensor]]:
        """Collect the values that a layer writes in one visit, with their graph."""
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
        made = [row.kwargs[_ARGUMENT].made.pop(layer) for row in rows]
        return [leaf.grad for one in made for values in one.values() for leaf in values]

    def with_shared(self, facts: ModelFacts) -> ModelFacts:
        """Return facts whose readers have the keys and values that they read, and of the table.

        Args:
            facts: Facts read off the layers alone, in which readers have no keys and values.
        """
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
        made = [kinds[source] for source in self.producers]
        features = sum(one.num_kv_heads * (one.qk_dim + one.v_dim) for one in made)
        table = layer_table(self._owner)
        return replace(
            facts,
            layers=tuple(layers),
            carried_features=features,
            layer_table_parameters=0 if table is None else table.weight.numel(),
        )

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{self._name} {what}",
            limit="layers may share keys and values, which one of them writes and later ones read",
            hint="train this model resident, with another tool",
        )


def _as_lost(values: Values, hidden_BTD: torch.Tensor) -> Values:
    """Return values that are NaN at the tokens whose hidden states are."""
    is_lost_BT = hidden_BTD.isnan().flatten(2).any(-1)
    return tuple(x.masked_fill(is_lost_BT[:, None, :, None], torch.nan) for x in values)
