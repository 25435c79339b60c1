"""The plan of scoring: sweeps, loads and memory."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import DoesNotFitError
from offload.plan.facts.facts import AdapterSpec
from offload.plan.machine.machine import GIB, Machine, named_machine
from offload.plan.scoring import ScorePlan, ScoreRequest, cut_rows, plan_scoring
from tests.builders import qwen3_8b, workload

FACTS = qwen3_8b()
NO_ADAPTER = AdapterSpec(rank=1, targets=(), experts=False)


def card(vram_gib: float = 24) -> Machine:
    return replace(named_machine("rtx4090"), vram_bytes=int(vram_gib * GIB))


def request(**changes: Any) -> ScoreRequest:
    fields: dict[str, Any] = {
        "workload": workload(),
        "lengths": (512,) * 200,
        "num_labels": 200 * 256,
        "num_adapters": 4,
        "adapter_bytes": 4 * 100 * 2**20,
        "num_slots": None,
        "vram_budget_bytes": None,
        "is_on_disk": False,
    }
    return ScoreRequest(**fields | changes)


def planned(vram_gib: float = 24, **changes: Any) -> ScorePlan:
    return plan_scoring(FACTS, card(vram_gib), request(**changes))


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60), max_tokens=st.integers(1, 900)
)
def test_a_cut_has_each_row_once_in_micro_batches_that_are_small_enough(
    lengths: list[int], max_tokens: int
) -> None:
    cut = cut_rows(lengths, max_tokens=max_tokens)
    assert sorted(row for rows in cut for row in rows) == list(range(len(lengths)))
    for rows in cut:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= max_tokens
    longest = [max(lengths[row] for row in rows) for rows in cut]
    assert all(one >= other for one, other in pairwise(longest))


def test_loads_depend_on_neither_rows_nor_adapters_while_they_fit() -> None:
    for num_adapters in (1, 2, 8):
        made = planned(num_adapters=num_adapters, num_slots=3)
        assert len(made.sweeps) == 1
        assert made.num_loads == FACTS.num_layers
    assert planned(lengths=(512,) * 20, num_labels=20).num_loads == FACTS.num_layers


def test_the_plan_fits_what_may_be_used_and_counts_every_micro_batch() -> None:
    for vram_gib in (6, 8, 12, 24):
        made = planned(vram_gib, lengths=(512,) * 2000, num_labels=2000 * 256)
        assert made.peak_bytes <= vram_gib * GIB
        rows = sorted(row for batches in made.sweeps for rows in batches for row in rows)
        assert rows == list(range(2000))
        names = {term.name: term.num_bytes for term in made.device_memory}
        assert names["adapters"] == 4 * 100 * 2**20
        assert names["hidden states"] > 0


def test_less_memory_takes_more_sweeps_and_more_loads() -> None:
    lengths = (1024,) * 4000
    few, many = (planned(g, lengths=lengths, num_labels=4000) for g in (24, 8))
    assert len(few.sweeps) < len(many.sweeps)
    assert many.num_loads == len(many.sweeps) * FACTS.num_layers
    assert many.sweep_s > few.sweep_s


def test_adapters_take_time_and_hidden_states_and_no_loads() -> None:
    one, four = planned(num_adapters=1), planned(num_adapters=4)
    assert four.num_loads == one.num_loads
    assert one.sweep_s < four.sweep_s < 4.2 * one.sweep_s
    together = [
        next(t.num_bytes for t in made.device_memory if t.name == "hidden states")
        for made in (one, four)
    ]
    assert together[1] > 3.5 * together[0]


def test_a_base_without_adapters_is_faster_than_with_one() -> None:
    plain = planned(workload=workload(adapter=NO_ADAPTER), num_adapters=1)
    assert plain.sweep_s < planned(num_adapters=1).sweep_s


def test_a_resident_model_is_loaded_once_for_all_sweeps() -> None:
    made = planned(24, lengths=(512,) * 4000, num_labels=4000, num_slots=36, num_adapters=8)
    assert made.num_slots == 36
    assert len(made.sweeps) > 1
    assert made.num_loads == FACTS.num_layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vram_budget_bytes": 2 * GIB}, "scoring a row of 512 tokens under 4 adapters with 2"),
        ({"vram_budget_bytes": 4 * GIB, "num_slots": 9}, "`offload.num_slots=2`"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DoesNotFitError) as found:
        planned(**changes)
    assert message in str(found.value)


def test_layers_that_do_not_fit_in_ram_are_refused_unless_they_are_on_disk() -> None:
    machine = replace(card(), ram_bytes=8 * GIB)
    with pytest.raises(DoesNotFitError, match=r"the layers take .* GiB of RAM"):
        plan_scoring(FACTS, machine, request())
    assert plan_scoring(FACTS, machine, request(is_on_disk=True)).num_loads == FACTS.num_layers
