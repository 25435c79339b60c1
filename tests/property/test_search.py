"""The choice among plans, its bounds and its parts, over drawn inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from finetune.report.explain import misses
from offload.errors import DoesNotFitError
from offload.plan.facts.facts import ModelFacts
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, Machine, Rate, named_machine
from offload.plan.memory.memory import SENT, STASH
from offload.plan.plan import Plan, costs_of, laid_out, plan
from offload.plan.request import ObjectiveCost, PlanRequest, sharing, with_workload
from offload.plan.schedule.op import LINK, Kind, Lane, Op, Route
from offload.plan.schedule.schedule import (
    NUM_STAGING,
    PIECE_BYTES,
    Order,
    Passes,
    Residency,
    Ring,
    Saved,
    Schedule,
    TransferSizes,
    cold_ring,
    warm_ring,
    without_trained,
)
from offload.plan.schedule.simulate import simulate
from offload.plan.schedule.timeline import (
    IDLE,
    OPTIMIZER,
    Part,
    Timeline,
    by_name,
    difference,
    layers_of,
    mean_parts,
    parts_from_json,
    parts_json,
    parts_of,
    term_of,
)
from offload.plan.search import Choice, fastest, search
from offload.plan.split import SAME_FRAC, WORTH_FRAC, Split
from offload.plan.step import MOST_TOKENS, Drafts, duration_of
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import Costs, LayerCost, Speed
from tests import builders
from tests.builders import llama_7b, lora, qwen3_8b, qwen3_30b, request, slow_link, workload
from tests.schedules import training_schedule

FACTS = qwen3_8b(num_hidden_layers=7, vocab_size=32000)
SEQ_LEN = 512


def request_search(*, micro_batch_size: int, num_sequences: int, is_stashed: bool) -> PlanRequest:
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
            request_search(
                micro_batch_size=size, num_sequences=num_sequences, is_stashed=is_stashed
            ),
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
def test_no_plan_that_fits_is_worth_more_than_the_chosen_one(machine, requests) -> None:
    """None is faster in the same form, and in another none by what is worth the host's memory."""
    every = [step_s(machine, one) for one in requests]
    choice = found(machine, requests)
    if choice is None:
        assert min(every) == inf
        return
    assert choice.plan.step_s == pytest.approx(choice.chosen.least_s, rel=1e-9)
    codec, place = choice.plan.request.typical.codec, requests.index(choice.plan.request)
    own = [place for place, one in enumerate(requests) if one.typical.codec == codec]
    own_s = min(every[place] for place in own)
    assert choice.plan.step_s <= own_s * (1 + 2 * SAME_FRAC)
    assert all(every[other] > own_s * (1 + SAME_FRAC / 2) for other in own if other < place)
    if choice.plan.step_s > min(every) * (1 + 2 * SAME_FRAC):
        assert choice.plan.step_s <= min(every) * (1 + WORTH_FRAC + 2 * SAME_FRAC)
        faster = plan(FACTS, machine, requests[every.index(min(every))])
        assert choice.plan.host_bytes < faster.host_bytes


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
            is_same_form = one.request.typical.codec == choice.plan.request.typical.codec
            least_frac = SAME_FRAC if is_same_form else WORTH_FRAC
            assert one.step_s >= choice.plan.step_s * (1 - 2 * SAME_FRAC - least_frac)


