"""Energy and money of runs and plans: sums by hand, and words where there is no figure."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.recipe.sections import ReportSection
from finetune.report.energy import (
    cost_of,
    plan_cost,
    plan_energy,
    plan_energy_line,
    run_energy,
    shown_kwh,
)
from finetune.report.explain import explain
from finetune.training.measured import energy_row
from offload.plan.machine.cards import BOARD_W, CARDS
from offload.plan.machine.machine import board_w, described_machine, named_machine
from offload.plan.plan import plan
from offload.probe.energy import Part, Taken
from tests.builders import request
from tests.unit.finetune.report.made_up import write_run
from tests.unit.finetune.report.sealed import FACTS, WORKLOAD, tiny_plan

EUROS = ReportSection(price_per_kwh=0.5, currency="EUR")


def row(*, seconds: float = 2.0, num_tokens: int = 100, **joules: float) -> dict[str, Any]:
    return {"num_tokens": num_tokens, "energy_j": joules, "energy_window_s": seconds}


def test_a_run_takes_what_its_steps_took() -> None:
    found = run_energy([row(GPU=3.6e6, CPU=1.8e6), row(GPU=3.6e6, CPU=1.8e6)], {})
    figures = found.to_json()
    assert figures["kwh"] == pytest.approx(3.0)
    assert cost_of(found.kwh, EUROS) == pytest.approx(1.5)
    assert figures["j_per_token"] == pytest.approx(10.8e6 / 200)
    assert figures["parts"]["GPU"]["mean_w"] == pytest.approx(7.2e6 / 4)
    assert found.lines(EUROS)[-1] == "cost of GPU and CPU: 1.50 EUR at 0.5 EUR per kWh"


def test_steps_that_were_not_counted_change_no_figure_per_token() -> None:
    found = run_energy([{"num_tokens": 900}, row(GPU=500.0), row(GPU=500.0)], {"CPU": "no root"})
    (gpu,) = found.parts
    assert gpu.j_per_token == pytest.approx(5.0)
    assert gpu.num_steps == 2
    assert "in 2 steps of 3" in found.lines()[0]
    assert found.lines()[1] == "CPU not counted: no root"


def test_what_is_not_counted_has_no_figure_and_says_why() -> None:
    figures = run_energy([{"num_tokens": 9}], {"GPU": "none"}).to_json()
    assert (figures["kwh"], figures["j_per_token"], figures["parts"]) == (None, None, {})
    assert cost_of(None, EUROS) is None
    assert figures["missing"] == {"GPU": "none"}
    assert run_energy([{"num_tokens": 9}], {}).lines(EUROS) == ["not counted"]


def test_less_than_a_second_is_too_short_for_a_counter() -> None:
    found = run_energy([row(seconds=0.3, GPU=5), row(seconds=0.6, GPU=5)], {})
    assert not found.parts
    assert "0.90 s" in found.missing["GPU"]


def test_a_row_has_the_sum_of_its_ranks_and_a_quotient_if_it_is_long_enough() -> None:
    def taken(rank: int, window_s: float) -> Taken:
        part: Part = "GPU"
        return Taken(window_s=window_s, joules={(part, f"{rank}"): 50.0})

    ranks = [taken(0, 2.0), taken(1, 2.1)]
    expected = {"energy_j": {"GPU": 100.0}, "energy_window_s": 2.0, "energy_per_token_j": 4.0}
    assert energy_row(ranks, num_tokens=25) == expected
    assert "energy_per_token_j" not in energy_row([taken(0, 0.5)], num_tokens=25)
    assert energy_row([Taken(window_s=2.0, missing={"GPU": "none"})], num_tokens=25) == {}


def test_explain_reads_energy_from_the_files_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, slow_s=[0.0] * 2)
    file = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps(one | row(GPU=7.0))}\n" for one in lines))
    assert explain(tmp_path).energy.joules == 14
    assert explain(tmp_path).to_json()["energy"]["parts"]["GPU"]["num_steps"] == 2


def test_a_plan_takes_at_most_its_boards_power() -> None:
    made = tiny_plan()
    found = plan_energy(made)
    assert found["board_w"] == 170
    joules = 170 * made.step_s
    assert found["at_most_j_per_token"] == pytest.approx(joules / made.tokens_per_step)
    kwh = joules / made.tokens_per_step / 3.6
    assert found["at_most_kwh_per_million_tokens"] == pytest.approx(kwh)
    cost = plan_cost(made, EUROS)
    assert cost == {"at_most_cost_per_million_tokens": pytest.approx(kwh / 2), "currency": "EUR"}
    assert "EUR" in plan_energy_line(made, EUROS)
    assert "per kWh" not in plan_energy_line(made, ReportSection())


def test_a_card_of_unknown_power_is_said_and_not_priced() -> None:
    text = '{"memory_gib": 24, "memory_gb_per_s": 936, "half_tflops": 71, "link_gb_per_s": 25}'
    asked = request(WORKLOAD, num_micro_batches=2, num_slots=2, is_slab_shared=True)
    made = plan(FACTS, described_machine("rtx3090", text), asked)
    assert plan_energy(made)["board_w"] is None
    assert plan_cost(made, EUROS)["at_most_cost_per_million_tokens"] is None
    assert "no board power is known" in plan_energy_line(made, EUROS)


def test_a_card_has_its_published_power_or_none() -> None:
    assert set(BOARD_W) < set(CARDS)
    assert board_w(named_machine("RTX 4090")) == 450
    assert board_w(named_machine("b200")) is None  # it is sold with several limits
    assert all(50 <= watts <= 1000 for watts in BOARD_W.values())


def test_energy_is_written_in_a_unit_that_can_be_read() -> None:
    assert [shown_kwh(0.05), shown_kwh(2.0)] == ["50 Wh", "2 kWh"]
