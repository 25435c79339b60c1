"""Measures the network between the ranks, by the sums that training takes over it."""

import statistics
import time

import torch
from torch import nn

from finetune.training.ranks import Ranks
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.machine.machine import MEASURED, Network, Rate
from offload.plan.schedule.schedule import Reduced

NETWORK_S = 0.5  # of a run's start, and of `sluice probe`
NUM_ELEMENTS = 2 * 2**20  # of the largest sum, if no layer says: 8 MiB
FEWEST_ELEMENTS = 2**12
FEWEST_REPEATS, MOST_REPEATS = 3, 15
LEAST_FRAC = 0.1  # the least share of a sum's time that is not latency; less is noise


def measure_network(
    ranks: Ranks,
    *,
    device: torch.device,
    num_elements: int = NUM_ELEMENTS,
    seconds: float = NETWORK_S,
) -> Network:
    """Return the latency and the rate between the ranks, the same on all of them.

    The latency is that of the sum of an element for each rank. Sums grow until they take long
    enough, or have as many elements as training's.

    Args:
        ranks: There are several.
        device: Where this rank's gradients are.
        num_elements: Of the largest sum.
        seconds: Time to measure for, about.
    """
    latency_s = _sum_s(ranks, ranks.num, device, seconds=seconds / 4)
    num, most = FEWEST_ELEMENTS, max(num_elements, FEWEST_ELEMENTS)
    sum_s = _sum_s(ranks, num, device, seconds=seconds / 4)
    while num < most and sum_s < seconds / 2:
        num = min(4 * num, most)
        sum_s = _sum_s(ranks, num, device, seconds=seconds / 4)
    sent = Reduced.of((), num, element_bytes=FP32_BYTES, world_size=ranks.num).rest
    bytes_s = max(sum_s - latency_s, LEAST_FRAC * sum_s)
    return Network(
        num_ranks=ranks.num,
        latency_s=Rate(value=latency_s, source=MEASURED),
        bytes_per_s=Rate(value=sent / bytes_s, source=MEASURED),
    )


def _sum_s(ranks: Ranks, num_elements: int, device: torch.device, *, seconds: float) -> float:
    """Return the median time of a sum, of the rank that takes longest; all repeat it as often."""
    parameter = nn.Parameter(torch.zeros(num_elements, device=device))
    parameter.grad = torch.zeros_like(parameter)

    def timed_s() -> float:
        start_s = time.perf_counter()
        ranks.sum_gradients([parameter], dtype=torch.float32)
        return time.perf_counter() - start_s

    timed_s()  # connections are opened, and memory is allocated
    first_s = max(ranks.exchange(timed_s()))
    num = min(MOST_REPEATS, max(FEWEST_REPEATS, int(seconds / first_s)))
    return max(ranks.exchange(statistics.median(timed_s() for _ in range(num))))
