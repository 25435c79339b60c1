from dataclasses import replace
from typing import Any

import pytest
import torch

from offload.plan.facts.facts import AdapterSpec
from offload.plan.facts.workload import Workload, to_pages
from offload.plan.machine.machine import (
    ExpertsImplementation,
    Implementation,
    Machine,
    Rate,
    named_machine,
)
from offload.plan.time.adapters import linear_branch
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import Costs, LayerCost, layer_work, price
from offload.plan.time.pricer import Pricer
from offload.plan.time.roofline import OPS_PER_CALL, Work, attention_flops
from tests import builders
from tests.builders import llama_7b, lora, qwen3_30b

LLAMA_7B = llama_7b()
QWEN_30B = qwen3_30b()
ATTENTION_ONLY = lora(targets=("q_proj", "k_proj", "v_proj", "o_proj"))


def workload(**changes: Any) -> Workload:
    return builders.workload(**{"seq_len": 8192, "adapter": ATTENTION_ONLY} | changes)


# ---------------------------------------------------------------------------------------------
# Attention


def test_a_window_as_long_as_the_sequence_changes_nothing() -> None:
    full = attention_flops(num_tokens=64, context_tokens=64, width=8, count="causal")
    windowed = attention_flops(num_tokens=64, context_tokens=64, width=8, count="causal", window=64)
    assert windowed == full


def test_a_short_window_costs_about_the_pairs_that_it_has() -> None:
    pairs = sum(min(i + 1, 16) for i in range(4096))
    flops = attention_flops(
        num_tokens=4096, context_tokens=4096, width=8, count="causal", window=16
    )
    assert flops == pytest.approx(4 * 8 * pairs, rel=0.05)


# ---------------------------------------------------------------------------------------------
# Bounds


def uniform_costs(*, load_s: float, num_layers: int = 10, decode_s: float = 0.0) -> Costs:
    layer = LayerCost(
        forward_s=1.0,
        backward_s=2.0,
        recompute_s=0.0,
        decode_s=decode_s,
        weight_bytes=1000,
        bound="compute",
    )
    return Costs(
        grade="spec",
        layers=(layer,) * num_layers,
        front_s=0.25,
        tail_s=3.0,
        optimizer_s=7.0,
        h2d_bytes_per_s=1000 / load_s,
        h2d_latency_s=0.0,
        d2h_bytes_per_s=1.0,
        fetch_bytes_per_s=1.0,
        read_bytes_per_s=1.0,
    )


def test_r3_counts_visits_alone_when_loads_are_short() -> None:
    bound_s = r3_bound_s(uniform_costs(load_s=0.1), num_slots=4, num_micro_batches=2)
    assert bound_s == pytest.approx(10 * 2 + 2 * 3.25 + 10 * 4)


def test_r3_counts_loads_and_the_two_visits_at_their_ends_when_loads_are_long() -> None:
    bound_s = r3_bound_s(uniform_costs(load_s=100.0), num_slots=4, num_micro_batches=2)
    assert bound_s == pytest.approx((6 * 100 + 2 * 2) + 2 * 3.25 + (6 * 100 + 2 * 4))


def test_r3_of_encoded_layers_counts_a_decoding_per_visit_but_for_the_turn() -> None:
    costs = uniform_costs(load_s=0.1, decode_s=0.5)
    bound_s = r3_bound_s(costs, num_slots=4, num_micro_batches=2)
    assert bound_s == pytest.approx(10 * 2.5 + 2 * 3.25 + 10 * 4.5 - 0.5)


@pytest.mark.parametrize("num_slots", [10, 12])
def test_nothing_is_loaded_when_every_layer_has_a_slot(num_slots: int) -> None:
    bound_s = r3_bound_s(uniform_costs(load_s=1e6), num_slots=num_slots, num_micro_batches=1)
    assert bound_s == pytest.approx(10 * 1 + 3.25 + 10 * 2)


