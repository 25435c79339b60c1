import re
from dataclasses import replace

import pytest

from offload.errors import DoesNotFitError
from offload.plan.machine.machine import GIB, Machine, Rate, named_machine
from offload.plan.memory.memory import TracedBytes
from offload.plan.plan import Plan, calibrate, plan, with_costs
from offload.plan.request import PlanRequest
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import NUM_STAGING, PIECE_BYTES
from offload.plan.schedule.simulate import simulate
from tests.builders import qwen3_8b, request, workload

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
    request = replace(REQUEST, num_slots=30, vram_budget_bytes=14 * GIB)
    with pytest.raises(
        DoesNotFitError,
        match=r"with 30 slots of 36 layers the plan needs \d+\.\d\d GiB of device memory,"
        r" \d+\.\d\d GiB too much; 14\.00 GiB may be used on rtx4060ti\n"
        r"  Most of device memory is for:\n +\d+\.\d\d GiB  slots; less with fewer"
        r" `offload\.num_slots`, `offload\.codec: nf4`\n(?:.*\n)+\n"
        r"hint: `offload\.num_slots: (\d+)`",
    ) as error:
        plan(FACTS, CARD, request)
    hinted = int(error.value.hint.split(": ")[1].rstrip("`"))
    assert plan(FACTS, CARD, replace(request, num_slots=hinted)).num_slots == hinted
    with pytest.raises(DoesNotFitError):
        plan(FACTS, CARD, replace(request, num_slots=hinted + 1))


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
    with pytest.raises(DoesNotFitError, match=r"GiB of RAM, .*; 8\.00 GiB of RAM is there"):
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
    costs = calibrate(
        priced.costs, measured, optimizer_s=0.5, num_kept_graphs=priced.num_kept_graphs
    )
    assert priced.num_kept_graphs == num_kept_graphs
    assert costs.grade == "calibrated"
    again = with_costs(priced, costs)
    assert again.predict().step_s == pytest.approx(measured.step_s)
    assert again.step_s == pytest.approx(measured.step_s + 0.5)
    assert all(c.back_s(has_graph=False) == pytest.approx(0.012) for c in costs.layers[:-1])
    graph_s = pytest.approx(0.012 - again_s)
    assert all(c.back_s(has_graph=True) == graph_s for c in costs.layers[:-1])


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
    assert plan(replace(FACTS, grade="built"), CARD, asked).num_kept_graphs == 0


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
    assert shared.costs.read_bytes_per_s == alone.costs.read_bytes_per_s / 2
    half = on_disk(CARD, gb_per_s=0.25)
    assert half.break_even_tokens
    assert shared.break_even_tokens == 2 * half.break_even_tokens  # the tokens of both ranks


def test_a_cpu_loads_straight_from_disk_and_fetches_inputs_from_memory() -> None:
    cpu = replace(CARD, device="cpu", ram_bytes=256 * GIB, vram_bytes=256 * GIB)
    found = on_disk(cpu, gb_per_s=0.5)
    assert not found.schedule.is_staged
    assert found.costs.h2d_bytes_per_s == 0.5e9
    assert found.costs.fetch_bytes_per_s == cpu.h2d_duplex_bytes_per_s.value
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
    costs = replace(found.costs, h2d_latency_s=0.0)
    faster = replace(costs, h2d_bytes_per_s=3e9, read_bytes_per_s=2e9)
    measured = with_costs(found, faster).predict()
    calibrated = calibrate(costs, measured, optimizer_s=1.0, num_kept_graphs=0)
    assert calibrated.h2d_bytes_per_s == pytest.approx(3e9)
    assert calibrated.read_bytes_per_s == pytest.approx(2e9)
    assert calibrated.fetch_bytes_per_s == costs.fetch_bytes_per_s


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
