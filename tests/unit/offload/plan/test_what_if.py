from dataclasses import replace

import pytest

from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.trainable import trained_parameters
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.plan import Plan, plan
from offload.plan.time.roofline import tensor_parallel_bytes
from offload.plan.what_if import Figures, Option, figures_of, plan_anyway, what_if
from tests.builders import lora, qwen3_8b, qwen3_30b, request, workload

DENSE = qwen3_8b(num_hidden_layers=6)
MOE = qwen3_30b(num_hidden_layers=8)
CARD = named_machine("rtx5090")
WORKLOAD = workload(seq_len=4096)
REQUEST = request(WORKLOAD, num_slots=3, num_workers=1)
# What a lecture lists as the ways to go about it.
LISTED = (
    "recompute all",
    "recompute the cheap part",
    "send activations",
    "shard (FSDP)",
    "split (tensor parallel)",
    "stage (pipeline)",
    "expert parallel",
    "offload weights",
    "offload optimizer",
    "fp8 weights",
    "4-bit weights",
    "8-bit optimizer",
    "factored optimizer",
)


def planned(facts: ModelFacts = MOE, **changes: object) -> Plan:
    return plan(facts, CARD, replace(REQUEST, **changes))  # type: ignore[arg-type]


def options_of(made: Plan, *, num_cards: int = 2) -> dict[str, Option]:
    options = what_if(made, num_cards=num_cards).options
    assert len({option.name for option in options}) == len(options)
    return {option.name: option for option in options}


def figures(made: Plan, name: str, *, num_cards: int = 2) -> Figures:
    found = options_of(made, num_cards=num_cards)[name].figures
    assert found is not None
    return found


@pytest.fixture(scope="module")
def options() -> dict[str, Option]:
    return options_of(planned())


@pytest.mark.parametrize("name", LISTED)
def test_every_listed_way_is_a_priced_row(name: str, options: dict[str, Option]) -> None:
    option = options[name]
    assert option.figures is not None
    assert option.figures != figures_of(planned())
    assert option.source.startswith("arXiv:")
    assert option.figures.step_s > 0
    assert min(option.figures.vram_bytes, option.figures.ram_bytes) > 0


def test_a_what_if_table_is_the_same_again() -> None:
    assert what_if(planned(), num_cards=2) == what_if(planned(), num_cards=2)


# ---------------------------------------------------------------------------------------------
# Settings


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "request_changes", "workload_changes"),
    [
        ("send activations", {"is_stashed": True}, {}),
        ("offload weights", {"num_slots": 8}, {}),
        ("fp8 weights", {}, {"codec": "fp8"}),
        ("4-bit weights", {}, {"codec": "nf4"}),
        ("8-bit optimizer", {}, {"optimizer": "adamw_8bit"}),
    ],
)
def test_a_setting_is_the_plan_that_it_would_make(name, request_changes, workload_changes) -> None:
    made, workload = planned(), replace(WORKLOAD, **workload_changes)
    request = replace(REQUEST, **request_changes, typical=workload, largest=workload)
    there, short = plan_anyway(MOE, CARD, request)
    option = options_of(made)[name]
    assert option.figures == figures_of(there)
    assert option.fits == (not short)
    # and from there the same row leads back to where it came from
    back = options_of(there)[name]
    if name != "offload weights":  # which leads to the fewest slots
        assert back.figures == figures_of(made)
    assert {option.standing, back.standing} == {"a setting", "in the plan"}


def test_the_number_of_slots_is_held_where_the_plan_chose_it() -> None:
    chosen = planned(num_slots=None, vram_budget_bytes=14 * GIB)
    assert 2 < chosen.num_slots < 8
    four_bits = replace(WORKLOAD, codec="nf4")
    request = replace(chosen.request, typical=four_bits, largest=four_bits)
    request = replace(request, num_slots=chosen.num_slots)
    assert figures(chosen, "4-bit weights") == figures_of(plan(MOE, CARD, request))


# ---------------------------------------------------------------------------------------------
# One card


def test_without_recompute_each_backward_visit_is_what_a_forward_repeats_shorter() -> None:
    made = planned(DENSE, num_micro_batches=4)
    saved_s = made.step_s - figures(made, "recompute all").step_s
    again_s = 4 * sum(cost.forward_s * cost.recompute_frac for cost in made.costs.layers)
    assert saved_s == pytest.approx(again_s, rel=0.02)
    cheap_s = made.step_s - figures(made, "recompute the cheap part").step_s
    assert 0.3 * saved_s < cheap_s < saved_s