@pytest.mark.thorough
@settings(max_examples=15)
@given(machines(), all_requests(), st.sampled_from(["vram", "ram", "pinned", "link"]))
def test_more_of_anything_gives_no_plan_that_is_slower_than_less_ram_is_worth(
    machine, requests, what
) -> None:
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
    assert more.plan.step_s <= choice.plan.step_s * (1 + WORTH_FRAC + 2 * SAME_FRAC)


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
        tokens / larger.plan.step_s, rel=WORTH_FRAC + 4 * SAME_FRAC
    )
    links = ("h2d_bytes_per_s", "h2d_duplex_bytes_per_s", "d2h_bytes_per_s")
    rates = {n: replace(getattr(machine, n), value=2 * getattr(machine, n).value) for n in links}
    faster = found(replace(machine, **rates), requests)
    assert faster is not None
    assert what_ifs["link"].tokens_per_s == pytest.approx(
        tokens / faster.plan.step_s, rel=WORTH_FRAC + 4 * SAME_FRAC
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
    one = request_search(micro_batch_size=1, num_sequences=num_sequences, is_stashed=is_stashed)
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
    if without.schedule.num_loads:
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
    one = request_search(micro_batch_size=1, num_sequences=4, is_stashed=is_stashed)
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


# -------------------------------------------------------------------------------------------- split


NUM_LAYERS = 6
SPLIT_FACTS = qwen3_8b(num_hidden_layers=NUM_LAYERS, vocab_size=32000)
ROUNDING_FRAC = 1e-9


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    seq_len = draw(st.sampled_from([512, 8192, 32768]))
    request = builders.request(
        builders.workload(micro_batch_size=1, seq_len=seq_len),
        num_micro_batches=draw(st.integers(1, 4)),
        is_stashed=draw(st.booleans()),
    )
    open_ways = replace(request, num_kept_graphs=None, has_outputs=True, has_sent_graphs=True)
    return with_workload(open_ways, codec=draw(st.sampled_from(["native", "nf4"])))


@st.composite
def machines_split(draw: st.DrawFn) -> Machine:
    card = named_machine(
        draw(st.sampled_from(["rtx3060", "rtx4090"])),
        ram_bytes=int(draw(st.floats(6, 24)) * GIB),
        link_bytes_per_s=draw(st.sampled_from([1e9, 8e9, 25e9, 1e12])),
    )
    return replace(card, vram_bytes=int(draw(st.floats(4, 24)) * GIB))


@settings(max_examples=60)
@given(requests(), machines_split())
def test_further_ways_to_spend_memory_fit_and_make_no_step_slower(
    request: PlanRequest, machine: Machine
) -> None:
    needs = MemoryNeeds.of(SPLIT_FACTS, machine, request)
    costs = costs_of(SPLIT_FACTS, machine, request)
    found = Split(needs=needs, costs=costs).fastest
    plain = replace(needs, request=replace(request, has_outputs=False, has_sent_graphs=False))
    plainest = Split(needs=plain, costs=costs).fastest
    assert (found is None) == (plainest is None)
    assume(found is not None)
    assert found is not None
    assert plainest is not None
    event(f"is plain: {found == plainest}")
    assert not needs.is_short(found)
    least_s = Split(needs=needs, costs=costs).step_s(plainest)
    assert Split(needs=needs, costs=costs).step_s(found) <= least_s * (1 + ROUNDING_FRAC)


# ------------------------------------------------------------------------------------------- bounds


seconds = st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0, 3.0, 10.0])
INPUT_BYTES = 10


