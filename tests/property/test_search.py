"""The choice among plans against all of them, simulated op by op."""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offload.errors import DoesNotFitError
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, Machine, Rate, named_machine
from offload.plan.memory.memory import SENT, STASH
from offload.plan.plan import plan
from offload.plan.request import PlanRequest, with_workload
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import Residency
from offload.plan.search import Choice, fastest, search
from offload.plan.split import SAME_FRAC, WORTH_FRAC
from tests import builders
from tests.builders import qwen3_8b

FACTS = qwen3_8b(num_hidden_layers=7, vocab_size=32000)
SEQ_LEN = 512


def request(*, micro_batch_size: int, num_sequences: int, is_stashed: bool) -> PlanRequest:
    return builders.request(
        builders.workload(micro_batch_size=micro_batch_size, seq_len=SEQ_LEN),
        num_micro_batches=num_sequences // micro_batch_size,
        is_stashed=is_stashed,
    )


def card(
    *, vram_gib: float, ram_gib: float, pinned_gib: float, gbytes_per_s: float, host: float
) -> Machine:
    like = named_machine(
        "rtx4090", ram_bytes=int(ram_gib * GIB), link_bytes_per_s=gbytes_per_s * 1e9
    )
    return replace(
        like,
        vram_bytes=int(vram_gib * GIB),
        pinned_bytes=int(pinned_gib * GIB),
        host_memory_bytes_per_s=Rate(value=host, source="drawn"),
    )


def machines() -> st.SearchStrategy[Machine]:
    """Draw a card on which some ways to run the step fit, or all, or none."""
    return st.builds(
        card,
        vram_gib=st.floats(2.5, 7),
        ram_gib=st.floats(4, 9),
        pinned_gib=st.floats(0.1, 6),
        gbytes_per_s=st.sampled_from([0.5, 2.0, 8.0, 25.0]),
        host=st.sampled_from([1e9, 60e9]),
    )


@st.composite
def all_requests(draw: st.DrawFn) -> list[PlanRequest]:
    num_sequences = draw(st.sampled_from([1, 4, 6, 8, 12]))
    num_kept_graphs = draw(st.sampled_from([0, None]))
    cut = [
        replace(
            request(micro_batch_size=size, num_sequences=num_sequences, is_stashed=is_stashed),
            num_kept_graphs=num_kept_graphs,
        )
        for is_stashed in (False, True)
        for size in range(1, num_sequences + 1)
        if num_sequences % size == 0
    ]
    return cut + [with_workload(one, codec="bf16_packed") for one in cut]


def found(machine: Machine, requests: list[PlanRequest]) -> Choice | None:
    try:
        return search(FACTS, machine, requests, rounding=("nf4",))
    except DoesNotFitError:
        return None


def with_residency(one: PlanRequest, residency: Residency) -> PlanRequest:
    """Ask for these slots and graphs."""
    return replace(one, num_slots=residency.num_slots, num_kept_graphs=residency.num_kept_graphs)


