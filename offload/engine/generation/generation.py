"""Generation with a key-value cache: each new token is one pass over the layers for all rows.

Rows of the same length are a *group*: they are computed together, without padding, with a cache of
their own. All groups pass through a layer while its weights are in their slot, so a pass loads at
most L - C layers, however many rows there are. A group's first tokens are its prompts; then each
pass is given the one token that continues each row. The caches stay on the compute device.

What a group computes is what plain transformers computes for the same rows with the same cache, to
the bit, whatever other groups share the pass.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from offload.engine.batch import Batch, Vocabulary, checked_batch, to_device
from offload.engine.closeness import is_near
from offload.engine.generation.cached_model import CachedModel, Held, are_same_ends
from offload.engine.model.layers import Front, LayeredModel
from offload.errors import OffloadError
from offload.plan.schedule.schedule import Schedule

if TYPE_CHECKING:
    from transformers import DynamicCache

Ready = Callable[[Batch, int], AbstractContextManager[Schedule]]
"""Checks the model for such inputs, and yields the schedule of a pass for a number of groups."""
Compute = Callable[
    [Schedule, Callable[[int], Front], Callable[[torch.Tensor], torch.Tensor]],
    dict[int, torch.Tensor],
]
"""Runs a pass: its schedule, the front of each group, and what follows the last layer."""

_SLACK, _SLACK_16_BITS = 0.01, 0.25  # of the norm: an error of a cache is larger, rounding smaller
_SIZES = ("_sliding_window_tensor",)  # of a cache, and no part of what it keeps
_AS_WHOLE = "a token is computed as in a pass over its whole row"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Rows of one length, and what is kept of them.

    Attributes:
        input_ids_BT: The tokens of the newest pass.
        cache: Of the tokens before them.
        num_past: How many tokens of each row these are.
        before: They themselves, as long as they are still needed: until a pass over a whole row was
            compared with one that continues it, or while LongRoPE may still change frequencies.
    """

    input_ids_BT: torch.Tensor
    cache: "DynamicCache"
    num_past: int = 0
    before: tuple[torch.Tensor, ...] = ()

    def passed(self, *, is_kept: bool) -> "_Rows":
        """Return the rows after a pass over their tokens."""
        num_past = self.num_past + self.input_ids_BT.shape[1]
        before = (*self.before, self.input_ids_BT) if is_kept else ()
        return replace(self, num_past=num_past, before=before)


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

    @property
    def cache_bytes(self) -> int:
        """What the caches take on the device."""
        storages = [x.untyped_storage() for one in self._groups.values() for x in _tensors(one)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def next_logits(self, tokens: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run one pass over the layers, and return the logits of the token that comes next.

        Args:
            tokens: By group, the tokens that continue its rows, (B, T): of a new group its prompts,
                all of one length; of a group that has a cache mostly one token of each row. Groups
                that are not named wait.

        Returns:
            Logits (B, V) by group, on the compute device.

        Raises:
            UnsupportedModelError: The model keeps something outside its cache.
            OffloadError: Tokens are invalid, the model is in training mode, a pass has failed, or
                parameters were written to since the first pass.
        """
        self._require_same_model()
        rows = {group: self._grown(group, tokens[group]) for group in tokens}
        tried = [n for n, one in enumerate(rows.values()) if one.before and not self._is_continued]
        again = [self._from_start(list(rows.values())[n]) for n in tried[:1]]
        passed = [*rows.values(), *again]
        if not passed:
            return {}
        fronts: dict[int, Front] = {}
        held: list[Held] = []

        def front(number: int) -> Front:
            one = passed[number]
            if not (self._is_tried or held):
                self._cached.begin(one.input_ids_BT[:1])
                held.append(self._cached.held())
            found = self._cached.front(one.input_ids_BT, one.cache, num_past=one.num_past)
            if again:
                fronts[number] = found
            return found

        try:
            with self._ready({"input_ids": passed[0].input_ids_BT}, len(passed)) as schedule:
                if not self._is_tried:  # the inspection before it tries other values of B
                    self._state_before = self._state()
                logits = self._compute(schedule, front, self._cached.logits)
            for before in held:
                self._cached.require_held(before)
            if again:
                self._require_continued(fronts[tried[0]], fronts[len(rows)])
                self._require_near(logits[tried[0]], logits[len(rows)])
                self._is_continued = True
        except BaseException:
            self.close()  # some layers have written to the caches, and others not
            raise
        self._is_tried = True
        for group, one in rows.items():
            num_past = one.num_past + one.input_ids_BT.shape[1]
            may_switch = self._layered.rotary.switches(num_past, sys.maxsize)
            self._groups[group] = one.passed(is_kept=may_switch or not self._is_continued)
        self.num_loads += schedule.num_loads
        return {group: logits[number] for number, group in enumerate(rows)}

    def _grown(self, group: int, tokens_BT: torch.Tensor) -> "_Rows":
        """Return a group's rows with the tokens of a pass, from the start where keys are stale.

        A cache keeps rotated keys: where a row grows past LongRoPE's original length, those of its
        first tokens are computed anew, as in the `generate` of the models published with it.
        """
        one = self._rows(group, tokens_BT)
        num_after = one.num_past + tokens_BT.shape[1]
        if not (one.num_past and self._layered.rotary.switches(one.num_past, num_after)):
            return one
        self._groups.pop(group)  # or its cache would take memory next to the new one
        return self._from_start(one)

    def _rows(self, group: int, tokens_BT: torch.Tensor) -> "_Rows":
        """Return a group's rows with the tokens of a pass.

        Raises:
            OffloadError: The tokens are invalid, or of another number of rows.
        """
        batch = checked_batch({"input_ids": tokens_BT}, self._vocabulary, f"group {group}")
        input_ids_BT = to_device(batch, self._torch_device)["input_ids"]
        known = self._groups.get(group)
        if known is None:
            return _Rows(input_ids_BT=input_ids_BT, cache=self._cached.new_cache())
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
        return _Rows(input_ids_BT=all_ids_BT, cache=self._cached.new_cache())

    def _require_continued(self, cached: Front, whole: Front) -> None:
        if not are_same_ends(cached, whole):
            self._layered.refuse(
                "passes its layers other values for a token with a cache than without one",
                limit=_AS_WHOLE,
            )

    def _require_near(self, cached_BV: torch.Tensor, whole_BV: torch.Tensor) -> None:
        slack = _SLACK if cached_BV.dtype.itemsize > 2 else _SLACK_16_BITS
        if not is_near(cached_BV.float(), whole_BV.float(), slack):
            self._layered.refuse(
                "gives other logits with a cache than without one", limit=_AS_WHOLE
            )

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
        if self._is_tried and self._state() != self._state_before:
            raise OffloadError(
                "parameters or the adapter changed since the generation began",
                limit="its caches were computed with those of before",
                hint="`with engine.generation() as generation:` for another, after the step",
            )


def _tensors(rows: _Rows) -> Iterator[torch.Tensor]:
    """Yield the tensors that rows' caches hold on the device, which may share memory."""
    for layer in rows.cache.layers:
        for name, value in vars(layer).items():
            inside = value.values() if isinstance(value, dict) else [value]
            yield from (x for x in inside if isinstance(x, torch.Tensor) and name not in _SIZES)
