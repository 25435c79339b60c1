"""The plan of full training: its counts, its memory, and its updates."""

from dataclasses import replace
from pathlib import Path

import pytest

from offload.engine.bound import EngineOptions
from offload.errors import DoesNotFitError
from offload.plan.facts.facts import AdapterSpec
from offload.plan.facts.optimizer import (
    HOST_GRADIENTS,
    HOST_STATES,
    LOW_HALVES,
    Optimizer,
    host_update_bytes,
)
from offload.plan.facts.trainable import EMBEDDING, HEAD, NORMS, all_weights, trained_parameters
from offload.plan.memory.memory import LAYER_GRADIENTS, SLAB, STAGING
from offload.plan.plan import Plan, plan
from offload.plan.schedule.op import Kind
from offload.plan.what_if import what_if
from tests.full_plans import facts_of, planned

DOCS = Path(__file__).parents[5] / "docs"


def test_all_weights_are_all_of_the_models_and_tied_ones_count_once() -> None:
    for name in ("qwen3-8b", "qwen3-0.6b", "qwen3-30b-a3b"):
        facts = facts_of(name)
        spec = AdapterSpec.none(all_weights(facts))
        assert trained_parameters(facts, spec) == facts.num_parameters
    tied, untied = all_weights(facts_of("qwen3-0.6b")), all_weights(facts_of("qwen3-8b"))
    assert set(dict(tied.outer)) == {NORMS, EMBEDDING}
    assert set(dict(untied.outer)) == {NORMS, EMBEDDING, HEAD}


@pytest.mark.parametrize(
    ("optimizer", "in_bfloat16", "in_float32"),
    [
        ("adamw", 14, 16),
        ("adamw_bf16", 12, 14),
        ("lion", 10, 12),
        ("lion_bf16", 8, 10),
        ("adamw_8bit", 8.03, 10.03),
        ("adafactor", 6.01, 8.01),
        ("sgd", 6, 8),
    ],
)
def test_the_guide_has_the_bytes_of_a_weight(
    optimizer: Optimizer, in_bfloat16: float, in_float32: float
) -> None:
    sizes = [
        host_update_bytes(number, optimizer, low) for number, low in ((2, None), (2, 4), (4, None))
    ]
    all_of = [in_bfloat16, in_bfloat16 + 2, in_float32]
    assert [sum(of.values()) for of in sizes] == pytest.approx(all_of, abs=2e-3)
    states = f"{sizes[0][HOST_STATES]:.3g}"
    row = f"| `{optimizer}` | {states} | {' | '.join(f'{size:.4g}' for size in all_of)} |"
    assert row in (DOCS / "guides" / "full-fine-tuning.md").read_text()


def test_host_memory_is_bytes_times_weights() -> None:
    found = planned("qwen3-8b", ram_gib=192)
    terms = {term.name: term.num_bytes for term in found.host_memory}
    facts = found.facts
    num, outer = facts.num_parameters, facts.outer_parameters
    assert terms[LOW_HALVES] == 2 * num
    assert terms[HOST_STATES] == 8 * num
    assert terms[HOST_GRADIENTS] == 2 * (num - outer) + 4 * outer
    assert terms[SLAB] == pytest.approx(2 * (num - outer), rel=1e-3)
    on_device = {term.name: term.num_bytes for term in found.device_memory}
    assert on_device[LAYER_GRADIENTS] == 2 * 2 * max(x.num_parameters for x in facts.layers)
    assert on_device["gradients"] == 4 * outer


def test_states_of_fewer_bytes_take_less_memory_and_the_slow_ones_more_time() -> None:
    found = {
        name: planned("qwen3-8b", ram_gib=192, optimizer=name)
        for name in ("adamw", "adamw_bf16", "lion", "adamw_8bit", "lion_bf16", "adafactor", "sgd")
    }
    memory = {name: sum(t.num_bytes for t in one.host_memory) for name, one in found.items()}
    assert sorted(memory, key=lambda name: -memory[name]) == list(found)
    busy_s = {name: one.predict().busy_s(Kind.UPDATE) for name, one in found.items()}
    assert busy_s["sgd"] < busy_s["lion"] < busy_s["adamw"]
    assert busy_s["adamw_bf16"] < busy_s["adamw"]
    facts = found["sgd"].facts
    num_weights = facts.num_parameters - facts.outer_parameters
    assert busy_s["adamw_8bit"] == pytest.approx(23e-9 / 8 * num_weights)


@pytest.mark.parametrize("ram_gib", [64, 96])
def test_what_is_too_much_is_refused_without_hints_that_do_not_apply(ram_gib: int) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        planned("qwen3-8b", ram_gib=ram_gib)
    shown = str(caught.value)
    assert "optimizer states in RAM; less with `train.optimizer: lion`" in shown
    for other in ("adapter", "codec", "tier: disk"):
        assert other not in shown


def updated_layers(found: Plan) -> list[int]:
    return [op.layer_index for op in found.schedule.ops if op.kind is Kind.UPDATE]


def test_each_trained_layer_is_updated_and_loaded_anew() -> None:
    found = planned("qwen3-8b", ram_gib=192)
    assert updated_layers(found) == list(range(36))
    assert found.schedule.num_loads == 2 * 36 - found.num_slots


def test_layers_that_are_frozen_stay_in_their_slots() -> None:
    every = all_weights(facts_of("qwen3-8b"))
    top = replace(every, layers=(0,) * 30 + every.layers[30:], outer=())
    found = planned("qwen3-8b", ram_gib=192, whole=top, num_slots=4)
    assert updated_layers(found) == list(range(30, 36))
    assert found.schedule.num_loads == 2 * (36 - 4)


def test_a_slow_memory_exposes_updates_and_the_bound_holds() -> None:
    fast = planned("qwen3-8b", ram_gib=192)
    rate = replace(fast.machine.host_memory_bytes_per_s, value=2e9)
    slow = plan(fast.facts, replace(fast.machine, host_memory_bytes_per_s=rate), fast.request)
    updates_s = slow.predict().busy_s(Kind.UPDATE)
    assert updates_s == pytest.approx(
        sum(slow.facts.num_parameters for _ in [0]) * 26 / 2e9, rel=0.2
    )
    assert fast.predict().exposed_s(Kind.UPDATE) < 0.3 * fast.predict().busy_s(Kind.UPDATE)
    assert slow.predict().exposed_s(Kind.UPDATE) > 0.5 * updates_s
    for one in (fast, slow):
        assert one.bound_s <= one.step_s * (1 + 1e-9)
        assert one.bound_s > 0.9 * one.step_s


def test_gradients_of_layers_are_page_locked_beside_the_layers() -> None:
    """Both in bf16: where one of them alone can be locked, layers go through a ring."""
    found = planned("qwen3-8b", ram_gib=192)
    size = 2 * sum(layer.num_parameters for layer in found.facts.layers)

    def staging(pinned_bytes: int) -> int:
        made = plan(found.facts, replace(found.machine, pinned_bytes=pinned_bytes), found.request)
        return {term.name: term.num_bytes for term in made.host_memory}.get(STAGING, 0)

    slab = {term.name: term.num_bytes for term in found.host_memory}[SLAB]
    assert EngineOptions.planned(found).locked_bytes == size
    assert staging(slab + size) == 0
    assert staging(slab + size - 1) > 0
    with pytest.raises(DoesNotFitError, match="for gradients of the model's weights"):
        staging(size - 1)


def test_other_ways_are_priced() -> None:
    found = what_if(planned("qwen3-8b", ram_gib=192), num_cards=2)
    assert all("adapter" not in option.how for option in found.options)
    assert found.options
