"""R3, a lower bound on the time of a layer-major step, from sums over its layers.

Each sweep takes the longer of its visits and its copies. Before a warm ring's first load and after
its last there is one visit each in which nothing can be loaded. A step of equal layers takes
exactly this long.
"""

from collections.abc import Sequence
from math import ceil

from offload.plan.schedule.op import RECOMPUTE, SENT_GRAPH, SENT_OUTPUT, Route, Save
from offload.plan.schedule.schedule import (
    NOTHING_SAVED,
    NUM_CARRIED,
    NUM_FETCHED,
    NUM_STAGING,
    PIECE_BYTES,
    Saved,
    head_slots,
    held_at_turn,
)
from offload.plan.time.costs import Costs


def r3_bound_s(
    costs: Costs,
    *,
    num_slots: int,
    num_micro_batches: int,
    saved: Saved = NOTHING_SAVED,
    stashed_bytes: int = 0,
    is_staged: bool = False,
) -> float:
    """Return R3 for a step from a warm ring, without the optimizer.

    Args:
        costs: Of the ops.
        num_slots: Layers on the device at a time, at most all.
        num_micro_batches: Micro-batches of the step.
        saved: The outputs and graphs that layers save.
        stashed_bytes: Size of one micro-batch's layer input, if inputs wait in host memory.
        is_staged: Whether loads pass through staging buffers, filled from memory or from disk.
    """
    num, layers, last = num_micro_batches, costs.layers, len(costs.layers) - 1
    low = max(0, len(layers) - num_slots)
    saves = saved.layers or (RECOMPUTE,) * len(layers)
    forth_s, back_s = _visits_s(costs, num, saves)
    fronts_s, tails_s = num * costs.fronts_s, num * costs.tails_s + costs.objective_s
    # the slot of an encoded layer is free once it is decoded
    decodes_s = [one.decode_s for one in layers]

    missing = [i for i, one in enumerate(layers) if i >= num_slots or one.update_s]
    turn_s, loaded_s = fronts_s + sum(forth_s), 0.0
    if missing:
        is_empty = missing[0] < num_slots or layers[missing[0] - num_slots].update_s
        loaded_s = 0.0 if is_empty else fronts_s + (decodes_s[0] or forth_s[0])
        loaded_s += _loads_s(costs, missing, is_staged=is_staged)
        loaded_s = max(loaded_s, sum([layers[i].update_s for i in missing]))  # one after the other
        turn_s = max(turn_s, loaded_s + sum(forth_s[missing[-1] :]))
    covered: list[int] = []
    if costs.head_bytes:
        slots = head_slots([one.weight_bytes for one in layers], num_slots, costs.head_bytes)
        covered = [held_at_turn(len(layers), num_slots, slot) for slot in slots]
        loaded_s += costs.head_bytes / costs.speed(Route.FETCH).bytes_per_s
        turn_s = max(turn_s, loaded_s)

    stashed = [i for i in range(last) if saves[i].what != "graph"] if stashed_bytes else []
    leaving_s = _copies_s(costs, saved, stashed, stashed_bytes, Route.LEAVE)
    coming_s = _copies_s(costs, saved, stashed, stashed_bytes, Route.FETCH)
    kept = last if decodes_s[last] else None  # it is decoded once for both of its visits
    reloaded = [i for i in range(last + 1) if i < low or (i in covered and i != kept)]
    loads_s = _loads_s(costs, reloaded, is_staged=is_staged)
    ends_s = [turn_s + tails_s + sum(back_s)]
    one_s = (back_s[0] - decodes_s[0]) / num  # the visit after the last copy
    free_s = turn_s + tails_s  # when the first copy downwards may begin
    if reloaded:
        free_s += 0.0 if covered else back_s[last]
        if decodes_s[last] and not covered:
            free_s = turn_s - forth_s[last] + decodes_s[last]
        closing_s = sum(back_s[: reloaded[0] + 1])
        ends_s.append(free_s + loads_s + (one_s if coming_s else closing_s))
    if coming_s:  # reads of layers do not delay them
        loads_s = _loads_s(costs, reloaded, is_staged=False)
        # before the turn inputs of so many visits may be back, and graphs or outputs of as many;
        # the last to leave is the first back
        later_s = sum(sorted(coming_s.values())[: -NUM_FETCHED - NUM_CARRIED])
        left_s = sum(leaving_s.values()) - leaving_s[max(leaving_s)]
        ends_s += (
            loaded_s + loads_s + num * sum(coming_s.values()) + one_s,
            min(free_s, turn_s + tails_s) + loads_s + num * later_s + one_s,
            costs.front_s + num * (left_s + sum(coming_s.values())) + one_s,
        )
    return max(ends_s) + num * costs.front_backward_s


def _visits_s(costs: Costs, num: int, saves: Sequence[Save]) -> tuple[list[float], list[float]]:
    """Return the seconds of each layer's visits upwards and downwards, with its decoding."""
    forth_s, back_s = [], []
    known: dict[tuple[int, Save], tuple[float, float]] = {}  # most layers are the same one
    for one, save in zip(costs.layers, saves, strict=True):
        key = id(one), save
        if key not in known:
            scoring_s = costs.num_scored * one.forward_s + costs.num_references * one.reference_s
            known[key] = num * (one.forth_s(save) + scoring_s), num * one.back_s(save)
        up_s, down_s = known[key]
        forth_s.append(up_s + one.decode_s)
        back_s.append(down_s + one.decode_s)
    back_s[-1] -= costs.layers[-1].decode_s  # it is still decoded
    return forth_s, back_s


def _loads_s(costs: Costs, loaded: Sequence[int], *, is_staged: bool) -> float:
    """Return the seconds of these loads, one after the other; buffers may be full before them."""
    sizes = [costs.layers[layer].weight_bytes for layer in loaded]
    pieces = sum([max(1, ceil(size / PIECE_BYTES)) for size in sizes])
    copies_s = costs.speed(Route.LOAD).seconds(sum(sizes), num_copies=pieces)
    if not (is_staged and sizes):
        return copies_s
    ahead = NUM_STAGING * min(PIECE_BYTES, max(sizes))
    return max(copies_s, (sum(sizes) - ahead) / costs.speed(Route.READ).bytes_per_s)


def _copies_s(
    costs: Costs, saved: Saved, stashed: Sequence[int], stashed_bytes: int, route: Route
) -> dict[int, float]:
    """Return the seconds of one micro-batch's inputs, graphs and outputs, by the layer's number."""
    speed = costs.speed(route)
    found = dict.fromkeys(stashed, speed.seconds(stashed_bytes))
    for save, sizes in (SENT_GRAPH, saved.graph_bytes), (SENT_OUTPUT, saved.output_bytes):
        for layer in saved.which[save]:
            mean_bytes = sum(sizes[layer]) / len(sizes[layer])
            found[layer] = found.get(layer, 0.0) + speed.latency_s + mean_bytes / speed.bytes_per_s
    return found
