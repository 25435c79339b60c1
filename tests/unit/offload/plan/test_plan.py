"""Plans and the search for the fastest of them."""

import re
from dataclasses import replace

import pytest

from offload.errors import DoesNotFitError, OffloadError
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.workload import to_pages
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, MEASURED, Machine, Rate, named_machine
from offload.plan.memory.memory import MemoryTerm, TracedBytes, device_terms, total_bytes
from offload.plan.plan import Plan, calibrate, hidden_frac, needed_bytes_per_s, plan, with_costs
from offload.plan.request import PlanRequest, Reduction, with_workload
from offload.plan.schedule.op import KEPT_GRAPH, RECOMPUTE, Kind, Route
from offload.plan.schedule.schedule import NUM_STAGING, PIECE_BYTES, Order, Residency
from offload.plan.schedule.simulate import simulate
from offload.plan.schedule.timeline import Span
from offload.plan.search import search
from offload.plan.split import Split
from offload.plan.step import FREE_FRAC, duration_of
from offload.plan.time.costs import Speed, price
from offload.plan.time.roofline import (
    attention_flops,
    elementwise,
    gemm,
    layer_elementwise_bytes,
    layer_flops,
    tensor_parallel_bytes,
    unfused_softmax_bytes,
)
from offload.plan.what_if import activation_bytes, full_training_terms
from tests.builders import (
    llama_7b,
    lora,
    qwen3_8b,
    qwen3_30b,
    request,
    slow_link,
    ways_of,
    workload,
)

FACTS = qwen3_8b()
CARD = named_machine("rtx4060ti")
WORKLOAD = workload()
REQUEST = request(num_workers=1)


def test_the_plan_takes_as_many_slots_as_fit() -> None:
    chosen = plan(FACTS, CARD, REQUEST)
    assert 2 < chosen.num_slots < FACTS.num_layers
    assert chosen.peak_bytes <= CARD.vram_bytes
    with pytest.raises(DoesNotFitError):
        plan(FACTS, CARD, replace(REQUEST, num_slots=chosen.num_slots + 1))


def test_a_larger_budget_never_takes_fewer_slots() -> None:
    budgets = [gib * GIB for gib in (11, 12, 13, 14, 15)]
    slots = [
        plan(FACTS, CARD, replace(REQUEST, vram_budget_bytes=budget)).num_slots
        for budget in budgets
    ]
    assert slots == sorted(slots)
    assert slots[0] < slots[-1]


