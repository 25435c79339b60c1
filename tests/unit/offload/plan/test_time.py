"""Times of operations: costs, rates and launches."""

import itertools
import json
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from peft import (
    LoraConfig,
    PrefixEncoder,
    PrefixTuningConfig,
    PromptEncoder,
    PromptEncoderConfig,
    TaskType,
)
from peft.tuners.lora import Linear as LoraLinear
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel

from finetune.adapter.linear_lora import compute_beside
from offload.engine.experts import fused
from offload.engine.experts import lora as lora_of_experts
from offload.engine.low_rank import AdaptedLinear, LowRank, apply_linears
from offload.engine.pointwise.layers import FusedLayers
from offload.engine.tracing.tracer import fake_copy
from offload.engine.tracing.visits import SilentLauncher, traced_experts
from offload.engine.visit_cache import VISIT_CACHE
from offload.plan.facts.facts import AdapterSpec, adapted_linears
from offload.plan.facts.linears import Linear
from offload.plan.facts.trainable import prefix_spec, trained_parameters, virtual_shapes
from offload.plan.facts.workload import LayerCode, Workload, to_pages
from offload.plan.machine.machine import (
    ExpertsImplementation,
    Implementation,
    Machine,
    Rate,
    named_machine,
)
from offload.plan.plan import plan
from offload.plan.schedule.op import KEPT_GRAPH, Route
from offload.plan.time.adapters import (
    branches,
    expert_branch,
    linear_branch,
    visit_norm,
    visit_scale,
)
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import (
    ROUTER_BACKWARD_OPS,
    ROUTER_OPS,
    Costs,
    LayerCost,
    Speed,
    encoder_backward,
    encoder_forward,
    layer_work,
    price,
    routing_work,
    with_measured_experts,
    with_norms,
)
from offload.plan.time.expert_passes import RowPasses, way_of
from offload.plan.time.pointwise import pointwise_work
from offload.plan.time.pricer import Pricer
from offload.plan.time.roofline import OPS_PER_CALL, VisitWork, Work, attention_flops
from tests import builders
from tests.bench.gpu.models import ATTENTION, fields
from tests.bench.record import ROOT
from tests.builders import (
    byte_machine,
    llama_7b,
    lora,
    model_facts,
    qwen3_8b,
    qwen3_30b,
    request,
    workload,
)
from tests.counted import SMALL, Counted
from tests.parity.experts import Sizes, adapted_experts, chosen
from tests.tiers import diagonal, each_value, mostly_slow, tiered

LLAMA_7B = llama_7b()
QWEN_30B = qwen3_30b()
ATTENTION_ONLY = lora(targets=("q_proj", "k_proj", "v_proj", "o_proj"))


def workload_costs(**changes: Any) -> Workload:
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
        speeds={Route.LOAD: Speed(1000 / load_s)},
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
    assert price(QWEN_30B, machine, workload_costs()).grade == "spec"
    assert price(QWEN_30B, replace(machine, **rates), workload_costs()).grade == "probed"  # type: ignore[arg-type]
    assert (
        price(QWEN_30B, replace(machine, launch_s=rates["launch_s"]), workload_costs()).grade
        == "spec"
    )


def test_a_backward_visit_costs_two_to_four_forwards() -> None:
    for layer in price(LLAMA_7B, named_machine("rtx4090"), workload_costs()).layers:
        assert 2 < layer.backward_s / layer.forward_s < 4
    at = Pricer(machine=named_machine("rtx4090"), facts=LLAMA_7B, workload=workload_costs())
    visits = layer_work(at, LLAMA_7B.layers[0]).visits
    assert 2 < (visits.recompute + visits.backward).flops / visits.forward.flops < 3


def test_one_token_is_bound_by_memory_or_launches_and_many_by_compute() -> None:
    machine = named_machine("rtx4090")
    few = price(LLAMA_7B, machine, workload_costs(seq_len=1, label_tokens=1)).layers[0]
    many = price(LLAMA_7B, machine, workload_costs()).layers[0]
    assert (few.bound != "compute", many.bound) == (True, "compute")


def test_a_cpu_adds_launches_to_work_where_a_gpu_hides_them() -> None:
    gpu = named_machine("rtx4090")
    cpu, slow = replace(gpu, device="cpu"), Rate(value=1e-3, source="measured")
    load = workload_costs(seq_len=16, label_tokens=16)
    on_cpu, on_gpu = (price(LLAMA_7B, m, load).layers[0].forward_s for m in (cpu, gpu))
    assert on_cpu > on_gpu
    slower = price(LLAMA_7B, replace(cpu, launch_s=slow), load).layers[0]
    assert slower.bound == "launch"
    assert slower.forward_s > 50e-3


def test_a_loop_over_experts_launches_more_than_a_grouped_product() -> None:
    at, load = named_machine("rtx4090"), workload_costs(seq_len=64, label_tokens=64)

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
    plain = price(QWEN_30B, machine, workload_costs(leaves_out=False))
    more = price(QWEN_30B, machine, workload_costs(adapter=experts, leaves_out=False))
    assert more.layers[0].backward_s > plain.layers[0].backward_s
    assert more.optimizer_s > plain.optimizer_s