def test_kept_graphs_take_what_a_visit_saves_for_each_layer_and_micro_batch() -> None:
    workload = replace(WORKLOAD, head_chunk_tokens=64)  # so that a visit is the worst instant
    made = planned(DENSE, num_micro_batches=2, typical=workload, largest=workload)
    visit = sum(
        term.num_bytes
        for term in made.device_memory
        if term.name in ("one visit: saved activations", "one visit: adapter inputs")
    )
    kept = figures(made, "recompute all").vram_bytes - made.peak_bytes
    outputs = 2 * 4096 * 4096 * 2  # of the last layer
    assert kept == pytest.approx(1.03 * ((6 * 2 - 1) * visit + outputs), rel=1e-3)
    products = figures(made, "recompute the cheap part").vram_bytes - made.peak_bytes
    features = 4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096
    assert products == pytest.approx(1.03 * 6 * 2 * 4096 * features * 2, rel=1e-3)


def test_an_optimizer_on_the_host_leaves_the_card_and_crosses_the_link_twice() -> None:
    made = planned()
    count = trained_parameters(MOE, WORKLOAD.adapter)
    there = figures(made, "offload optimizer")
    assert made.peak_bytes - there.vram_bytes == pytest.approx(1.03 * 8 * count, rel=1e-3)
    assert there.ram_bytes - made.host_bytes == 16 * count
    assert there.link_bytes - figures_of(made).link_bytes == 8 * count
    copies_s, update_s = 8 * count / 56e9, 28 * count / 60e9
    expected_s = made.step_s - made.costs.optimizer_s + copies_s + update_s
    assert there.step_s == pytest.approx(expected_s)


def test_a_factored_optimizer_keeps_a_sum_for_each_row_and_column() -> None:
    made = planned()
    count = trained_parameters(MOE, WORKLOAD.adapter)
    sums = 8 * (2 * 16 + 2048 + 4096 + 2 * 16 + 2048 + 512)
    saved = made.peak_bytes - figures(made, "factored optimizer").vram_bytes
    assert saved == pytest.approx(1.03 * (8 * count - 4 * sums), abs=2)


def test_attention_that_is_not_fused_grows_with_the_square_of_the_sequence() -> None:
    def growth(seq_len: int) -> int:
        workload = replace(WORKLOAD, seq_len=seq_len, label_tokens=seq_len)
        made = planned(typical=workload, largest=workload)
        return figures(made, "attention not fused").vram_bytes - made.peak_bytes

    assert growth(4096) == pytest.approx(1.03 * 4 * 32 * 4096**2, rel=1e-3)
    assert growth(4096) == pytest.approx(4 * growth(2048), rel=1e-3)


def test_fused_kernels_are_never_slower() -> None:
    for facts in (DENSE, MOE):
        made = planned(facts)
        assert figures(made, "fused norms and SwiGLU").step_s < made.step_s


def test_training_all_weights_takes_16_bytes_for_each_and_does_not_fit() -> None:
    option = options_of(planned(DENSE))["train all weights"]
    assert option.figures is not None
    assert option.figures.vram_bytes > 16 * DENSE.num_parameters
    assert not option.fits


# ---------------------------------------------------------------------------------------------
# Several cards


@pytest.mark.parametrize("num_cards", [2, 4])
def test_sharding_gathers_what_a_card_has_not_for_every_micro_batch(num_cards: int) -> None:
    made = planned(num_micro_batches=8)
    layer, trained = 2 * MOE.layers[0].num_parameters, trained_parameters(MOE, WORKLOAD.adapter)
    missing_frac = (num_cards - 1) / num_cards
    micro_batches = 8 // num_cards
    gathered = 2 * (8 * layer + 4 * trained) + 2 * MOE.outer_parameters
    sent = micro_batches * missing_frac * (gathered + 4 * trained)
    option = options_of(made, num_cards=num_cards)["shard (FSDP)"]
    assert option.standing == "a setting"
    there = option.figures
    assert there is not None
    assert there.link_bytes == pytest.approx(sent, rel=1e-6)
    rate = CARD.h2d_duplex_bytes_per_s.value
    assert there.step_s > micro_batches * missing_frac * gathered / rate
    assert there.vram_bytes > 8 * layer / num_cards


def test_sharding_that_no_recipe_may_ask_for_is_only_priced() -> None:
    made = plan(MOE, CARD, replace(REQUEST, typical=workload(adapter=lora(experts=True))))
    assert options_of(made)["shard (FSDP)"].standing == "not done here"


