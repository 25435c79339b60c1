"""Which way the plan takes on four clusters, each with its arithmetic by hand."""

import pytest

from finetune.planning.parallel import Ways
from offload.plan.plan import Plan
from offload.plan.schedule.op import OVER_NETWORK, Kind
from tests.tools.clusters import CLUSTERS, Cluster, ways_of

LATENCY_S = 50e-6  # of a collective, assumed


def linear_weights(hidden: int, heads: int, kv_heads: int, mlp: int) -> int:
    """Return the weights of a layer's linears, whose heads have 128 features."""
    return hidden * 128 * (2 * heads + 2 * kv_heads) + 3 * hidden * mlp


def lora_weights(hidden: int, heads: int, kv_heads: int, mlp: int, *, rank: int) -> int:
    """Return those of LoRA on all of them."""
    q = o = hidden + 128 * heads
    k = v = hidden + 128 * kv_heads
    return rank * (q + o + k + v + 3 * (hidden + mlp))


LLAMA_70B = linear_weights(8192, 64, 8, 28672) + 2 * 8192
LLAMA_70B_LORA = lora_weights(8192, 64, 8, 28672, rank=16)
LLAMA_70B_OUTER = 2 * 128_256 * 8192 + 8192
QWEN_8B = linear_weights(4096, 32, 8, 12288) + 2 * 4096 + 2 * 128
QWEN_8B_LORA = lora_weights(4096, 32, 8, 12288, rank=16)
QWEN_8B_OUTER = 2 * 151_936 * 4096 + 4096
QWEN_32B = linear_weights(5120, 64, 8, 25600) + 2 * 5120 + 2 * 128


def both(ways: Ways) -> tuple[Plan, Plan]:
    assert ways.stream.plan is not None
    assert ways.sharded.plan is not None
    return ways.stream.plan, ways.sharded.plan


def seconds(plan: Plan, *, num_bytes: float, num_collectives: int, bytes_per_s: float) -> None:
    """Compare the network's time of a sharded step with bytes at a rate, and its collectives."""
    busy_s = plan.predict().busy_s(*OVER_NETWORK)
    assert plan.schedule.network_bytes == pytest.approx(num_bytes, rel=1e-6)
    expected_s = num_bytes / bytes_per_s + num_collectives * LATENCY_S
    assert busy_s == pytest.approx(expected_s, rel=1e-6)


def test_eight_h100_hold_llama_70b_and_gather_it_faster_than_a_link_loads_it() -> None:
    assert (LLAMA_70B, LLAMA_70B_LORA) == (855_654_400, 2_588_672)
    stream, sharded = both(ways_of(CLUSTERS[0]))
    # one micro-batch of 2,048 tokens each: 80 layers up and down, what is around them, 80 sums
    gathered = 160 * (2 * LLAMA_70B + 4 * LLAMA_70B_LORA) + 2 * LLAMA_70B_OUTER
    sent = 7 / 8 * (gathered + 80 * 4 * LLAMA_70B_LORA)
    assert sent == pytest.approx(245.4e9, rel=1e-3)
    seconds(sharded, num_bytes=sent, num_collectives=241, bytes_per_s=0.8 * 450e9)
    # 80 layers in 41 slots: 39 are loaded for the forward and 39 for the backward
    assert stream.residency.num_slots == 41
    assert stream.schedule.num_loads == 78
    load_s = 78 * 2 * LLAMA_70B / stream.machine.h2d_bytes_per_s.value
    assert stream.predict().busy_s(Kind.LOAD) == pytest.approx(load_s, rel=0.03)
    assert load_s > sharded.step_s - sharded.predict().exposed_s(*OVER_NETWORK)  # of compute
    assert ways_of(CLUSTERS[0]).faster.name == "fsdp2"


def test_eight_h100_train_all_weights_of_qwen_8b_in_parts() -> None:
    ways = ways_of(CLUSTERS[1])
    sharded = ways.sharded.plan
    assert sharded is not None
    weights = 36 * QWEN_8B + QWEN_8B_OUTER
    gathered, added = 72 * 2 * QWEN_8B + 2 * QWEN_8B_OUTER, 4 * weights  # bf16, and fp32 sums
    seconds(
        sharded,
        num_bytes=7 / 8 * (gathered + added),
        num_collectives=72 + 1 + 36 + 1,
        bytes_per_s=0.8 * 450e9,
    )
    terms = {term.name: term.num_bytes for term in sharded.device_memory}
    own = sum(terms[name] for name in ("own part of the weights", "gradients", "optimizer states"))
    assert own == 16 * weights // 8
    assert ways.stream.plan is None
    assert ways.faster.name == "fsdp2"


def test_two_rtx_3090_stream_qwen_8b_whose_gathers_cost_more_than_its_loads() -> None:
    stream, sharded = both(ways_of(CLUSTERS[2]))
    # four micro-batches each, every one of which gathers all layers twice
    gathered = 72 * (2 * QWEN_8B + 4 * QWEN_8B_LORA) + 2 * QWEN_8B_OUTER
    sent = 4 * (gathered + 36 * 4 * QWEN_8B_LORA) / 2
    rate = sharded.machine.h2d_duplex_bytes_per_s.value
    seconds(sharded, num_bytes=sent, num_collectives=4 * (73 + 36), bytes_per_s=rate)
    assert stream.predict().stall_s < 0.01 * stream.step_s
    # both compute as many tokens: plain code against fused kernels and graphs that are kept
    waits_s = sharded.predict().exposed_s(*OVER_NETWORK)
    assert sharded.step_s - waits_s > 1.5 * stream.step_s
    assert ways_of(CLUSTERS[2]).faster.name == "stream"


def test_four_rtx_4090_cannot_hold_qwen_32b() -> None:
    ways = ways_of(CLUSTERS[3])
    assert ways.sharded.plan is None
    own_gib = 64 * 2 * QWEN_32B / 4 / 2**30
    outer_gib = 2 * 2 * 151_936 * 5120 / 2**30
    assert own_gib == pytest.approx(14.5, abs=0.1)
    assert own_gib + outer_gib / 4 + outer_gib > 18.0  # and 22.68 are free
    assert "of device memory on each rank, of 22.68 GiB" in ways.sharded.why_not
    assert ways.faster.name == "stream"


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: f"{cluster.card}-{cluster.model}")
def test_the_way_that_is_taken_is_the_faster_of_those_that_fit(cluster: Cluster) -> None:
    ways = ways_of(cluster)
    times = {
        way.name: way.plan.step_s
        for way in (ways.stream, ways.sharded)
        if way.plan is not None and way.plan.peak_bytes <= way.plan.machine.vram_bytes
    }
    assert ways.faster.name == min(times, key=lambda name: times[name])