def test_adapters_on_experts_cost_by_the_routed_row_and_not_by_the_weight() -> None:
    machine, experts = named_machine("rtx5090"), replace(ATTENTION_ONLY, experts=True)
    load = workload_costs(adapter=experts)
    plain, more = (price(QWEN_30B, machine, w).layers[0] for w in (workload_costs(), load))
    rows, features = 8 * load.num_tokens, (2048 + 1536) + (768 + 2048)
    flops = [
        layer_work(Pricer(machine=machine, facts=QWEN_30B, workload=one), QWEN_30B.layers[0])
        for one in (workload_costs(), load)
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
    native = price(LLAMA_7B, machine, workload_costs()).layers[0]
    nf4 = price(LLAMA_7B, machine, workload_costs(codec="nf4")).layers[0]
    facts = LLAMA_7B.layers[0]
    matrices = sum(linear.num_weights for linear in facts.linears)
    expected = matrices * (0.5 + 1 / 64 + 1 / 4096) + 2 * 2 * 4096
    assert nf4.weight_bytes == pytest.approx(expected, rel=2e-4)
    assert native.weight_bytes == to_pages(2 * facts.num_parameters)
    assert native.decode_s == 0 < nf4.decode_s
    assert nf4.forward_s == native.forward_s


def test_the_tail_is_priced_by_the_tokens_that_have_a_loss() -> None:
    machine = named_machine("rtx4090")
    all_tokens = price(QWEN_30B, machine, workload_costs()).tail_s
    half = price(QWEN_30B, machine, workload_costs(label_tokens=4096)).tail_s
    assert half == pytest.approx(all_tokens / 2, rel=0.01)


def test_only_layers_of_different_shape_differ_in_price() -> None:
    assert len(set(price(QWEN_30B, named_machine("rtx5090"), workload_costs()).layers)) == 1


def test_a_branch_of_few_columns_costs_as_one_of_sixteen_and_more_cost_their_arithmetic() -> None:
    machine = replace(named_machine("rtx4090"), launch_s=Rate(value=1e-12, source="drawn"))
    linear = LLAMA_7B.layers[0].linears[0]

    def branch(rank: int, at: Machine) -> Work:
        adapter = AdapterSpec(rank=rank, targets=("q_proj",), experts=False)
        load = workload_costs(adapter=adapter)
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
    at = Pricer(machine=cpu, facts=LLAMA_7B, workload=workload_costs())
    on_card = Pricer(machine=named_machine("rtx4090"), facts=LLAMA_7B, workload=workload_costs())
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
        at = Pricer(machine=machine, facts=LLAMA_7B, workload=workload_costs())
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
        return (
            Pricer(machine=machine, facts=QWEN_30B, workload=workload_costs()).experts(up).compute_s
        )

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
        load = workload_costs(seq_len=tokens)
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


# ----------------------------------------------------------------------------------------- adapters


T = 512
FACTS = model_facts(SMALL)
TARGETS = tuple(linear.name for linear in FACTS.layers[0].linears)
GROUPS = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]


def planned(
    names: tuple[str, ...], rank: int, dtype: torch.dtype, *, left_out: bool = False
) -> tuple[Work, Work]:
    load = replace(
        workload(),
        micro_batch_size=1,
        seq_len=T,
        dtype_bytes=dtype.itemsize,
        adapter=AdapterSpec(rank=rank, targets=TARGETS, experts=False, is_in_base_dtype=True),
    )
    at = Pricer(machine=byte_machine(dtype.itemsize), facts=FACTS, workload=load)
    adapted = [linear for linear in FACTS.layers[0].linears if linear.name in names]
    found = branches(at, adapted, left_out=adapted if left_out else ())
    return found.recompute, found.backward


def made(linear: Linear, rank: int, dtype: torch.dtype) -> AdaptedLinear:
    low = LowRank(
        a_RK=torch.randn(rank, linear.d_in, requires_grad=True),
        b_MR=torch.randn(linear.d_out, rank, requires_grad=True),
        scaling=2.0,
    )
    weight = torch.randn(linear.d_out, linear.d_in).to(dtype)
    return AdaptedLinear(weight_MK=weight, bias_M=None, branches=(low,))


def counted(
    names: tuple[str, ...], rank: int, dtype: torch.dtype, *, left_out: bool = False
) -> tuple[Counted, Counted]:
    """Count a micro-batch that is not the first: its gradients are added to what is there."""
    linears = [x for x in FACTS.layers[0].linears if x.name in names]
    group = [made(linear, rank, dtype) for linear in linears]
    x = torch.randn(1, T, linears[0].d_in).to(dtype).requires_grad_()
    _pass_through(group, x, has_value=not left_out)
    return _pass_through(group, x, has_value=not left_out)


def _pass_through(
    group: list[AdaptedLinear], x: torch.Tensor, *, has_value: bool = True, key: object = None
) -> tuple[Counted, Counted]:
    forward, backward = Counted(multiplies=False), Counted(multiplies=False)
    with forward:
        outputs = apply_linears(x, group, key=key, has_value=has_value)
    cotangents = [torch.randn(y.shape, dtype=y.dtype) for y in outputs]
    x.grad = None
    with backward:
        torch.autograd.backward(outputs, cotangents)
    return forward, backward


@pytest.mark.parametrize(
    ("names", "rank", "dtype"), diagonal(GROUPS, [16, 64], [torch.float32, torch.bfloat16])
)
def test_branches_move_what_the_plan_says_within_a_tenth(
    names: tuple[str, ...], rank: int, dtype: torch.dtype
) -> None:
    for said, found in zip(planned(names, rank, dtype), counted(names, rank, dtype), strict=True):
        assert said.memory_s == pytest.approx(found.total_bytes, rel=0.1), dict(found.num_bytes)
        assert said.num_ops == found.total_ops - len(names), found.num_ops  # but for W's products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["q_proj", "down_proj"])
