"""Ranks that hold parts of a model, or shares of its rows, by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import DoesNotFitError
from offload.plan.facts.facts import AdapterSpec, ModelFacts
from offload.plan.facts.trainable import all_weights
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import GIB, MEASURED, Machine, Network, Rate, named_machine
from offload.plan.memory.memory import GRADIENTS, STATES
from offload.plan.plan import Plan, plan
from offload.plan.schedule.op import Kind, Route
from offload.plan.sharded import (
    CHECKPOINT,
    COLLECTIVE_LATENCY_S,
    GATHERED,
    LOGITS,
    LOSS,
    NEW_GRADIENTS,
    OUTER,
    OUTER_BUFFER,
    OVERLAP_FRAC,
    SHARDS,
    as_sharded,
    sharded_choice,
    sharded_plan,
)
from offload.plan.shares import apportioned, fastest_shares
from offload.plan.time.costs import Speed
from tests.builders import lora, qwen3_8b, qwen3_30b, request, workload

# q 16,777,216; k and v 4,194,304 each; o 16,777,216; MLP 150,994,944; norms 8,448
LAYER = 192_946_432
AROUND = 2 * 151_936 * 4096 + 4096
ADAPTER = 16 * (4096 + 4096) + 16 * (4096 + 1024)  # of a layer: queries and values
WEIGHTS = 36 * LAYER + AROUND
NETWORK = Network(
    world_size=4,
    latency_s=Rate(value=1e-4, source=MEASURED),
    bytes_per_s=Rate(value=100e9, source="given"),
)
HERE = replace(named_machine("h100"), network=NETWORK)


def planned(
    *,
    micro_batch: Workload | None = None,
    facts: ModelFacts | None = None,
    machine: Machine = HERE,
) -> Plan:
    asked = request(micro_batch or workload(), num_ranks=4)
    return sharded_plan(facts or qwen3_8b(), machine, as_sharded(asked))


def bytes_of(made: Plan) -> dict[str, int]:
    return {term.name: term.num_bytes for term in made.device_memory}


def test_a_rank_sends_three_quarters_of_what_four_gather() -> None:
    made = planned()  # 2 of 8 micro-batches
    gather, add_up = 3 * (2 * LAYER + 4 * ADAPTER) // 4, 3 * 4 * ADAPTER // 4
    assert gather == 290_058_624
    assert made.schedule.network_bytes == 2 * (72 * gather + 3 * 2 * AROUND // 4 + 36 * add_up)
    gathers = [op for op in made.schedule.ops if op.kind is Kind.GATHER]
    assert len(gathers) == 2 * (2 * 36 + 1)
    network_s = made.predict().busy_s(Kind.GATHER)
    sent = sum(op.num_bytes for op in gathers)
    assert network_s == pytest.approx(len(gathers) * 1e-4 + sent / 100e9)


def test_each_rank_holds_a_quarter_and_the_layers_that_it_gathers() -> None:
    found = bytes_of(planned())
    assert found[SHARDS] == 2 * WEIGHTS / 4
    assert found["adapters"] == found[GRADIENTS] == 36 * ADAPTER
    # the worst instant is the loss, at which no layer is gathered
    assert found[OUTER] == 2 * AROUND  # gathered for a micro-batch
    assert found["kept layer inputs"] == 36 * 2048 * 4096 * 2  # of one micro-batch
    assert found[LOGITS] == 2048 * 151_936 * 2
    assert found[LOSS] == 2048 * 151_936 * (2 + 4 + 4)  # a copy, in fp32, and the log-softmax
    assert GATHERED not in found


def test_of_short_rows_the_worst_instant_is_a_gather() -> None:
    gathered, short = 2 * LAYER + 4 * ADAPTER, workload(seq_len=16)
    first = bytes_of(planned(micro_batch=short))
    assert (first[OUTER], first[OUTER_BUFFER]) == (2 * AROUND, 2 * AROUND)
    assert first[GATHERED] == 2 * gathered
    assert "kept layer inputs" not in first  # no layer has computed
    last = bytes_of(planned(micro_batch=short, facts=qwen3_8b(vocab_size=1024)))
    assert last[GATHERED] == 3 * gathered
    assert last["kept layer inputs"] == 36 * 16 * 4096 * 2
    assert OUTER_BUFFER not in last


def test_of_long_rows_and_few_words_it_is_the_backward_of_a_layer() -> None:
    found = bytes_of(planned(facts=qwen3_8b(vocab_size=1024)))
    assert found[GATHERED] == 2 * (2 * LAYER + 4 * ADAPTER)
    assert found[NEW_GRADIENTS] == 4 * ADAPTER + int(OVERLAP_FRAC * 4 * ADAPTER)
    assert "one visit: saved activations" in found
    assert LOGITS not in found


def test_of_all_weights_and_short_rows_it_is_the_end_of_the_backward() -> None:
    spec = AdapterSpec.none(all_weights(qwen3_8b()))
    found = bytes_of(planned(micro_batch=workload(seq_len=16, adapter=spec)))
    # gradients in bf16 and fp32 of what is around the layers, and a copy of the head's
    assert found[NEW_GRADIENTS] == 6 * AROUND + 2 * 151_936 * 4096
    assert OUTER not in found


def test_of_weights_that_train_each_rank_has_a_quarter_of_16_bytes() -> None:
    made = planned(micro_batch=workload(adapter=AdapterSpec.none(all_weights(qwen3_8b()))))
    found = bytes_of(made)
    assert found[SHARDS] == 4 * WEIGHTS / 4  # fp32 masters
    assert found[GRADIENTS] == 4 * WEIGHTS / 4
    assert found[STATES] == 8 * WEIGHTS / 4
    assert {term.name: term.num_bytes for term in made.host_memory}[CHECKPOINT] == 16 * WEIGHTS
    update_s = 92 * WEIGHTS / 4 / HERE.memory_bytes_per_s.value
    assert made.costs.optimizer_s == pytest.approx(update_s)
    sums = [op for op in made.schedule.ops if op.kind is Kind.REDUCE]
    assert sum(op.num_bytes for op in sums) == 2 * (36 * 3 * LAYER + 3 * AROUND)  # fp32, 3/4


def test_a_latency_that_was_not_measured_is_that_of_a_collective() -> None:
    assert planned().costs.speed(Route.NETWORK).latency_s == 1e-4
    assumed = planned(machine=named_machine("h100"))
    assert assumed.costs.speed(Route.NETWORK).latency_s == COLLECTIVE_LATENCY_S


def test_nothing_is_loaded_and_visits_are_those_of_a_resident_model() -> None:
    asked = request(num_ranks=4, num_slots=36)
    resident = plan(qwen3_8b(), HERE, replace(as_sharded(asked), is_sharded=False))
    made = planned()
    assert made.schedule.num_loads == made.schedule.h2d_bytes == 0
    assert made.costs.layers[0].forward_s == resident.costs.layers[0].forward_s
    assert made.predict().busy_s(Kind.BACKWARD) == pytest.approx(
        resident.predict().busy_s(Kind.BACKWARD)
    )


def test_the_fastest_cut_that_fits_is_chosen_and_none_is_refused_with_the_fix() -> None:
    ones = [
        as_sharded(request(workload(micro_batch_size=n), num_ranks=4, num_micro_batches=8 // n))
        for n in (1, 2)
    ]
    choice = sharded_choice(qwen3_8b(), HERE, ones)
    plans = [sharded_plan(qwen3_8b(), HERE, one) for one in ones]
    assert choice.plan == min(plans, key=lambda one: one.step_s)
    assert choice.what_ifs == ()
    small = replace(HERE, vram_bytes=8 * GIB)
    with pytest.raises(DoesNotFitError, match=r"sharded over 4 ranks .* of 8\.00 GiB") as refused:
        sharded_choice(qwen3_8b(), small, ones)
    assert "`train.parallel: stream`" in refused.value.hint


# ------------------------------------------------------------------------------------------- shares


@given(num=st.integers(0, 60), shares=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_what_is_apportioned_adds_up_and_is_within_one_of_its_proportion(
    num: int, shares: list[int]
) -> None:
    counts = apportioned(num, shares)
    assert sum(counts) == num
    if num >= len(shares):
        assert min(counts) >= 1
    exact = [num * share / sum(shares) for share in shares]
    if min(exact) >= 1:
        assert all(abs(one - count) < 1 for one, count in zip(exact, counts, strict=True))


def test_equal_shares_give_the_first_ones_more() -> None:
    assert apportioned(5, (1, 1, 1)) == (2, 2, 1)
    assert apportioned(6, (3, 1)) == (5, 1)
    assert apportioned(2, (9, 1)) == (1, 1)


# Of a rank: the time of its loads, that of a micro-batch, and how many micro-batches fit.
CARDS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=3
)


@given(cards=CARDS, num=st.integers(2, 12))
def test_no_other_shares_have_a_faster_slowest_rank(
    cards: list[tuple[int, int, int]], num: int
) -> None:
    def fits(card: tuple[int, int, int], count: int) -> bool:
        return count <= card[2]

    def step_s(card: tuple[int, int, int], count: int) -> float:
        assert fits(card, count)
        return max(card[0], card[1] * count)

    def slowest_s(counts: Sequence[int]) -> float:
        taken = list(zip(cards, counts, strict=True))
        return max(step_s(*one) for one in taken) if all(fits(*one) for one in taken) else math.inf

    found = fastest_shares(
        [partial(step_s, card) for card in cards], [partial(fits, card) for card in cards], num=num
    )
    every = [
        counts for counts in product(range(1, num + 1), repeat=len(cards)) if sum(counts) == num
    ]
    best_s = min(map(slowest_s, every), default=math.inf)
    assert (found is None) == math.isinf(best_s)
    if found is not None:
        assert sum(found) == num
        assert slowest_s(found) == best_s


def test_a_step_that_is_shorter_with_more_ends_the_search() -> None:
    odd = {1: 5.0, 2: 4.0, 3: 9.0}
    steps_s = [odd.__getitem__, lambda count: 2.0 * count]
    found = fastest_shares(steps_s, [lambda count: True] * 2, num=4)
    assert found == (2, 2)


# --------------------------------------------------------------------------------------- other rank


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
    costs = made.costs.at({Route.NETWORK: Speed(1.0)})
    assert replace(made, costs=costs).as_other.arrivals_s == made.as_other.arrivals_s
    num_sums = sum(span.kind is Kind.REDUCE for span in made.predict().spans)
    assert len(made.as_other.arrivals_s) == num_sums


def test_a_rank_plans_its_own_micro_batches() -> None:
    few, many = rank(FAST, 1), rank(FAST, 5)
    assert (few.request.rank_micro_batches, many.request.rank_micro_batches) == (1, 5)
    assert few.tokens_per_step == many.tokens_per_step
    assert few.step_s < many.step_s
