"""A model's own key-value cache, for layers that are visited one by one.

A cached pass computes the last tokens of some rows, and reads what earlier passes have kept of the
tokens before them. transformers passes one `Cache` object to all layers, and each layer reads and
writes its own part of it. So the front is recorded with that object and the layers are visited with
it: the same calls in the same order, and so the same bits, as in the model's own cached forward.

That holds if the cache is all that layers keep, and if only layers use it. So each of these is
checked, and refuses the model by name: its forward takes a cache and passes it to its layers;
nothing between or after the layers uses the cache; no module of a layer holds another tensor after
a cached pass than before it; what enters the layers at a token is the same in a pass over its whole
row.
"""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.engine.closeness import are_close
from offload.engine.model.layers import FORWARD_ERRORS, Front, LayeredModel, unchanged
from offload.engine.model.recorded_args import Leaves
from offload.engine.model.recorders import Injector, Note, StandIn, TouchedError
from offload.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import DynamicCache

NAMES = ("past_key_values", "cache_params")
"""What models call the cache among the arguments of their forward."""
_POSITIONS = "position_ids"
_OWN_TO_TORCH = frozenset(vars(nn.Module()))
_CACHE_ALONE = "what layers keep from token to token is in a cache of transformers, and only there"

Held = dict[str, object]
"""Tensors in attributes of the layers' modules, by path."""