def test_a_branch_by_peft_moves_what_the_plan_says_within_a_tenth(
    name: str, dtype: torch.dtype
) -> None:
    (linear,) = (x for x in FACTS.layers[0].linears if x.name == name)
    adapter = AdapterSpec(rank=16, targets=(name,), experts=False)
    load = replace(
        workload(), micro_batch_size=1, seq_len=T, dtype_bytes=dtype.itemsize, adapter=adapter
    )
    tall = byte_machine(4).tall_fp32_flops_per_s
    machine = replace(byte_machine(dtype.itemsize), tall_fp32_flops_per_s=tall)
    said = branches(Pricer(machine=machine, facts=FACTS, workload=load), [linear], left_out=())
    base = torch.nn.Linear(linear.d_in, linear.d_out, bias=False, dtype=dtype)
    wrapped = LoraLinear(
        base.requires_grad_(requires_grad=False), "default", LoraConfig(r=16, lora_alpha=32), r=16
    )
    for low in (wrapped.lora_A, wrapped.lora_B):
        low["default"].to(torch.float32)
    x = torch.randn(1, T, linear.d_in).to(dtype).requires_grad_()

    def count() -> tuple[Counted, Counted]:
        x.grad = None
        forward, backward = Counted(multiplies=False), Counted(multiplies=False)
        with forward:
            y = wrapped(x)
        gradient = torch.randn_like(y)
        with backward:
            y.backward(gradient)
        return forward, backward

    count()
    forward, backward = count()  # its gradients are added to those of the first
    for work, found in ((said.forward, forward), (said.backward, backward)):
        assert work.memory_s == pytest.approx(found.total_bytes, rel=0.1), dict(found.num_bytes)
        if dtype is torch.bfloat16:  # without casts there are fewer
            assert work.num_ops == found.total_ops - 1, found.num_ops  # but for W's product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [16, 64])
def test_a_recompute_without_values_moves_what_the_plan_says_within_a_tenth(
    rank: int, dtype: torch.dtype
) -> None:
    said, backward = planned(("down_proj",), rank, dtype, left_out=True)
    found, after = counted(("down_proj",), rank, dtype, left_out=True)
    assert said.memory_s == pytest.approx(found.total_bytes, rel=0.1), dict(found.num_bytes)
    assert said.num_ops == found.total_ops, found.num_ops
    assert backward.memory_s == pytest.approx(after.total_bytes, rel=0.1)
    assert backward.num_ops == after.total_ops - 1  # but for W's product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["q_proj", "down_proj"])
def test_a_dropout_before_a_branch_moves_what_the_plan_says_within_a_tenth(
    name: str, dtype: torch.dtype
) -> None:
    (linear,) = (x for x in FACTS.layers[0].linears if x.name == name)
    load = replace(
        workload(),
        micro_batch_size=1,
        seq_len=T,
        dtype_bytes=dtype.itemsize,
        adapter=AdapterSpec(
            rank=16, targets=TARGETS, experts=False, is_in_base_dtype=True, has_dropout=True
        ),
    )
    machine = replace(byte_machine(dtype.itemsize), device="cpu")
    said = branches(Pricer(machine=machine, facts=FACTS, workload=load), [linear], left_out=())
    one, x = made(linear, 16, dtype), torch.randn(1, T, linear.d_in).to(dtype).requires_grad_()

    def count() -> tuple[Counted, Counted]:
        x.grad = None
        forward, backward = Counted(multiplies=False), Counted(multiplies=False)
        with forward:
            (y,) = apply_linears(x, [one], x_branch=torch.dropout(x, 0.1, train=True))
        gradient = torch.randn_like(y)
        with backward:
            y.backward(gradient)
        return forward, backward

    count()
    forward, backward = count()  # its gradients are added to those of the first
    for work, found in ((said.forward, forward), (said.backward, backward)):
        assert work.memory_s == pytest.approx(found.total_bytes, rel=0.1), dict(found.num_bytes)
        assert work.num_ops == found.total_ops - 1, found.num_ops  # but for W's product


def with_magnitude(one: AdaptedLinear) -> AdaptedLinear:
    magnitude_M = torch.linalg.norm(one.weight_MK.float(), dim=1).requires_grad_()
    return replace(one, magnitude_M=magnitude_M)


@pytest.mark.parametrize(
    ("names", "rank", "dtype"), diagonal(GROUPS, [16, 64], [torch.float32, torch.bfloat16])
)
def test_dora_moves_what_the_plan_says_within_a_tenth(
    names: tuple[str, ...], rank: int, dtype: torch.dtype
) -> None:
    adapter = AdapterSpec(
        rank=rank, targets=TARGETS, experts=False, is_in_base_dtype=True, is_dora=True
    )
    load = replace(
        workload(), micro_batch_size=1, seq_len=T, dtype_bytes=dtype.itemsize, adapter=adapter
    )
    machine = replace(byte_machine(dtype.itemsize), device="cpu")
    at = Pricer(machine=machine, facts=FACTS, workload=load)
    linears = [linear for linear in FACTS.layers[0].linears if linear.name in names]
    said = branches(at, linears, left_out=())
    group = [with_magnitude(made(linear, rank, dtype)) for linear in linears]
    x = torch.randn(1, T, linears[0].d_in).to(dtype).requires_grad_()
    _pass_through(group, x)  # gradients of the next are added to its own
    with VISIT_CACHE.in_pass():
        VISIT_CACHE.enter("a visit")
        first, backward = _pass_through(group, x, key="group")
        later, again = _pass_through(group, x, key="group")
        VISIT_CACHE.enter("downwards")
        down, _ = _pass_through(group, x, key="group")
    assert again.num_bytes == backward.num_bytes
    assert first.total_ops > down.total_ops > later.total_ops
    assert not any("norm" in name for name in down.num_ops)
    scaled = sum((visit_scale(at, linear) for linear in linears), start=said.recompute)
    assert scaled.memory_s == pytest.approx(down.total_bytes, rel=0.1), dict(down.num_bytes)
    assert scaled.num_ops == down.total_ops - len(names), down.num_ops
    once = sum((visit_norm(at, linear) for linear in linears), start=scaled)
    assert once.memory_s == pytest.approx(first.total_bytes, rel=0.1), dict(first.num_bytes)
    assert once.num_ops == first.total_ops - len(names), first.num_ops
    assert said.backward.memory_s == pytest.approx(backward.total_bytes, rel=0.1)
    assert said.backward.num_ops == backward.total_ops - len(names), backward.num_ops


