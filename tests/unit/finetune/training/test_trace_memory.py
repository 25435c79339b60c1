"""A plan whose memory is traced: on the model that is there, or why not."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from finetune.model.facts import facts_of
from finetune.training.ranks import Ranks
from finetune.training.trace_memory import trace_memory
from offload.engine.model.layers import LayeredModel
from offload.errors import DoesNotFitError
from offload.plan.facts.facts import linear_names
from offload.plan.machine.machine import named_machine
from offload.plan.plan import Plan, plan
from offload.plan.request import PlanRequest
from tests.builders import lora, request, workload
from tests.parity.tiny_models import tiny_model, with_adapters

CPU = replace(named_machine("rtx3060"), device="cpu", context_bytes=0)


def planned(model_type: str, *, num_slots: int | None, budget_bytes: int | None = None) -> Plan:
    facts = facts_of(tiny_model(model_type))
    micro_batch = workload(
        micro_batch_size=2,
        seq_len=64,
        label_tokens=32,
        adapter=lora(rank=2, targets=linear_names(facts)),
        dtype_bytes=4,
    )
    asked = request(
        micro_batch,
        num_micro_batches=3,
        num_slots=num_slots,
        vram_budget_bytes=budget_bytes,
        is_slab_shared=True,
    )
    return plan(facts, CPU, asked)


def traced(first: Plan, *, ways: Sequence[PlanRequest] = ()) -> tuple[Plan, str]:
    base = tiny_model(first.facts.model_type)
    model: Any = with_adapters(base, LayeredModel(base).layers).train()
    all_ways = ways or [first.request, replace(first.request, is_stashed=True)]
    cpu = torch.device("cpu")
    return trace_memory(model, first, open_requests=all_ways, device=cpu, ranks=Ranks())


@pytest.mark.thorough
def test_a_plan_of_auto_slots_takes_as_many_as_fit_by_the_trace() -> None:
    first = planned("qwen3", num_slots=None)
    whole, note = traced(first)
    assert (first.memory_grade, whole.memory_grade) == ("formula", "traced")
    assert whole.num_slots == first.num_slots == 4
    assert "planned again" not in note
    found = {term.name: term.num_bytes for term in whole.device_memory}
    assert found["one visit"] > 0
    assert whole.peak_bytes == sum(found.values())
    budget_bytes = whole.peak_bytes - found["slots"] // 8
    assert budget_bytes > first.peak_bytes - found["slots"] // 4 * 2  # the formula has room for 3
    tight = planned("qwen3", num_slots=None, budget_bytes=budget_bytes)
    again, note = traced(tight)
    assert again.num_slots == 3
    assert again.peak_bytes <= budget_bytes
    assert (again.num_slots != tight.num_slots) == ("planned again: 3 slots" in note)


@pytest.mark.thorough
def test_a_number_of_slots_that_does_not_fit_by_the_trace_is_refused_with_one_that_does() -> None:
    first = planned("qwen3", num_slots=4)
    whole, _ = traced(first)
    roomy = replace(first, request=replace(first.request, vram_budget_bytes=whole.peak_bytes))
    assert traced(roomy)[0].num_slots == 4
    short = replace(roomy, request=replace(roomy.request, vram_budget_bytes=whole.peak_bytes - 1))
    with pytest.raises(
        DoesNotFitError,
        match=r"with 4 slots of 4 layers, its visits traced, the plan needs .* for computing",
    ) as error:
        traced(short, ways=[short.request])
    assert error.value.hint == "`offload.num_slots: 3`"


def test_a_model_that_no_fake_tensor_passes_keeps_its_formulas_and_says_why() -> None:
    first = planned("jetmoe", num_slots=2)
    kept, note = traced(first)
    assert kept is first
    assert note.startswith("Memory (formula): ")
    assert "could not be traced: RuntimeError: split_with_sizes" in note
