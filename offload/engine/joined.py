"""One pass over the layers for generations with several adapters.

A generation keeps caches of rows under one adapter. All groups of several generations pass a layer
while its weights are in their slot, each switched to its own adapter for its visit. So the loads of
a pass depend neither on the groups nor on the adapters, and each group computes what it computes in
a pass of its own generation, to the bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from offload.engine.engine import Engine
from offload.engine.generation import CachedModel, Generation
from offload.engine.model.layers import Front


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What of one generation is to be computed."""

    adapter: str  # the adapter with which it began
    generation: Generation  # begun within `Engine.using` of this adapter
    tokens: Mapping[int, torch.Tensor]  # as `Generation.next_logits` takes them, of some group


def joined_logits(engine: Engine, asked: Sequence[Asked]) -> list[dict[int, torch.Tensor]]:
    """Run one pass over the layers; return for each generation what its `next_logits` would.

    Args:
        engine: The generations' own.
        asked: Each of a generation of its own.

    Raises:
        UnsupportedModelError: As for `Generation.next_logits`; all are closed.
        OffloadError: As there; if tokens are invalid, no cache was written to.
    """
    begun = []
    for one in asked:
        with engine.using(one.adapter):
            begun.append(one.generation.begin(one.tokens))
            inputs = [{"input_ids": rows.input_ids_BT} for rows in begun[-1].passed]
            engine._require_usable()
            engine._inspect(inputs, has_labels=False)
    places = [(i, n) for i, one in enumerate(begun) for n in range(len(one.passed))]
    models = [(asked[i].adapter, engine._switched(asked[i].adapter)) for i, _ in places]

    def front(number: int) -> Front:
        i, n = places[number]
        return begun[i].front(n)

    try:
        engine._bring_up_to_date()
        with engine._pass(len(places)) as schedule:
            logits = engine._bound.executor.compute(
                schedule, front, CachedModel(engine._layered).logits, models=models
            )
        by_generation: list[dict[int, torch.Tensor]] = [{} for _ in asked]
        for number, (i, n) in enumerate(places):
            by_generation[i][n] = logits[number]
        ended = zip(asked, begun, by_generation, strict=True)
        return [one.generation.end(given, found, schedule.num_loads) for one, given, found in ended]
    except BaseException:
        for one in asked:
            one.generation.close()  # some layers have written to the caches, and others not
        raise
