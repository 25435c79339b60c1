from dataclasses import replace

import pytest

from offload.plan.machine.machine import named_machine
from offload.plan.plan import hidden_frac, needed_bytes_per_s, plan
from offload.plan.request import Reduction
from offload.plan.schedule.simulate import simulate
from offload.plan.step import FREE_FRAC, duration_of
from tests.builders import lora, qwen3_30b, request, workload


def test_gradients_of_30b_experts_overlap_with_the_backward_at_less_than_half_a_gigabit() -> None:
    """Two machines that send bf16: about the bytes of all layers by the time of the backward."""
    asked = request(
        workload(adapter=lora(rank=8, experts=True)),
        num_micro_batches=48,
        num_ranks=2,
        most_local_ranks=1,
        reduction=Reduction(element_bytes=2),
    )
    made = plan(qwen3_30b(), named_machine("rtx5090"), asked)
    backward_s = made.predict().phases()["backward"]
    even = made.schedule.network_bytes / backward_s
    assert even * 8 == pytest.approx(0.48e9, rel=0.05)

    def hidden(bytes_per_s: float) -> float:
        costs = replace(made.costs, network_bytes_per_s=bytes_per_s)
        return hidden_frac(simulate(made.schedule, duration_of(costs)))

    # the sum of layer 0, one of 48, has no visit left to overlap with
    assert hidden(1.05 * even) == pytest.approx(47 / 48, abs=0.002)
    assert hidden(0.9 * even) < 0.9
    assert even < made.network_needed_bytes_per_s < 2 * even


def test_the_needed_link_is_the_slowest_that_makes_the_step_no_longer() -> None:
    made = plan(qwen3_30b(), named_machine("rtx5090"), request(num_ranks=2, most_local_ranks=1))
    needed = needed_bytes_per_s(made.schedule, made.costs)

    def step_s(bytes_per_s: float) -> float:
        costs = replace(made.costs, network_bytes_per_s=bytes_per_s)
        return simulate(made.schedule, duration_of(costs)).step_s

    allowed_s = (1 + FREE_FRAC) * step_s(1e18)
    assert step_s(needed) <= allowed_s
    assert step_s(0.97 * needed) > allowed_s
