"""An engine whose adapters come and go, and one pass over the layers for several of them.

A generation keeps caches of rows under one adapter. All groups of several generations pass a layer
while its weights are in their slot, each switched to its own adapter for its visit. So the loads of
a pass depend neither on the groups nor on the adapters, and each group computes what it computes in
a pass of its own generation, to the bit.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from offload.engine.batch import Vocabulary
from offload.engine.engine import Engine
from offload.engine.generation import CachedModel, Generation
from offload.engine.model import placement
from offload.engine.model.layers import Front, modules_outside
from offload.engine.safety.attached import Attached
from offload.errors import OffloadError


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What of one generation is to be computed."""

    adapter: str  # the adapter with which it began
    generation: Generation  # begun within `Engine.using` of this adapter
    tokens: Mapping[int, torch.Tensor]  # as `Generation.next_logits` takes them, of some group


class SharedEngine(Engine):
    """An engine for `offload.engine.adapters.Adapters`."""

    @property
    def model(self) -> Any:
        """The model as attached, of peft."""
        return cast("Any", self._model)

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens that the model knows."""
        return self._vocabulary

    def require_adapters_alone(self) -> None:
        """Check that what trains is all on the device, and that no graph is sent to the host.

        Raises:
            OffloadError: It is not.
        """
        if self._masters or self._options.num_sent_graphs:
            what = "weights of the layers train" if self._masters else "graphs of layers wait"
            raise OffloadError(
                f"{what} on the host",
                limit="adapters that come and go train alone, on the device",
                hint='`trained_weights="device"` and `sent_graphs=0`',
            )

    @contextmanager
    def changing(self, settle: Callable[[Any], object]) -> Iterator[None]:
        """Let modules that hold adapters change in a block; then the engine knows them anew.

        peft draws initial values from torch's generator, and changes which adapters train.

        Args:
            settle: Called with the model after the block, before the engine looks at it.

        Raises:
            OffloadError: A pass runs, or the model has changed before.
        """
        self._require_usable()
        self._attached.require_unchanged()
        if self._seal.is_open_here or self._bound.executor.adapter is not None:
            raise OffloadError(
                "adapters are changed while the engine computes, or within `engine.using`",
                limit="a pass computes with the adapters that it began with",
                hint="wait for the pass, or leave the block",
            )
        with self._seal.opened():  # no other thread runs a pass
            trains = [(one, one.requires_grad) for one in self._model.parameters()]
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of peft: several adapters, tied weights
                yield
        finally:
            for parameter, is_trained in trains:
                if parameter.requires_grad != is_trained:
                    parameter.requires_grad_(is_trained)
            settle(self._model)
            layered = self._layered
            layered.around = modules_outside(layered.model, layered.layers)
            self._attached = Attached(self._model, layered, self._masters)
            self._trains_front = placement.trains_front(layered)
            self._switched.cache_clear()

    def forget(self, adapter: str) -> None:
        """Forget what checks have found out about an adapter that was removed."""
        verdict = self._layered.verdict
        self._layered.verdict = replace(
            verdict,
            sizes={case: size for case, size in verdict.sizes.items() if case[0][0] != adapter},
            allowed={mode: one for mode, one in verdict.allowed.items() if mode[0] != adapter},
        )

    def know_alike(self, adapter: str, *, like: str) -> None:
        """Let what checks have found out about an adapter hold for one with the same settings."""
        verdict = self._layered.verdict
        sizes, allowed = dict(verdict.sizes), dict(verdict.allowed)
        for ((name, is_training), has_labels, inputs), size in verdict.sizes.items():
            if name == like:
                sizes[(adapter, is_training), has_labels, inputs] = size
        for (name, is_training), found in verdict.allowed.items():
            if name == like:
                allowed[adapter, is_training] = found
        self._layered.verdict = replace(verdict, sizes=sizes, allowed=allowed)

    def joined_logits(self, asked: Sequence[Asked]) -> list[dict[int, torch.Tensor]]:
        """Run one pass over the layers; return for each generation what its `next_logits` would.

        Args:
            asked: Each of a generation of its own.

        Raises:
            UnsupportedModelError: As for `Generation.next_logits`; all are closed.
            OffloadError: One of them is refused; if tokens are invalid, no cache was written to.
        """
        begun = []
        for one in asked:
            with self.using(one.adapter):
                begun.append(one.generation.begin(one.tokens))
                inputs = [{"input_ids": rows.input_ids_BT} for rows in begun[-1].passed]
                self._require_usable()
                self._inspect(inputs, has_labels=False)
        places = [(i, n) for i, one in enumerate(begun) for n in range(len(one.passed))]
        models = [(asked[i].adapter, self._switched(asked[i].adapter)) for i, _ in places]

        def front(number: int) -> Front:
            i, n = places[number]
            return begun[i].front(n)

        try:
            self._bring_up_to_date()
            with self._pass(len(places)) as schedule:
                logits = self._bound.executor.compute(
                    schedule, front, CachedModel(self._layered).logits, models=models
                )
            of_each: list[dict[int, torch.Tensor]] = [{} for _ in asked]
            for number, (i, n) in enumerate(places):
                of_each[i][n] = logits[number]
            ended = zip(asked, begun, of_each, strict=True)
            return [
                one.generation.end(given, found, schedule.num_loads) for one, given, found in ended
            ]
        except BaseException:
            for one in asked:
                one.generation.close()  # some layers have written to the caches, and others not
            raise
