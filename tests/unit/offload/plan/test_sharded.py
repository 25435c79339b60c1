"""What ranks that each hold a part of the model send and hold, by hand, of Qwen3-8B."""

from dataclasses import replace

import pytest

from offload.errors import DoesNotFitError
from offload.plan.facts.facts import AdapterSpec, ModelFacts
from offload.plan.facts.trainable import all_weights
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import GIB, MEASURED, Machine, Network, Rate, named_machine
from offload.plan.memory.memory import GRADIENTS, STATES
from offload.plan.plan import Plan, plan
from offload.plan.schedule.op import Kind
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
from tests.builders import qwen3_8b, request, workload

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
    assert planned().costs.network_latency_s == 1e-4
    assumed = planned(machine=named_machine("h100"))
    assert assumed.costs.network_latency_s == COLLECTIVE_LATENCY_S


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