def test_splitting_waits_for_four_exchanges_per_layer_and_pass() -> None:
    made = planned(DENSE)
    moved = 3 * 8 * 6 * tensor_parallel_bytes(num_tokens=2048, hidden_size=4096, dtype_bytes=2)
    there = figures(made, "split (tensor parallel)")
    assert there.link_bytes == figures_of(made).link_bytes // 2 + moved
    waits_s = moved / CARD.h2d_duplex_bytes_per_s.value
    layers_s = sum(cost.forward_s + cost.backward_s for cost in made.costs.layers)
    computing_s = 8 * (layers_s + made.costs.tail_s) / 2
    assert there.step_s > computing_s + waits_s
    assert there.step_s == pytest.approx(computing_s + waits_s, rel=0.03)
    assert there.vram_bytes < made.peak_bytes


def test_splitting_makes_kernels_smaller_and_not_fewer() -> None:
    few = replace(WORKLOAD, seq_len=16, label_tokens=16)
    made = planned(DENSE, typical=few, largest=few, num_slots=6)
    assert made.costs.layers[0].bound == "launch"
    split = figures(made, "split (tensor parallel)")
    visits_s = 8 * sum(cost.forward_s + cost.backward_s for cost in made.costs.layers)
    assert split.step_s > visits_s


def test_a_pipeline_waits_while_it_fills_and_empties() -> None:
    few, many = (
        figures(planned(DENSE, num_micro_batches=num), "stage (pipeline)").step_s / num
        for num in (1, 8)
    )
    alone = planned(DENSE, num_slots=6, num_micro_batches=8)
    batch_s = (alone.step_s - alone.costs.optimizer_s) / 8
    assert few == pytest.approx(batch_s, rel=0.02)  # one micro-batch: nothing runs beside it
    assert many == pytest.approx(batch_s * 9 / 16, rel=0.02)


def test_experts_are_loaded_once_by_all_cards_together() -> None:
    made = planned(num_micro_batches=8)
    there = figures(made, "expert parallel")
    experts = sum(layer.weights("experts") for layer in MOE.layers)
    share = 1 - experts / sum(layer.num_parameters for layer in MOE.layers) / 2
    rows = 3 * 4 * 8 * 2 * 4096 * 2048 * 2  # three passes, four micro-batches, there and back
    reduced = 4 * trained_parameters(MOE, WORKLOAD.adapter)
    expected = share * made.schedule.h2d_bytes + rows + reduced
    assert there.link_bytes == pytest.approx(expected, rel=1e-6)
    assert there.step_s < made.step_s


def test_a_model_without_experts_cannot_spread_them() -> None:
    option = options_of(planned(DENSE))["expert parallel"]
    assert option.figures is None
    assert option.how == "the model has no experts"


def test_a_copy_on_each_card_is_what_the_plan_says_of_ranks() -> None:
    made = planned(DENSE)
    ranks = planned(DENSE, num_ranks=2, is_slab_shared=True)
    there = figures(made, "copy (data parallel)")
    assert there.step_s == ranks.step_s
    needed = 8e-9 * ranks.network_needed_bytes_per_s
    how = options_of(made)["copy (data parallel)"].how
    assert how.startswith(f"2 cards, `--num_processes 2`; {needed:,.2g} Gb/s between them ")
    assert there.ram_bytes == ranks.host_bytes


def test_a_cpu_has_one_device_and_its_optimizer_on_the_host() -> None:
    cpu = replace(CARD, device="cpu", vram_bytes=64 * GIB)
    options = options_of(plan(DENSE, cpu, replace(REQUEST, num_micro_batches=1)))
    for name in ("shard (FSDP)", "copy (data parallel)", "offload optimizer"):
        assert options[name].figures is None
    assert options["4-bit weights"].figures is not None


# ---------------------------------------------------------------------------------------------
# Without regard to memory


def test_what_fits_is_planned_as_ever() -> None:
    assert plan_anyway(DENSE, CARD, REQUEST) == (plan(DENSE, CARD, REQUEST), ())


@pytest.mark.parametrize(
    ("changes", "vram_gib", "short"),
    [
        ({}, 4, ("VRAM",)),
        ({"ram_bytes": 3 * GIB, "pinned_bytes": 3 * GIB}, 32, ("RAM",)),
        ({"ram_bytes": 3 * GIB, "pinned_bytes": 3 * GIB}, 4, ("VRAM", "RAM")),
    ],
)
def test_what_does_not_fit_is_planned_and_its_memories_named(changes, vram_gib, short) -> None:
    request = replace(REQUEST, num_slots=None, vram_budget_bytes=vram_gib * GIB)
    made, found = plan_anyway(DENSE, replace(CARD, **changes), request)
    assert found == short
    assert made.num_slots == 2
    assert made.machine == replace(CARD, **changes)


def test_layer_inputs_that_cannot_be_locked_are_named() -> None:
    wsl = replace(CARD, pinned_bytes=GIB)
    _, found = plan_anyway(DENSE, wsl, replace(REQUEST, is_stashed=True))
    assert found == ("page-locked RAM",)