# ------------------------------------------------------------------------------------------ encoder


NUM = 20
ENCODER_FACTS = qwen3_8b(num_hidden_layers=2)
SIZES: dict[str, Any] = {
    "task_type": TaskType.CAUSAL_LM,
    "num_virtual_tokens": NUM,
    "num_layers": 2,
    "num_transformer_submodules": 1,
}
# keys of 8 heads with 128 features each; of p-tuning as wide as the model
SPECS = {
    "prefix_mlp": prefix_spec(ENCODER_FACTS, num_past=NUM, has_encoder=True),
    "p_tuning": AdapterSpec(
        rank=1, targets=(), experts=False, virtual=virtual_shapes(NUM, 4096, has_encoder=True)
    ),
}


def encoder_of(name: str) -> torch.nn.Module:
    if name == "p_tuning":
        of_tokens = PromptEncoderConfig(**SIZES, token_dim=4096, encoder_hidden_size=4096)
        return PromptEncoder(of_tokens)
    of_keys = PrefixTuningConfig(
        **SIZES, token_dim=1024, encoder_hidden_size=1024, prefix_projection=True
    )
    return PrefixEncoder(of_keys)


@pytest.mark.parametrize("name", SPECS)
def test_flops_and_weights_are_those_of_peft_s_encoder(name: str) -> None:
    at = Pricer(
        machine=named_machine("rtx4090"),
        facts=ENCODER_FACTS,
        workload=workload(adapter=SPECS[name]),
    )
    with torch.device("meta"):
        encoder, tokens = encoder_of(name), torch.arange(NUM).unsqueeze(0)
    with FlopCounterMode(display=False) as forward:
        made = encoder(tokens)
    with FlopCounterMode(display=False) as backward:
        made.sum().backward()
    assert encoder_forward(at).flops == forward.get_total_flops() > 0
    assert encoder_backward(at).flops == backward.get_total_flops() > 0
    assert trained_parameters(ENCODER_FACTS, SPECS[name]) == sum(
        p.numel() for p in encoder.parameters()
    )


@pytest.mark.parametrize("name", SPECS)
def test_bytes_are_mostly_those_of_its_weights_and_gradients(name: str) -> None:
    """Read once for each product, and a new gradient written, read and added to the sum."""
    at = Pricer(
        machine=byte_machine(2), facts=ENCODER_FACTS, workload=workload(adapter=SPECS[name])
    )
    in_linears = 4 * sum(a * b for a, b in (s for s in SPECS[name].virtual[1:] if len(s) > 1))
    forward_s, backward_s = (
        work(at).seconds(at.machine) for work in (encoder_forward, encoder_backward)
    )
    assert in_linears < forward_s < 1.1 * in_linears
    assert 5 * in_linears < backward_s < 1.1 * 5 * in_linears


def test_a_table_alone_has_no_products_and_a_step_with_an_encoder_takes_longer() -> None:
    machine = named_machine("rtx4090")
    table = prefix_spec(ENCODER_FACTS, num_past=NUM, has_encoder=False)
    at = Pricer(machine=machine, facts=ENCODER_FACTS, workload=workload(adapter=table))
    assert (encoder_forward(at).num_ops, encoder_backward(at).num_ops) == (0, 0)
    plain, with_mlp = (
        price(ENCODER_FACTS, machine, workload(adapter=one)) for one in (table, SPECS["prefix_mlp"])
    )
    # 4 layers' widths of 1,024 and one more, squared, in fp32
    weights_s = 4 * 5 * 1024**2 / machine.memory_bytes_per_s.value
    assert with_mlp.front_s >= plain.front_s
    more_s = with_mlp.front_backward_s - plain.front_backward_s
    assert with_mlp.front_backward_s > 5 * weights_s
    of_table, of_mlp = (
        plan(ENCODER_FACTS, machine, request(workload(adapter=one))).step_s
        for one in (table, SPECS["prefix_mlp"])
    )
    assert of_mlp >= of_table + 8 * more_s


# ------------------------------------------------------------------------------------ expert passes


EXPERT_PASSES_SIZES = Sizes(512, 256, 4, 64, 2)
NUM_ROWS, SIZE = (
    EXPERT_PASSES_SIZES.num_tokens * EXPERT_PASSES_SIZES.num_choices,
    torch.bfloat16.itemsize,
)
# Of the kernels: what each reads or writes besides the rows and matrices of a large product.
MOVED = {"activate": ("out", "gates"), "activate_backward": ("gates", "of_gates", "out")}


