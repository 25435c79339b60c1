"""What a step cannot be faster than, in either order, and from where on streaming is free."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offload.plan.costs import Costs
from offload.plan.facts import ModelFacts
from offload.plan.machine import Machine
from offload.plan.schedule import NUM_FETCHED, NUM_STAGING, PIECE_BYTES, Ring, warm_ring


def r3_bound_s(
    costs: Costs,
    *,
    num_slots: int,
    num_micro_batches: int,
    stashed_bytes: int = 0,
    ring: Ring | None = None,
    is_staged: bool = False,
) -> float:
    """Return R3, which no layer-major step is faster than, without the optimizer.

    Each sweep takes the longer of its visits and its loads. Before a warm ring's loads and behind
    them stands one visit each, in which nothing can be loaded. Encoded cargo leaves its slot when
    it is decoded: the loads upwards begin behind the first decoding, and the first load downwards
    behind the last layer's, which is decoded once for both of its visits. A step of equal layers
    takes exactly this long, whatever the rates.

    Stashed inputs leave one behind the other, and of those that come back all but the first two
    visits' wait for a visit on the way down; behind the last of them stands one micro-batch.

    Args:
        costs: Of the ops.
        num_slots: Layers on the device at a time.
        num_micro_batches: Micro-batches of the step.
        stashed_bytes: Of one micro-batch's layer input, where inputs wait in host memory.
        ring: What the slots hold at the start; None is what a training step leaves there.
        is_staged: Whether loads pass staging buffers, which are filled from memory or from disk.
    """
    sweeps = _Sweeps(
        costs=costs,
        num_micro_batches=num_micro_batches,
        stashed_bytes=stashed_bytes,
        is_staged=is_staged,
    )
    num_slots = min(num_slots, len(costs.layers))
    top_s = sweeps.top_s(warm_ring(num_slots) if ring is None else ring)
    return sweeps.end_s(top_s, num_slots) + num_micro_batches * costs.front_backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sweeps:
    """The way up to the head, and the way down from it, at one price."""

    costs: Costs
    num_micro_batches: int
    stashed_bytes: int
    is_staged: bool

    def visit_s(self, layer: int, *, is_backward: bool) -> float:
        """All micro-batches at a layer, and its decoding."""
        cost = self.costs.layers[layer]
        one_s = cost.backward_s if is_backward else cost.forward_s
        return self.num_micro_batches * one_s + cost.decode_s

    def top_s(self, ring: Ring) -> float:
        """Return when the last layer's forward visit has ended, at the earliest."""
        costs, num_layers = self.costs, len(self.costs.layers)
        visits_s = [self.visit_s(i, is_backward=False) for i in range(num_layers)]
        fronts_s = self.num_micro_batches * costs.front_s
        ends_s = [fronts_s + sum(visits_s)]
        missing, link_s = _missing(ring, num_layers), 0.0
        if missing:
            ends_s.append(self.read_s(missing) + sum(visits_s[missing[-1] :]))
        for place, layer in reversed(list(enumerate(missing))):
            link_s += _load_s(costs, layer)
            before = layer - len(ring)  # the visit that has its slot
            hold_s = fronts_s + sum(visits_s[:before]) + self._hold_s(before) if before >= 0 else 0
            way_s = max(link_s, self.read_s(missing[place:], is_ahead=True))
            ends_s.append(hold_s + way_s + sum(visits_s[missing[-1] :]))
        if missing and missing[0] == 0:
            ends_s.append(_load_s(costs, 0) + sum(visits_s))
        if self.stashed_bytes:
            stash_s = costs.h2d_latency_s + self.stashed_bytes / costs.d2h_bytes_per_s
            num_stashed = (num_layers - 1) * self.num_micro_batches
            ends_s.append(costs.front_s + num_stashed * stash_s + costs.layers[-1].forward_s)
        return max(ends_s)

    def end_s(self, top_s: float, num_slots: int) -> float:
        """Return when the first layer's backward visit has ended, at the earliest."""
        costs, num_layers = self.costs, len(self.costs.layers)
        visits_s = [self.visit_s(i, is_backward=True) for i in range(num_layers)]
        last = costs.layers[-1]
        turned_s = top_s + self.num_micro_batches * costs.tail_s
        visits_s[-1] -= last.decode_s  # it still lies decoded
        loaded = list(reversed(range(num_layers - num_slots)))
        starts = [(turned_s + visits_s[-1], loaded)]
        if last.decode_s and loaded:
            up_s = self.num_micro_batches * last.forward_s
            held_s = turned_s + visits_s[-1] + self._hold_s(num_layers - 2)
            starts = [(top_s - up_s, loaded), (held_s, loaded[1:])]
        ends_s = [turned_s + sum(visits_s)]
        for start_s, layers in starts if loaded else []:
            way_s = max(self.link_s(layers), self.read_s(layers, is_ahead=True))
            ends_s.append(start_s + way_s + visits_s[0])
        if self.stashed_bytes:
            fetch_s = costs.h2d_latency_s + self.stashed_bytes / costs.fetch_bytes_per_s
            num_waiting = max(0, num_layers - 1 - NUM_FETCHED) * self.num_micro_batches
            for start_s, layers in starts if num_waiting else []:
                one_s = costs.layers[0].backward_s
                ends_s.append(start_s + self.link_s(layers) + num_waiting * fetch_s + one_s)
        return max(ends_s)

    def link_s(self, layers: Sequence[int]) -> float:
        """Return what these layers take on the link."""
        return sum(_load_s(self.costs, layer) for layer in layers)

    def read_s(self, layers: Sequence[int], *, is_ahead: bool = False) -> float:
        """Return what filling buffers with these layers takes at least.

        Args:
            layers: Which.
            is_ahead: Whether all buffers may be full by then.
        """
        if not self.is_staged:
            return 0.0
        sizes = [self.costs.layers[layer].weight_bytes for layer in layers]
        ahead = NUM_STAGING * min(PIECE_BYTES, max(sizes, default=0)) if is_ahead else 0
        return max(0, sum(sizes) - ahead) / self.costs.read_bytes_per_s

    def _hold_s(self, layer: int) -> float:
        """How long a layer's visit on the way up, or its decoding in either, keeps its slot."""
        return self.costs.layers[layer].decode_s or self.visit_s(layer, is_backward=False)