@dataclass(frozen=True, kw_only=True)
class Step:
    """A priced step; with `is_stashed`, inputs of 10 bytes travel."""

    costs: Costs
    num_slots: int
    num_micro_batches: int
    is_stashed: bool
    is_encoded: bool
    is_staged: bool
    num_kept_graphs: int
    num_sent_graphs: int
    num_kept_outputs: int
    num_sent_outputs: int

    @property
    def saved(self) -> Saved:
        residency = Residency(
            num_slots=self.num_slots,
            num_kept_graphs=self.num_kept_graphs,
            num_sent_graphs=self.num_sent_graphs,
            num_kept_outputs=self.num_kept_outputs,
            num_sent_outputs=self.num_sent_outputs,
        )
        return self.costs.saved(residency, num_micro_batches=self.num_micro_batches)

    @property
    def sizes(self) -> TransferSizes:
        sizes = [layer.weight_bytes for layer in self.costs.layers]
        frozen = TransferSizes.frozen(
            sizes,
            decoded_bytes=[99] * len(sizes) if self.is_encoded else None,
            num_staging=NUM_STAGING if self.is_staged else 0,
        )
        updated = {number for number, layer in enumerate(self.costs.layers) if layer.update_s}
        return replace(
            frozen,
            head_bytes=self.costs.head_bytes,
            gradient_bytes=tuple(INPUT_BYTES * (number in updated) for number in range(len(sizes))),
            updated=frozenset(updated),
        )

    def simulated_s(self, ring: Ring | None = None) -> float:
        schedule = training_schedule(
            self.sizes,
            ring=without_trained(warm_ring(self.num_slots) if ring is None else ring, self.sizes),
            num_micro_batches=self.num_micro_batches,
            order=Order.LAYER_MAJOR,
            trains_front=self.costs.front_backward_s > 0,
            input_bytes=(INPUT_BYTES,) * self.num_micro_batches if self.is_stashed else (),
            saved=self.saved,
        )
        return simulate(schedule, duration_of(self.costs)).step_s

    def bound_s(self) -> float:
        return r3_bound_s(
            self.costs,
            num_slots=self.num_slots,
            num_micro_batches=self.num_micro_batches,
            stashed_bytes=INPUT_BYTES if self.is_stashed else 0,
            saved=self.saved,
            is_staged=self.is_staged,
        )


def on_device(costs: Costs) -> Costs:
    """Return the costs with the head on the device."""
    return replace(costs, head_bytes=0)


@st.composite
def layer_costs(draw: st.DrawFn, *, is_encoded: bool) -> LayerCost:
    backward_s = draw(seconds)
    recompute_s = backward_s * draw(st.sampled_from([0.0, 0.3, 0.9]))
    output_bytes = draw(st.sampled_from([0, 1, 20]))
    return LayerCost(
        forward_s=draw(seconds),
        backward_s=backward_s,
        recompute_s=recompute_s,
        attention_s=recompute_s * draw(st.sampled_from([0.1, 1.0])) if output_bytes else 0.0,
        pack_s=draw(st.sampled_from([0.0, 0.05])),
        output_bytes=output_bytes,
        graph_bytes=draw(st.sampled_from([1, 60])),
        graph_pack_s=draw(st.sampled_from([0.0, 0.1])),
        decode_s=draw(seconds) if is_encoded else 0.0,
        weight_bytes=draw(st.sampled_from([1, 10, 40, PIECE_BYTES + 1, 3 * PIECE_BYTES])),
        bound="compute",
    )


@st.composite
def steps(
    draw: st.DrawFn,
    *,
    are_alike: bool = False,
    is_stashed: bool | None = None,
    is_staged: bool | None = None,
    is_encoded: bool | None = None,
    may_send: bool = True,
) -> Step:
    num_layers = draw(st.integers(1, 9))
    num_slots = min(num_layers, draw(st.integers(2, 9)))
    is_encoded = draw(st.booleans()) if is_encoded is None else is_encoded
    layers = [draw(layer_costs(is_encoded=is_encoded)) for _ in range(num_layers)]
    latency_s = draw(st.sampled_from([0.0, 0.2]))
    costs = Costs(
        grade="spec",
        layers=tuple(layers[:1] * num_layers if are_alike else layers),
        front_s=draw(seconds),
        tail_s=draw(seconds),
        optimizer_s=0.0,
        speeds={
            Route.LOAD: Speed(draw(st.sampled_from([1.0, 10.0, 100.0, 1e8])), latency_s),
            Route.LEAVE: Speed(draw(st.sampled_from([1.0, 100.0])), latency_s),
            Route.FETCH: Speed(draw(st.sampled_from([1.0, 10.0, 100.0])), latency_s),
            Route.READ: Speed(draw(st.sampled_from([1.0, 10.0, 1e8]))),
        },
        front_backward_s=draw(st.sampled_from([0.0, 0.3])),
        head_bytes=draw(st.sampled_from([0, 0, 1, 25, 90, 2 * PIECE_BYTES])),
    )
    return Step(
        costs=costs,
        num_slots=num_slots,
        num_micro_batches=draw(st.integers(1, 4)),
        is_stashed=draw(st.booleans()) if is_stashed is None else is_stashed,
        is_encoded=is_encoded,
        is_staged=draw(st.booleans()) if is_staged is None else is_staged,
        num_kept_graphs=draw(st.integers(0, num_layers)),
        num_sent_graphs=draw(st.integers(0, num_layers)) if may_send else 0,
        num_kept_outputs=draw(st.integers(0, num_layers)),
        num_sent_outputs=draw(st.integers(0, num_layers)) if may_send else 0,
    )