class Count(TorchDispatchMode):
    """Bytes of kernels and of sums over tokens, in this way: routed rows, and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.of_rows = self.of_branches = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sum.dim_IntList and out.shape[-1] == EXPERT_PASSES_SIZES.hidden:
            self.of_rows += (
                NUM_ROWS * EXPERT_PASSES_SIZES.hidden * SIZE
            )  # the tokens that it writes are fewer
        if func in (torch.ops.aten.mul_.Tensor, torch.ops.aten.mul_.Scalar):
            self.of_branches += sum(_bytes(x) for x in tree_leaves(out))
        return out


class _Kernels:
    """In place of the module of kernels: what is launched is counted."""

    def __init__(self, count: Count) -> None:
        self._count = count

    def __getattr__(self, name: str) -> "_Kernel":
        return _Kernel(self._count, name)


class _Kernel:
    def __init__(self, count: Count, name: str) -> None:
        self._count, self._name = count, name

    def __getitem__(self, grid: object) -> "_Kernel":
        return self

    def __call__(self, **given: Any) -> None:
        if self._name in MOVED:
            self._count.of_rows += sum(_bytes(given[name]) for name in MOVED[self._name])
        elif self._name == "sum_outer":
            self._count.of_branches += NUM_ROWS * given["num_n"] * SIZE
        elif given["num_n"] < EXPERT_PASSES_SIZES.hidden:  # rows times A or B
            self._count.of_branches += NUM_ROWS * given["num_k"] * SIZE
        else:
            self._count.of_rows += _bytes(given["out"])


def _features(passes: RowPasses) -> float:
    return passes.features(
        width=EXPERT_PASSES_SIZES.width,
        hidden=EXPERT_PASSES_SIZES.hidden,
        rows_per_token=EXPERT_PASSES_SIZES.num_choices,
        num_experts=EXPERT_PASSES_SIZES.num_experts,
    )


def _bytes(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.numel() * x.element_size()


@pytest.mark.parametrize("visit", ["forward", "recompute", "left out", "backward"])
def test_fused_kernels_move_what_the_plan_says_within_a_tenth(visit: str) -> None:
    model: Any = compute_beside(
        adapted_experts("gated", "eager", torch.bfloat16, sizes=EXPERT_PASSES_SIZES)
    )
    model.get_base_model().config._experts_implementation = (
        lora_of_experts.TRITON + lora_of_experts.SUFFIX
    )
    hidden_TD, expert_TC, weight_TC = chosen("mixed", torch.bfloat16, sizes=EXPERT_PASSES_SIZES)
    hidden_TD.requires_grad_()
    counted = Count()

    class Counting(SilentLauncher):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._kernels = _Kernels(counted)

    def forward(*, has_graph: bool = True) -> torch.Tensor:
        wrapper = model.get_base_model().experts
        run = wrapper.without_value if visit == "left out" else wrapper
        with torch.set_grad_enabled(has_graph):
            out: torch.Tensor = run(hidden_TD, expert_TC, weight_TC)
        return out

    with mock.patch.object(fused, "Launcher", Counting):
        if visit == "backward":
            out = forward()
            counted.of_rows = counted.of_branches = 0
            with counted:
                out.backward(torch.ones_like(out))
        else:
            with counted:
                forward(has_graph=visit != "forward")

    way = way_of("triton", is_adapted=True, is_ours=True, dtype_bytes=SIZE)
    passes = {"forward": way.forward, "backward": way.backward}.get(visit, way.recompute)
    features = _features(passes)
    if visit == "left out":
        features -= _features(way.down)
    branch = way.branch_backward if visit == "backward" else way.branch_forward
    sides = [
        (EXPERT_PASSES_SIZES.hidden, 2 * EXPERT_PASSES_SIZES.width),
        (EXPERT_PASSES_SIZES.width, EXPERT_PASSES_SIZES.hidden),
    ]
    of_branches = sum(branch.d_in * d_in + branch.d_out * d_out for d_in, d_out in sides)
    assert NUM_ROWS * SIZE * features == pytest.approx(counted.of_rows, rel=0.1)
    assert NUM_ROWS * SIZE * of_branches == pytest.approx(counted.of_branches, rel=0.1)


# No side of a frozen product is narrow, nor the rows of an expert few.
LARGE = Sizes(512, 256, 4, 1024, 2)
RANK = 16
Parts = dict[str, tuple[float, float]]  # bytes and launches


def counted_expert_passes(implementation: str, dtype: torch.dtype, *, is_adapted: bool) -> Parts:
    """Count experts by themselves, without values."""
    model: Any = adapted_experts("gated", "eager", dtype, sizes=LARGE, r=RANK)
    if is_adapted:
        compute_beside(model)
        model.get_base_model().config._experts_implementation = (
            implementation + lora_of_experts.SUFFIX
        )
    else:
        model = model.unload()
        model.config._experts_implementation = implementation
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_copy(model, mode)
    found = {name: Counted() for name in ("forward", "recompute", "backward")}
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(traced_experts(LARGE.num_experts, (9, 0)))
        for parameter in fake.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        hidden_TD, weight_TC = (
            torch.empty(LARGE.num_tokens, size, dtype=dtype, requires_grad=True)
            for size in (LARGE.hidden, LARGE.num_choices)
        )
        expert_TC = torch.empty(LARGE.num_tokens, LARGE.num_choices, dtype=torch.long)
        with found["forward"], torch.no_grad():
            fake(hidden_TD, expert_TC, weight_TC)
        with found["recompute"]:
            out = fake(hidden_TD, expert_TC, weight_TC)
        gradient = torch.empty_like(out)
        with found["backward"]:
            out.backward(gradient)
    return {name: (one.total_bytes, one.total_ops) for name, one in found.items()}


def said(implementation: ExpertsImplementation, dtype: torch.dtype, *, is_adapted: bool) -> Parts:
    """Return what the plan says of the same."""
    facts = qwen3_30b(
        hidden_size=LARGE.hidden,
        moe_intermediate_size=LARGE.width,
        num_experts=LARGE.num_experts,
        num_experts_per_tok=LARGE.num_choices,
    )
    machine = replace(
        byte_machine(dtype.itemsize),
        has_grouped_gemm=True,
        experts_implementation=Implementation(value=implementation, source="test"),
    )
    load = workload(
        seq_len=LARGE.num_tokens,
        dtype_bytes=dtype.itemsize,
        adapter=AdapterSpec(rank=RANK, targets=(), experts=is_adapted),
    )
    at = Pricer(machine=machine, facts=facts, workload=load)
    experts = [x for x in facts.layers[0].linears if x.group == "experts"]
    routing = routing_work(at, facts.layers[0])
    branches = [expert_branch(at, linear) for linear in experts] if is_adapted else []
    parts: Parts = {}
    for name in ("forward", "recompute", "backward"):
        work = sum((getattr(one, name) for one in branches), start=getattr(routing, name))
        products = sum((Work(num_ops=at.expert_launches(x)) for x in experts), start=work)
        router = ROUTER_BACKWARD_OPS if name == "backward" else ROUTER_OPS
        parts[name] = (work.memory_s, products.num_ops - router)
    return parts


CASES = [
    (implementation, dtype, is_adapted)
    for implementation in ("eager", "grouped_mm")
    for is_adapted in (True, False)
    for dtype in (torch.bfloat16, torch.float32)
]


@pytest.mark.parametrize(
    ("implementation", "dtype", "is_adapted"),
    mostly_slow(CASES, CASES[0], CASES[4], CASES[6]),
    ids=str,
)
def test_experts_by_torch_move_and_launch_what_the_plan_says_within_a_tenth(
    implementation: ExpertsImplementation, dtype: torch.dtype, *, is_adapted: bool
) -> None:
    found = counted_expert_passes(implementation, dtype, is_adapted=is_adapted)
    for name, (num_bytes, num_ops) in said(implementation, dtype, is_adapted=is_adapted).items():
        assert num_bytes == pytest.approx(found[name][0], rel=0.1), name
        assert num_ops == pytest.approx(found[name][1], abs=1), name


# -------------------------------------------------------------------------------------- expert rate


MOE = qwen3_30b(intermediate_size=6144, num_hidden_layers=2, mlp_only_layers=[0])
CARD = named_machine("rtx3090")


def with_adapters(*, experts: bool) -> Workload:
    return workload(seq_len=8192, adapter=lora(targets=("q_proj",), experts=experts))


def priced_s(machine: Machine, load: Workload) -> float:
    """Forward with a graph, as a trial measures it, and backward of the layer's experts."""
    load = replace(load, leaves_out=False)
    layer = MOE.layers[1]
    others = tuple(linear for linear in layer.linears if linear.group != "experts")
    whole, bare = (replace(MOE, layers=(x,)) for x in (layer, replace(layer, linears=others)))
    plain = replace(load, adapter=replace(load.adapter, experts=False))
    whole_s = price(whole, machine, load).layers[0].backward_s
    return whole_s - price(bare, machine, plain).layers[0].backward_s