def _missing(ring: Ring, num_layers: int) -> list[int]:
    """Return the layers that a way up has to load."""
    held, missing = list(ring), []
    for layer in range(num_layers):
        slot = layer % len(held)
        if held[slot] != layer:
            held[slot] = layer
            missing.append(layer)
    return missing


def _load_s(costs: Costs, layer: int) -> float:
    """Return what the pieces of a layer take on the link."""
    num_more = max(0, math.ceil(costs.layers[layer].weight_bytes / PIECE_BYTES) - 1)
    return costs.load_s(layer) + num_more * costs.h2d_latency_s


def usual_order_bound_s(costs: Costs, *, num_slots: int, num_micro_batches: int) -> float:
    """Return the bound on a step in which every micro-batch walks all layers."""
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


def break_even_tokens(
    facts: ModelFacts,
    machine: Machine,
    *,
    codec_ratio: float,
    num_slots: int,
    dtype_bytes: int,
    num_disk_readers: int = 0,
) -> float:
    """Return N*, the tokens per step above which streaming hides behind computing.

    N* = kappa * r * F / B * (1 - C / L) for weights of two bytes, where kappa is total by active
    parameters of the layers, and B the rate of the slowest that a layer passes: link, or disk.
    """
    total = sum(layer.num_parameters for layer in facts.layers)
    active = sum(layer.num_active_parameters for layer in facts.layers)
    streamed_frac = max(0.0, 1 - num_slots / facts.num_layers)
    bytes_per_s = machine.h2d_bytes_per_s.value
    if num_disk_readers and machine.disk_bytes_per_s is not None:
        bytes_per_s = min(bytes_per_s, machine.disk_bytes_per_s.value / num_disk_readers)
    flops_per_byte = machine.gemm_flops_per_s.value / bytes_per_s
    return total / active * codec_ratio * dtype_bytes / 2 * flops_per_byte * streamed_frac