# ---------------------------------------------------------------------------------------------
# Prices


def test_a_named_card_is_priced_to_grade_spec_and_a_measured_one_to_probed() -> None:
    machine = named_machine("rtx4090")
    rates = {
        name: Rate(value=getattr(machine, name).value, source="measured")
        for name in Machine.__dataclass_fields__
        if isinstance(getattr(machine, name), Rate)
    }
    assert price(QWEN_30B, machine, workload()).grade == "spec"
    assert price(QWEN_30B, replace(machine, **rates), workload()).grade == "probed"  # type: ignore[arg-type]
    assert price(QWEN_30B, replace(machine, launch_s=rates["launch_s"]), workload()).grade == "spec"


def test_a_backward_visit_costs_two_to_four_forwards() -> None:
    for layer in price(LLAMA_7B, named_machine("rtx4090"), workload()).layers:
        assert 2 < layer.backward_s / layer.forward_s < 4
    at = Pricer(machine=named_machine("rtx4090"), facts=LLAMA_7B, workload=workload())
    visits = layer_work(at, LLAMA_7B.layers[0]).visits
    assert 2 < (visits.recompute + visits.backward).flops / visits.forward.flops < 3


def test_one_token_is_bound_by_memory_or_launches_and_many_by_compute() -> None:
    machine = named_machine("rtx4090")
    few = price(LLAMA_7B, machine, workload(seq_len=1, label_tokens=1)).layers[0]
    many = price(LLAMA_7B, machine, workload()).layers[0]
    assert (few.bound != "compute", many.bound) == (True, "compute")


def test_a_cpu_adds_launches_to_work_where_a_gpu_hides_them() -> None:
    gpu = named_machine("rtx4090")
    cpu, slow = replace(gpu, device="cpu"), Rate(value=1e-3, source="measured")
    load = workload(seq_len=16, label_tokens=16)
    on_cpu, on_gpu = (price(LLAMA_7B, m, load).layers[0].forward_s for m in (cpu, gpu))
    assert on_cpu > on_gpu
    slower = price(LLAMA_7B, replace(cpu, launch_s=slow), load).layers[0]
    assert slower.bound == "launch"
    assert slower.forward_s > 50e-3


def test_a_loop_over_experts_launches_more_than_a_grouped_product() -> None:
    at, load = named_machine("rtx4090"), workload(seq_len=64, label_tokens=64)

    def launches(way: ExpertsImplementation, *, has_kernel: bool) -> float:
        machine = multiplying_by(at, way, has_kernel=has_kernel)
        pricer = Pricer(machine=machine, facts=QWEN_30B, workload=load)
        return layer_work(pricer, QWEN_30B.layers[0]).visits.forward.num_ops

    grouped = launches("grouped_mm", has_kernel=True)
    assert launches("triton", has_kernel=False) < grouped
    assert launches("grouped_mm", has_kernel=False) - grouped == 2 * 127  # torch's own loop
    # each expert's rows are gathered alone
    assert launches("eager", has_kernel=True) - grouped == 2 * 127 + 8 * 128 + 7 - 14


def multiplying_by(machine: Machine, way: ExpertsImplementation, *, has_kernel: bool) -> Machine:
    implementation = Implementation(value=way, source="test")
    return replace(machine, experts_implementation=implementation, has_grouped_gemm=has_kernel)


def test_adapters_on_experts_cost_more_than_on_attention_only() -> None:
    machine, experts = named_machine("rtx5090"), replace(ATTENTION_ONLY, experts=True)
    plain = price(QWEN_30B, machine, workload(leaves_out=False))
    more = price(QWEN_30B, machine, workload(adapter=experts, leaves_out=False))
    assert more.layers[0].backward_s > plain.layers[0].backward_s
    assert more.optimizer_s > plain.optimizer_s


