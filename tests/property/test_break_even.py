"""N* against a search through every step of fewer tokens, simulated op by op."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.plan.facts.facts import ModelFacts
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, Machine, Rate, named_machine
from offload.plan.plan import Plan, costs_of, laid_out, plan
from offload.plan.request import PlanRequest
from offload.plan.schedule.op import Kind, Op
from offload.plan.schedule.simulate import simulate
from offload.plan.step import MOST_TOKENS, Draft, duration_of
from tests import builders
from tests.builders import llama_7b, qwen3_8b, qwen3_30b

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
    draft = Draft.of(
        made.facts,
        made.request,
        made.costs,
        made.residency,
        is_staged=made.schedule.is_staged,
    )
    whole_s = made.predict().step_s
    assert abs(draft.step_s(number) - whole_s) <= 1e-9 * whole_s


def test_n_star_is_none_where_no_sensible_step_hides_the_loads() -> None:
    slow = replace(
        named_machine("rtx5090", ram_bytes=VAST_BYTES, link_bytes_per_s=1e6),
        vram_bytes=VAST_BYTES,
    )
    asked = builders.request(builders.workload(seq_len=256), num_slots=2)
    assert plan(qwen3_30b(), slow, asked).break_even_tokens is None
    few = replace(slow, h2d_bytes_per_s=Rate(value=1e9, source="drawn"))
    assert 0 < (plan(qwen3_30b(), few, asked).break_even_tokens or 0) <= MOST_TOKENS
