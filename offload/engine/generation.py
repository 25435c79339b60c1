"""Generation with a model's own key-value cache, by passes over layers visited one by one.

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
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from offload.engine.batch import Batch, Vocabulary, checked_batch, to_device
from offload.engine.closeness import are_close, is_near
from offload.engine.model.layers import FORWARD_ERRORS, Front, LayeredModel, unchanged
from offload.engine.model.recorders import Injector, Leaves, Note, StandIn, TouchedError
from offload.errors import OffloadError, UnsupportedModelError
from offload.plan.schedule.schedule import Schedule

if TYPE_CHECKING:
    from transformers import DynamicCache


_NAMES = ("cache", "past_key_values", "cache_params")  # the first is that of transformers 5.24
_POSITIONS = "position_ids"
_OWN_TO_TORCH = frozenset(vars(nn.Module()))
_CACHE_ALONE = "what layers keep from token to token is in a cache of transformers, and only there"

Held = dict[str, object]
"""Tensors in attributes of the layers' modules, by path."""


def cache_argument(model: Any) -> str | None:
    """Return what a model's forward calls its key-value cache; None if it takes no ordinary one."""
    parameters = inspect.signature(model.forward).parameters
    names = [name for name in _NAMES if name in parameters]
    return names[0] if names and model._supports_default_dynamic_cache() else None


class CachedModel:
    """The layers of a model with caches of transformers' classes."""

    def __init__(self, layered: LayeredModel) -> None:
        """Find how the model takes its cache.

        Raises:
            UnsupportedModelError: It takes none.
        """
        self._layered = layered
        parameters = inspect.signature(layered.model.forward).parameters
        name = cache_argument(layered.model)
        if name is None:
            layered.refuse("takes no key-value cache of transformers", limit=_CACHE_ALONE)
        self._name = name
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

    def front(
        self,
        input_ids_BT: torch.Tensor,
        cache: "DynamicCache",
        *,
        num_past: int,
        padding_B: torch.Tensor | None = None,
    ) -> Front:
        """Run the part of the model before the layers.

        Args:
            input_ids_BT: Tokens that follow those in the cache, on the compute device.
            cache: Of these rows; the layers write to it in their visits.
            num_past: Tokens that are in the cache.
            padding_B: Tokens of each row, its first ones, that are none of its own; None if all
                are.

        Raises:
            UnsupportedModelError: As for `LayeredModel.front`; or no layer is passed the cache, or
                the model takes no positions of rows that are padded.
        """
        if not self._takes_positions and padding_B is not None:
            self._layered.refuse(
                "takes no positions of rows that are padded at their left",
                limit="rows of unequal length are computed together with positions of their own",
            )
        return self._front(
            input_ids_BT, cache, num_past if self._takes_positions else None, padding_B
        )

    def _front(
        self,
        input_ids_BT: torch.Tensor,
        cache: "DynamicCache",
        num_past: int | None,
        padding_B: torch.Tensor | None = None,
    ) -> Front:
        batch = {"input_ids": input_ids_BT}
        if num_past is not None:
            num_rows, num_tokens = input_ids_BT.shape
            places_K = torch.arange(num_past + num_tokens, device=input_ids_BT.device)
            positions_BT = places_K[num_past:].expand(num_rows, -1)
            if padding_B is not None:
                positions_BT = (positions_BT - padding_B[:, None]).clamp_min(0)
                batch["attention_mask"] = (places_K >= padding_B[:, None]).long()
            batch[_POSITIONS] = positions_BT
        more = {self._name: cache, "use_cache": True}
        try:
            notes = self._layered.notes(batch, shared=cache, **more)
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
                hidden=layered.outside(hidden_BTD),
                on_call=cache.close,
            )
        more = {self._name: cache, "use_cache": True}
        with layered.replaced(stand_ins), unchanged(layered.around), layered.unread_head():
            try:
                layered.model(**layered.given({"input_ids": input_ids_BT, **more}))
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


# ---------------------------------------------------------------------------------------------
# Generation with a key-value cache: each new token is one pass over the layers for all rows.
#
# Rows of the same length are a *group*: they are computed together, without padding, with a cache
# of their own. All groups pass through a layer while its weights are in their slot, so a pass loads
# at most L - C layers, however many rows there are. A group's first tokens are its prompts; then
# each pass is given the one token that continues each row. The caches stay on the compute device.
#
# What a group computes is what plain transformers computes for the same rows with the same cache,
# to the bit, whatever other groups share the pass.

