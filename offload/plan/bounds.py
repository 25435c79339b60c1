"""What a step cannot be faster than, in either order, and from where on streaming is free."""

from offload.plan.costs import Costs
from offload.plan.facts import ModelFacts
from offload.plan.machine import Machine


def r3_bound_s(
    costs: Costs, *, num_slots: int, num_micro_batches: int, fetched_bytes: int = 0
) -> float:
    """Return R3, the time that a warm layer-major step can reach, without the optimizer.

    Each sweep takes the longer of its visits and its loads; before the loads and behind them
    stands one visit each, in which nothing can be loaded. Encoded cargo leaves its slot when it is
    decoded: the loads upwards begin behind the first decoding, and the first load downwards behind
    the last layer's, which is decoded once for both of its visits.

    Args:
        costs: Of the ops.
        num_slots: Layers on the device at a time.
        num_micro_batches: Micro-batches of the step.
        fetched_bytes: Stashed inputs that a visit on the way down takes from the host.
    """
    forward = [num_micro_batches * c.forward_s + c.decode_s for c in costs.layers]
    backward = [num_micro_batches * c.backward_s + c.decode_s for c in costs.layers]
    upwards_s, downwards_s = _sweep_load_s(costs, num_slots)
    num_loads = max(0, len(costs.layers) - num_slots)
    downwards_s += num_loads * fetched_bytes / costs.h2d_bytes_per_s
    visit_s, back_s = sum(forward) / len(forward), sum(backward) / len(backward)
    fronts_s = num_micro_batches * (costs.front_s + costs.front_backward_s)
    tail_s = num_micro_batches * costs.tail_s
    decode_s = sum(c.decode_s for c in costs.layers) / len(costs.layers)
    if decode_s == 0:
        up_s = max(sum(forward), upwards_s + 2 * visit_s)
        return up_s + fronts_s + tail_s + max(sum(backward), downwards_s + 2 * back_s)
    up_s = max(sum(forward), upwards_s + decode_s + visit_s)
    if num_loads == 0:
        return up_s + fronts_s + tail_s + sum(backward) - decode_s
    down_s = max(
        tail_s + sum(backward) - decode_s,
        tail_s + downwards_s * (num_loads - 1) / num_loads + 2 * back_s,
        downwards_s + back_s - (visit_s - decode_s),
    )
    return up_s + fronts_s + down_s


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
    loads = [costs.load_s(i) for i in range(len(costs.layers))]
    return sum(loads[len(loads) - num_loads :]), sum(loads[:num_loads])


def break_even_tokens(
    facts: ModelFacts, machine: Machine, *, codec_ratio: float, num_slots: int, dtype_bytes: int
) -> float:
    """Return N*, the tokens per step above which streaming hides behind computing.

    N* = kappa * r * F / B * (1 - C / L) for weights of two bytes, where kappa is total by active
    parameters of the layers.
    """
    total = sum(layer.num_parameters for layer in facts.layers)
    active = sum(layer.num_active_parameters for layer in facts.layers)
    streamed_frac = max(0.0, 1 - num_slots / facts.num_layers)
    flops_per_byte = machine.gemm_flops_per_s.value / machine.h2d_bytes_per_s.value
    return total / active * codec_ratio * dtype_bytes / 2 * flops_per_byte * streamed_frac
