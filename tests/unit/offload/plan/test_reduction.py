from dataclasses import replace

import pytest

from offload.plan.facts.trainable import trained_parameters
from offload.plan.machine.machine import MEASURED, Network, Rate, named_machine
from offload.plan.plan import Plan, plan
from offload.plan.request import ETHERNET, PlanRequest, Reduction, network_of, sharing
from offload.plan.schedule.op import Kind, Lane
from tests.builders import lora, qwen3_8b, request, workload

HERE = named_machine("rtx4090")


def planned(asked: PlanRequest) -> Plan:
    return plan(qwen3_8b(), HERE, asked)


def sums_of(made: Plan) -> list[tuple[int | None, int | None, int]]:
    return [(op.layer, op.run, op.num_bytes) for op in made.schedule.ops if op.kind is Kind.REDUCE]


def test_a_single_rank_has_no_network() -> None:
    made = planned(request())
    assert made.network is None
    assert not any(op.lane is Lane.NETWORK for op in made.schedule.ops)
    assert "network" not in made.predict().phases()


@pytest.mark.parametrize(("num_ranks", "element_bytes"), [(2, 4), (2, 2), (4, 4)])
def test_each_layer_sends_its_share_of_an_all_reduce(num_ranks, element_bytes) -> None:
    spec = lora(modules=("embed_tokens",))
    made = planned(
        request(
            workload(adapter=spec),
            num_ranks=num_ranks,
            reduction=Reduction(element_bytes=element_bytes),
        )
    )
    # q_proj 4096 -> 4096 and v_proj 4096 -> 1024 at rank 16; then the embedding
    of_layer, outer = 16 * (4096 + 4096) + 16 * (4096 + 1024), 151936 * 4096
    share = 2 * (num_ranks - 1) * element_bytes / num_ranks
    assert 36 * of_layer + outer == trained_parameters(qwen3_8b(), spec)
    assert sums_of(made) == [
        *((layer, 0, share * of_layer) for layer in reversed(range(36))),
        (None, 0, share * outer),
    ]


def test_all_but_the_sum_of_the_first_layer_overlaps_with_compute() -> None:
    made = planned(request(num_ranks=2))
    assert made.network_hidden_frac > 0.9
    slower = made.step_s - planned(request(num_micro_batches=4)).step_s
    last = made.predict().spans[-1]
    assert slower == pytest.approx(last.duration_s, rel=0.01)  # that of layer 0 hides nowhere


def test_runs_that_share_a_step_add_up_each_by_itself() -> None:
    small, large = (request(workload(adapter=lora(rank=r)), num_ranks=2) for r in (8, 16))
    sums = sums_of(planned(sharing([small, large])))
    assert [run for _, run, _ in sums] == [0, 1] * 36
    assert all(2 * a[2] == b[2] for a, b in zip(sums[::2], sums[1::2], strict=True))


def test_the_network_is_the_measured_one_or_assumed_by_where_the_ranks_are() -> None:
    asked = request(num_ranks=2)
    assert network_of(HERE, replace(asked, most_local_ranks=1)).bytes_per_s == ETHERNET
    on_one = network_of(HERE, asked).bytes_per_s
    assert on_one.value == HERE.h2d_duplex_bytes_per_s.value
    assert on_one.source.startswith("assumed")
    rate = Rate(value=5e6, source=MEASURED)
    known = Network(world_size=2, latency_s=Rate(value=0.25, source=MEASURED), bytes_per_s=rate)
    made = plan(qwen3_8b(), replace(HERE, network=known), asked)
    assert made.network == known
    for span in made.predict().spans:
        if span.kind is Kind.REDUCE:
            assert span.duration_s == pytest.approx(0.25 + span.num_bytes / 5e6)
