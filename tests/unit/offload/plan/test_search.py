import re
from dataclasses import replace

import pytest

from offload.errors import DoesNotFitError
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.memory.memory import device_terms
from offload.plan.plan import plan
from offload.plan.request import with_workload
from offload.plan.schedule.schedule import Order, Residency
from offload.plan.search import search
from offload.plan.split import draft_step_s
from offload.plan.time.costs import price
from tests.builders import qwen3_8b, qwen3_30b, request, slow_link, ways_of, workload

FACTS = qwen3_8b()
CARD = named_machine("rtx4060ti")
WORKLOAD = workload()
REQUEST = request(num_workers=1)
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
    assert draft_step_s(
        needs, costs, Residency(num_slots=4, num_kept_graphs=kept)
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
    draft_s = draft_step_s(needs, whole.costs, whole.residency)
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
    chosen = search(mixture, replace(card, ram_bytes=128 * GIB), both, rounding=()).plan
    assert chosen.request.order is Order.LAYER_MAJOR
    assert 2 * chosen.step_s < plan(mixture, card, both[1]).step_s


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
        r" RAM is there on rtx4060ti\n  Most of device memory is for:\n(?:.*\n)+  Most of RAM is"
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