def step_s(machine: Machine, one: PlanRequest) -> float:
    """Return the time of a request's whole schedule; infinite if it does not fit."""
    try:
        return plan(FACTS, machine, one).step_s
    except DoesNotFitError:
        return inf


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Stands in for a candidate: its bound, what its simulation will say, and whether it fits."""

    bound_s: float
    true_s: float
    shortages: tuple[str, ...]
    step_s: float | None = None

    @property
    def least_s(self) -> float:
        return self.bound_s if self.step_s is None else self.step_s

    def simulated(self) -> "Timed":
        return replace(self, step_s=self.true_s)


@st.composite
def timed(draw: st.DrawFn) -> Timed:
    true_s = draw(st.sampled_from([10.0, 10.000001, 10.2, 10.5, 11.0, 20.0]))
    slack = draw(st.sampled_from([1.0, 1.0 - 1e-12, 0.99, 0.97, 0.5]))
    shortages = draw(st.sampled_from([(), (), ("of RAM",)]))
    return Timed(bound_s=true_s * slack, true_s=true_s, shortages=shortages)


@given(st.lists(timed(), max_size=8))
def test_the_first_of_the_fastest_is_found_whatever_the_bounds_promise(
    candidates: list[Timed],
) -> None:
    fitting = [one.true_s for one in candidates if not one.shortages]
    best_s = min(fitting, default=inf) * (1 + SAME_FRAC)
    expected = [i for i, one in enumerate(candidates) if not one.shortages and one.true_s <= best_s]
    place = fastest(candidates)  # type: ignore[arg-type]  # a double
    assert place == (expected[0] if expected else None)
    if place is not None:
        assert candidates[place].step_s == candidates[place].true_s


@settings(max_examples=15)
@given(machines(), all_requests())
def test_no_plan_that_fits_is_faster_than_the_chosen_one(machine, requests) -> None:
    every = [step_s(machine, one) for one in requests]
    choice = found(machine, requests)
    if choice is None:
        assert min(every) == inf
        return
    assert choice.plan.step_s <= min(every) * (1 + 2 * SAME_FRAC)
    assert choice.plan.step_s == pytest.approx(choice.chosen.least_s, rel=1e-9)
    place = requests.index(choice.plan.request)
    earlier = every[:place]
    assert all(other > min(every) * (1 + SAME_FRAC / 2) for other in earlier)


@settings(max_examples=15)
@given(machines(), all_requests())
def test_what_was_rejected_trains_the_same_and_is_slower_or_does_not_fit(machine, requests) -> None:
    choice = found(machine, requests)
    if choice is None:
        return
    for one in (choice.chosen, *choice.rejected):
        tokens = one.request.typical.num_tokens * one.request.num_micro_batches
        assert tokens == requests[0].typical.num_tokens * requests[0].num_micro_batches
        assert one.request.typical.codec in ("native", "bf16_packed")
    assert len(choice.rejected) <= 3
    times = [one.least_s for one in choice.rejected]
    assert times == sorted(times)
    for one in choice.rejected:
        asked = with_residency(one.request, one.residency)
        if one.shortages and one.request.num_kept_graphs is None:
            continue  # it may be short of the reserve alone
        if one.shortages:
            with pytest.raises(DoesNotFitError):
                plan(FACTS, machine, asked)
        else:
            assert one.step_s is not None
            assert one.step_s == pytest.approx(plan(FACTS, machine, asked).step_s, rel=1e-9)
            assert one.step_s >= choice.plan.step_s * (1 - 2 * SAME_FRAC)


@pytest.mark.thorough
@settings(max_examples=15)
@given(machines(), all_requests(), st.sampled_from(["vram", "ram", "pinned", "link"]))
def test_more_of_anything_never_gives_a_slower_plan(machine, requests, what) -> None:
    choice = found(machine, requests)
    larger = {
        "vram": replace(machine, vram_bytes=machine.vram_bytes + GIB // 2),
        "ram": replace(machine, ram_bytes=machine.ram_bytes + GIB // 2),
        "pinned": replace(machine, pinned_bytes=machine.pinned_bytes + GIB),
        "link": replace(
            machine,
            **{
                name: Rate(value=2 * getattr(machine, name).value, source="drawn")
                for name in ("h2d_bytes_per_s", "h2d_duplex_bytes_per_s", "d2h_bytes_per_s")
            },
        ),
    }[what]
    if choice is None:
        return
    more = found(larger, requests)
    assert more is not None
    assert more.plan.step_s <= choice.plan.step_s * (1 + 2 * SAME_FRAC)


@pytest.mark.thorough
@settings(max_examples=15)
@given(machines(), all_requests())
def test_what_if_is_what_a_plan_says_of_that_machine_or_step(machine, requests) -> None:
    choice = found(machine, requests)
    if choice is None:
        return
    what_ifs = {what_if.change: what_if for what_if in choice.what_ifs}
    tokens = choice.plan.tokens_per_step
    larger = found(replace(machine, vram_bytes=machine.vram_bytes + GIB), requests)
    assert larger is not None
    assert what_ifs["memory"].tokens_per_s == pytest.approx(
        tokens / larger.plan.step_s, rel=4 * SAME_FRAC
    )
    links = ("h2d_bytes_per_s", "h2d_duplex_bytes_per_s", "d2h_bytes_per_s")
    rates = {n: replace(getattr(machine, n), value=2 * getattr(machine, n).value) for n in links}
    faster = found(replace(machine, **rates), requests)
    assert faster is not None
    assert what_ifs["link"].tokens_per_s == pytest.approx(
        tokens / faster.plan.step_s, rel=4 * SAME_FRAC
    )
    size = choice.plan.request.typical.micro_batch_size
    doubled = [
        replace(one, num_micro_batches=2 * one.num_micro_batches)
        for one in requests
        if one.typical.micro_batch_size == size
    ]
    longer = found(machine, doubled)
    rate = None if longer is None else pytest.approx(2 * tokens / longer.plan.step_s, rel=1e-5)
    assert what_ifs["tokens"].tokens_per_s == rate
    rounded = what_ifs.get("nf4")
    if rounded is not None:
        assert rounded.tokens_per_s is not None
        assert rounded.tokens_per_s > tokens / choice.plan.step_s
        assert rounded.best.request.typical.codec == "nf4"


TOO_LITTLE_RAM_FOR_ALL_INPUTS = card(
    vram_gib=3, ram_gib=5, pinned_gib=1, gbytes_per_s=0.5, host=1e9
)


@settings(max_examples=15)
@given(machine=machines(), is_stashed=st.booleans(), num_sequences=st.sampled_from([1, 4]))
@example(machine=TOO_LITTLE_RAM_FOR_ALL_INPUTS, is_stashed=True, num_sequences=1)
def test_memory_is_shared_out_between_slots_and_graphs_as_is_fastest(
    machine: Machine, is_stashed: bool, num_sequences: int
) -> None:
    one = request(micro_batch_size=1, num_sequences=num_sequences, is_stashed=is_stashed)
    one = replace(one, num_kept_graphs=None)
    needs = MemoryNeeds.of(FACTS, machine, one)
    every = [
        step_s(machine, with_residency(one, residency))
        for residency in map(needs.with_graphs, range(2, FACTS.num_layers + 1))
        if not needs.shortages(residency)
    ]
    assert step_s(machine, one) <= min(every, default=inf) * (1.002 + WORTH_FRAC)


@settings(max_examples=40)
@given(
    machine=machines(),
    is_stashed=st.booleans(),
    num_micro_batches=st.sampled_from([1, 4]),
    seq_len=st.sampled_from([512, 4096]),
    num_kept_graphs=st.sampled_from([0, 1, None]),
    has_sent_graphs=st.booleans(),
)
def test_attention_is_kept_and_more_is_sent_only_where_a_step_is_then_faster(
    machine: Machine,
    is_stashed: bool,
    num_micro_batches: int,
    seq_len: int,
    num_kept_graphs: int | None,
    has_sent_graphs: bool,
) -> None:
    one = builders.request(
        builders.workload(micro_batch_size=1, seq_len=seq_len),
        num_micro_batches=num_micro_batches,
        num_kept_graphs=num_kept_graphs,
        is_stashed=is_stashed,
    )
    try:
        without = plan(FACTS, machine, one)
    except DoesNotFitError:
        return
    chosen = plan(FACTS, machine, replace(one, has_outputs=True, has_sent_graphs=has_sent_graphs))
    if chosen.residency.num_sent_graphs:
        assert has_sent_graphs
        outputs = plan(FACTS, machine, replace(one, has_outputs=True))
        assert chosen.step_s < outputs.step_s * (1 - SAME_FRAC)
    if not (chosen.residency.has_outputs or chosen.residency.sends):
        assert chosen.residency == without.residency
        assert chosen.schedule == without.schedule
        return
    assert chosen.step_s < without.step_s * (1 - SAME_FRAC)
    assert chosen.bound_s <= chosen.step_s * (1 + 1e-9)
    assert chosen.peak_bytes <= machine.vram_bytes
    assert chosen.host_bytes <= machine.ram_bytes
    assert chosen.schedule.is_staged == without.schedule.is_staged
    host = {term.name: term.num_bytes for term in chosen.host_memory}
    if SENT in host:
        loaded = "staging" if "staging" in host else "slab"
        locked = sum(host.get(name, 0) for name in (SENT, STASH, loaded))
        assert locked <= machine.pinned_bytes


@settings(max_examples=10)
@given(machines(), st.booleans(), st.integers(2, 6))
def test_a_kept_graph_never_slows_a_step_nor_takes_less_memory(
    machine: Machine, is_stashed: bool, num_slots: int
) -> None:
    vast = replace(machine, vram_bytes=200 * GIB, ram_bytes=200 * GIB, pinned_bytes=200 * GIB)
    one = request(micro_batch_size=1, num_sequences=4, is_stashed=is_stashed)
    plans = [
        plan(FACTS, vast, replace(one, num_slots=num_slots, num_kept_graphs=number))
        for number in range(FACTS.num_layers + 1)
    ]
    for fewer, more in pairwise(plans):
        assert more.step_s <= fewer.step_s * (1 + 1e-9)
        assert more.peak_bytes >= fewer.peak_bytes
        assert more.host_bytes <= fewer.host_bytes
    assert plans[-1].schedule.d2h_bytes == 0
    saved_s = 4 * sum(layer.recompute_s for layer in plans[0].costs.layers)
    assert plans[0].predict().busy_s(Kind.BACKWARD) - plans[-1].predict().busy_s(
        Kind.BACKWARD
    ) == pytest.approx(saved_s)
