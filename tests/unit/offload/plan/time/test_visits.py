"""What a visit or a pass computes once, in the costs of its micro-batches."""

from dataclasses import replace
from typing import Any

import pytest

from offload.plan.facts.facts import AdapterSpec, adapted_linears, model_facts
from offload.plan.machine.machine import named_machine
from offload.plan.time.adapters import visit_norm, visit_scale
from offload.plan.time.costs import price, with_norms
from offload.plan.time.pricer import Pricer
from offload.plan.time.roofline import Work
from tests.builders import workload
from tests.counted import SMALL

FACTS, MACHINE = model_facts(SMALL), named_machine("rtx4090")
DORA = AdapterSpec(
    rank=16,
    targets=tuple(linear.name for linear in FACTS.layers[0].linears),
    experts=False,
    is_in_base_dtype=True,
    is_dora=True,
)


@pytest.mark.parametrize("num", [1, 4])
def test_micro_batches_share_the_norms_of_dora(num: int) -> None:
    load = workload(adapter=DORA)
    before = price(FACTS, MACHINE, load)
    after = with_norms(before, FACTS, MACHINE, load, num_micro_batches=num)
    at, layer = Pricer(machine=MACHINE, facts=FACTS, workload=load), FACTS.layers[0]
    adapted = adapted_linears(layer, DORA)
    norms_s = sum((visit_norm(at, x) for x in adapted), start=Work()).seconds(MACHINE)
    scales_s = sum((visit_scale(at, x) for x in adapted), start=Work()).seconds(MACHINE)
    assert norms_s > scales_s > 0
    (one,), (other,) = before.layers, after.layers
    assert other.forward_s == pytest.approx(one.forward_s + (norms_s + scales_s) / num)
    for name in ("backward_s", "recompute_s"):
        assert getattr(other, name) == pytest.approx(getattr(one, name) + scales_s / num), name
    assert other.back_s(has_graph=True) == pytest.approx(one.back_s(has_graph=True))


@pytest.mark.parametrize(
    "changes", [{"is_dora": False}, {"has_dropout": True}, {"is_in_base_dtype": False}]
)
def test_nothing_is_added_where_there_is_no_dora_or_peft_computes_it(
    changes: dict[str, Any],
) -> None:
    load = workload(adapter=replace(DORA, **changes))
    costs = price(FACTS, MACHINE, load)
    assert with_norms(costs, FACTS, MACHINE, load, num_micro_batches=1) is costs


def test_dora_takes_less_time_than_by_peft_and_more_than_lora() -> None:
    ours = price(FACTS, MACHINE, workload(adapter=DORA))
    by_peft = price(FACTS, MACHINE, workload(adapter=replace(DORA, is_in_base_dtype=False)))
    plain = price(FACTS, MACHINE, workload(adapter=replace(DORA, is_dora=False)))
    times = [one.layers[0].forward_s + one.layers[0].backward_s for one in (plain, ours, by_peft)]
    assert times == sorted(times)
