"""The division of device memory: it fits, and further ways to spend it make no step slower."""

from dataclasses import replace

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, Machine, named_machine
from offload.plan.plan import costs_of
from offload.plan.request import PlanRequest, with_workload
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
    return with_workload(open_ways, codec=draw(st.sampled_from(["native", "nf4"])))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    card = named_machine(
        draw(st.sampled_from(["rtx3060", "rtx4090"])),
        ram_bytes=int(draw(st.floats(6, 24)) * GIB),
        link_bytes_per_s=draw(st.sampled_from([1e9, 8e9, 25e9, 1e12])),
    )
    return replace(card, vram_bytes=int(draw(st.floats(4, 24)) * GIB))


@settings(max_examples=60)
@given(requests(), machines())
def test_further_ways_to_spend_memory_fit_and_make_no_step_slower(
    request: PlanRequest, machine: Machine
) -> None:
    needs = MemoryNeeds.of(FACTS, machine, request)
    costs = costs_of(FACTS, machine, request)
    found = Split(needs=needs, costs=costs).fastest
    plain = replace(needs, request=replace(request, has_outputs=False, has_sent_graphs=False))
    plainest = Split(needs=plain, costs=costs).fastest
    assert (found is None) == (plainest is None)
    assume(found is not None)
    assert found is not None
    assert plainest is not None
    event(f"is plain: {found == plainest}")
    assert not needs.is_short(found)
    least_s = draft_step_s(needs, costs, plainest)
    assert draft_step_s(needs, costs, found) <= least_s * (1 + ROUNDING_FRAC)