class CachedModel:
    """The layers of a model with caches of transformers' classes."""

    def __init__(self, layered: LayeredModel) -> None:
        """Find how the model takes its cache.

        Raises:
            UnsupportedModelError: It takes none.
        """
        self._layered = layered
        parameters = inspect.signature(layered.model.forward).parameters
        names = [name for name in NAMES if name in parameters]
        model: Any = layered.model
        if not names or not model._supports_default_dynamic_cache():
            layered.refuse("takes no key-value cache of transformers", limit=_CACHE_ALONE)
        self._name = names[0]
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = _POSITIONS in parameters

    def new_cache(self) -> "DynamicCache":
        """Return an empty cache, as the model's own `generate` makes it."""
        from transformers import DynamicCache

        return DynamicCache(config=self._layered.model.config.get_text_config(decoder=True))

    def begin(self, input_ids_BT: torch.Tensor) -> None:
        """Find whether the model takes positions from 0, and check that only layers use its cache.

        Args:
            input_ids_BT: Some tokens, on the compute device.

        Raises:
            UnsupportedModelError: Other parts of the model use it too.
        """
        plain = self._front(input_ids_BT, self.new_cache(), None)
        if self._takes_positions:
            try:
                found = self._front(input_ids_BT, self.new_cache(), 0)
                self._takes_positions = are_same_ends(found, plain)
            except UnsupportedModelError:  # it has positions of its own
                self._takes_positions = False
        self._require_unused_outside(input_ids_BT, plain.hidden_BTD)

    def front(self, input_ids_BT: torch.Tensor, cache: "DynamicCache", *, num_past: int) -> Front:
        """Run the part of the model before the layers.

        Args:
            input_ids_BT: Tokens that follow those in the cache, on the compute device.
            cache: Of these rows; the layers write to it in their visits.
            num_past: Tokens that are in the cache.

        Raises:
            UnsupportedModelError: As for `LayeredModel.front`; or no layer is passed the cache.
        """
        return self._front(input_ids_BT, cache, num_past if self._takes_positions else None)

    def _front(
        self, input_ids_BT: torch.Tensor, cache: "DynamicCache", num_past: int | None
    ) -> Front:
        batch = {"input_ids": input_ids_BT}
        if num_past is not None:
            num_rows, num_tokens = input_ids_BT.shape
            positions_T = torch.arange(num_tokens, device=input_ids_BT.device) + num_past
            batch[_POSITIONS] = positions_T.expand(num_rows, -1)
        more = {self._name: cache, "use_cache": True}
        try:
            notes = self._layered.notes(batch, cache=cache, **more)
        except torch.OutOfMemoryError:
            raise
        except FORWARD_ERRORS as error:
            self._layered.refuse(f"fails when it is passed a cache: {error}", limit=_CACHE_ALONE)
        if not any(part is cache for note in notes for part in note.call.parts()):
            self._layered.refuse("passes its cache to none of its layers", limit=_CACHE_ALONE)
        leaves = Leaves()
        calls = tuple(leaves.cut(note.call) for note in notes)
        return Front(hidden_BTD=notes[0].hidden, calls=calls, leaves=leaves)

    def logits(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, V) of the last tokens, given the last layer's output of all.

        As the model computes them where it takes `logits_to_keep`, else from the last tokens alone.
        """
        if self._keeps_logits:
            output = self._layered.output(hidden_BTD, logits_to_keep=1)
            return output.logits[:, -1]  # type: ignore[no-any-return]  # of transformers
        return self._layered.tail_logits(hidden_BTD[:, -1:])[:, -1]

    def _require_unused_outside(self, input_ids_BT: torch.Tensor, hidden_BTD: torch.Tensor) -> None:
        """Check that only layers use the cache, which is closed while other code computes.

        Args:
            input_ids_BT: Some tokens, on the compute device.
            hidden_BTD: What the first and the last layer return.

        Raises:
            UnsupportedModelError: The model uses it between its layers or after them.
        """
        layered = self._layered
        cache = _closable(self.new_cache())
        notes: list[Note] = []
        stand_ins = layered.stand_ins(StandIn, layered.forms, notes=notes)
        for i in {0, len(stand_ins) - 1}:
            stand_ins[i] = Injector(
                layered.layers[i],
                i,
                notes=notes,
                form=layered.forms[i],
                hidden=hidden_BTD,
                on_call=cache.close,
            )
        more = {self._name: cache, "use_cache": True}
        with layered.replaced(stand_ins), unchanged(layered.around), layered.unread_head():
            try:
                layered.model(input_ids=input_ids_BT, **more)
            except TouchedError as error:
                layered.refuse(str(error), limit=_CACHE_ALONE)

    def held(self) -> Held:
        """Return the tensors that modules of the layers hold, other than parameters and buffers."""
        return {
            f"{index}.{path}.{name}": value
            for index, layer in enumerate(self._layered.layers)
            for path, module in layer.named_modules()
            for name, value in vars(module).items()
            if name not in _OWN_TO_TORCH and (value is None or isinstance(value, torch.Tensor))
        }

    def require_held(self, before: Held) -> None:
        """Check that a cached pass has left nothing in modules of the layers.

        Args:
            before: What they held before it.

        Raises:
            UnsupportedModelError: It has.
        """
        after = self.held()
        changed = [name for name in after if after[name] is not before.get(name)]
        if changed:
            self._layered.refuse(
                f"keeps `{changed[0]}` of its layers outside its cache", limit=_CACHE_ALONE
            )


def are_same_ends(some: Front, whole: Front) -> bool:
    """Return whether layers are passed for the last tokens of rows what they are for all of them.

    Args:
        some: What enters the layers in a pass over the last tokens.
        whole: The same in a pass over the whole rows.
    """
    lens = some.hidden_BTD.shape[1], whole.hidden_BTD.shape[1]
    pairs = [(some.hidden_BTD, whole.hidden_BTD)]
    for ours, theirs in zip(some.calls, whole.calls, strict=True):
        few, many = list(ours.tensors()), list(theirs.tensors())
        pairs += zip(few, many, strict=True) if len(few) == len(many) else ()
    return all(_is_end(few, many, lens) for few, many in pairs)


def _is_end(some: torch.Tensor, whole: torch.Tensor, lens: tuple[int, int]) -> bool:
    """Return whether values of some tokens are the last of those of all, where they are by token.

    Args:
        some: Values of the last tokens.
        whole: The same of all tokens.
        lens: How many tokens each has.
    """
    num_some, num_whole = lens
    pairs = list(zip(some.shape, whole.shape, strict=False))
    differing = [dim for dim, (few, many) in enumerate(pairs) if few != many]
    if some.ndim != whole.ndim or [pairs[dim] for dim in differing] not in ([], [lens]):
        return True
    end = whole.narrow(differing[0], num_whole - num_some, num_some) if differing else whole
    return are_close(some, end) if some.is_floating_point() else torch.equal(some, end)


def _closable(cache: "DynamicCache") -> Any:
    """Return the cache as one that refuses all use of its layers once it is closed."""

    class Closable(type(cache)):  # type: ignore[misc]  # the class is found at run time
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

        @property
        def layers(self) -> Any:
            if self.is_closed:
                raise TouchedError("uses its cache between or after its layers")
            return self.__dict__["layers"]

        @layers.setter
        def layers(self, value: Any) -> None:
            self.__dict__["layers"] = value

    cache.__class__ = Closable
    return cache
