"""Who updates which layer among the ranks of a machine, and what that costs."""

from dataclasses import replace

import pytest

from offload.plan.facts.optimizer import HOST_GRADIENTS, HOST_STATES, LOW_HALVES
from offload.plan.facts.trainable import HEAD, all_weights
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.memory.memory import OTHER_RANKS
from offload.plan.owners import owned_around, owned_by, owners_of
from offload.plan.plan import Plan, plan
from offload.plan.schedule.op import Kind, Lane
from tests.full_plans import facts_of, request_of, workload


def planned(num_ranks: int) -> Plan:
    """Return Qwen3-8B, all weights, by cards with memory and RAM for it."""
    facts = facts_of("qwen3-8b")
    machine = named_machine("rtx4090", dtype="bfloat16", ram_bytes=192 * GIB)
    request = replace(request_of(workload(all_weights(facts))), num_ranks=num_ranks, num_slots=2)
    return plan(facts, machine, request)


def test_equal_layers_are_dealt_out_in_turn() -> None:
    assert owners_of([5] * 7, num_ranks=3) == (0, 1, 2, 0, 1, 2, 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_each_layer_that_trains_has_one_owner_and_no_rank_has_a_layer_more_than_another(
    num_ranks: int,
) -> None:
    trained = [70, 0, 30, 30, 10, 90, 0, 40, 20, 60, 10]
    owned = [owned_by(rank, trained, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert sorted(i for one in owned for i in one) == [i for i, num in enumerate(trained) if num]
    loads = [sum(trained[i] for i in one) for one in owned]
    assert max(loads) - min(loads) <= (max(trained) if num_ranks > 1 else 0)


def test_of_weights_around_the_layers_the_largest_are_dealt_out_first() -> None:
    embedding, norm, head = 0, 1, 2
    sizes = {embedding: 900, norm: 3, head: 900}
    owned = [owned_around(rank, [*sizes.values()], num_ranks=2) for rank in range(2)]
    assert owned == [{embedding, norm}, {head}]
    assert owned_around(0, [*sizes.values()], num_ranks=1) == {embedding, norm, head}
    assert owned_around(3, [*sizes.values()], num_ranks=4) == set()


def test_a_layer_is_loaded_once_its_owner_has_updated_it_while_all_share_the_memory() -> None:
    alone, two = planned(1), planned(2)
    timeline = two.predict()
    spans = {
        kind: {s.layer: s for s in timeline.spans if s.kind is kind}
        for kind in (Kind.UPDATE, Kind.AWAIT)
    }
    assert [*spans[Kind.UPDATE]] == [*range(0, 36, 2)]
    assert [*spans[Kind.AWAIT]] == [*range(1, 36, 2)]
    for span in spans[Kind.AWAIT].values():
        assert span.lane is Lane.NETWORK
    one_s = alone.costs.layers[0].update_s
    first_loads: dict[int | None, float] = {}
    for span in timeline.spans:
        if span.kind is Kind.LOAD:
            first_loads.setdefault(span.layer, span.start_s)
    for layer in range(36):
        # two owners at half of the rate each: the layers before this one, and it, by its own
        updated_s = 2 * one_s * (layer // 2 + 1)
        kind = Kind.AWAIT if layer % 2 else Kind.UPDATE
        assert spans[kind][layer].end_s == pytest.approx(updated_s)
        assert first_loads[layer] >= updated_s * (1 - 1e-9)
    assert two.bound_s <= two.step_s * (1 + 1e-9)
    assert two.costs.optimizer_s == alone.costs.optimizer_s  # around the layers, by both together
    phases = timeline.phases()
    assert phases["awaited updates"] == pytest.approx(phases["updates"])
    assert "awaited updates" not in alone.predict().phases()


def test_gradients_are_summed_before_they_leave_and_only_those_of_own_layers_do() -> None:
    ops = planned(2).schedule.ops
    place = {(op.kind, op.layer): number for number, op in enumerate(ops)}
    left = [op.layer for op in ops if op.kind is Kind.GRADIENT and not op.offset]
    assert left == [*reversed(range(0, 36, 2))]
    for layer in left:
        first = next(
            n for n, op in enumerate(ops) if op.kind is Kind.GRADIENT and op.layer == layer
        )
        assert place[Kind.REDUCE, layer] in ops[first].waits
    per_weight = 2 * (2 - 1) / 2 * 4  # bytes that each of two ranks sends in fp32
    whole = all_weights(facts_of("qwen3-8b"))
    assert [op.num_bytes for op in ops if op.kind is Kind.REDUCE] == [
        *(per_weight * num for num in reversed(whole.layers)),
        per_weight * whole.num_outer,
    ]


def test_states_are_in_ram_once_and_gradients_with_the_owners() -> None:
    alone, two = ({t.name: t.num_bytes for t in planned(num).host_memory} for num in (1, 2))
    assert two[HOST_STATES] == alone[HOST_STATES]
    assert two[LOW_HALVES] == alone[LOW_HALVES]
    whole = all_weights(facts_of("qwen3-8b"))
    head = dict(whole.outer)[HEAD]
    assert head > whole.num_outer / 2.01
    # the other rank has the gradients of its layers, and the head's in fp32
    of_other = 2 * sum(whole.layers) // 2 + 4 * head
    assert two[HOST_GRADIENTS] == alone[HOST_GRADIENTS] - of_other
    assert two["weights around the layers, in RAM"] == 2 * whole.num_outer
    kept = sum(
        number
        for name, number in alone.items()
        if name in ("loading", "data workers", "process", "stashed layer inputs")
    )
    assert two[OTHER_RANKS] == pytest.approx(of_other + kept, abs=4)
