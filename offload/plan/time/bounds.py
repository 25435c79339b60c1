"""Lower bounds on the time of a step, in either order."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from offload.plan.schedule.schedule import (
    NOTHING_SAVED,
    NUM_CARRIED,
    NUM_FETCHED,
    NUM_STAGING,
    PIECE_BYTES,
    Ring,
    Saved,
    head_slots,
    held_at_turn,
)
from offload.plan.time.costs import Costs

_Ends = tuple[float, float]
"""When a visit ends for its first and for its last micro-batch."""
_AT_ONCE = (0.0, 0.0)


def r3_bound_s(
    costs: Costs,
    *,
    num_slots: int,
    num_micro_batches: int,
    stashed_bytes: int = 0,
    num_kept_graphs: int = 0,
    saved: Saved = NOTHING_SAVED,
    ring: Ring | None = None,
    is_staged: bool = False,
) -> float:
    """Return R3, a lower bound on the time of a layer-major step, without the optimizer.

    Each sweep takes the longer of its visits and its loads. Before and after a warm ring's loads
    there is one visit each during which nothing can be loaded. The slot of an encoded layer is free
    once it is decoded: the loads upwards begin after the first decoding, and the first load
    downwards after that of the last layer, which is decoded once for both of its visits. On the way
    down visits have two durations, with a kept graph and without, so each load is followed
    individually: it waits for its slot and for the load before it. A step of equal layers takes
    exactly this long, whatever the rates.

    Layers that are updated on the host are so one after the other, each before its load.
    A head in host memory is copied after the loads of the way up, over each slot as soon as that is
    free; the layers under it are loaded again on the way down.

    Stashed inputs leave one after the other. They come back between the loads, each as soon as the
    visit two before its own has released the buffer. So do sent graphs and attention outputs; the
    first to come back is the last that left, and a visit upwards packs its own into the buffer that
    the one two before it has left.

    Args:
        costs: Of the ops.
        num_slots: Layers on the device at a time, at most all.
        num_micro_batches: Micro-batches of the step.
        stashed_bytes: Of one micro-batch's layer input, if inputs are stashed in host memory.
        num_kept_graphs: How many layers, the last ones, are not checkpointed.
        saved: What the other layers keep or send.
        ring: What the slots hold at the start; None is the ring after a training step.
        is_staged: Whether loads pass through staging buffers, filled from memory or from disk.
    """
    step = StepBound.of(
        costs,
        num_micro_batches=num_micro_batches,
        stashed_bytes=stashed_bytes,
        is_staged=is_staged,
    )
    return step.bound_s(num_slots, num_kept_graphs=num_kept_graphs, saved=saved, ring=ring)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBound:
    """R3 for steps that differ only in what stays on the device; see `r3_bound_s`.

    A search asks for thousands of bounds at the same costs, so what they share is computed once.
    """

    costs: Costs  # the prices of the ops
    num_micro_batches: int  # micro-batches of the step
    # Bytes of one micro-batch's layer input, if inputs are stashed in host memory.
    stashed_bytes: int
    is_staged: bool  # whether loads pass through staging buffers
    loads_s: tuple[float, ...]  # seconds on the link, by layer
    # Seconds of one micro-batch on the way up, by layer, where nothing is sent; with its share of
    # what only scores.
    forth_s: tuple[float, ...]
    # Seconds of one micro-batch on the way down, by layer, with its recompute.
    back_s: tuple[float, ...]
    # Seconds of one micro-batch on the way down, by layer, without its recompute.
    graph_back_s: tuple[float, ...]
    decodes_s: tuple[float, ...]  # seconds of decoding each layer
    host_updates_s: tuple[float, ...]  # seconds of updating each layer on the host
    fetch_s: float  # seconds of copying one micro-batch's input back to the device

    @classmethod
    def of(
        cls, costs: Costs, *, num_micro_batches: int, stashed_bytes: int, is_staged: bool
    ) -> "StepBound":
        """Compute what steps at these costs share."""
        return cls(
            costs=costs,
            num_micro_batches=num_micro_batches,
            stashed_bytes=stashed_bytes,
            is_staged=is_staged,
            loads_s=tuple(_load_s(costs, layer) for layer in range(len(costs.layers))),
            forth_s=tuple(
                cost.forth_s(is_sent=False) + costs.scoring_s(layer)
                for layer, cost in enumerate(costs.layers)
            ),
            back_s=tuple(cost.back_s(has_graph=False) for cost in costs.layers),
            graph_back_s=tuple(cost.back_s(has_graph=True) for cost in costs.layers),
            decodes_s=tuple(cost.decode_s for cost in costs.layers),
            host_updates_s=tuple(cost.update_s for cost in costs.layers),
            fetch_s=costs.h2d_latency_s + stashed_bytes / costs.fetch_bytes_per_s,
        )

    def bound_s(
        self, num_slots: int, *, num_kept_graphs: int, saved: Saved, ring: Ring | None = None
    ) -> float:
        """Return the bound with this on the device; arguments as of `r3_bound_s`."""
        costs, num_layers = self.costs, len(self.costs.layers)
        sweeps = _Sweeps.of(self, first_graph=num_layers - num_kept_graphs, saved=saved)
        if ring is None:  # after a step: no layer that is updated in the next
            updated = {i for i, layer in enumerate(costs.layers) if layer.update_s}
            ring = tuple(None if i in updated else i for i in range(num_slots))
        up_s, loaded = sweeps.up_s(ring)
        sizes = [layer.weight_bytes for layer in costs.layers]
        slots = head_slots(sizes, num_slots, costs.head_bytes)
        covered = [held_at_turn(num_layers, num_slots, slot) for slot in slots]
        turn_s = max(up_s, sweeps.head_s(covered, up_s, loaded))
        end_s = sweeps.end_s(up_s, turn_s, num_slots, frozenset(covered))
        return end_s + self.num_micro_batches * costs.front_backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sweeps:
    """The sweep up to the head and the sweep down from it, with this on the device."""

    step: StepBound  # what does not depend on it
    leaving: frozenset[int]  # the layers that send anything
    stashed: Sequence[int]  # the layers whose inputs leave the device, in order
    # Seconds of copying what each layer sends of one micro-batch, for those that send anything.
    send_s: Mapping[int, float]
    # Seconds of copying back what each layer sends of one micro-batch.
    return_s: Mapping[int, float]
    forth_s: Sequence[float]  # seconds of one micro-batch at each layer on the way up
    back_s: Sequence[float]  # seconds of one micro-batch at each layer on the way down
    # Seconds of all micro-batches at each layer on the way up, with its decoding.
    visits_s: Sequence[float]

    @classmethod
    def of(cls, step: StepBound, *, first_graph: int, saved: Saved) -> "_Sweeps":
        """Compute the visits of a step in which the layers from this one on keep their graphs."""
        layers, leaving, num = step.costs.layers, saved.leaving, step.num_micro_batches
        forth_s, back_s = list(step.forth_s), list(step.back_s)
        for layer in leaving:
            has_graph = layer in saved.graphs
            forth_s[layer] = layers[layer].forth_s(is_sent=True, has_graph=has_graph)
            forth_s[layer] += step.costs.scoring_s(layer)
        for layer in saved.kept | saved.sent:
            back_s[layer] = layers[layer].back_s(has_graph=False, has_output=True)
        for layer in saved.graphs:
            back_s[layer] = step.graph_back_s[layer]
        back_s[first_graph:] = step.graph_back_s[first_graph:]
        costs = step.costs
        sizes = {layer: saved.sent_bytes(layer) for layer in leaving}
        sent_bytes = {layer: sum(each) // len(each) for layer, each in sizes.items()}
        below = range(min(first_graph, len(layers) - 1)) if step.stashed_bytes else range(0)
        return cls(
            step=step,
            leaving=leaving,
            stashed=[i for i in below if i not in saved.graphs] if saved.graphs else below,
            send_s={
                layer: costs.h2d_latency_s + num_bytes / costs.d2h_bytes_per_s
                for layer, num_bytes in sent_bytes.items()
            },
            return_s={
                layer: costs.h2d_latency_s + num_bytes / costs.fetch_bytes_per_s
                for layer, num_bytes in sent_bytes.items()
            },
            forth_s=forth_s,
            back_s=back_s,
            visits_s=[
                num * one_s + decode_s
                for one_s, decode_s in zip(forth_s, step.decodes_s, strict=True)
            ],
        )

    def up_s(self, ring: Ring) -> tuple[float, tuple[int, float]]:
        """Return when the last layer's forward visit ends if no input has to be stashed.

        And which layer is loaded last before it, and when its load ends; 0 if there is none.
        """
        step, visits_s = self.step, self.visits_s
        fronts_s = step.num_micro_batches * step.costs.fronts_s
        below_s = list(accumulate(visits_s, initial=fronts_s))
        missing, link_s = _missing(ring, len(visits_s)), 0.0
        if not missing:
            return below_s[-1], (0, 0.0)
        last_s = sum(visits_s[missing[-1] :])
        ends_s = [below_s[-1], self.read_s(missing) + last_s]
        num_slots, decodes_s, arrived_s = len(ring), step.decodes_s, 0.0
        for place, layer in reversed(list(enumerate(missing))):
            link_s += step.loads_s[layer]
            before = layer - num_slots  # the layer whose visit holds the slot until it is decoded
            hold_s = 0.0
            if before >= 0:
                hold_s = below_s[before] + (decodes_s[before] or visits_s[before])
            way_s = link_s
            if step.is_staged:
                way_s = max(link_s, self.read_s(missing[place:], is_ahead=True))
            arrived_s = max(arrived_s, hold_s + way_s)
        ends_s.append(arrived_s + last_s)
        if missing[0] == 0:
            ends_s.append(step.loads_s[0] + sum(visits_s))
        updated_s = latest_s = 0.0
        for layer in missing:  # updates follow one another, each ahead of its load
            updated_s += step.host_updates_s[layer]
            loaded_s = updated_s + step.loads_s[layer]
            if loaded_s > latest_s:  # or one with more visits after it was loaded as late
                latest_s = loaded_s
                ends_s.append(loaded_s + sum(visits_s[layer:]))
        return max(ends_s), (missing[-1], max(arrived_s, latest_s))

    def head_s(self, covered: Sequence[int], up_s: float, loaded: tuple[int, float]) -> float:
        """Return when the head has been copied over slots; 0 if it is on the device.

        Args:
            covered: The layers that are in its slots, in their order.
            up_s: When the last layer's forward visit ends.
            loaded: The layer that is loaded last before it, and when its load ends.
        """
        if not covered:
            return 0.0
        step, costs, visits_s = self.step, self.step.costs, self.visits_s
        below_s = list(accumulate(visits_s, initial=step.num_micro_batches * costs.fronts_s))
        slot_bytes, (last, end_s) = max(layer.weight_bytes for layer in costs.layers), loaded
        for number, layer in enumerate(covered):
            is_last = number == len(covered) - 1
            left = costs.head_bytes - number * slot_bytes
            num_bytes = left if is_last else slot_bytes
            latency_s = math.ceil(num_bytes / PIECE_BYTES) * costs.h2d_latency_s
            begun_s = below_s[layer]
            if layer >= last:  # from there on no visit waits
                begun_s = max(begun_s, up_s - sum(visits_s[layer:]))
            freed_s = begun_s + (step.decodes_s[layer] or visits_s[layer])
            end_s = max(end_s, freed_s) + latency_s + num_bytes / costs.fetch_bytes_per_s
        return end_s

    def leaving_s(self) -> float:
        """Return when the last layer's forward visit ends if only copies to the host delay it.

        The visit after the last one that is stashed overwrites its input; the last visit that sends
        needs the buffer of the one two before it.
        """
        ends_s = [0.0]
        if self.stashed:
            last = self.stashed[-1]
            after_s = self.send_s[last] if last in self.leaving else 0.0
            ends_s.append(self._left_s(last, is_all=True) - after_s + self._above_s(last + 1))
        if len(self.leaving) > NUM_CARRIED:
            leaving = sorted(self.leaving)
            before, last = leaving[-1 - NUM_CARRIED], leaving[-1]
            ends_s.append(self._left_s(before, is_all=True) + self._above_s(last))
        return max(ends_s)

    def sent_s(self) -> tuple[float, float]:
        """Return when the last layer that sends has sent its first and its last micro-batch.

        That is if only copies delay it.
        """
        last = max(self.leaving)
        left_s = self._left_s(last, is_all=False)
        send_s = self.send_s[last]
        return left_s + send_s, left_s + self.step.num_micro_batches * send_s

    def _left_s(self, layer: int, *, is_all: bool) -> float:
        """Return when all below a layer has left the device, and with `is_all` the layer's too."""
        step, costs = self.step, self.step.costs
        stash_s = costs.h2d_latency_s + step.stashed_bytes / costs.d2h_bytes_per_s
        sends_s = sum([self.send_s[i] for i in self.leaving if i < layer + is_all])
        num_stashed = bisect_left(self.stashed, layer + is_all)
        return costs.front_s + step.num_micro_batches * (num_stashed * stash_s + sends_s)

    def _above_s(self, layer: int) -> float:
        """Return the time from the last micro-batch's visit of a layer to the end of all visits."""
        return self.forth_s[layer] + sum(self.visits_s[layer + 1 :])

    def end_s(self, up_s: float, turn_s: float, num_slots: int, covered: frozenset[int]) -> float:
        """Return the earliest end of the first layer's backward visit.

        From `turn_s` on the head may compute, over the slots of the covered layers. Of a visit the
        first and the last micro-batch are enough; see `simulate.merged_s`.
        """
        step, num_layers, back_s = self.step, len(self.visits_s), self.back_s
        loads_s, decodes_s, num = step.loads_s, step.decodes_s, step.num_micro_batches
        stashed, leaving = frozenset(self.stashed), self.leaving
        tails_s = num * step.costs.tails_s + step.costs.objective_s
        now_s, link_s = max(turn_s, self.leaving_s()) + tails_s, 0.0
        after_s = now_s
        free_s = [0.0] * num_layers
        done_s = [_AT_ONCE] * NUM_FETCHED
        carried_s = [self.sent_s() if leaving else _AT_ONCE] * NUM_CARRIED
        for layer in reversed(range(num_layers)):
            decode_s, one_s = decodes_s[layer], back_s[layer]
            is_last = layer == num_layers - 1
            if layer + num_slots < num_layers or (layer in covered and not (is_last and decode_s)):
                above = layer + num_slots  # the layer that is in its slot before it
                freed_s = free_s[above] if above < num_layers else after_s
                link_s = (link_s if link_s > freed_s else freed_s) + loads_s[layer]
                now_s = now_s if now_s > link_s else link_s
            now_s += decode_s
            free_s[layer] = now_s
            if is_last:  # it is still decoded
                now_s -= decode_s
                free_s[layer] = after_s if covered else up_s - num * self.forth_s[layer]
            is_stashed, is_sent = layer in stashed, layer in leaving
            if is_stashed or is_sent:
                copy_s, first_free_s, last_free_s = self._copies_back(
                    layer, done_s[0] if is_stashed else None, carried_s[0] if is_sent else None
                )
                copied_s = (link_s if link_s > first_free_s else first_free_s) + copy_s
                link_s = max(copied_s + (num - 1) * copy_s, last_free_s + copy_s)
                first_s = (now_s if now_s > copied_s else copied_s) + one_s
                now_s = max(first_s + (num - 1) * one_s, link_s + one_s)
                done_s = [*done_s[1:], (first_s, now_s)] if is_stashed else done_s
                carried_s = [*carried_s[1:], (first_s, now_s)] if is_sent else carried_s
            else:
                now_s += num * one_s
            if not decode_s:
                free_s[layer] = now_s
        loaded = range(num_layers - num_slots)
        if loaded:
            read_s = self.read_s(loaded, is_ahead=True)
            first_s = num * self.back_s[0]
            now_s = max(now_s, free_s[-1] + read_s + decodes_s[0] + first_s)
        return now_s

    def read_s(self, layers: Sequence[int], *, is_ahead: bool = False) -> float:
        """Return the least time to read these layers into staging buffers.

        Args:
            layers: Which layers.
            is_ahead: Whether all buffers may already be full at the start.
        """
        if not self.step.is_staged:
            return 0.0
        costs = self.step.costs
        sizes = [costs.layers[layer].weight_bytes for layer in layers]
        ahead = NUM_STAGING * min(PIECE_BYTES, max(sizes, default=0)) if is_ahead else 0
        return max(0, sum(sizes) - ahead) / costs.read_bytes_per_s

    def _copies_back(
        self, layer: int, done_s: _Ends | None, carried_s: _Ends | None
    ) -> tuple[float, float, float]:
        """Return how long the copies for one micro-batch's backward visit take, and when they may.

        Args:
            layer: The layer.
            done_s: When the buffers of its inputs are free; None if they are not stashed.
            carried_s: When those of what it sends are free; None if it sends nothing.

        Returns:
            The time of one micro-batch's copies, and when those of the first and of the last may
            begin. A return follows the fetch on the same lane, so it waits for less.
        """
        if done_s is None:
            copy_s, (first_s, last_s) = 0.0, _AT_ONCE
        else:
            copy_s, (first_s, last_s) = self.step.fetch_s, done_s
        if carried_s is not None:
            first_s = max(first_s, carried_s[0] - copy_s)
            last_s = max(last_s, carried_s[1] - copy_s)
            copy_s += self.return_s[layer]
        return copy_s, first_s, last_s


@lru_cache(maxsize=2**10)
def _missing(ring: Ring, num_layers: int) -> Sequence[int]:
    """Return the layers that a sweep up has to load."""
    held, missing = list(ring), []
    for layer in range(num_layers):
        slot = layer % len(held)
        if held[slot] != layer:
            held[slot] = layer
            missing.append(layer)
    return missing


def _load_s(costs: Costs, layer: int) -> float:
    """Return the time of a layer's pieces on the link."""
    num_more = max(0, math.ceil(costs.layers[layer].weight_bytes / PIECE_BYTES) - 1)
    return costs.load_s(layer) + num_more * costs.h2d_latency_s
