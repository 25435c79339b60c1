import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from finetune.recipe.load import shipped_facts
from offload.errors import DoesNotFitError
from offload.plan.facts.facts import ModelFacts
from offload.plan.machine.machine import GIB, Machine, Rate, named_machine
from offload.plan.plan import Plan, plan, with_costs
from offload.plan.sampling import (
    SamplingPlan,
    SamplingRequest,
    pass_seconds,
    plan_sampling,
    reached_experts,
)
from offload.plan.schedule.op import Route
from offload.plan.time.costs import Speed
from tests.builders import byte_machine, lora, request, workload

LAYERS = 6


def shipped(name: str, num_layers: int = LAYERS) -> ModelFacts:
    """Return the first layers of a shipped shape."""
    facts = ModelFacts.from_json(shipped_facts()[name])
    return replace(facts, layers=facts.layers[:num_layers])


DENSE = shipped("qwen3-8b")
# By hand, of Qwen3-8B: queries and outputs, keys and values, three of the MLP.
HIDDEN, KV_WIDTH, MLP_WIDTH, VOCABULARY = 4096, 8 * 128, 12288, 151936
LAYER_WEIGHTS = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_WIDTH + 3 * HIDDEN * MLP_WIDTH
LAYER_BYTES, HEAD_BYTES = 2 * LAYER_WEIGHTS, 2 * HIDDEN * VOCABULARY
TOKEN_BYTES = 2 * 2 * KV_WIDTH  # of a layer's cache: a key and a value in bf16


def rate(value: float) -> Rate:
    return Rate(value=value, source="test")


def card(**rates: float) -> Machine:
    """Return an RTX 4090 with other rates."""
    changes: dict[str, Any] = {name: rate(value) for name, value in rates.items()}
    return replace(named_machine("rtx4090"), **changes)


def made(
    facts: ModelFacts = DENSE,
    machine: Machine | None = None,
    *,
    num_slots: int | None = 2,
    codec: str = "native",
    head: str = "device",
    **changes: Any,
) -> Plan:
    one = workload(codec=codec, adapter=lora(targets=("o_proj",)), head=head)
    asked = request(one, num_slots=num_slots, **changes)
    return plan(facts, machine or card(), asked)


def asked(**changes: Any) -> SamplingRequest:
    """Return 16 prompts with 8 answers each."""
    settings: dict[str, Any] = {
        "num_prompts": 16,
        "num_answers": 8,
        "prompt_tokens": 100,
        "longest_prompt": 200,
        "new_tokens": 256,
        "groups_share": False,
    }
    return SamplingRequest(**settings | changes)


def one_pass(
    planned: Plan, *, groups: int = 1, rows: int = 1, past: int = 300, tokens: int = 1
) -> float:
    return pass_seconds(planned, num_groups=groups, num_rows=rows, num_past=past, num_tokens=tokens)


# ---------------------------------------------------------------------------------------------
# Loads


@pytest.mark.parametrize("num_slots", range(2, LAYERS + 1))
def test_a_pass_loads_what_the_pass_before_has_not_left_in_its_slot(num_slots: int) -> None:
    slots, loads = dict[int, int](), list[int]()
    for _ in range(3):
        loads.append(0)
        for layer in range(LAYERS):
            loads[-1] += slots.get(layer % num_slots) != layer
            slots[layer % num_slots] = layer
    found = plan_sampling(made(num_slots=num_slots), asked(num_prompts=1))
    assert found.loads_per_pass == loads[-1]
    assert found.loads_per_pass == min(LAYERS, 2 * (LAYERS - num_slots))


def test_a_pass_that_waits_for_the_link_takes_its_loads() -> None:
    slow = card(h2d_bytes_per_s=1e9, h2d_duplex_bytes_per_s=1e9, launch_s=1e-12)
    found = plan_sampling(made(machine=slow), asked(num_prompts=2))
    assert found.pass_s == pytest.approx(LAYERS * LAYER_BYTES / 1e9, rel=0.02)
    assert found.limited_by == "link"