def test_adapters_on_experts_cost_by_the_routed_row_and_not_by_the_weight() -> None:
    machine, experts = named_machine("rtx5090"), replace(ATTENTION_ONLY, experts=True)
    load = workload(adapter=experts)
    plain, more = (price(QWEN_30B, machine, w).layers[0] for w in (workload(), load))
    rows, features = 8 * load.num_tokens, (2048 + 1536) + (768 + 2048)
    flops = [
        layer_work(Pricer(machine=machine, facts=QWEN_30B, workload=one), QWEN_30B.layers[0])
        for one in (workload(), load)
    ]
    plain_flops, more_flops = (work.visits.forward.flops for work in flops)
    assert more_flops - plain_flops == 2 * rows * 16 * features
    whole = price(QWEN_30B, machine, replace(load, leaves_out=False)).layers[0]
    added_s = more.forward_s - plain.forward_s  # an outer product reads one side once more
    assert 3 * added_s <= whole.backward_s - plain.backward_s <= 4.1 * added_s
    assert more.backward_s < whole.backward_s  # the projection down is not computed again
    assert more.forward_s < 1.25 * plain.forward_s


def test_encoded_cargo_is_smaller_and_decoded_once_per_visit() -> None:
    machine = named_machine("rtx4090")
    native = price(LLAMA_7B, machine, workload()).layers[0]
    nf4 = price(LLAMA_7B, machine, workload(codec="nf4")).layers[0]
    facts = LLAMA_7B.layers[0]
    matrices = sum(facts.matrix_sizes)
    expected = matrices * (0.5 + 1 / 64 + 1 / 4096) + 2 * 2 * 4096
    assert nf4.weight_bytes == pytest.approx(expected, rel=2e-4)
    assert native.weight_bytes == to_pages(2 * facts.num_parameters)
    assert native.decode_s == 0 < nf4.decode_s
    assert nf4.forward_s == native.forward_s


def test_the_tail_is_priced_by_the_tokens_that_have_a_loss() -> None:
    machine = named_machine("rtx4090")
    all_tokens = price(QWEN_30B, machine, workload()).tail_s
    half = price(QWEN_30B, machine, workload(label_tokens=4096)).tail_s
    assert half == pytest.approx(all_tokens / 2, rel=0.01)


def test_only_layers_of_different_shape_differ_in_price() -> None:
    assert len(set(price(QWEN_30B, named_machine("rtx5090"), workload()).layers)) == 1


def test_a_branch_of_few_columns_costs_as_one_of_sixteen_and_more_cost_their_arithmetic() -> None:
    machine = replace(named_machine("rtx4090"), launch_s=Rate(value=1e-12, source="drawn"))
    linear = LLAMA_7B.layers[0].linears[0]

    def branch(rank: int, at: Machine) -> Work:
        adapter = AdapterSpec(rank=rank, targets=("q_proj",), experts=False)
        load = workload(adapter=adapter)
        return linear_branch(Pricer(machine=at, facts=LLAMA_7B, workload=load), linear).forward

    def seconds(rank: int, at: Machine = machine) -> float:
        work = branch(rank, at)
        return work.compute_s + work.memory_s

    assert seconds(1) == pytest.approx(seconds(16))
    more_s = branch(64, machine).compute_s - branch(16, machine).compute_s
    assert seconds(64) - seconds(16) == pytest.approx(more_s)
    slow = replace(machine, tall_fp32_flops_per_s=Rate(value=1e12, source="drawn"))
    flops = branch(16, machine).flops
    tall = machine.tall_fp32_flops_per_s.value
    assert seconds(16, slow) - seconds(16) == pytest.approx(flops / 1e12 - flops / tall)