@pytest.mark.parametrize("experts", [False, True])
def test_the_experts_of_a_layer_are_priced_as_they_were_measured(*, experts: bool) -> None:
    load = with_adapters(experts=experts)
    ways: tuple[ExpertsImplementation, ...] = ("triton", "grouped_mm")
    for way, seconds in itertools.product(ways, (0.06, 0.2)):
        machine = with_measured_experts(CARD, MOE, load, implementation=way, seconds=seconds)
        assert priced_s(machine, load) == pytest.approx(seconds)
        assert machine.experts_implementation.value == way
        assert machine.experts_implementation.source == "measured"
        assert machine.expert_gemm_flops_per_s.source == "measured"


def test_experts_are_never_priced_above_the_rate_of_large_products() -> None:
    machine = with_measured_experts(
        CARD, MOE, with_adapters(experts=True), implementation="triton", seconds=1e-9
    )
    assert machine.expert_gemm_flops_per_s.value == pytest.approx(CARD.gemm_flops_per_s.value)


def test_nothing_else_of_the_machine_is_changed() -> None:
    machine = with_measured_experts(
        CARD, MOE, with_adapters(experts=True), implementation="triton", seconds=0.1
    )
    restored = replace(
        machine,
        experts_implementation=CARD.experts_implementation,
        expert_gemm_flops_per_s=CARD.expert_gemm_flops_per_s,
    )
    assert restored == CARD


# ------------------------------------------------------------------------------------ measured rows


RESULTS = ROOT / "tests/bench/results"
TOLERANCE = 0.15
ADAPTERS = {
    "qwen3-8b": AdapterSpec(
        rank=16, targets=(*ATTENTION, "gate_proj", "up_proj", "down_proj"), experts=False
    ),
    "qwen3-30b-a3b": AdapterSpec(rank=8, targets=ATTENTION, experts=True),
}


def rows(code: str, case: str) -> dict[str, dict[str, Any]]:
    (file,) = RESULTS.glob(f"*-{code}.jsonl")
    each = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["part"]: row for row in each if row["case"] == case}


PROFILE = rows("cffe8a3b", "profile")
TRIAL = rows("374ebad4", "probe")["experts, 8192 tokens"]