def test_a_head_in_host_memory_is_copied_in_each_pass_over_slots_that_are_loaded_again() -> None:
    slow = card(h2d_bytes_per_s=1e9, h2d_duplex_bytes_per_s=1e9, launch_s=1e-12)
    planned = made(machine=slow, num_slots=LAYERS, head="host")
    found = plan_sampling(planned, asked(num_prompts=1))
    assert found.loads_per_pass == -(-HEAD_BYTES // LAYER_BYTES) == 4
    moved = found.loads_per_pass * LAYER_BYTES + HEAD_BYTES
    assert found.pass_s == pytest.approx(moved / 1e9, rel=0.05)


def test_a_measured_link_takes_the_place_of_the_priced_one() -> None:
    planned = made(machine=card(launch_s=1e-12))
    costs = planned.costs.at({Route.LOAD: Speed(5e8)})
    measured = with_costs(planned, replace(costs, grade="calibrated"))
    assert one_pass(measured) == pytest.approx(LAYERS * LAYER_BYTES / 5e8, rel=0.02)


def test_sampling_is_not_slowed_by_what_a_step_sends() -> None:
    plain = made(num_slots=3)
    slowed = replace(plain, costs=plain.costs.faster(0.5, Route.LOAD))
    assert one_pass(slowed) == one_pass(plain)


# ---------------------------------------------------------------------------------------------
# What is computed: on a card that reads a byte a second and computes in no time


def resident(facts: ModelFacts = DENSE, machine: Machine | None = None, **more: Any) -> Plan:
    return made(facts, machine or byte_machine(2), num_slots=facts.num_layers, **more)


def test_each_group_reads_the_weights_once_for_all_of_its_rows() -> None:
    read = LAYERS * LAYER_BYTES + HEAD_BYTES
    planned = resident()
    assert one_pass(planned) == pytest.approx(read, rel=0.01)
    assert one_pass(planned, groups=5) == pytest.approx(5 * one_pass(planned), rel=1e-9)
    assert one_pass(planned, rows=4) < 1.03 * one_pass(planned)


def test_a_token_copies_the_cache_of_its_row_and_reads_the_copy() -> None:
    planned = resident()
    more_s = one_pass(planned, groups=3, rows=4, past=700) - one_pass(planned, groups=3, rows=4)
    assert more_s == pytest.approx(3 * 4 * LAYERS * 3 * 400 * TOKEN_BYTES, rel=1e-6)


def test_a_sliding_window_ends_what_a_token_reads() -> None:
    facts = shipped("gemma-3-1b")  # one head of 256 features for keys, and one for values
    num_full = sum(layer.attention.window is None for layer in facts.layers)  # type: ignore[union-attr]
    assert 0 < num_full < 6
    planned = resident(facts)
    more_s = one_pass(planned, past=1000) - one_pass(planned, past=600)
    assert more_s == pytest.approx(num_full * 3 * 400 * 2 * 2 * 256, rel=1e-6)


def test_a_state_of_fixed_size_takes_as_long_at_any_length() -> None:
    facts = shipped("qwen3.5-9b", 4)  # the last of four layers has keys and values
    planned = resident(facts)
    more_s = one_pass(planned, past=700) - one_pass(planned)
    assert more_s == pytest.approx(3 * 400 * 4 * 2 * 2 * 256, rel=1e-6)
    # of 8 more rows: a state of 32 heads in fp32 and 4 tokens of a convolution, read and written
    state = 32 * 128 * 128 * 4 + 4 * (2 * 16 * 128 + 32 * 128) * 2
    kept = 3 * 2 * state + 3 * 301 * 4 * 2 * 256 * 2
    logits = facts.vocab_size * 4 * 4
    more_s = one_pass(planned, rows=9) - one_pass(planned)
    assert more_s == pytest.approx(8 * (kept + logits), rel=0.15)  # the rest are activations


def test_an_encoded_layer_is_decoded_once_for_all_groups() -> None:
    planned = resident(codec="nf4")
    once_s = 2 * one_pass(planned) - one_pass(planned, groups=2)
    cargo = planned.costs.layers[0].weight_bytes
    norms = 2 * HIDDEN + 2 * 128
    fused = 0.65 / 0.55  # of the bandwidth that a kernel reaches, and that eager operators do
    decoded = cargo + 2 * (LAYER_WEIGHTS + norms)
    assert once_s == pytest.approx(LAYERS * decoded / fused, rel=1e-6)


def drawn(num_experts: int, active: int, num_tokens: int) -> float:
    """Return the mean number of experts that are reached, over all choices of all tokens."""
    choices = list(itertools.combinations(range(num_experts), active))
    sizes = [len(set().union(*one)) for one in itertools.product(choices, repeat=num_tokens)]
    return sum(sizes) / len(sizes)


@pytest.mark.parametrize(("num_experts", "active", "num_tokens"), [(4, 2, 3), (5, 1, 4), (6, 3, 2)])
def test_reached_experts_are_the_mean_over_all_choices(num_experts, active, num_tokens) -> None:
    found = reached_experts(num_experts, active=active, num_tokens=num_tokens)
    assert found == pytest.approx(drawn(num_experts, active, num_tokens))


def test_a_mixture_reads_the_experts_that_its_rows_reach() -> None:
    planned = resident(shipped("qwen3-30b-a3b", 2))
    expert_bytes = 2 * 3 * 2048 * 768
    more_s = one_pass(planned, rows=16, past=1) - one_pass(planned, past=1)
    reached = 128 * (1 - (1 - 8 / 128) ** 16) - 8
    logits = 15 * 151936 * 4 * 4  # four passes in fp32, as log-probabilities take
    assert more_s == pytest.approx(2 * reached * expert_bytes + logits, rel=0.02)


def test_where_launches_set_the_time_rows_and_caches_are_free_and_groups_are_not() -> None:
    planned = resident(machine=card(launch_s=1.0))
    one_s = one_pass(planned)
    assert one_pass(planned, rows=16, past=2000) == pytest.approx(one_s)
    assert one_pass(planned, groups=7) == pytest.approx(7 * one_s)
    shared, alone = (plan_sampling(planned, asked(groups_share=x)) for x in (True, False))
    assert shared.groups_per_batch == alone.groups_per_batch == 16
    assert alone.pass_s == pytest.approx(16 * shared.pass_s)
    assert shared.limited_by == alone.limited_by == "launches"


def test_many_rows_are_limited_by_arithmetic_and_few_by_memory() -> None:
    planned = resident(machine=card(launch_s=1e-12))
    few = plan_sampling(planned, asked(num_prompts=1, new_tokens=16))
    assert few.limited_by == "memory"
    many = asked(num_prompts=2, num_answers=1024, prompt_tokens=1, longest_prompt=1, new_tokens=2)
    assert plan_sampling(planned, many).limited_by == "compute"


def test_a_store_on_a_slow_disk_is_what_a_pass_waits_for() -> None:
    slow = replace(card(), disk_bytes_per_s=rate(1e9))
    found = plan_sampling(made(machine=slow, is_on_disk=True), asked(num_prompts=1))
    assert found.limited_by == "disk"
    assert found.pass_s == pytest.approx(LAYERS * LAYER_BYTES / 1e9, rel=0.1)


# ---------------------------------------------------------------------------------------------
# Rounds


def test_a_round_is_its_prompts_and_a_pass_for_each_further_token() -> None:
    planned = made()
    one = asked(num_prompts=3)
    found = plan_sampling(planned, one)
    prefill_s = one_pass(planned, groups=3, rows=1, past=0, tokens=100)
    pass_s = one_pass(planned, groups=3, rows=8, past=100 + 128)
    assert (found.prefill_s, found.pass_s) == (prefill_s, pass_s)
    assert found.sample_s == pytest.approx(prefill_s + 255 * pass_s)
    assert found.tokens_per_s == pytest.approx(3 * 8 * 256 / found.sample_s)


def test_passes_one_by_one_take_what_the_round_was_predicted_to() -> None:
    planned = made()
    one = asked(num_prompts=4, new_tokens=64)
    each_s = [one_pass(planned, groups=4, rows=8, past=100 + n) for n in range(1, 64)]
    prefill_s = one_pass(planned, groups=4, past=0, tokens=100)
    assert plan_sampling(planned, one).sample_s == pytest.approx(prefill_s + sum(each_s), rel=0.01)


def test_more_prompts_that_fit_together_never_cost_tokens_per_second() -> None:
    for machine in (card(), card(h2d_bytes_per_s=2e9), card(launch_s=1e-6)):
        planned = made(machine=machine, num_slots=3)
        found = [plan_sampling(planned, asked(num_prompts=num)) for num in (1, 2, 3, 5, 8, 16)]
        assert {one.num_batches for one in found} == {1}
        rates = [one.tokens_per_s for one in found]
        assert rates == sorted(rates)


# ---------------------------------------------------------------------------------------------
# Memory


def row_bytes(longest_prompt: int = 200, new_tokens: int = 256) -> int:
    """Return what a row has at its end, whose last token is in no cache."""
    return LAYERS * TOKEN_BYTES * (longest_prompt + new_tokens - 1)


def with_free(num_bytes: int) -> Plan:
    """Return a plan whose slots, and what else stays, leave so many bytes of its budget."""
    planned = made(num_slots=4)
    names = {
        *("slots", "cuBLAS workspaces", "CUDA context", "context", "adapters"),
        *("embeddings, norm and head", "trained modules"),
    }
    staying = sum(term.num_bytes for term in planned.device_memory if term.name in names)
    budget = replace(planned.request, vram_budget_bytes=staying + num_bytes)
    return replace(planned, request=budget)


def test_as_many_prompts_are_together_as_have_room_for_all_their_answers() -> None:
    prompt = 8 * row_bytes()
    for free, together, batches in (
        (prompt, 1, 16),
        (5 * prompt + prompt // 2, 4, 4),
        (7 * prompt - 1, 6, 3),
        (16 * prompt - 1, 8, 2),
        (16 * prompt, 16, 1),
        (99 * prompt, 16, 1),
    ):
        found = plan_sampling(with_free(free), asked())
        assert (found.groups_per_batch, found.num_batches) == (together, batches)
        assert found.cache_bytes == together * prompt <= free


def test_batches_have_passes_of_their_own() -> None:
    found = plan_sampling(with_free(8 * 6 * row_bytes()), asked())
    parts = [plan_sampling(with_free(99 * GIB), asked(num_prompts=num)) for num in (6, 6, 4)]
    assert found.sample_s == pytest.approx(sum(part.sample_s for part in parts))


def test_more_memory_never_makes_a_round_longer() -> None:
    def rounds() -> Iterator[SamplingPlan]:
        for together in range(1, 17):
            yield plan_sampling(with_free(8 * together * row_bytes()), asked())

    seconds = [one.sample_s for one in rounds()]
    assert seconds == sorted(seconds, reverse=True)


def refused(planned: Plan, one: SamplingRequest) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        plan_sampling(planned, one)
    return str(caught.value)


def test_what_does_not_fit_says_what_there_is_and_how_many_slots_would() -> None:
    prompt = 8 * row_bytes()
    planned = with_free(prompt - 1)
    text = refused(planned, asked())
    assert (
        f"one prompt's 8 answers, of 200 tokens and 256 new ones, take {prompt / GIB:.2f} GiB"
        in (text)
    )
    assert f"{(prompt - 1) / GIB:.2f} GiB of device memory is free next to 4 slots" in text
    assert "`offload.num_slots: 3`" in text
    budget = planned.request.vram_budget_bytes
    fewer = made(num_slots=3)
    fewer = replace(fewer, request=replace(fewer.request, vram_budget_bytes=budget))
    assert plan_sampling(fewer, asked()).groups_per_batch >= 1


def test_with_the_fewest_slots_fewer_answers_are_named_and_then_shorter_ones() -> None:
    def at_two_slots(num_bytes: int) -> Plan:
        planned, four = made(num_slots=2), with_free(num_bytes)
        slots = [
            next(term.num_bytes for term in one.device_memory if term.name == "slots")
            for one in (planned, four)
        ]
        budget = four.request.vram_budget_bytes
        assert budget is not None
        budget += slots[0] - slots[1]
        return replace(planned, request=replace(planned.request, vram_budget_bytes=budget))

    some = at_two_slots(5 * row_bytes() + 1)
    assert "`objective.num_answers: 5`" in refused(some, asked())
    assert plan_sampling(some, asked(num_answers=5)).groups_per_batch == 1
    refused(some, asked(num_answers=6))

    few = at_two_slots(3 * row_bytes() // 2)  # 682 tokens: 341 of each, of 200 and 142
    assert refused(few, asked(num_answers=2)).endswith("`objective.max_new_tokens: 142`")
    assert plan_sampling(few, asked(num_answers=2, new_tokens=142)).groups_per_batch == 1


def test_fewer_or_shorter_answers_may_also_need_fewer_slots() -> None:
    # two slots fewer free room for 31,404 tokens: of 44 rows of 711, or two of 200 and 15,503
    slot_bytes = -(-(LAYER_BYTES + 2 * (2 * HIDDEN + 2 * 128)) // 4096) * 4096  # norms, in pages
    assert 2 * slot_bytes // (LAYERS * TOKEN_BYTES) == 31_404
    none, slots = with_free(0), " with `offload.num_slots: 2`"
    text = refused(none, asked(num_answers=64, new_tokens=512))
    assert text.endswith(f"`objective.num_answers: 44`{slots}")
    text = refused(none, asked(num_answers=2, new_tokens=20_000))
    assert text.endswith(f"`objective.max_new_tokens: 15503`{slots}")
    text = refused(none, asked(num_answers=2, longest_prompt=32_000))
    assert text.endswith("shorter prompts, or a machine with more memory")


def test_what_layers_keep_of_a_token_may_not_be_known() -> None:
    latent = shipped("glm-4.7-flash")
    found = plan_sampling(made(latent), asked(num_prompts=99))
    assert (found.groups_per_batch, found.cache_bytes) == (99, None)