def test_a_cpu_waits_for_weights_and_maps_large_tensors_anew() -> None:
    cpu = replace(
        named_machine("rtx4090"), device="cpu", h2d_bytes_per_s=Rate(value=1e9, source="")
    )
    at = Pricer(machine=cpu, facts=LLAMA_7B, workload=workload())
    on_card = Pricer(machine=named_machine("rtx4090"), facts=LLAMA_7B, workload=workload())
    extra = at.gemm(4096, 512, 512).memory_s - on_card.gemm(4096, 512, 512).memory_s
    assert extra == pytest.approx(2 * 512 * 512 / 1e9)
    small, large = (
        at.new_memory(1e9, num_ops=0, tensor_bytes=n).memory_s for n in (2**25 - 1, 2**25)
    )
    assert small == 1e9 / cpu.memory_bytes_per_s.value
    assert large == 1e9 / cpu.host_memory_bytes_per_s.value


# ---------------------------------------------------------------------------------------------
# Kernels that fuse, and loops


def test_a_kernel_that_fuses_its_passes_reaches_more_of_the_bandwidth_on_a_gpu() -> None:
    card = named_machine("rtx4090")
    cpu = replace(card, device="cpu")
    for machine, gain in ((card, 0.65 / 0.55), (cpu, 1.0)):
        at = Pricer(machine=machine, facts=LLAMA_7B, workload=workload())
        eager, fused = (at.traffic(1e9, num_ops=1, is_fused=fuses) for fuses in (False, True))
        assert eager.memory_s == pytest.approx(gain * fused.memory_s)


def test_a_loop_over_experts_multiplies_slower_until_it_is_measured() -> None:
    one_kernel = Implementation(value="grouped_mm", source="given")
    card = replace(named_machine("h100"), experts_implementation=one_kernel)
    layer = next(layer for layer in QWEN_30B.layers if layer.num_experts)
    up = next(linear for linear in layer.linears if linear.group == "experts")
    loop = replace(card, experts_implementation=Implementation(value="eager", source="given"))
    rate = replace(card.expert_gemm_flops_per_s, source="measured")

    def compute_s(machine: Machine) -> float:
        return Pricer(machine=machine, facts=QWEN_30B, workload=workload()).experts(up).compute_s

    assert compute_s(loop) == pytest.approx(4 * compute_s(card))
    assert compute_s(replace(loop, expert_gemm_flops_per_s=rate)) == compute_s(card)
    assert compute_s(replace(loop, device="cpu")) == compute_s(card)


def test_triton_multiplies_the_empty_rows_of_tiles_too() -> None:
    """By counts of tiles: an expert with n rows has ceil(n / 64), half a tile more on average."""
    layer = next(layer for layer in QWEN_30B.layers if layer.num_experts)
    up = next(linear for linear in layer.linears if linear.group == "experts")
    generator = torch.Generator().manual_seed(0)
    for tokens, card, tile in ((2048, "rtx4090", 64), (8192, "rtx4090", 64), (8192, "h100", 128)):
        chosen = torch.rand(tokens, 128, generator=generator).topk(8).indices.flatten()
        tiles = (torch.bincount(chosen, minlength=128) + tile - 1) // tile
        load = workload(seq_len=tokens)
        triton = Implementation(value="triton", source="given")
        machine = replace(named_machine(card), experts_implementation=triton)
        at = Pricer(machine=machine, facts=QWEN_30B, workload=load)
        exact_s = at.experts(up).flops / at.machine.expert_gemm_flops_per_s.value
        padded = tile * int(tiles.sum()) / (8 * tokens)
        assert at.experts(up).compute_s == pytest.approx(padded * exact_s, rel=0.04)


def test_what_the_host_must_issue_bounds_small_steps_and_costs_large_ones_nothing() -> None:
    """A kernel of our own is one operator, and as long for the host as several of torch's."""
    card = named_machine("rtx4090")
    small, large = Work(memory_s=1e-9, num_ops=1, num_calls=1), Work(memory_s=1.0, num_calls=100)
    assert small.seconds(card) == (1 + OPS_PER_CALL) * card.launch_s.value
    assert small.bound(card) == "launch"
    assert large.seconds(card) == 1.0
    assert (small + small).times(2).num_calls == 4