@settings(max_examples=200)
@given(steps())
def test_no_step_is_simulated_below_r3(step: Step) -> None:
    assert step.simulated_s() >= step.bound_s() * (1 - 1e-9)


@settings(max_examples=60)
@given(steps(are_alike=True, is_stashed=False, is_staged=False, is_encoded=False, may_send=False))
def test_a_warm_step_of_equal_layers_takes_exactly_r3(step: Step) -> None:
    """With the head on the device: the bound does not know when its slots are free.

    Layers of which some are spared a recompute are not equal.
    """
    step = replace(step, costs=on_device(step.costs), num_kept_graphs=0, num_kept_outputs=0)
    assert step.simulated_s() == pytest.approx(step.bound_s(), rel=1e-9)


@settings(max_examples=60)
@given(steps())
def test_a_cold_ring_makes_no_step_faster(step: Step) -> None:
    assert step.simulated_s(cold_ring(step.num_slots)) >= step.simulated_s() * (1 - 1e-9)


@settings(max_examples=60)
@given(steps())
def test_one_more_slot_never_makes_a_step_slower(step: Step) -> None:
    """With the head on the device: one more slot may be one more that the head waits for."""
    step = replace(step, costs=on_device(step.costs))
    more = replace(step, num_slots=min(step.num_slots + 1, len(step.costs.layers)))
    assert more.simulated_s() <= step.simulated_s() * (1 + 1e-9)


@settings(max_examples=60)
@given(steps())
def test_a_faster_link_never_makes_a_step_slower(step: Step) -> None:
    costs = step.costs.faster(2, *LINK, Route.READ)
    assert replace(step, costs=costs).simulated_s() <= step.simulated_s() * (1 + 1e-9)


# --------------------------------------------------------------------------------------- break even


