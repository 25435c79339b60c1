import itertools
from dataclasses import replace

import pytest

from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import ExpertsImplementation, Machine, named_machine
from offload.plan.time.costs import price, with_measured_experts
from tests.builders import lora, qwen3_30b, workload

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
