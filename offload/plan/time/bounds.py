"""Lower bounds on the time of a step, in either order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from offload.plan.schedule.residency import NOTHING_SAVED, Saved
from offload.plan.schedule.schedule import (
    NUM_CARRIED,
    NUM_FETCHED,
    NUM_STAGING,
    PIECE_BYTES,
    Ring,
    warm_ring,
)
from offload.plan.time.costs import Costs


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
    sweeps = _Sweeps(
        costs=costs,
        num_micro_batches=num_micro_batches,
        stashed_bytes=stashed_bytes,
        is_staged=is_staged,
        first_graph=len(costs.layers) - num_kept_graphs,
        saved=saved,
    )
    up_s = sweeps.up_s(_ring_between_steps(costs, num_slots) if ring is None else ring)
    return sweeps.end_s(up_s, num_slots) + num_micro_batches * costs.front_backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sweeps:
    """The sweep up to the head and the sweep down from it, at given costs."""

    costs: Costs
    num_micro_batches: int
    stashed_bytes: int
    is_staged: bool
    first_graph: int
    saved: Saved

    @property
    def stashed(self) -> list[int]:
        """The layers whose inputs leave the device."""
        layers = range(min(self.first_graph, len(self.costs.layers) - 1))
        return [i for i in layers if i not in self.saved.graphs] if self.stashed_bytes else []

    def visit_s(self, layer: int) -> float:
        """Time of all micro-batches at a layer on the way up, with its decoding."""
        cost = self.costs.layers[layer]
        return self.num_micro_batches * self.forth_s(layer) + cost.decode_s

    def forth_s(self, layer: int) -> float:
        """Time of one micro-batch at a layer on the way up, with its share of what only scores."""
        forth_s = self.costs.layers[layer].forth_s(
            is_sent=layer in self.saved.leaving, has_graph=layer in self.saved.graphs
        )
        return forth_s + self.costs.scoring_s(layer) if self.costs.num_passes > 1 else forth_s

    def back_s(self, layer: int) -> float:
        """Time of one micro-batch at a layer on the way down."""
        has_output = self.saved.has_output(layer)
        has_graph = layer >= self.first_graph or layer in self.saved.graphs
        return self.costs.layers[layer].back_s(has_graph=has_graph, has_output=has_output)

    def up_s(self, ring: Ring) -> float:
        """Return when the last layer's forward visit ends if no input has to be stashed."""
        costs, num_layers = self.costs, len(self.costs.layers)
        visits_s = [self.visit_s(i) for i in range(num_layers)]
        fronts_s = self.num_micro_batches * costs.fronts_s
        below_s = list(accumulate(visits_s, initial=fronts_s))
        missing, link_s = _missing(ring, num_layers), 0.0
        if not missing:
            return below_s[-1]
        last_s = sum(visits_s[missing[-1] :])
        ends_s = [below_s[-1], self.read_s(missing) + last_s]
        for place, layer in reversed(list(enumerate(missing))):
            link_s += _load_s(costs, layer)
            before = layer - len(ring)  # the layer whose visit holds the slot
            hold_s = below_s[before] + self._hold_s(before) if before >= 0 else 0
            way_s = max(link_s, self.read_s(missing[place:], is_ahead=True))
            ends_s.append(hold_s + way_s + last_s)
        if missing[0] == 0:
            ends_s.append(_load_s(costs, 0) + sum(visits_s))
        updated_s = 0.0
        for layer in missing:  # updates follow one another, each ahead of its load
            updated_s += costs.layers[layer].update_s
            ends_s.append(updated_s + _load_s(costs, layer) + sum(visits_s[layer:]))
        return max(ends_s)

    def leaving_s(self) -> float:
        """Return when the last layer's forward visit ends if only copies to the host delay it.

        The visit after the last one that is stashed overwrites its input; the last visit that sends
        needs the buffer of the one two before it.
        """
        ends_s = [0.0]
        if self.stashed:
            last = self.stashed[-1]
            after_s = self._send_s(last) if last in self.saved.leaving else 0.0
            ends_s.append(self._left_s(last, is_all=True) - after_s + self._above_s(last + 1))
        leaving = sorted(self.saved.leaving)
        if len(leaving) > NUM_CARRIED:
            before, last = leaving[-1 - NUM_CARRIED], leaving[-1]
            ends_s.append(self._left_s(before, is_all=True) + self._above_s(last))
        return max(ends_s)

    def sent_s(self) -> list[float]:
        """Return when the last layer that sends has sent each micro-batch, if only copies delay."""
        last = max(self.saved.leaving)
        left_s = self._left_s(last, is_all=False)
        return [left_s + (m + 1) * self._send_s(last) for m in range(self.num_micro_batches)]

    def _left_s(self, layer: int, *, is_all: bool) -> float:
        """Return when all below a layer has left the device, and with `is_all` the layer's too."""
        costs = self.costs
        stash_s = costs.h2d_latency_s + self.stashed_bytes / costs.d2h_bytes_per_s
        sends_s = sum(self._send_s(i) for i in self.saved.leaving if i < layer + is_all)
        num_stashed = sum(i < layer + is_all for i in self.stashed)
        return costs.front_s + self.num_micro_batches * (num_stashed * stash_s + sends_s)

    def _above_s(self, layer: int) -> float:
        """Return the time from the last micro-batch's visit of a layer to the end of all visits."""
        above = range(layer + 1, len(self.costs.layers))
        return self.forth_s(layer) + sum(map(self.visit_s, above))

    def end_s(self, up_s: float, num_slots: int) -> float:
        """Return the earliest end of the first layer's backward visit."""
        costs, num_layers = self.costs, len(self.costs.layers)
        stashed, leaving = frozenset(self.stashed), self.saved.leaving
        top_s = max(up_s, self.leaving_s())
        fetch_s = costs.h2d_latency_s + self.stashed_bytes / costs.fetch_bytes_per_s
        now_s, link_s = top_s + self.num_micro_batches * costs.tails_s + costs.objective_s, 0.0
        free_s, at_once = [0.0] * num_layers, [0.0] * self.num_micro_batches
        done_s = [at_once] * NUM_FETCHED
        carried_s = [self.sent_s() if leaving else at_once] * NUM_CARRIED
        for layer in reversed(range(num_layers)):
            cost = costs.layers[layer]
            if layer + num_slots < num_layers:
                link_s = max(link_s, free_s[layer + num_slots]) + _load_s(costs, layer)
                now_s = max(now_s, link_s)
            now_s += cost.decode_s
            free_s[layer] = now_s
            if layer == num_layers - 1:  # it is still decoded
                now_s -= cost.decode_s
                free_s[layer] = up_s - self.num_micro_batches * self.forth_s(layer)
            one_s = self.back_s(layer)
            is_stashed, is_sent = layer in stashed, layer in leaving
            if is_stashed or is_sent:
                ends_s = []
                return_s = self._return_s(layer) if is_sent else 0.0
                # a plan asks for thousands of bounds: comparisons take half as long as `max`
                for was_done_s, was_carried_s in zip(done_s[0], carried_s[0], strict=True):
                    if is_stashed:  # to a buffer, once it is free
                        link_s = (link_s if link_s > was_done_s else was_done_s) + fetch_s
                    if is_sent:
                        link_s = (link_s if link_s > was_carried_s else was_carried_s) + return_s
                    now_s = (now_s if now_s > link_s else link_s) + one_s
                    ends_s.append(now_s)
                done_s = [*done_s[1:], ends_s] if is_stashed else done_s
                carried_s = [*carried_s[1:], ends_s] if is_sent else carried_s
            else:
                now_s += self.num_micro_batches * one_s
            if not cost.decode_s:
                free_s[layer] = now_s
        loaded = range(num_layers - num_slots)
        if loaded:
            read_s = self.read_s(loaded, is_ahead=True)
            first_s = self.num_micro_batches * self.back_s(0)
            now_s = max(now_s, free_s[-1] + read_s + costs.layers[0].decode_s + first_s)
        return now_s

    def read_s(self, layers: Sequence[int], *, is_ahead: bool = False) -> float:
        """Return the least time to read these layers into staging buffers.

        Args:
            layers: Which layers.
            is_ahead: Whether all buffers may already be full at the start.
        """
        if not self.is_staged:
            return 0.0
        sizes = [self.costs.layers[layer].weight_bytes for layer in layers]
        ahead = NUM_STAGING * min(PIECE_BYTES, max(sizes, default=0)) if is_ahead else 0
        return max(0, sum(sizes) - ahead) / self.costs.read_bytes_per_s

    def _send_s(self, layer: int) -> float:
        num_bytes, costs = self.saved.sent_bytes(layer)[0], self.costs
        return costs.h2d_latency_s + num_bytes / costs.d2h_bytes_per_s

    def _return_s(self, layer: int) -> float:
        num_bytes, costs = self.saved.sent_bytes(layer)[0], self.costs
        return costs.h2d_latency_s + num_bytes / costs.fetch_bytes_per_s

    def _hold_s(self, layer: int) -> float:
        """How long a layer holds its slot: until it is decoded, or else for its visit upwards."""
        return self.costs.layers[layer].decode_s or self.visit_s(layer)


def _ring_between_steps(costs: Costs, num_slots: int) -> Ring:
    """Return what the slots hold after a step: no layer that is updated on the host."""
    updated = {number for number, layer in enumerate(costs.layers) if layer.update_s}
    return tuple(None if layer in updated else layer for layer in warm_ring(num_slots))


def _missing(ring: Ring, num_layers: int) -> list[int]:
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


def usual_order_bound_s(costs: Costs, *, num_slots: int, num_micro_batches: int) -> float:
    """Return the bound on a micro-batch-major step: each micro-batch passes through all layers."""
    upwards_s, downwards_s = _sweep_load_s(costs, num_slots)
    return num_micro_batches * (
        max(sum(c.forward_s + c.decode_s for c in costs.layers), upwards_s)
        + costs.front_s
        + costs.tail_s
        + costs.front_backward_s
        + max(sum(c.backward_s + c.decode_s for c in costs.layers), downwards_s)
    )


def _sweep_load_s(costs: Costs, num_slots: int) -> tuple[float, float]:
    num_loads = max(0, len(costs.layers) - num_slots)
    loads = [_load_s(costs, i) for i in range(len(costs.layers))]
    return sum(loads[len(loads) - num_loads :]), sum(loads[:num_loads])
