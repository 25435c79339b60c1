from dataclasses import replace

import pytest

from offload.plan.machine.machine import Machine, named_machine
from offload.plan.plan import Plan, plan
from offload.plan.schedule.op import Kind
from tests.builders import lora, qwen3_30b, request, workload

ROOMY = 256 * 2**30


def rank(machine: Machine, own: int) -> Plan:
    asked = request(
        workload(adapter=lora(rank=8, experts=True)),
        num_micro_batches=6,
        own_micro_batches=own,
        num_ranks=2,
    )
    return plan(qwen3_30b(), machine, asked)


FAST, SLOW = (named_machine(name, ram_bytes=ROOMY) for name in ("rtx5090", "rtx3090"))


def test_a_fast_rank_waits_for_the_last_sum_of_a_slow_one() -> None:
    fast, slow = rank(FAST, 3), rank(SLOW, 3)
    together = replace(fast, others=(slow.as_other,))
    assert fast.step_s < slow.step_s
    ends = {span.kind: span.end_s for span in together.predict().spans}
    last_visit_s = max(s.end_s for s in slow.predict().spans if s.kind is Kind.BACKWARD)
    assert ends[Kind.REDUCE] > last_visit_s > fast.predict().step_s
    assert together.step_s == pytest.approx(slow.step_s, rel=0.01)  # they differ in their updates
    assert together.predict().phases()["backward"] == fast.predict().phases()["backward"]


def test_a_slow_rank_waits_for_nobody() -> None:
    fast, slow = rank(FAST, 3), rank(SLOW, 3)
    assert replace(slow, others=(fast.as_other,)).predict() == slow.predict()


def test_when_a_rank_comes_to_its_sums_depends_on_no_network() -> None:
    made = rank(FAST, 4)
    costs = replace(made.costs, network_bytes_per_s=1.0)
    assert replace(made, costs=costs).as_other.arrivals_s == made.as_other.arrivals_s
    num_sums = sum(span.kind is Kind.REDUCE for span in made.predict().spans)
    assert len(made.as_other.arrivals_s) == num_sums


def test_a_rank_plans_its_own_micro_batches() -> None:
    few, many = rank(FAST, 1), rank(FAST, 5)
    assert (few.request.rank_micro_batches, many.request.rank_micro_batches) == (1, 5)
    assert few.tokens_per_step == many.tokens_per_step
    assert few.step_s < many.step_s