def took(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a layer's visits and of the head, of one micro-batch."""
    phases, num = row["phases_s"], row["num_micro_batches"]
    return {
        "forward": phases["forward"] / row["num_layers"] / num,
        "backward": phases["backward"] / row["num_layers"] / num,
        "head and loss": phases["head and loss"] / num,
    }


def named() -> Machine:
    """Return the card as a plan knows it by name, with the expert kernels of the profile."""
    triton = Implementation(value="triton", source="as the profile")
    return replace(named_machine("h200"), experts_implementation=triton)


def probed(shape: str) -> Machine:
    """Return the card with the rates that its probe and its trial of experts found."""
    rates: dict[str, float] = PROFILE[shape]["rates"]["bfloat16"]
    changes: dict[str, Any] = {name: Rate(value=x, source="measured") for name, x in rates.items()}
    machine = replace(named(), **changes)
    if shape != "qwen3-30b-a3b":
        return machine
    return with_measured_experts(
        machine,
        model_facts(fields(shape)),
        workload(seq_len=8192, adapter=ADAPTERS[shape]),
        implementation="triton",
        seconds=TRIAL["seconds"]["triton"],
    )


@pytest.mark.parametrize("grade", ["named", "probed"])
@pytest.mark.parametrize("shape", ADAPTERS)
def test_each_part_is_priced_within_15_percent_of_what_a_card_took(shape: str, grade: str) -> None:
    machine = named() if grade == "named" else probed(shape)
    load = replace(
        workload(seq_len=8192, adapter=ADAPTERS[shape]), label_tokens=8191, head_chunk_tokens=1024
    )
    costs = price(model_facts(fields(shape)), machine, load)
    layer = costs.layers[0]
    said = {
        "forward": layer.forward_s,
        "backward": layer.backward_s,
        "head and loss": costs.tail_s,
    }
    assert said == pytest.approx(took(PROFILE[shape]), rel=TOLERANCE)


# ---------------------------------------------------------------------------------------- pointwise


# Settings of each type, and how far off the plan may be: where norms and angles keep their weights
# in fp32 (olmo2), or keys and queries are joined from a part with a rotation and one without
# (phi3), there are passes that the plan does not know.
TYPES: dict[str, tuple[dict[str, object], float]] = {
    "qwen3": ({}, 0.1),
    "llama": ({}, 0.1),
    "mistral": ({"sliding_window": None}, 0.1),
    "qwen2": ({}, 0.1),
    "gemma3_text": ({}, 0.1),
    "phi3": ({"pad_token_id": 0}, 0.2),
    "olmo2": ({}, 0.2),
}


def counted_pointwise(
    config: dict[str, Any], dtype: torch.dtype, *, is_fused: bool = False
) -> tuple[Counted, Counted]:
    """Count the forward and the backward of a frozen layer."""
    built = AutoConfig.for_model(**config)
    built._attn_implementation = "sdpa"
    model: Any = AutoModel.from_config(built, dtype=dtype).requires_grad_(requires_grad=False)
    hidden = torch.randn(1, T, built.hidden_size, dtype=dtype)
    calls: list[tuple[Any, Any]] = []
    layer = model.layers[0]
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad(), Counted(multiplies=False):
        model(inputs_embeds=hidden, use_cache=False)
    hook.remove()
    (args, kwargs) = calls[0]
    leaf = hidden.requires_grad_()
    forward, backward = Counted(multiplies=False), Counted(multiplies=False)
    ours = FusedLayers([layer]).visited(0) if is_fused else nullcontext()
    with ours, forward:
        output = layer(
            *((leaf, *args[1:]) if args else ()),
            **(kwargs if args else kwargs | {"hidden_states": leaf}),
        )
    output = output if isinstance(output, torch.Tensor) else output[0]
    gradient = torch.randn_like(output)
    with backward:
        output.backward(gradient)
    return forward, backward


def moved(found: Counted) -> int:
    return sum(
        n
        for name, n in found.num_bytes.items()
        if "attention" not in name and name not in ("mm", "addmm", "bmm")
    )


def priced(config: dict[str, Any], dtype: torch.dtype, code: LayerCode) -> VisitWork:
    facts, b = model_facts(config), dtype.itemsize
    load = replace(
        workload(),
        micro_batch_size=1,
        seq_len=T,
        dtype_bytes=b,
        adapter=AdapterSpec(rank=1, targets=(), experts=False),
        layer_code=code,
    )
    host = replace(byte_machine(b), device="cpu")  # where fused kernels are no faster
    at = Pricer(machine=host, facts=facts, workload=load)
    return pointwise_work(at, facts.layers[0])


DTYPES = (torch.bfloat16, torch.float32)
POINTWISE_CASES = tiered(
    itertools.product(TYPES, DTYPES),
    default=[("qwen3", torch.float32)],
    slow=[("qwen3", torch.bfloat16), *each_value(tuple(TYPES), DTYPES)],
)


@pytest.mark.parametrize(("model_type", "dtype"), POINTWISE_CASES, ids=str)
def test_a_layer_moves_what_the_plan_says_within_a_tenth(
    model_type: str, dtype: torch.dtype
) -> None:
    config: dict[str, Any] = {**SMALL, **TYPES[model_type][0], "model_type": model_type}
    facts, limit = model_facts(config), TYPES[model_type][1]
    said = priced(config, dtype, "plain")
    forward, backward = counted_pointwise(config, dtype)
    assert said.forward.memory_s == pytest.approx(moved(forward), rel=limit), forward.num_bytes
    assert said.backward.memory_s == pytest.approx(moved(backward), rel=limit), backward.num_bytes
    if limit == 0.1:
        num_products = len(facts.layers[0].linears)
        assert said.forward.num_ops == forward.total_ops - num_products - 1  # attention
        assert said.backward.num_ops == backward.total_ops - num_products - 1


@pytest.mark.parametrize(("model_type", "dtype"), POINTWISE_CASES, ids=str)
def test_a_fused_layer_moves_what_the_plan_says_within_a_tenth(
    model_type: str, dtype: torch.dtype
) -> None:
    config: dict[str, Any] = {**SMALL, **TYPES[model_type][0], "model_type": model_type}
    said, limit = priced(config, dtype, "fused"), 0.2 if model_type == "phi3" else 0.1
    forward, backward = counted_pointwise(config, dtype, is_fused=True)
    assert said.forward.memory_s == pytest.approx(moved(forward), rel=limit), forward.num_bytes
    assert said.backward.memory_s == pytest.approx(moved(backward), rel=limit), backward.num_bytes
    if limit == 0.1:
        num_products = len(model_facts(config).layers[0].linears)
        assert said.forward.num_ops == forward.total_ops - num_products - 1  # attention
        assert said.backward.num_ops == backward.total_ops - num_products - 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.float32, torch.bfloat16], torch.float32), ids=str
)
def test_a_mixture_saves_by_fused_parts_what_the_plan_says_within_a_tenth(
    dtype: torch.dtype,
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    config: dict[str, Any] = {**SMALL, **experts, "model_type": "qwen3_moe"}
    plain, fused = (priced(config, dtype, code) for code in ("plain", "fused"))
    plain_found, fused_found = (counted_pointwise(config, dtype, is_fused=x) for x in (False, True))
    for name, before, after in zip(("forward", "backward"), plain_found, fused_found, strict=True):
        said = getattr(plain, name).memory_s - getattr(fused, name).memory_s
        assert said == pytest.approx(moved(before) - moved(after), rel=0.1)
        num_ops = getattr(plain, name).num_ops - getattr(fused, name).num_ops
        assert num_ops == before.total_ops - after.total_ops


def test_compiled_layers_are_priced_as_fused_ones_and_those_of_auto_by_the_device() -> None:
    config: dict[str, Any] = {**SMALL, "model_type": "llama"}
    prices = {code: priced(config, torch.bfloat16, code) for code in get_args(LayerCode)}
    ours = prices["fused"].forward.num_calls  # torch's compiler makes one call of all that it fuses
    assert ours == 4
    calls = Work(num_calls=ours)
    assert prices["compiled"].forward + calls == prices["fused"].forward
    assert prices["compiled"].backward + calls == prices["fused"].backward
    assert prices["fused"].forward.memory_s < 0.5 * prices["plain"].forward.memory_s
    assert prices["auto"] == prices["plain"]  # on a CPU
    assert workload(layer_code="auto").code_on("cuda") == "fused"


# ------------------------------------------------------------------------------------------- visits


VISITS_FACTS, MACHINE = model_facts(SMALL), named_machine("rtx4090")
DORA = AdapterSpec(
    rank=16,
    targets=tuple(linear.name for linear in VISITS_FACTS.layers[0].linears),
    experts=False,
    is_in_base_dtype=True,
    is_dora=True,
)


@pytest.mark.parametrize("num", [1, 4])
def test_micro_batches_share_the_norms_of_dora(num: int) -> None:
    load = workload(adapter=DORA)
    before = price(VISITS_FACTS, MACHINE, load)
    after = with_norms(before, VISITS_FACTS, MACHINE, load, num_micro_batches=num)
    at, layer = Pricer(machine=MACHINE, facts=VISITS_FACTS, workload=load), VISITS_FACTS.layers[0]
    adapted = adapted_linears(layer, DORA)
    norms_s = sum((visit_norm(at, x) for x in adapted), start=Work()).seconds(MACHINE)
    scales_s = sum((visit_scale(at, x) for x in adapted), start=Work()).seconds(MACHINE)
    assert norms_s > scales_s > 0
    (one,), (other,) = before.layers, after.layers
    assert other.forward_s == pytest.approx(one.forward_s + (norms_s + scales_s) / num)
    for name in ("backward_s", "recompute_s"):
        assert getattr(other, name) == pytest.approx(getattr(one, name) + scales_s / num), name
    assert other.back_s(KEPT_GRAPH) == pytest.approx(one.back_s(KEPT_GRAPH))


@pytest.mark.parametrize(
    "changes", [{"is_dora": False}, {"has_dropout": True}, {"is_in_base_dtype": False}]
)
def test_nothing_is_added_where_there_is_no_dora_or_peft_computes_it(
    changes: dict[str, Any],
) -> None:
    load = workload(adapter=replace(DORA, **changes))
    costs = price(VISITS_FACTS, MACHINE, load)
    assert with_norms(costs, VISITS_FACTS, MACHINE, load, num_micro_batches=1) is costs


def test_dora_takes_less_time_than_by_peft_and_more_than_lora() -> None:
    ours = price(VISITS_FACTS, MACHINE, workload(adapter=DORA))
    by_peft = price(VISITS_FACTS, MACHINE, workload(adapter=replace(DORA, is_in_base_dtype=False)))
    plain = price(VISITS_FACTS, MACHINE, workload(adapter=replace(DORA, is_dora=False)))
    times = [one.layers[0].forward_s + one.layers[0].backward_s for one in (plain, ours, by_peft)]
    assert times == sorted(times)
