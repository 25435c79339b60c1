"""What no division of device memory gets a step below, against every division that is drawn."""

from dataclasses import replace

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, Machine, named_machine
from offload.plan.plan import costs_of
from offload.plan.request import PlanRequest, with_codec
from offload.plan.schedule.schedule import Residency
from offload.plan.split import Split, draft_step_s
from tests import builders
from tests.builders import qwen3_8b

NUM_LAYERS = 6
FACTS = qwen3_8b(num_hidden_layers=NUM_LAYERS, vocab_size=32000)
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
    return with_codec(open_ways, draw(st.sampled_from(["native", "nf4"])))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    card = named_machine(
        draw(st.sampled_from(["rtx3060", "rtx4090"])),
        ram_bytes=int(draw(st.floats(6, 24)) * GIB),
        link_bytes_per_s=draw(st.sampled_from([1e9, 8e9, 25e9, 1e12])),
    )
    return replace(card, vram_bytes=int(draw(st.floats(4, 24)) * GIB))


def residencies() -> st.SearchStrategy[Residency]:
    layers = st.integers(0, NUM_LAYERS)
    return st.builds(
        Residency,
        num_slots=st.integers(2, NUM_LAYERS),
        num_kept_graphs=layers,
        num_sent_graphs=layers,
        num_kept_outputs=layers,
        num_sent_outputs=layers,
    )


@settings(max_examples=60)
@given(requests(), machines(), st.lists(residencies(), min_size=1, max_size=12))
def test_no_residency_that_fits_gets_the_step_below_its_least_time(
    request: PlanRequest, machine: Machine, drawn: list[Residency]
) -> None:
    needs = MemoryNeeds.of(FACTS, machine, request)
    split = Split(needs=needs, costs=costs_of(FACTS, machine, request))
    assume(split.fits)
    found = split.fastest
    assert found is not None
    fitting = [one for one in map(needs.within_layers, drawn) if not needs.is_short(one)]
    event(f"any fits: {bool(fitting)}")
    for one in (found, *fitting):
        step_s = draft_step_s(needs, split.costs, one)
        assert step_s >= split.least_s * (1 - ROUNDING_FRAC)
        assert step_s >= split.loads_s * (1 - ROUNDING_FRAC)


@settings(max_examples=30)
@given(requests(), machines(), st.booleans())
def test_each_number_of_kept_graphs_comes_with_the_most_outputs_that_fit(
    request: PlanRequest, machine: Machine, sends: bool
) -> None:
    needs = MemoryNeeds.of(FACTS, machine, request)
    fewest = needs.fewest._replace(num_sent_outputs=int(sends))
    assume(not needs.is_short(fewest))
    most = list(needs.most_kept(fewest))
    numbers = [one.num_kept_graphs for one in most]
    assert numbers == list(range(needs.fewest.num_kept_graphs, numbers[-1] + 1))
    for one in most:
        assert not needs.is_short(one)
        more = one._replace(num_kept_outputs=one.num_kept_outputs + 1)
        is_all = one.num_kept_outputs >= NUM_LAYERS - one.num_kept_graphs - sends
        assert is_all or needs.is_short(more)
    further = fewest._replace(num_kept_graphs=numbers[-1] + 1)
    assert numbers[-1] == NUM_LAYERS or needs.is_short(further)