Ready = Callable[[Batch, int], AbstractContextManager[Schedule]]
"""Checks the model for such inputs, and yields the schedule of a pass for a number of groups."""
Compute = Callable[
    [Schedule, Callable[[int], Front], Callable[[torch.Tensor], torch.Tensor]],
    dict[int, torch.Tensor],
]
"""Runs a pass: its schedule, the front of each group, and what follows the last layer."""

_CACHED, _PADDED = "with a cache than without one", "to a padded row than to it alone"
_SLACK, _SLACK_16_BITS = 0.01, 0.25  # of the norm: an error of a cache is larger, rounding smaller
_SIZES = ("_sliding_window_tensor",)  # of a cache, and no part of what it keeps
_AS_WHOLE = "a token is computed as in a pass over its whole row"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Rows of one length, and what is kept of them."""

    input_ids_BT: torch.Tensor  # the tokens of the newest pass
    cache: "DynamicCache"  # the keys and values of the tokens before them
    num_past: int = 0  # how many tokens of each row these are
    # They themselves, as long as they are still needed: until a pass over a whole row was compared
    # with one that continues it, or while LongRoPE may still change frequencies.
    before: tuple[torch.Tensor, ...] = ()
    # Tokens of each row, its first ones, that are none of its own; None if all are.
    padding_B: torch.Tensor | None = None

    def passed(self, *, is_kept: bool) -> "_Rows":
        """Return the rows after a pass over their tokens."""
        num_past = self.num_past + self.input_ids_BT.shape[1]
        before = (*self.before, self.input_ids_BT) if is_kept else ()
        return replace(self, num_past=num_past, before=before)


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedPass:
    """One pass of a generation."""

    rows: Mapping[int, _Rows]  # what goes on, by group
    # The same; and after them whole rows, if they are compared with some that go on.
    passed: Sequence[_Rows]
    front: Callable[[int], Front]  # computes what enters the layers, by number
    fronts: Mapping[int, Front]  # those that are compared
    held: Sequence[Held]  # what layers held before it, if that is compared
    # A group's number and a padded row of it that is compared with itself alone, the last of
    # `passed`; empty if none is.
    padded: Sequence[tuple[int, int]]


class Generation:
    """Groups of rows whose caches are kept from pass to pass. See `Engine.generation`."""

    def __init__(
        self,
        layered: LayeredModel,
        *,
        where: tuple[Vocabulary, torch.device],
        state: Callable[[], list[object]],
        ready: Ready,
        compute: Compute,
    ) -> None:
        """Keep the parts; nothing is computed.

        Args:
            layered: The model.
            where: The tokens that it knows, and where it computes.
            state: Returns what differs once the model computes something else.
            ready: Checks the model and makes the schedule of a pass.
            compute: Runs it.

        Raises:
            UnsupportedModelError: The model takes no cache.
        """
        self._layered, (self._vocabulary, self._torch_device) = layered, where
        self._ready, self._compute = ready, compute
        self._state, self._state_before = state, state()
        self._cached = CachedModel(layered)
        self._groups: dict[int, _Rows] = {}
        self._is_open, self._is_tried, self._is_continued = True, False, False
        self.num_loads = 0

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all caches."""
        self._is_open = False
        self._groups.clear()

    def drop(self, group: int) -> None:
        """Let go of the cache of one group."""
        self._groups.pop(group, None)

    def repeat(self, group: int, num: int) -> None:
        """Continue each row of a group several times, next to each other, from what is kept.

        So rows that begin alike are computed once up to where they differ.

        Args:
            group: It has a cache.
            num: The number of times.
        """
        one = self._groups[group]
        rows = torch.arange(len(one.input_ids_BT), device=self._torch_device)
        rows = rows.repeat_interleave(num)
        one.cache.reorder_cache(cast("torch.LongTensor", rows))
        self._groups[group] = replace(
            one,
            input_ids_BT=one.input_ids_BT[rows],
            before=tuple(tokens_BT[rows] for tokens_BT in one.before),
            padding_B=None if one.padding_B is None else one.padding_B[rows],
        )

    @property
    def cache_bytes(self) -> int:
        """What the caches take on the device."""
        storages = [x.untyped_storage() for one in self._groups.values() for x in _tensors(one)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def next_logits(
        self,
        tokens: Mapping[int, torch.Tensor],
        *,
        padding: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> dict[int, torch.Tensor]:
        """Run one pass over the layers, and return the logits of the token that comes next.

        Args:
            tokens: By group, the tokens that continue its rows, (B, T): of a new group its prompts,
                all of one length; of a group that has a cache mostly one token of each row. Groups
                that are not named wait.
            padding: By group, the tokens at the left of each of its prompts that make them as long,
                (B,), where a new group has such: no other token sees them. What a row computes is
                then that of it alone within rounding.

        Returns:
            Logits (B, V) by group, on the compute device.

        Raises:
            UnsupportedModelError: The model keeps something outside its cache.
            OffloadError: Tokens are invalid, the model is in training mode, a pass has failed, or
                parameters were written to since it began.
        """
        if not tokens:
            return {}
        one = self.begin(tokens, padding=padding)
        try:
            inputs = {"input_ids": one.passed[0].input_ids_BT}
            with self._ready(inputs, len(one.passed)) as schedule:
                logits = self._compute(schedule, one.front, self._cached.logits)
            return self.end(one, logits, schedule.num_loads)
        except BaseException:
            self.close()  # some layers have written to the caches, and others not
            raise

    def begin(
        self,
        tokens: Mapping[int, torch.Tensor],
        *,
        padding: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> "CachedPass":
        """Return what is to be computed in a pass; see `next_logits`."""
        self._require_same_model()
        rows = {group: self._grown(group, tokens[group], padding.get(group)) for group in tokens}
        tried = [n for n, one in enumerate(rows.values()) if one.before and not self._is_continued]
        again = [self._from_start(list(rows.values())[n]) for n in tried[:1]]
        padded = [] if self._is_tried else _longest_padded(rows.values())
        passed = [*rows.values(), *again]
        passed += [self._unpadded(passed[number], row) for number, row in padded]
        fronts: dict[int, Front] = {}
        held: list[Held] = []

        def front(number: int) -> Front:
            one = passed[number]
            if not (self._is_tried or held):
                self._cached.begin(one.input_ids_BT[:1])
                held.append(self._cached.held())
            found = self._cached.front(
                one.input_ids_BT, one.cache, num_past=one.num_past, padding_B=one.padding_B
            )
            if again and number in (tried[0], len(rows)):
                fronts[number] = found
            return found

        return CachedPass(
            rows=rows, passed=passed, front=front, fronts=fronts, held=held, padded=padded
        )

    def end(
        self, one: "CachedPass", logits: Mapping[int, torch.Tensor], num_loads: int
    ) -> dict[int, torch.Tensor]:
        """Check and keep what a pass has computed, and return it by group.

        Args:
            one: The pass.
            logits: Logits (B, V) of each of its rows.
            num_loads: Layers that were loaded meanwhile.

        Raises:
            UnsupportedModelError: The model keeps something outside its cache.
        """
        for before in one.held:
            self._cached.require_held(before)
        if one.fronts:
            self._require_continued(*one.fronts.values())
            cached_BV, whole_BV = (logits[number] for number in one.fronts)
            self._require_near(cached_BV, whole_BV, _CACHED)
            self._is_continued = True
        for number, row in one.padded:
            alone_1V = logits[len(one.passed) - 1]
            self._require_near(logits[number][row : row + 1], alone_1V, _PADDED)
        self._is_tried = True
        self._groups.update({group: self._passed(rows) for group, rows in one.rows.items()})
        self.num_loads += num_loads
        return {group: logits[number] for number, group in enumerate(one.rows)}

    def _passed(self, one: "_Rows") -> "_Rows":
        """Return rows after a pass, with their tokens as long as they are still needed."""
        num_past = one.num_past + one.input_ids_BT.shape[1]
        may_switch = self._layered.rotary.switches(num_past, sys.maxsize)
        return one.passed(is_kept=may_switch or not self._is_continued)

    def _grown(
        self, group: int, tokens_BT: torch.Tensor, padding_B: torch.Tensor | None
    ) -> "_Rows":
        """Return a group's rows with the tokens of a pass, from the start where keys are stale.

        A cache keeps rotated keys: where a row grows past LongRoPE's original length, those of its
        first tokens are computed anew, as in the `generate` of the models published with it.
        """
        one = self._rows(group, tokens_BT, padding_B)
        num_after = one.num_past + tokens_BT.shape[1]
        if not (one.num_past and self._layered.rotary.switches(one.num_past, num_after)):
            return one
        self._groups.pop(group)  # or its cache would take memory next to the new one
        return self._from_start(one)

    def _rows(self, group: int, tokens_BT: torch.Tensor, padding_B: torch.Tensor | None) -> "_Rows":
        """Return a group's rows with the tokens of a pass.

        Raises:
            OffloadError: The tokens are invalid, or of another number of rows.
        """
        batch = checked_batch({"input_ids": tokens_BT}, self._vocabulary, f"group {group}")
        input_ids_BT = to_device(batch, self._torch_device)["input_ids"]
        known = self._groups.get(group)
        if known is None:
            return _Rows(
                input_ids_BT=input_ids_BT,
                cache=self._cached.new_cache(),
                padding_B=None if padding_B is None else padding_B.to(self._torch_device),
            )
        if len(known.input_ids_BT) != len(input_ids_BT):
            raise OffloadError(
                f"group {group} is given {len(input_ids_BT)} rows, and its cache has"
                f" {len(known.input_ids_BT)}",
                limit="all rows of a group go on, or none",
                hint="also give a token, whichever, for rows that have ended",
            )
        return replace(known, input_ids_BT=input_ids_BT)

    def _from_start(self, one: "_Rows") -> "_Rows":
        """Return the same rows with all of their tokens to pass, and an empty cache."""
        all_ids_BT = torch.cat([*one.before, one.input_ids_BT], dim=1)
        return _Rows(
            input_ids_BT=all_ids_BT, cache=self._cached.new_cache(), padding_B=one.padding_B
        )

    def _require_continued(self, cached: Front, whole: Front) -> None:
        if not are_same_ends(cached, whole):
            self._layered.refuse(
                "passes its layers other values for a token with a cache than without one",
                limit=_AS_WHOLE,
            )

    def _unpadded(self, one: "_Rows", row: int) -> "_Rows":
        """Return a row of a new group by itself."""
        assert one.padding_B is not None
        own_ids_1T = one.input_ids_BT[row : row + 1, int(one.padding_B[row]) :]
        return _Rows(input_ids_BT=own_ids_1T, cache=self._cached.new_cache())

    def _require_near(self, found_BV: torch.Tensor, expected_BV: torch.Tensor, than: str) -> None:
        slack = _SLACK if found_BV.dtype.itemsize > 2 else _SLACK_16_BITS
        if not is_near(found_BV.float(), expected_BV.float(), slack):
            self._layered.refuse(f"gives other logits {than}", limit=_AS_WHOLE)

    def _require_same_model(self) -> None:
        """Check that the caches are of the model as it is now."""
        if not self._is_open:
            raise OffloadError(
                "a generation is used after it was closed, or after a pass of it has failed",
                limit="its caches are gone",
                hint="`with engine.generation() as generation:` for another",
            )
        if self._layered.model.training:
            raise OffloadError(
                "a generation is used while the model is in training mode",
                limit="caches are kept for `eval`, where nothing is drawn",
                hint="`model.eval()`",
            )
        if self._state() != self._state_before:
            raise OffloadError(
                "parameters or the adapter changed since the generation began",
                limit="its caches were computed with those of before",
                hint="`with engine.generation() as generation:` for another, after the step",
            )


def _longest_padded(groups: Iterable[_Rows]) -> list[tuple[int, int]]:
    """Return the number of the first new group with padded rows, and of the longest of these."""
    for number, one in enumerate(groups):
        if one.padding_B is not None and not one.num_past:
            lens_B = one.input_ids_BT.shape[1] - one.padding_B
            return [(number, int(torch.where(one.padding_B > 0, lens_B, 0).argmax()))]
    return []


def _tensors(rows: _Rows) -> Iterator[torch.Tensor]:
    """Yield the tensors that rows' caches hold on the device, which may share memory."""
    for layer in rows.cache.layers:
        for name, value in vars(layer).items():
            inside = value.values() if isinstance(value, dict) else [value]
            yield from (x for x in inside if isinstance(x, torch.Tensor) and name not in _SIZES)