MOST_TRIED = 40  # micro-batches
VAST_BYTES = 1024 * GIB


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a machine with memory for any step, with a number of slots."""

    facts: ModelFacts
    machine: Machine
    request: PlanRequest

    def plan_of(self, num_micro_batches: int) -> Plan:
        """Return the plan of one micro-batch for each rank, with this many of them."""
        num_ranks = self.request.num_ranks
        one = plan(self.facts, self.machine, replace(self.request, num_micro_batches=num_ranks))
        request = replace(self.request, num_micro_batches=num_micro_batches * num_ranks)
        needs = MemoryNeeds.of(self.facts, self.machine, request)
        return laid_out(needs, costs_of(self.facts, self.machine, request), one.residency)

    def is_free(self, num_micro_batches: int) -> bool:
        """Return whether the whole schedule is within 1 % of itself with loads of no time."""
        made = self.plan_of(num_micro_batches)
        duration_s = duration_of(made.costs)

        def without_loads_s(op: Op) -> float:
            return 0.0 if op.kind in (Kind.LOAD, Kind.READ) else duration_s(op)

        free_s = simulate(made.schedule, without_loads_s).step_s
        return simulate(made.schedule, duration_s).step_s <= 1.01 * free_s


@st.composite
def cases(draw: st.DrawFn) -> Case:
    make = draw(st.sampled_from([qwen3_8b, qwen3_30b, llama_7b]))
    num_layers = draw(st.integers(3, 7))
    link = draw(st.sampled_from([1.0, 3.0, 12.5, 25.0, 56.0]))
    is_stashed = draw(st.booleans())
    # page-locked memory for inputs has to grow with the step
    locked = [VAST_BYTES] if is_stashed else [VAST_BYTES, VAST_BYTES, 2 * GIB]
    card = draw(st.sampled_from(["rtx3060", "rtx4060", "rtx4090", "rtx5090", "h100"]))
    machine = replace(
        named_machine(card, ram_bytes=VAST_BYTES, link_bytes_per_s=link * 1e9),
        vram_bytes=VAST_BYTES,
        pinned_bytes=draw(st.sampled_from(locked)),
        host_memory_bytes_per_s=Rate(value=draw(st.sampled_from([4e9, 60e9])), source="drawn"),
        disk_bytes_per_s=Rate(value=draw(st.sampled_from([1e9, 6e9, 14e9])), source="drawn"),
    )
    typical = builders.workload(
        micro_batch_size=draw(st.integers(1, 4)),
        seq_len=draw(st.sampled_from([256, 1024, 4096])),
        codec=draw(st.sampled_from(["native", "native", "fp8", "nf4"])),
        embeddings=draw(st.sampled_from(["device", "host"])),
    )
    return Case(
        facts=make(num_hidden_layers=num_layers, vocab_size=draw(st.sampled_from([4096, 151936]))),
        machine=machine,
        request=builders.request(
            typical,
            num_micro_batches=1,
            num_slots=draw(st.integers(2, num_layers)),
            num_kept_graphs=draw(st.sampled_from([0, 0, 1, num_layers])),
            is_stashed=is_stashed,
            is_on_disk=draw(st.sampled_from([False, False, True])),
            num_ranks=draw(st.sampled_from([1, 1, 2])),
            is_slab_shared=True,
            has_outputs=draw(st.booleans()),
            has_sent_graphs=draw(st.booleans()),
        ),
    )


@pytest.mark.thorough
@settings(max_examples=20)
@given(cases())
def test_n_star_is_the_fewest_micro_batches_with_which_streaming_is_free(case: Case) -> None:
    tokens = case.request.typical.num_tokens * case.request.num_ranks
    found = case.plan_of(1).break_even_tokens
    if case.request.num_slots == case.facts.num_layers:
        assert found == 0
        return
    tried = range(1, MOST_TRIED + 1)
    fewest = next((number for number in tried if case.is_free(number)), None)
    if fewest is None:
        assert found is None or found > tokens * MOST_TRIED
    else:
        assert found == tokens * fewest


@settings(max_examples=30)
@given(cases(), st.integers(1, 9))
def test_a_draft_takes_as_long_as_all_micro_batches_and_pieces(case: Case, number: int) -> None:
    made = case.plan_of(number)
    drafts = Drafts(
        facts=made.facts,
        request=made.request,
        costs=made.costs,
        is_staged=made.schedule.is_staged,
    )
    assert drafts.step_s(made.residency) == pytest.approx(made.step_s, rel=1e-9)


def test_n_star_is_none_where_no_sensible_step_hides_the_loads() -> None:
    slow = replace(
        named_machine("rtx5090", ram_bytes=VAST_BYTES, link_bytes_per_s=1e6),
        vram_bytes=VAST_BYTES,
    )
    asked = builders.request(builders.workload(seq_len=256), num_slots=2)
    assert plan(qwen3_30b(), slow, asked).break_even_tokens is None
    few = replace(slow, h2d_bytes_per_s=Rate(value=1e9, source="drawn"))
    assert 0 < (plan(qwen3_30b(), few, asked).break_even_tokens or 0) <= MOST_TOKENS


# ------------------------------------------------------------------------------ breakdown of a step


TICK_S = 1 / 1024
ticks = st.integers(0, 40).map(lambda n: n * TICK_S)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    num_layers, num_micro_batches = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    num_slots = draw(st.integers(2, num_layers))
    is_trained = draw(st.booleans())
    return training_schedule(
        TransferSizes(
            layer_bytes=(30,) * num_layers,
            gradient_bytes=(9 * is_trained,) * num_layers,
            decoded_bytes=(draw(st.sampled_from([0, 50])),) * num_layers,
            piece_bytes=draw(st.sampled_from([7, 100])),
            num_staging=draw(st.integers(0, 2)),
        ),
        ring=draw(st.sampled_from([warm_ring(num_slots), cold_ring(num_slots)])),
        num_micro_batches=num_micro_batches,
        order=Order.LAYER_MAJOR,
        trains_front=draw(st.booleans()),
        input_bytes=draw(st.sampled_from([(), (5,) * num_micro_batches])),
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Timeline, Timeline]:
    """Draw a step, predicted and as it may have been: each op late and long by some ticks."""
    schedule = draw(schedules())
    count = len(schedule.ops)
    first, second, late = (
        draw(st.lists(ticks, min_size=count, max_size=count)) for _ in ("took", "takes", "late")
    )

    def timed(seconds: list[float]) -> Callable[[Op], float]:
        turn = iter(seconds)
        return lambda op: next(turn)

    predicted = simulate(schedule, timed(first))
    measured = simulate(schedule, timed([a + b for a, b in zip(second, late, strict=True)]))
    spans = tuple(
        span._replace(start_s=span.start_s + min(gap, span.duration_s))
        for span, gap in zip(measured.spans, late, strict=True)
    )
    return predicted, Timeline(spans=spans)


@settings(max_examples=60)
@given(pairs(), ticks)
def test_the_parts_of_a_step_add_up_to_it_and_those_of_two_to_their_difference(
    pair: tuple[Timeline, Timeline], optimizer_s: float
) -> None:
    predicted, measured = (timeline.with_optimizer(optimizer_s) for timeline in pair)
    before, after = parts_of(predicted), parts_of(measured)
    assert sum(before.values()) == predicted.step_s
    assert sum(after.values()) == measured.step_s
    assert all(seconds > 0 for seconds in after.values() if seconds)
    apart_s = measured.step_s - predicted.step_s
    assert sum(difference(before, after).values()) == apart_s
    assert sum(miss.difference_s for miss in misses(before, after)) == apart_s
    busy = {kind.value: measured.busy_s(kind) for kind in Kind}
    computed = {s.kind.value for s in measured.spans if s.lane is Lane.COMPUTE}
    assert all(by_name(after).get(name, 0.0) == busy[name] for name in computed)
    waited = [s for name, s in by_name(after).items() if term_of(name) in ("copy", "stall")]
    assert sum(waited) == pair[1].stall_s


@settings(max_examples=40)
@given(pairs())
def test_parts_are_read_back_as_written(pair: tuple[Timeline, Timeline]) -> None:
    parts = {part: seconds for part, seconds in parts_of(pair[1]).items() if seconds}
    read = parts_from_json(parts_json(parts))
    assert read.keys() == parts.keys()
    assert all(abs(read[part] - parts[part]) <= 1e-9 for part in parts)


@settings(max_examples=20)
@given(st.lists(pairs(), min_size=1, max_size=3))
def test_the_parts_of_a_mean_add_up_to_the_mean_of_the_steps(
    steps: list[tuple[Timeline, Timeline]],
) -> None:
    timelines = [measured for _, measured in steps]
    mean = mean_parts([parts_of(timeline) for timeline in timelines])
    wanted_s = sum(timeline.step_s for timeline in timelines) / len(timelines)
    assert abs(sum(mean.values()) - wanted_s) <= 1e-12


# ------------------------------------------------------------------------------- what is blamed


def step(
    slow: Callable[[Op], bool] = lambda op: False, *, num_slots: int = 4, load_s: float = 1.0
) -> Timeline:
    """Simulate 8 layers and 2 micro-batches: a visit takes 8 s, of a slow op 16 more."""
    schedule = training_schedule(
        TransferSizes.frozen([10] * 8),
        ring=warm_ring(num_slots),
        num_micro_batches=2,
        order=Order.LAYER_MAJOR,
        trains_front=False,
        input_bytes=(),
    )
    return simulate(schedule, lambda op: (load_s if op.lane is Lane.H2D else 4.0) + 16 * slow(op))


def missed(measured: Timeline, predicted: Timeline) -> dict[Part, float]:
    apart = difference(parts_of(predicted), parts_of(measured))
    return {part: seconds for part, seconds in apart.items() if seconds}


def test_a_slow_layer_is_named_with_its_seconds() -> None:
    slow = step(lambda op: op.kind is Kind.BACKWARD and op.layer in (2, 5))
    apart = missed(slow, step())
    assert apart == {("backward", 2): 32.0, ("backward", 5): 32.0}
    assert layers_of(apart, "backward") == (2, 5)


def test_a_slow_copy_is_blamed_only_for_what_compute_waited() -> None:
    slow = step(lambda op: op.kind is Kind.LOAD and op.layer == 6, num_slots=2)
    apart = missed(slow, step(num_slots=2))
    waits = {part: s for part, s in apart.items() if part[0] == "wait for load"}
    assert waits
    assert apart == waits
    assert term_of("wait for load") == "copy"
    assert sum(apart.values()) == slow.step_s - step(num_slots=2).step_s < 2 * 16
    hidden = step(lambda op: op.kind is Kind.LOAD and op.layer == 6 and op.slot == 2)
    assert missed(hidden, step()) == {}  # with 4 slots there is time for it


def test_a_pause_with_nothing_to_wait_for_is_no_copy_s_fault() -> None:
    whole = step(num_slots=2)
    late = next(i for i, s in enumerate(whole.spans) if s.kind is Kind.FORWARD and s.layer == 3)
    spans = tuple(
        s._replace(start_s=s.start_s + 2, end_s=s.end_s + 2) if i >= late else s
        for i, s in enumerate(whole.spans)
    )
    apart = missed(Timeline(spans=spans), whole)
    assert apart == {(IDLE, None): 2.0}
    assert term_of(IDLE) == "stall"


def test_what_drains_behind_the_last_op_belongs_to_the_step() -> None:
    schedule = training_schedule(
        replace(TransferSizes.frozen([10] * 3), gradient_bytes=(9, 9, 9)),
        ring=cold_ring(3),
        num_micro_batches=1,
        order=Order.LAYER_MAJOR,
        trains_front=False,
        input_bytes=(),
    )
    timeline = simulate(schedule, lambda op: 1.0)
    assert parts_of(timeline)["wait for gradient", 0] == 1.0


def test_layers_that_make_up_most_of_a_miss_are_as_few_as_possible() -> None:
    apart: dict[Part, float] = {("forward", i): s for i, s in enumerate([1.0, -9.0, 30.0, 60.0])}
    assert layers_of(apart, "forward") == (2, 3)
    assert layers_of(apart, "forward", share=0.5) == (3,)
    assert layers_of({(OPTIMIZER, None): 1.0}, OPTIMIZER) == ()
    assert layers_of({("forward", 0): -1.0, ("forward", 1): 0.5}, "forward") == (0,)


# --------------------------------------------------------------------------------------------- runs


RUNS_FACTS = qwen3_8b(num_hidden_layers=6)
NUM_SLOTS = 3
CARD = named_machine("rtx4060ti")

runs_of_steps = st.lists(
    st.builds(
        lambda rank, seq_len, number, objective: request(
            workload(seq_len=seq_len, adapter=lora(rank=rank)),
            num_micro_batches=number,
            objective=objective,
            num_slots=NUM_SLOTS,
        ),
        st.sampled_from([2, 16, 128]),
        st.sampled_from([64, 256, 1024]),
        st.integers(1, 3),
        st.sampled_from(
            [None, ObjectiveCost(), ObjectiveCost(has_reference=True, scored_frac=1.0)]
        ),
    ),
    min_size=1,
    max_size=4,
)


def passes_of(one: Plan) -> Passes:
    return one.request.passes(one.request.num_micro_batches)


def forth_s(one: Plan, layer: int) -> float:
    passes, cost = passes_of(one), one.costs.layers[layer]
    num_scored = passes.num_policy * passes.has_reference
    return passes.num_policy * cost.forward_s + num_scored * cost.reference_s


def back_s(one: Plan, layer: int) -> float:
    return one.request.num_micro_batches * one.costs.layers[layer].backward_s


def front_s(one: Plan) -> float:
    passes = passes_of(one)
    return (passes.num_trained + passes.num_further) * one.costs.front_s


def tail_s(one: Plan) -> float:
    passes, costs = passes_of(one), one.costs
    score_s = (passes.num_trained + passes.num_further) * costs.score_s
    losses_s = score_s + costs.objective_s if passes.has_objective else 0.0
    return passes.num_trained * costs.tail_s + losses_s


def walked_s(alone: Sequence[Plan]) -> float:
    """Follow a step visit by visit, from the times of each run alone.

    Nothing is stashed, kept or sent, and layers compute in their slots. The first layers are there.
    A load waits for the load before it, and for the last visit that read its slot.
    """
    costs, num_layers = alone[0].costs, RUNS_FACTS.num_layers
    visits = [*range(num_layers), *reversed(range(num_layers))]
    held = list(range(NUM_SLOTS))
    done_s, link_s, now_s = [0.0] * NUM_SLOTS, 0.0, sum(map(front_s, alone))
    for place, layer in enumerate(visits):
        slot, num_bytes = layer % NUM_SLOTS, costs.layers[layer].weight_bytes
        if held[slot] != layer:
            num_pieces = -(-num_bytes // 2**26)
            load_s = costs.speed(Route.LOAD).seconds(num_bytes, num_copies=num_pieces)
            link_s = max(link_s, done_s[slot]) + load_s
            held[slot] = layer
            now_s = max(now_s, link_s)
        if place == num_layers:
            now_s += sum(map(tail_s, alone))
        visit_s = forth_s if place < num_layers else back_s
        now_s += sum(visit_s(one, layer) for one in alone)
        done_s[slot] = now_s
    return now_s


@given(runs=runs_of_steps, is_slow=st.booleans())
def test_a_step_is_that_of_its_visits_one_after_the_other(
    runs: list[PlanRequest], *, is_slow: bool
) -> None:
    machine = slow_link() if is_slow else CARD
    machine = replace(machine, vram_bytes=2**38, ram_bytes=2**40, pinned_bytes=2**40)
    found = plan(RUNS_FACTS, machine, sharing(runs))
    alone = [plan(RUNS_FACTS, machine, run) for run in runs]
    assert found.predict().step_s == pytest.approx(walked_s(alone), rel=1e-9)
    assert found.bound_s <= found.step_s * (1 + 1e-9)
    assert found.schedule.num_loads == alone[0].schedule.num_loads == 6


@pytest.mark.thorough
@given(runs=runs_of_steps, is_stashed=st.booleans(), num_kept_graphs=st.integers(0, 6))
def test_a_search_prices_the_step_that_is_laid_out(
    runs: list[PlanRequest], *, is_stashed: bool, num_kept_graphs: int
) -> None:
    asked = replace(sharing(runs), is_stashed=is_stashed, num_kept_graphs=num_kept_graphs)
    machine = replace(CARD, vram_bytes=2**38, ram_bytes=2**40, pinned_bytes=2**40)
    found = plan(RUNS_FACTS, machine, asked)
    needs = MemoryNeeds.of(RUNS_FACTS, machine, asked)
    split = Split(needs=needs, costs=costs_of(RUNS_FACTS, machine, asked))
    assert split.step_s(found.residency) == pytest.approx(found.step_s, rel=1e-9)
    alone = [plan(RUNS_FACTS, machine, run) for run in asked.runs]
    assert found.peak_bytes >= max(one.peak_bytes for one in alone)
    assert found.step_s <= sum(one.step_s for one in alone) * (1 + 1e-9)