def test_a_budget_in_which_nothing_fits_is_to_be_larger() -> None:
    with pytest.raises(DoesNotFitError, match=r"hint: a larger `offload\.vram_budget`, or none"):
        plan(FACTS, CARD, replace(REQUEST, vram_budget_bytes=GIB // 100))


def test_what_does_not_fit_names_need_limit_and_the_nearest_fix() -> None:
    request = replace(REQUEST, num_slots=30, vram_budget_bytes=13 * GIB)
    with pytest.raises(
        DoesNotFitError,
        match=r"with 30 slots of 36 layers the plan needs \d+\.\d\d GiB of device memory,"
        r" \d+\.\d\d GiB too much; 13\.00 GiB may be used on rtx4060ti\n"
        r"  Most of device memory is for:\n +\d+\.\d\d GiB  slots; less with fewer"
        r" `offload\.num_slots`, `offload\.codec: nf4`\n(?:.*\n)+\n"
        r"hint: `offload\.num_slots: (\d+)`",
    ) as error:
        plan(FACTS, CARD, request)
    hinted = int(error.value.hint.split(": ")[1].rstrip("`"))
    assert plan(FACTS, CARD, replace(request, num_slots=hinted)).num_slots == hinted
    with pytest.raises(DoesNotFitError):
        plan(FACTS, CARD, replace(request, num_slots=hinted + 1))


def test_what_lacks_no_more_than_others_have_says_how_much_they_would_free() -> None:
    need = plan(FACTS, CARD, replace(REQUEST, num_slots=2))
    rates = {
        name: replace(getattr(CARD, name), source=MEASURED)
        for name, kind in Machine.__annotations__.items()
        if kind is Rate
    }
    busy = replace(CARD, ram_bytes=need.host_bytes - GIB // 2, **rates)
    with pytest.raises(
        DoesNotFitError,
        match=r"0\.50 GiB too much; \d+\.\d\d GiB of RAM is there on rtx4060ti, with 4\.00 GiB in"
        r" use by others\n(?:.*\n)+hint: .*, or close other programs, until 0\.50 GiB of RAM more"
        r" is free$",
    ):
        plan(FACTS, busy, REQUEST)
    with pytest.raises(DoesNotFitError) as refused:
        plan(FACTS, replace(busy, system_bytes=GIB // 4), REQUEST)
    assert "close other programs" not in refused.value.hint


def test_too_long_sequences_are_told_a_length_that_fits() -> None:
    long = replace(WORKLOAD, seq_len=131072, label_tokens=131072)
    with pytest.raises(DoesNotFitError, match=r"hint: `train\.seq_len: \d+`") as error:
        plan(FACTS, CARD, replace(REQUEST, typical=long, largest=long))
    seq_len = int(error.value.hint.split("`")[1].split(": ")[1])
    shorter = replace(WORKLOAD, seq_len=seq_len, label_tokens=seq_len)
    assert error.value.hint.endswith("with `offload.stash: host`")
    hinted = replace(REQUEST, typical=shorter, largest=shorter, is_stashed=True)
    assert plan(FACTS, CARD, hinted).num_slots >= 2


def test_an_encoded_plan_decodes_each_layer_once_per_visit_and_respects_r3() -> None:
    encoded = replace(WORKLOAD, codec="nf4")
    request = replace(REQUEST, typical=encoded, largest=encoded, num_slots=4)
    found = plan(FACTS, CARD, request)
    decodings = [op for op in found.schedule.ops if op.kind is Kind.DECODE]
    assert len(decodings) == 2 * FACTS.num_layers - 1
    assert found.step_s >= found.bound_s * (1 - 1e-9) > 0
    native = plan(FACTS, CARD, replace(REQUEST, num_slots=4))
    assert found.schedule.h2d_bytes == pytest.approx(0.258 * native.schedule.h2d_bytes, rel=0.01)
    assert 0 < (found.break_even_tokens or 0) <= (native.break_even_tokens or 0)
    assert found.predict().phases()["decode"] > 0


def test_too_little_ram_is_named() -> None:
    small = named_machine("rtx4060ti", ram_bytes=8 * GIB)
    with pytest.raises(DoesNotFitError, match=r"GiB of RAM, .*; 4\.00 GiB of RAM is there"):
        plan(FACTS, small, REQUEST)


def test_layers_that_cannot_be_page_locked_pass_a_ring_of_buffers_which_is_priced() -> None:
    locked = plan(FACTS, CARD, replace(REQUEST, num_slots=2, num_micro_batches=1))
    wsl = replace(CARD, pinned_bytes=2 * GIB)
    staged = plan(FACTS, wsl, replace(REQUEST, num_slots=2, num_micro_batches=1))
    assert staged.schedule.is_staged
    assert not locked.schedule.is_staged
    assert staged.schedule.num_loads == locked.schedule.num_loads
    slow = replace(wsl, host_memory_bytes_per_s=Rate(value=2e9, source="assumed"))
    ring = {term.name: term.num_bytes for term in staged.host_memory}["staging"]
    assert ring == NUM_STAGING * PIECE_BYTES
    assert ring == staged.host_bytes - locked.host_bytes
    late = plan(FACTS, slow, replace(REQUEST, num_slots=2, num_micro_batches=1))
    assert late.step_s > staged.step_s >= locked.step_s


def test_layers_on_disk_pass_buffers_on_a_card_and_none_on_a_cpu() -> None:
    request = replace(REQUEST, num_slots=2, num_micro_batches=1, is_on_disk=True)
    for machine, num_bytes in ((CARD, NUM_STAGING * PIECE_BYTES), (replace(CARD, device="cpu"), 0)):
        found = {term.name: term.num_bytes for term in plan(FACTS, machine, request).host_memory}
        assert found.get("staging", 0) == num_bytes
        assert "slab" not in found


def test_layer_inputs_that_cannot_be_page_locked_do_not_fit() -> None:
    wsl = replace(CARD, pinned_bytes=2 * GIB)
    with pytest.raises(
        DoesNotFitError,
        match=r"layers and their inputs in RAM the plan needs 4\.38 GiB of page-locked memory for"
        r" layer inputs, 2\.38 GiB too much; 2\.00 GiB may be page-locked on rtx4060ti\n\n"
        r"hint: `offload\.stash: device`",
    ):
        plan(FACTS, wsl, replace(REQUEST, is_stashed=True))


def test_the_prediction_is_never_below_its_bound() -> None:
    for num_micro_batches in (1, 2, 4, 8):
        found = plan(FACTS, CARD, replace(REQUEST, num_micro_batches=num_micro_batches))
        assert found.step_s >= found.bound_s * (1 - 1e-9)
        assert found.step_s <= found.bound_s * 1.05


@pytest.mark.parametrize("num_kept_graphs", [0, 1])
def test_a_calibrated_plan_predicts_the_step_that_it_was_calibrated_on(num_kept_graphs) -> None:
    request = replace(REQUEST, num_slots=4, num_micro_batches=1, num_kept_graphs=num_kept_graphs)
    priced = plan(FACTS, CARD, request)
    seconds = {
        Kind.FRONT: 0.001,
        Kind.LOAD: 0.02,
        Kind.FORWARD: 0.004,
        Kind.TAIL: 0.01,
        Kind.BACKWARD: 0.012,
    }
    again_s = 0.004 * priced.costs.layers[0].recompute_frac
    assert again_s < 0.004  # it leaves out what is not read
    measured = simulate(
        priced.schedule,
        lambda op: (
            seconds[op.kind] - (again_s if op.has_graph and op.kind is Kind.BACKWARD else 0.0)
        ),
    )
    costs = calibrate(priced.costs, measured, optimizer_s=0.5, saved=priced.saved)
    assert priced.num_kept_graphs == num_kept_graphs
    assert costs.grade == "calibrated"
    again = with_costs(priced, costs)
    assert again.predict().step_s == pytest.approx(measured.step_s)
    assert again.step_s == pytest.approx(measured.step_s + 0.5)
    assert all(c.back_s(RECOMPUTE) == pytest.approx(0.012) for c in costs.layers[:-1])
    graph_s = pytest.approx(0.012 - again_s)
    assert all(c.back_s(KEPT_GRAPH) == graph_s for c in costs.layers[:-1])


def test_graphs_that_do_not_fit_are_refused_with_the_most_that_would() -> None:
    asked = replace(REQUEST, num_slots=2, num_micro_batches=1, num_kept_graphs=36)
    with pytest.raises(DoesNotFitError, match=r"2 slots of 36 layers, 36 kept graphs") as refused:
        plan(FACTS, CARD, asked)
    number = int(re.findall(r"`offload.kept_graphs: (\d+)`", str(refused.value))[0])
    assert 0 < number < 36
    assert plan(FACTS, CARD, replace(asked, num_kept_graphs=number)).num_kept_graphs == number
    many = replace(asked, num_micro_batches=24)
    both = r"`offload.stash: host` with `offload.kept_graphs: 0`"
    with pytest.raises(DoesNotFitError, match=both):
        plan(FACTS, CARD, many)


def test_graphs_that_nobody_asked_for_are_kept_for_known_families_and_with_a_reserve() -> None:
    asked = replace(REQUEST, num_slots=2, num_micro_batches=1, num_kept_graphs=None)
    chosen = plan(FACTS, CARD, asked)
    graphs = next(t.num_bytes for t in chosen.device_memory if t.name == "kept graphs")
    assert chosen.peak_bytes + graphs / 10 <= CARD.vram_bytes
    needed = chosen.peak_bytes + int(graphs / 10)
    assert plan(FACTS, replace(CARD, vram_bytes=needed), asked) == replace(
        chosen, machine=replace(CARD, vram_bytes=needed)
    )
    less = plan(FACTS, replace(CARD, vram_bytes=needed - 1), asked)
    assert less.num_kept_graphs == chosen.num_kept_graphs - 1
    assert plan(replace(FACTS, is_memory_tested=False), CARD, asked).num_kept_graphs == 0


def test_stashing_inputs_makes_room_for_slots_and_takes_the_links_other_direction() -> None:
    kept = plan(FACTS, CARD, replace(REQUEST, num_micro_batches=12))
    stashed = plan(FACTS, CARD, replace(REQUEST, num_micro_batches=12, is_stashed=True))
    assert stashed.num_slots > kept.num_slots
    inputs_bytes = (FACTS.num_layers - 1) * 12 * 2048 * FACTS.hidden_size * 2
    assert stashed.schedule.d2h_bytes == inputs_bytes
    assert kept.schedule.d2h_bytes == 0
    assert stashed.predict().busy_s(Kind.FETCH) > 0


@pytest.mark.parametrize("num_slots", [2, 3, 8])
def test_a_simulated_step_with_stashed_inputs_is_not_below_r3_and_close_to_it(num_slots) -> None:
    chosen = plan(FACTS, CARD, replace(REQUEST, num_slots=num_slots, is_stashed=True))
    assert 0.999 < chosen.step_s / chosen.bound_s < 1.15


def test_where_only_stashed_inputs_fit_the_error_says_so() -> None:
    with pytest.raises(DoesNotFitError, match=r"hint: `offload\.stash: host`$"):
        plan(FACTS, CARD, replace(REQUEST, num_micro_batches=24, num_slots=2))


# ------------------------------------------------------------------------------------------- ranks


def test_ranks_share_the_micro_batches_and_not_the_step() -> None:
    alone, shared = (
        plan(FACTS, CARD, replace(REQUEST, num_slots=4, num_micro_batches=7, num_ranks=num))
        for num in (1, 2)
    )
    assert shared.tokens_per_step == alone.tokens_per_step
    assert shared.request.rank_micro_batches == 4  # the one with most of them
    assert shared.schedule.num_loads == alone.schedule.num_loads
    four = plan(FACTS, CARD, replace(REQUEST, num_slots=4, num_micro_batches=4))
    found = shared.predict()
    assert found.step_s - found.exposed_s(Kind.REDUCE) == pytest.approx(four.predict().step_s)


def test_ranks_that_fit_one_by_one_and_not_together_are_refused_with_the_fix() -> None:
    request = replace(REQUEST, num_slots=4)
    alone = plan(FACTS, CARD, request)
    ram_bytes = int(2.5 * alone.host_bytes)
    machine = replace(CARD, ram_bytes=ram_bytes, pinned_bytes=ram_bytes)
    assert plan(FACTS, machine, replace(request, num_ranks=2)).host_bytes == 2 * alone.host_bytes
    with pytest.raises(
        DoesNotFitError,
        match=r"GiB of RAM, (?:.*\n)+\nhint: `--num_processes 2`",
    ):
        plan(FACTS, machine, replace(request, num_ranks=4))


def test_ranks_that_share_a_slab_hold_and_lock_it_once() -> None:
    request = replace(REQUEST, num_slots=4, num_ranks=4)
    each = plan(FACTS, replace(CARD, ram_bytes=256 * GIB, pinned_bytes=256 * GIB), request)
    slab_bytes = {term.name: term.num_bytes for term in each.host_memory}["slab"]
    shared = replace(request, is_slab_shared=True)
    needed = each.host_bytes - 3 * slab_bytes
    machine = replace(CARD, ram_bytes=needed, pinned_bytes=slab_bytes)
    assert plan(FACTS, machine, shared).host_bytes == needed
    assert not plan(FACTS, machine, shared).schedule.is_staged
    ring_bytes = 4 * NUM_STAGING * PIECE_BYTES
    short = replace(machine, pinned_bytes=slab_bytes - 1, ram_bytes=needed + ring_bytes)
    assert plan(FACTS, short, shared).schedule.is_staged
    assert plan(FACTS, short, shared).host_bytes == needed + ring_bytes


def test_ranks_on_a_cpu_compute_in_one_memory() -> None:
    cpu = replace(CARD, device="cpu", vram_bytes=256 * GIB, ram_bytes=256 * GIB)
    found = plan(FACTS, cpu, replace(REQUEST, num_slots=4, num_ranks=3))
    terms = {term.name: term.num_bytes for term in found.host_memory}
    others = terms.pop("other ranks")
    assert others == 2 * (sum(terms.values()) + found.peak_bytes)
    needed = found.host_bytes + found.peak_bytes
    with pytest.raises(DoesNotFitError, match=r"GiB of RAM, "):
        plan(FACTS, replace(cpu, ram_bytes=needed - 1), found.request)
    assert plan(FACTS, replace(cpu, ram_bytes=needed), found.request).num_slots == 4


def test_layers_on_disk_take_no_host_memory_but_buffers() -> None:
    in_ram = plan(FACTS, CARD, replace(REQUEST, num_slots=2))
    on_disk = plan(FACTS, CARD, replace(REQUEST, num_slots=2, is_on_disk=True))
    layer_bytes = sum(layer.weight_bytes for layer in in_ram.costs.layers)
    assert in_ram.host_bytes - on_disk.host_bytes == layer_bytes - NUM_STAGING * PIECE_BYTES


def on_disk(machine: Machine, *, gb_per_s: float, num_ranks: int = 1) -> Plan:
    drive = replace(machine, disk_bytes_per_s=Rate(value=gb_per_s * 1e9, source="drawn"))
    asked = replace(REQUEST, num_slots=2, is_on_disk=True, num_ranks=num_ranks, is_slab_shared=True)
    return plan(FACTS, drive, replace(asked, num_micro_batches=num_ranks))


def test_a_slow_disk_is_what_a_step_waits_for() -> None:
    slow, fast = on_disk(CARD, gb_per_s=0.5), on_disk(CARD, gb_per_s=500)
    assert slow.schedule.is_staged
    reads_s = slow.schedule.h2d_bytes / 0.5e9
    assert slow.predict().phases()["reads"] == pytest.approx(reads_s)
    assert reads_s <= slow.step_s
    assert slow.bound_s <= slow.step_s == pytest.approx(slow.bound_s, rel=0.03)
    assert fast.step_s < 0.1 * slow.step_s
    assert (slow.break_even_tokens or 0) > 10 * (fast.break_even_tokens or 0) > 0


def test_ranks_of_another_machine_take_none_of_this_ones_memory() -> None:
    roomy = replace(CARD, ram_bytes=256 * GIB, pinned_bytes=256 * GIB)
    request = replace(REQUEST, num_slots=4, num_ranks=4, num_micro_batches=4)
    for is_shared in (False, True):
        four = replace(request, is_slab_shared=is_shared)
        on_two = plan(FACTS, roomy, replace(four, most_local_ranks=2))
        pair = plan(FACTS, roomy, replace(four, num_ranks=2))
        assert on_two.host_bytes == pair.host_bytes < plan(FACTS, roomy, four).host_bytes
        assert on_two.step_s > plan(FACTS, roomy, four).step_s  # over a slower network


def test_ranks_share_the_disk() -> None:
    alone, shared = on_disk(CARD, gb_per_s=0.5), on_disk(CARD, gb_per_s=0.5, num_ranks=2)
    rate = alone.costs.speed(Route.READ).bytes_per_s
    assert shared.costs.speed(Route.READ).bytes_per_s == rate / 2
    half = on_disk(CARD, gb_per_s=0.25)
    assert half.break_even_tokens
    assert shared.break_even_tokens == 2 * half.break_even_tokens  # the tokens of both ranks


def test_a_cpu_loads_straight_from_disk_and_fetches_inputs_from_memory() -> None:
    cpu = replace(CARD, device="cpu", ram_bytes=256 * GIB, vram_bytes=256 * GIB)
    found = on_disk(cpu, gb_per_s=0.5)
    assert not found.schedule.is_staged
    assert found.costs.speed(Route.LOAD).bytes_per_s == 0.5e9
    assert found.costs.speed(Route.FETCH).bytes_per_s == cpu.h2d_duplex_bytes_per_s.value
    slow = replace(cpu, h2d_duplex_bytes_per_s=Rate(value=0.5e9, source="drawn"))
    in_ram = plan(FACTS, slow, replace(REQUEST, num_slots=2))
    assert found.break_even_tokens == in_ram.break_even_tokens


def test_a_disk_that_nobody_measured_makes_no_prediction_probed() -> None:
    rates = {
        name: Rate(value=getattr(CARD, name).value, source="measured")
        for name in Machine.__dataclass_fields__
        if isinstance(getattr(CARD, name), Rate)
    }
    measured = replace(CARD, **rates)  # type: ignore[arg-type]
    unknown = replace(measured, disk_bytes_per_s=None)
    request = replace(REQUEST, num_slots=2, is_on_disk=True)
    assert plan(FACTS, measured, request).costs.grade == "probed"
    assert plan(FACTS, unknown, request).costs.grade == "spec"
    assert plan(FACTS, unknown, replace(request, is_on_disk=False)).costs.grade == "probed"


def test_calibration_replaces_the_rate_of_each_kind_of_copy_that_was_measured() -> None:
    found = on_disk(CARD, gb_per_s=0.5)
    costs = found.costs
    faster = costs.at({Route.LOAD: Speed(3e9), Route.READ: Speed(2e9)})
    measured = with_costs(found, faster).predict()
    calibrated = calibrate(costs, measured, optimizer_s=1.0)
    assert calibrated.speed(Route.LOAD) == pytest.approx(Speed(3e9))
    assert calibrated.speed(Route.READ) == pytest.approx(Speed(2e9))
    assert calibrated.speed(Route.FETCH) == costs.speed(Route.FETCH)


def test_copies_of_nothing_say_nothing_of_a_rate() -> None:
    """As of a graph that was too large to be sent: a rate of zero would last for ever."""
    found = on_disk(CARD, gb_per_s=0.5)
    steps = found.predict()
    empty = Span(Kind.SEND, 0, 0, 0, 0.0, 1e-3)
    calibrated = calibrate(
        found.costs, replace(steps, spans=(*steps.spans, empty)), optimizer_s=1.0
    )
    assert calibrated.speed(Route.LEAVE) == found.costs.speed(Route.LEAVE)


def test_copies_to_the_host_are_calibrated_as_those_from_it() -> None:
    request = replace(REQUEST, num_slots=2, is_stashed=True)
    found = plan(FACTS, CARD, request)
    rates = {Kind.STASH: 2e9, Kind.FETCH: 3e9}
    priced_s = duration_of(found.costs)
    measured = simulate(
        found.schedule,
        lambda op: op.num_bytes / rates[op.kind] if op.kind in rates else priced_s(op),
    )
    calibrated = calibrate(found.costs, measured, optimizer_s=1.0, saved=found.saved)
    assert calibrated.speed(Route.LEAVE).bytes_per_s == pytest.approx(2e9)
    assert calibrated.speed(Route.FETCH).bytes_per_s == pytest.approx(3e9)
    assert with_costs(found, calibrated).predict().step_s == pytest.approx(measured.step_s)


# ---------------------------------------------------------------------------------------------
# Traced


TRACED = TracedBytes(visits=(GIB, 2 * GIB, GIB), head_chunk=GIB // 2, recorded=GIB // 16)


def device(request: PlanRequest, traced: TracedBytes | None) -> dict[str, int]:
    made = plan(FACTS, CARD, replace(request, traced=traced))
    assert made.memory_grade == ("traced" if traced else "formula")
    return {term.name: term.num_bytes for term in made.device_memory}


def test_traced_bytes_stand_in_place_of_formulas_and_the_rest_stays() -> None:
    request = replace(REQUEST, num_slots=2)
    formula, found = device(request, None), device(request, TRACED)
    assert found["one visit"] == 2 * GIB
    assert found["recorded arguments"] == 8 * (GIB // 16)
    assert not any(name.startswith("one visit:") for name in found)
    others = found.keys() - {"one visit", "recorded arguments", "fragmentation"}
    assert {name: found[name] for name in others} == {name: formula[name] for name in others}
    used = sum(found.values()) - found["context"] - found["cuBLAS workspaces"]
    assert found["fragmentation"] == int(0.03 * (used - found["fragmentation"]))


def test_the_worst_of_three_instants_is_found_again_from_traced_bytes() -> None:
    request = replace(REQUEST, num_slots=2)
    large_head = replace(TRACED, head_chunk=3 * GIB)
    found = device(request, large_head)
    assert found["head chunk"] == 3 * GIB
    assert "one visit" not in found
    tiny = TracedBytes(visits=(1,), head_chunk=1, recorded=1)
    many = replace(WORKLOAD, adapter=replace(WORKLOAD.adapter, rank=512), seq_len=8)
    updating = replace(request, typical=many, largest=many, num_micro_batches=1)
    assert "optimizer temporaries" in device(updating, tiny)


def test_a_trace_of_a_trained_head_holds_its_new_gradient() -> None:
    for modules, is_apart in ((("lm_head",), False), (("embed_tokens",), True)):
        trained = replace(WORKLOAD, adapter=replace(WORKLOAD.adapter, modules=modules))
        request = replace(REQUEST, typical=trained, largest=trained, num_slots=2)
        request = replace(request, vram_budget_bytes=None)
        machine = replace(CARD, vram_bytes=64 * GIB)
        made = plan(FACTS, machine, replace(request, traced=TRACED))
        names = {term.name for term in made.device_memory}
        assert ("a module's new gradient" in names) == is_apart


def test_fewer_slots_are_taken_or_hinted_where_a_trace_finds_more_than_formulas() -> None:
    by_formula = plan(FACTS, CARD, REQUEST)
    chunk_bytes = {term.name: term.num_bytes for term in by_formula.device_memory}["head chunk"]
    more = TracedBytes(visits=(1,), head_chunk=chunk_bytes + GIB, recorded=1)
    less = TracedBytes(visits=(1,), head_chunk=1, recorded=1)
    fewer = plan(FACTS, CARD, replace(REQUEST, traced=more))
    assert (
        fewer.num_slots
        < by_formula.num_slots
        < plan(FACTS, CARD, replace(REQUEST, traced=less)).num_slots
    )
    wanted = replace(REQUEST, num_slots=by_formula.num_slots, traced=more)
    with pytest.raises(
        DoesNotFitError, match=r", its visits traced, the plan needs \d+\.\d\d GiB of device"
    ) as error:
        plan(FACTS, CARD, wanted)
    assert error.value.hint == f"`offload.num_slots: {fewer.num_slots}`"


def test_a_trace_that_is_too_large_for_any_slots_is_told_a_shorter_length() -> None:
    huge = TracedBytes(visits=(CARD.vram_bytes,), head_chunk=1, recorded=1)
    with pytest.raises(DoesNotFitError, match=r"hint: `train\.seq_len: 1024`"):
        plan(FACTS, CARD, replace(REQUEST, traced=huge))


def test_more_slots_than_layers_are_one_for_each_layer() -> None:
    roomy = replace(CARD, vram_bytes=200 * GIB)
    made = plan(FACTS, roomy, replace(REQUEST, num_slots=FACTS.num_layers + 7))
    assert made == plan(FACTS, roomy, replace(REQUEST, num_slots=FACTS.num_layers))
    assert made.num_slots == FACTS.num_layers


# ------------------------------------------------------------------------------------------- search


SLOW = slow_link()
SHORT = replace(WORKLOAD, seq_len=256, label_tokens=256)
SHORT_REQUEST = replace(REQUEST, typical=SHORT, largest=SHORT, num_micro_batches=1)
CPU = replace(CARD, device="cpu", vram_bytes=64 * GIB)


@pytest.mark.parametrize("codec", ["native", "nf4"])
@pytest.mark.parametrize("is_stashed", [False, True])
@pytest.mark.parametrize("pinned_gib", [64, 5])
@pytest.mark.parametrize(("workload", "kept"), [(SHORT, 0), (WORKLOAD, 0), (SHORT, 5)])
def test_a_draft_takes_as_long_as_the_whole_schedule(
    codec, is_stashed, pinned_gib, workload, kept
) -> None:
    asked = replace(REQUEST, typical=workload, largest=WORKLOAD, num_micro_batches=8)
    asked = replace(asked, num_slots=4, num_kept_graphs=kept)
    request = replace(with_workload(asked, codec=codec), is_stashed=is_stashed)
    machine = replace(SLOW, vram_bytes=64 * GIB, pinned_bytes=pinned_gib * GIB)
    costs = price(FACTS, machine, request.typical, is_duplex=is_stashed)
    needs = MemoryNeeds.of(FACTS, machine, request)
    assert needs.is_staged == (pinned_gib == 5 and not (codec == "nf4" and not is_stashed))
    whole = plan(FACTS, machine, request)
    assert whole.schedule.is_staged == needs.is_staged
    assert Split(needs=needs, costs=costs).step_s(
        Residency(num_slots=4, num_kept_graphs=kept)
    ) == pytest.approx(whole.step_s, rel=1e-12)


@pytest.mark.parametrize("codec", ["native", "nf4"])
@pytest.mark.parametrize("kept", [0, 5, 36])
@pytest.mark.parametrize("num_slots", [4, 36])
def test_a_step_in_rounds_takes_as_long_as_its_whole_schedule(codec, kept, num_slots) -> None:
    asked = replace(REQUEST, num_micro_batches=5, num_slots=num_slots, num_kept_graphs=kept)
    asked = replace(with_workload(asked, codec=codec), order=Order.MICRO_BATCH_MAJOR)
    machine = replace(SLOW, vram_bytes=192 * GIB)
    whole = plan(FACTS, machine, asked)
    needs = MemoryNeeds.of(FACTS, machine, asked)
    draft_s = Split(needs=needs, costs=whole.costs).step_s(whole.residency)
    assert draft_s == pytest.approx(whole.step_s, rel=1e-12)
    assert whole.bound_s <= whole.step_s * (1 + 1e-9)
    assert whole.schedule.num_loads == 2 * 5 * (36 - num_slots)
    one = plan(FACTS, machine, replace(asked, num_micro_batches=1))
    assert whole.peak_bytes == one.peak_bytes


def test_rounds_are_taken_where_most_layers_fit_and_no_others() -> None:
    card = named_machine("rtx4090")
    free = replace(REQUEST, num_kept_graphs=None, has_outputs=True, has_sent_graphs=True)
    for num in (8, 64):
        one = replace(free, num_micro_batches=num, is_stashed=num == 64)
        rounds_of = replace(one, is_stashed=False, order=Order.MICRO_BATCH_MAJOR)
        both = [one, rounds_of]
        layers, rounds = (search(FACTS, card, [way], rounding=()).plan for way in both)
        found = search(FACTS, card, both, rounding=()).plan
        assert found.step_s == pytest.approx(rounds.step_s)
        assert found.step_s < 0.95 * layers.step_s
        assert found.request.order is Order.MICRO_BATCH_MAJOR
        assert not found.schedule.d2h_bytes
    mixture = qwen3_30b()  # each token computes with a few of the experts that are loaded
    both = [replace(free, order=order) for order in Order]
    roomy = replace(card, ram_bytes=128 * GIB)
    chosen = search(mixture, roomy, both, rounding=()).plan
    assert chosen.request.order is Order.LAYER_MAJOR
    assert 2 * chosen.step_s < plan(mixture, roomy, both[1]).step_s


@pytest.mark.parametrize("machine", [CARD, CPU])
@pytest.mark.parametrize("num_slots", [1, 2, 7, 36, 40])
def test_memory_by_slots_is_what_the_memory_model_says(machine, num_slots) -> None:
    needs = MemoryNeeds.of(FACTS, machine, REQUEST)
    assert needs.device(Residency(num_slots=num_slots)) == device_terms(
        FACTS,
        machine,
        REQUEST.largest,
        num_slots=num_slots,
        num_micro_batches=REQUEST.num_micro_batches,
        is_reduced=False,
        is_padded=False,
        is_stashed=False,
    )


def test_where_all_take_the_same_time_the_plainest_is_chosen() -> None:
    fast = replace(CARD, vram_bytes=80 * GIB)  # everything is resident, so nothing crosses the link
    plain = ways_of(REQUEST)[:2]
    choice = search(FACTS, fast, plain, rounding=())
    assert choice.plan.request == plain[0]
    assert choice.rejected[0].request == plain[1]
    assert choice.rejected[0].step_s == pytest.approx(choice.plan.step_s, rel=1e-6)
    assert search(FACTS, fast, plain[::-1], rounding=()).plan.request == plain[1]


def test_on_a_slow_link_the_packed_form_is_chosen_and_the_native_one_is_slower() -> None:
    choice = search(FACTS, SLOW, ways_of(SHORT_REQUEST), rounding=())
    assert choice.plan.request.typical.codec == "bf16_packed"
    native = [one for one in choice.rejected if one.request.typical.codec == "native"]
    assert native
    assert all(one.least_s > choice.plan.step_s for one in native)


@pytest.mark.parametrize(
    ("asked", "gain", "codec"),
    [(SHORT_REQUEST, -0.19, "native"), (REQUEST, -0.008, "bf16_packed")],
    ids=["faster", "as fast"],
)
def test_of_exact_forms_that_are_as_fast_the_one_with_less_ram_is_chosen(
    asked: PlanRequest, gain: float, codec: str
) -> None:
    ways = ways_of(asked)
    native, packed = (
        search(FACTS, CARD, [way for way in ways if way.typical.codec == name], rounding=())
        for name in ("native", "bf16_packed")
    )
    assert 1 - packed.plan.step_s / native.plan.step_s == pytest.approx(gain, abs=0.005)
    assert packed.chosen.host_bytes == packed.plan.host_bytes < native.plan.host_bytes
    assert search(FACTS, CARD, ways, rounding=()).plan.request.typical.codec == codec


def test_the_same_input_gives_the_same_choice() -> None:
    first, second = (
        search(FACTS, SLOW, ways_of(REQUEST), rounding=("int8", "nf4")) for _ in range(2)
    )
    assert first == second
    assert repr(first) == repr(second)
    assert first.what_ifs == second.what_ifs
    assert repr(first.what_ifs) == repr(second.what_ifs)


def test_one_slot_more_is_among_the_rejected_and_short_of_what_the_plan_says() -> None:
    choice = search(FACTS, CARD, [REQUEST], rounding=())
    (more,) = choice.rejected
    assert more.residency.num_slots == choice.plan.num_slots + 1
    (short,) = more.shortages
    asked = replace(REQUEST, num_slots=more.residency.num_slots)
    with pytest.raises(DoesNotFitError, match=f"{short.short_bytes / GIB:.2f} GiB too much"):
        plan(FACTS, CARD, asked)
    enough = replace(CARD, vram_bytes=CARD.vram_bytes + short.short_bytes)
    assert plan(FACTS, enough, asked).num_slots == more.residency.num_slots
    with pytest.raises(DoesNotFitError):
        plan(FACTS, replace(enough, vram_bytes=enough.vram_bytes - 1), asked)


def test_what_was_asked_for_is_not_chosen_anew() -> None:
    asked = [replace(REQUEST, num_slots=3)]
    choice = search(FACTS, CARD, asked, rounding=())
    assert choice.plan.num_slots == 3
    assert choice.plan.request == asked[0]
    assert not choice.rejected


def test_a_rounding_codec_is_never_chosen_and_named_only_where_it_is_faster() -> None:
    requests = ways_of(SHORT_REQUEST)
    choice = search(FACTS, SLOW, requests, rounding=("int8", "nf4"))
    assert choice.plan.request.typical.codec in ("native", "bf16_packed")
    named = {what_if.change: what_if.tokens_per_s or 0 for what_if in choice.what_ifs}
    assert named["nf4"] > named["int8"] > choice.plan.tokens_per_step / choice.plan.step_s
    resident = replace(CARD, vram_bytes=80 * GIB)
    choice = search(FACTS, resident, requests, rounding=("int8", "nf4"))
    assert {what_if.change for what_if in choice.what_ifs} == {
        "memory",
        "link",
        "tokens",
        "micro_batch",
    }


def test_on_a_cpu_layers_are_packed_only_for_want_of_memory() -> None:
    roomy = search(FACTS, CPU, ways_of(REQUEST), rounding=())
    assert not roomy.plan.request.typical.is_encoded
    assert all(not one.request.typical.is_encoded for one in roomy.rejected)
    tightest = replace(REQUEST, num_slots=2)
    need = plan(FACTS, CPU, tightest)
    ram_bytes = need.host_bytes + need.peak_bytes - 1
    small = replace(CPU, ram_bytes=ram_bytes)
    packed = search(FACTS, small, ways_of(REQUEST), rounding=())
    assert packed.plan.request.typical.codec == "bf16_packed"


def test_more_tokens_that_do_not_fit_are_said_not_to() -> None:
    tight = replace(REQUEST, num_micro_batches=12)
    choice = search(FACTS, CARD, [tight], rounding=())
    (doubled,) = [one for one in choice.what_ifs if one.change == "tokens"]
    assert doubled.tokens_per_s is None
    assert doubled.best.request.num_micro_batches == 24
    assert [short.what for short in doubled.best.shortages] == ["of device memory"]


def test_where_nothing_fits_the_nearest_is_named_with_what_would_fit() -> None:
    small = replace(CARD, vram_bytes=9 * GIB, ram_bytes=12 * GIB, pinned_bytes=12 * GIB)
    with pytest.raises(
        DoesNotFitError,
        match=r"with 2 slots of 36 layers the plan needs 10\.87 GiB of device memory and 12\.85"
        r" GiB of RAM, 1\.87 GiB and 0\.85 GiB too much; 9\.00 GiB may be used and 12\.00 GiB of"
        r" RAM is there on rtx4060ti, with 1\.50 GiB left to a desktop \(`--headless`: none\) and"
        r" 4\.00 GiB left to the system\n  Most of device memory is for:\n(?:.*\n)+  Most of RAM is"
        r" for:\n     9\.88 GiB  slab; less with `offload\.codec: nf4`\n(?:.*\n)+\nhint:"
        r" `offload\.codec: nf4` \(rounds each weight, by 9\.2%"
        r" of their size\) with `offload\.stash: host`$",
    ):
        search(FACTS, small, ways_of(REQUEST), rounding=())
    hinted = replace(with_workload(REQUEST, codec="nf4"), is_stashed=True)
    search(FACTS, small, [hinted], rounding=())
    for nearer in (with_workload(REQUEST, codec="nf4"), *ways_of(REQUEST)):
        with pytest.raises(DoesNotFitError):
            search(FACTS, small, [nearer], rounding=())


def test_large_micro_batches_that_do_not_fit_are_told_to_be_cut() -> None:
    large = replace(WORKLOAD, micro_batch_size=8, label_tokens=8 * 2048)
    request = replace(REQUEST, typical=large, largest=large, num_micro_batches=1)
    machine = replace(CARD, vram_bytes=9 * GIB)
    with pytest.raises(DoesNotFitError, match=r"hint: `offload\.embeddings: host`$"):
        search(FACTS, machine, [request, replace(request, is_stashed=True)], rounding=())
    request, machine = with_workload(request, embeddings="host"), replace(CARD, vram_bytes=7 * GIB)
    with pytest.raises(
        DoesNotFitError, match=r"hint: `train\.micro_batch_size: (\d)` and \d times as many"
    ) as error:
        search(FACTS, machine, [request, replace(request, is_stashed=True)], rounding=())
    size = int(error.value.hint.split("`")[1].split(": ")[1])
    cut = replace(large, micro_batch_size=size, label_tokens=size * 2048, embeddings="host")
    smaller = replace(request, typical=cut, largest=cut, num_micro_batches=8 // size)
    search(FACTS, machine, [smaller, replace(smaller, is_stashed=True)], rounding=())


def test_fewer_tokens_are_named_where_their_inputs_leave_room_for_what_is_faster() -> None:
    """Of layers that are not visited in rounds: the search has no other way to need less."""
    free = replace(REQUEST, num_kept_graphs=None, num_micro_batches=16)
    choice = search(FACTS, named_machine("rtx4090"), [free], rounding=())
    rates = {one.change: one.tokens_per_s or 0 for one in choice.what_ifs}
    assert rates["fewer_tokens"] > 1.02 * choice.chosen.tokens_per_s
    halved = plan(FACTS, named_machine("rtx4090"), replace(free, num_micro_batches=8))
    assert rates["fewer_tokens"] == pytest.approx(halved.tokens_per_step / halved.step_s, rel=1e-3)
    odd = search(FACTS, named_machine("rtx4090"), [replace(free, num_micro_batches=7)], rounding=())
    assert "fewer_tokens" not in {one.change for one in odd.what_ifs}


def test_a_hint_of_shorter_rows_names_the_tokens_of_a_step_too() -> None:
    """A recipe that gives the tokens of a step would have as many in more micro-batches."""
    long = workload(seq_len=32768)
    asked = replace(REQUEST, typical=long, largest=long, num_micro_batches=1, num_slots=2)
    small = replace(CARD, vram_bytes=6 * GIB, ram_bytes=20 * GIB)
    with pytest.raises(DoesNotFitError) as refused:
        plan(FACTS, small, asked)
    found = re.search(
        r"`train.seq_len: (\d+)` with `train.tokens_per_step: (\d+)`", refused.value.hint
    )
    assert found is not None, refused.value.hint
    seq_len, tokens = map(int, found.groups())
    assert tokens == seq_len < long.seq_len
    step = replace(REQUEST, num_micro_batches=4096)
    with pytest.raises(DoesNotFitError) as refused:
        plan(FACTS, small, step)
    found = re.search(r"`train.tokens_per_step: (\d+)`", refused.value.hint)
    assert found is not None, refused.value.hint
    fewer = replace(step, num_micro_batches=int(found[1]) // WORKLOAD.num_tokens)
    stash = "offload.stash: host" in refused.value.hint
    assert plan(FACTS, small, replace(fewer, is_stashed=stash)).num_slots


# --------------------------------------------------------------------------------------- arithmetic


WITHIN = 0.01
US, MS, GB = 1e-6, 1e-3, 10**9
NVLINK = 400e9
BF16, FP32 = 2, 4
# "H100 as measured": tensor cores 800 TFLOP/s, CUDA cores 25 TFLOP/s, HBM 2.4 TB/s.
# The lecture's operations read and write at the rate of large copies.
H100 = replace(named_machine("h100"), memory_bytes_per_s=Rate(value=2.4e12, source="ARITHMETIC.md"))
# 250 TFLOP/s, and a link of 64 GB/s.
RTX_5090 = named_machine("rtx5090", link_bytes_per_s=64e9)
LECTURE_5090_FLOPS_PER_S = 250e12

LLAMA_7B = llama_7b()
LLAMA_70B = llama_7b(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=4,
)
QWEN_30B = qwen3_30b()
QWEN_WORKLOAD = workload(seq_len=8192)


def test_the_machine_is_the_lecture_s() -> None:
    rates = (H100.gemm_flops_per_s, H100.vector_flops_per_s, H100.memory_bytes_per_s)
    assert [rate.value for rate in rates] == [800e12, 25e12, 2.4e12]


# ---------------------------------------------------------------------------------------------
# Operations on the H100: time in memory traffic, time in arithmetic, and which of them bounds


@pytest.mark.parametrize(
    ("roof", "memory_s", "compute_s", "verdict"),
    [
        pytest.param(
            elementwise(H100, num_elements=8192**2, num_passes=3, dtype_bytes=BF16),
            167.8 * US,
            2.68 * US,
            "memory",
            id="C = A + B, 8192 x 8192",
        ),
        pytest.param(
            gemm(H100, m=1024, k=1024, n=1024, dtype_bytes=BF16),
            2.62 * US,
            2.68 * US,
            "balanced",
            id="C = A @ B, 1024 x 1024",
        ),
        pytest.param(
            gemm(H100, m=4, k=8192, n=8192, dtype_bytes=BF16),
            56.0 * US,
            0.67 * US,
            "memory",
            id="C = A @ B, A 4 x 8192, B 8192 x 8192",
        ),
    ],
)
def test_an_operation_on_the_roofline(roof, memory_s, compute_s, verdict) -> None:
    assert roof.memory_s == pytest.approx(memory_s, rel=WITHIN)
    assert roof.compute_s == pytest.approx(compute_s, rel=WITHIN)
    is_balanced = abs(roof.memory_s - roof.compute_s) <= 0.1 * roof.time_s
    bound = "memory" if roof.memory_s > roof.compute_s else "compute"
    assert verdict == ("balanced" if is_balanced else bound)


def at_gemm_rate(machine: Machine, flops: float) -> float:
    return flops / machine.gemm_flops_per_s.value


def through_memory(machine: Machine, num_bytes: float) -> float:
    return num_bytes / machine.memory_bytes_per_s.value


@pytest.mark.parametrize(
    ("seconds", "expected_s"),
    [
        pytest.param(
            4 * gemm(H100, m=8192, k=4096, n=4096, dtype_bytes=BF16).time_s,
            1.37 * MS,
            id="linear layers: S 8192, H 4096",
        ),
        pytest.param(
            at_gemm_rate(
                H100,
                attention_flops(
                    num_tokens=8192, context_tokens=8192, width=4096, count="lecture_full"
                ),
            ),
            2.06 * MS,
            id="QK^T, PV and scaling: 3 * 2 * H * S^2",
        ),
        pytest.param(
            through_memory(
                H100, unfused_softmax_bytes(num_heads=64, seq_len=8192, dtype_bytes=BF16)
            ),
            7.16 * MS,
            id="softmax and scaling, unfused: nh 64, S 8192",
        ),
    ],
)
def test_attention_in_parts(seconds: float, expected_s: float) -> None:
    assert seconds == pytest.approx(expected_s, rel=WITHIN)


# ---------------------------------------------------------------------------------------------
# The forward of a layer


def matmuls_s(facts: ModelFacts, *, num_tokens: int, context_tokens: int) -> float:
    flops = layer_flops(
        facts,
        facts.layers[0],
        num_tokens=num_tokens,
        context_tokens=context_tokens,
        count="lecture",
    )
    return at_gemm_rate(H100, flops)


def memory_bound_s(facts: ModelFacts, *, num_tokens: int, mlp_width: int) -> float:
    """Two norms, two additions, one SwiGLU."""
    num_bytes = layer_elementwise_bytes(
        num_tokens=num_tokens,
        hidden_size=facts.hidden_size,
        mlp_width=mlp_width,
        dtype_bytes=BF16,
    )
    return through_memory(H100, num_bytes)


def gathered_bytes(facts: ModelFacts) -> int:
    return facts.layers[0].num_parameters * BF16


@pytest.mark.parametrize(
    ("seconds", "expected_s"),
    [
        pytest.param(
            matmuls_s(LLAMA_7B, num_tokens=8192, context_tokens=8192),
            5.18 * MS,
            id="7B: matmuls",
        ),
        pytest.param(
            memory_bound_s(LLAMA_7B, num_tokens=8192, mlp_width=11008),
            0.505 * MS,
            id="7B: memory-bound operations",
        ),
        pytest.param(  # slide: 1.34 ms
            gathered_bytes(LLAMA_7B) / NVLINK, 1.01 * MS, id="7B: FSDP all-gather"
        ),
        # Two ranks share a sequence of 8192, so each attends from 4096 tokens to all of it.
        pytest.param(
            matmuls_s(LLAMA_70B, num_tokens=4096, context_tokens=8192),
            9.71 * MS,
            id="70B, TP 2: matmuls",
        ),
        pytest.param(
            memory_bound_s(LLAMA_70B, num_tokens=4096, mlp_width=28672),
            0.573 * MS,
            id="70B, TP 2: memory-bound operations",
        ),
        pytest.param(
            gathered_bytes(LLAMA_70B) / NVLINK, 4.24 * MS, id="70B, TP 2: FSDP all-gather"
        ),
        pytest.param(  # slide: 1.3 ms
            tensor_parallel_bytes(num_tokens=4096, hidden_size=8192, dtype_bytes=BF16) / NVLINK,
            0.67 * MS,
            id="70B, TP 2: tensor-parallel",
        ),
    ],
)
def test_the_forward_of_a_llama_layer(seconds: float, expected_s: float) -> None:
    assert seconds == pytest.approx(expected_s, rel=WITHIN)


@pytest.mark.parametrize(
    ("num_bytes", "expected_mb"),
    [
        pytest.param(gathered_bytes(LLAMA_7B), 405, id="7B"),  # slide: 540 MB
        pytest.param(gathered_bytes(LLAMA_70B), 1694, id="70B"),  # slide: 1,560 MB
    ],
)
def test_the_bytes_of_an_fsdp_all_gather(num_bytes: int, expected_mb: float) -> None:
    assert num_bytes / 1e6 == pytest.approx(expected_mb, rel=WITHIN)


@pytest.mark.parametrize(
    ("count", "forward_s"),
    [
        pytest.param("lecture", 5.36 * MS, id="attention as 3 products of S x H"),
        pytest.param("causal", 5.93 * MS, id="attention counted exactly: 181 MFLOP per token"),
    ],
)
def test_the_forward_of_a_qwen_30b_layer_on_a_5090(count, forward_s: float) -> None:
    layer = QWEN_30B.layers[0]
    flops = layer_flops(QWEN_30B, layer, num_tokens=8192, context_tokens=8192, count=count)
    assert flops / LECTURE_5090_FLOPS_PER_S == pytest.approx(forward_s, rel=WITHIN)
    if count == "causal":
        assert flops / 8192 == pytest.approx(181e6, rel=WITHIN)


def test_the_load_of_a_qwen_30b_layer_on_a_5090() -> None:
    layer = QWEN_30B.layers[0]
    num_bytes = BF16 * (layer.weights("attention") + layer.weights("experts"))
    assert num_bytes / 1e6 == pytest.approx(1245.7, rel=1e-4)
    assert RTX_5090.h2d_bytes_per_s == Rate(value=64e9, source="given")
    costs = price(QWEN_30B, RTX_5090, QWEN_WORKLOAD)
    assert costs.load_s(0) == pytest.approx(19.46 * MS, rel=WITHIN)
    assert costs.layers[0].weight_bytes == to_pages(BF16 * layer.num_parameters)


# ---------------------------------------------------------------------------------------------
# The memory of training all weights


def full_training(*, num_parameters: int, dtype_bytes: int, **others: int) -> dict[str, int]:
    terms: tuple[MemoryTerm, ...] = full_training_terms(
        num_parameters=num_parameters, dtype_bytes=dtype_bytes, **others
    )
    found = {term.name: term.num_bytes for term in terms if term.num_bytes}
    return found | {"all": total_bytes(terms)}


def activations_of_1_5b(*, features: int, batch: int, dtype_bytes: int) -> int:
    """`features * h * S * B * L` elements, of h 1600, S 1024, L 48."""
    return activation_bytes(
        features=features,
        num_tokens=1024 * batch,
        hidden_size=1600,
        num_layers=48,
        dtype_bytes=dtype_bytes,
    )


@pytest.mark.parametrize(
    ("num_bytes", "unit", "expected"),
    [
        pytest.param(
            full_training(
                num_parameters=7 * GB, dtype_bytes=FP32, activation_bytes=0, context_bytes=0
            ),
            GIB,
            {"weights": 26.1, "gradients": 26.1, "optimizer states": 52.2, "all": 104.3},
            id="7 B, fp32, Adam: GiB",
        ),
        pytest.param(  # slide: about 84 GB
            full_training(
                num_parameters=1_500_000_000,
                dtype_bytes=FP32,
                activation_bytes=activations_of_1_5b(features=12, batch=16, dtype_bytes=FP32),
                context_bytes=GB,
            ),
            GB,
            {
                "weights": 6,
                "gradients": 6,
                "optimizer states": 12,
                "activations": 60.4,
                "context": 1,
                "all": 85.4,
            },
            id="1.5 B, fp32, Adam, batch 16: GB",
        ),
        pytest.param(  # slide: 26.8 GB
            full_training(
                num_parameters=1_500_000_000,
                dtype_bytes=BF16,
                activation_bytes=activations_of_1_5b(features=6, batch=2, dtype_bytes=BF16),
                context_bytes=GB,
            ),
            GB,
            {
                "weights": 3,
                "fp32 copy": 6,
                "gradients": 3,
                "optimizer states": 12,
                "activations": 1.9,
                "context": 1,
                "all": 26.9,
            },
            id="1.5 B, mixed precision, batch 2: GB",
        ),
    ],
)
def test_the_memory_of_training_all_weights(num_bytes, unit: int, expected) -> None:
    found = {name: value / unit for name, value in num_bytes.items()}
    assert found == pytest.approx(expected, rel=WITHIN)


# --------------------------------------------------------------------------------------------- link


def test_gradients_of_30b_experts_overlap_with_the_backward_at_less_than_half_a_gigabit() -> None:
    """Two machines that send bf16: about the bytes of all layers by the time of the backward."""
    asked = request(
        workload(adapter=lora(rank=8, experts=True)),
        num_micro_batches=48,
        num_ranks=2,
        most_local_ranks=1,
        reduction=Reduction(element_bytes=2),
    )
    made = plan(qwen3_30b(), named_machine("rtx5090", ram_bytes=96 * GIB), asked)
    backward_s = made.predict().phases()["backward"]
    even = made.schedule.network_bytes / backward_s
    assert even * 8 == pytest.approx(0.48e9, rel=0.05)

    def hidden(bytes_per_s: float) -> float:
        speed = made.costs.speed(Route.NETWORK)._replace(bytes_per_s=bytes_per_s)
        costs = made.costs.at({Route.NETWORK: speed})
        return hidden_frac(simulate(made.schedule, duration_of(costs)))

    # the sum of layer 0, one of 48, has no visit left to overlap with
    assert hidden(1.05 * even) == pytest.approx(47 / 48, abs=0.002)
    assert hidden(0.9 * even) < 0.9
    assert even < made.network_needed_bytes_per_s < 2 * even


def test_the_needed_link_is_the_slowest_that_makes_the_step_no_longer() -> None:
    card = named_machine("rtx5090", ram_bytes=96 * GIB)
    made = plan(qwen3_30b(), card, request(num_ranks=2, most_local_ranks=1))
    needed = needed_bytes_per_s(made.schedule, made.costs)

    def step_s(bytes_per_s: float) -> float:
        speed = made.costs.speed(Route.NETWORK)._replace(bytes_per_s=bytes_per_s)
        costs = made.costs.at({Route.NETWORK: speed})
        return simulate(made.schedule, duration_of(costs)).step_s

    allowed_s = (1 + FREE_FRAC) * step_s(1e18)
    assert step_s(needed) <= allowed_s
    assert step_s(0.97 * needed) > allowed_s


# ------------------------------------------------------------------------------------------- errors


def test_an_error_says_what_the_limit_and_the_fix() -> None:
    error = OffloadError("num_slots is 1", limit="at least 2", hint="`num_slots=2`")
    assert str(error) == "num_slots is 1; at least 2\n\nhint: `num_slots=2`"


def test_a_limit_that_is_plain_from_what_is_wrong_is_left_out() -> None:
    error = OffloadError("the file exists", hint="name another")
    assert str(error) == "the file exists\n\nhint: name another"
