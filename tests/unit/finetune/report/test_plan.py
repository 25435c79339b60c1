"""A plan as it is shown: figures, choices, energy, and the chart of a step."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from finetune.errors import ConfigError
from finetune.planning.request import facts_of, full_request
from finetune.planning.subject import model_subject
from finetune.recipe.sections import ReportSection
from finetune.report.choice import choice_json, choice_tables, host_map
from finetune.report.energy import (
    cost_of,
    plan_cost,
    plan_energy,
    plan_energy_line,
    run_energy,
)
from finetune.report.explain import explain
from finetune.report.format import shown_kwh
from finetune.report.gantt import COLOURS, WIDTH, gantt_svg
from finetune.report.plan import machine_table, plan_json
from finetune.report.rows import as_text
from finetune.training.attach import too_large
from finetune.training.measured import energy_row
from offload.plan.machine.machine import (
    GIB,
    Node,
    Rate,
    board_w,
    described_machine,
    named_machine,
)
from offload.plan.plan import Plan, plan
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.timeline import Timeline
from offload.plan.search import search
from offload.probe.energy import Part, Taken
from tests.builders import qwen3_8b, request, slow_link, ways_of, workload
from tests.builders import simulated as step
from tests.unit.finetune.report.made_up import write_run
from tests.unit.finetune.report.sealed import FACTS, WORKLOAD, tiny_plan


def test_a_machine_is_shown_with_how_it_multiplies_experts_and_why() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(as_text([machine_table(named_machine("rtx3060"))]))
    (line,) = [x for x in capture.get().splitlines() if "experts_implementation" in x]
    assert line.split() == [
        *("experts_implementation", "triton"),
        *("assumed", "until", "a", "run", "measures", "it"),
    ]


def test_layers_that_keep_their_graph_are_counted_with_what_they_save() -> None:
    settings = [f"offload.{name}=none" for name in ("sent_graphs", "attention_outputs")]
    settings += ["offload.kept_graphs=2", "train.seq_len=64"]
    recipe = model_subject("tiny-qwen3", settings).recipe
    facts = facts_of(recipe.model)
    made = plan(facts, named_machine("rtx3060"), full_request(recipe, facts, num_ranks=1))
    layers, found = made.costs.layers, plan_json(made)["schedule"]
    saved_s = made.request.num_micro_batches * sum(layer.recompute_s for layer in layers[-2:])
    assert found["recompute_saved_s"] == pytest.approx(saved_s)
    assert found["kept_graphs"] == 2


def test_graphs_that_are_sent_save_less_than_those_that_are_kept() -> None:
    settings = ["offload.codec=nf4", "train.seq_len=2048", "offload.attention_outputs=none"]
    recipe = model_subject("llama-3.1-8b", settings).recipe
    facts = facts_of(recipe.model)
    machine = named_machine("rtx4090", ram_bytes=64 * GIB)
    made = plan(facts, machine, full_request(recipe, facts, num_ranks=1))
    num_sent = made.residency.num_sent_graphs
    assert num_sent > 0
    found, layer = plan_json(made)["schedule"], made.costs.layers[0]
    assert found["sent_graphs"] == num_sent
    num, num_kept = made.request.num_micro_batches, found["kept_graphs"]
    saved_s = num * ((num_kept + num_sent) * layer.recompute_s - num_sent * layer.graph_pack_s)
    assert found["recompute_saved_s"] == pytest.approx(saved_s)


def test_more_graphs_than_layers_are_refused_with_the_setting_for_all() -> None:
    recipe = model_subject("tiny-qwen3", ["offload.kept_graphs=99"]).recipe
    with pytest.raises(
        ConfigError, match=r"kept_graphs: 99 .*\n\nhint: `offload.kept_graphs: all`"
    ):
        full_request(recipe, facts_of(recipe.model), num_ranks=1)


def test_a_step_too_large_with_kept_graphs_names_them_first() -> None:
    settings = ["offload.kept_graphs=2", "offload.sent_graphs=none", "train.seq_len=64"]
    recipe = model_subject("tiny-qwen3", settings).recipe
    facts = facts_of(recipe.model)
    made = plan(facts, named_machine("rtx3060"), full_request(recipe, facts, num_ranks=1))
    error = too_large(made, torch.OutOfMemoryError("CUDA out of memory"))
    assert "slots and 2 kept graphs: CUDA out of memory" in str(error)
    assert "hint: `offload.kept_graphs: 0`" in str(error)
    without = replace(made, residency=made.residency._replace(num_kept_graphs=0))
    assert "kept" not in str(too_large(without, torch.OutOfMemoryError("CUDA out of memory")))


# ------------------------------------------------------------------------------------------- choice


CHOICE_FACTS = qwen3_8b()
CARD = named_machine("rtx4060ti")
REQUEST = request(num_workers=1)
SHORT_REQUEST = request(workload(seq_len=256), num_micro_batches=1, num_workers=1)
SLOW = slow_link()


def shown(choice) -> str:
    console = Console(width=140, highlight=False)
    with console.capture() as capture:
        console.print(as_text(choice_tables(choice)))
    return capture.get()


def test_the_choice_its_rivals_and_what_if_are_shown() -> None:
    choice = search(CHOICE_FACTS, SLOW, ways_of(SHORT_REQUEST), rounding=("int8", "nf4"))
    text = shown(choice)
    reasons = [one for one in text.splitlines() if "slower by" in one or "short of" in one]
    assert len(reasons) == 3
    for words in (
        *("codec native", "GiB of device memory", "1 GiB more VRAM"),  # the chosen one is packed
        *("a link of twice the rate", "512 tokens per step"),
        "`offload.codec: nf4` (rounds each weight by 9.2%; ",
    ):
        assert words in text


def test_the_json_holds_what_is_shown() -> None:
    choice = search(CHOICE_FACTS, SLOW, ways_of(SHORT_REQUEST), rounding=("nf4",))
    values = json.loads(json.dumps(choice_json(choice)))
    assert values["choice"]["codec"] == "bf16_packed"
    assert values["choice"]["num_slots"] == choice.plan.num_slots
    assert values["choice"]["step_s"] == choice.plan.step_s
    assert len(values["rejected"]) == 3
    for one, rejected in zip(values["rejected"], choice.rejected, strict=True):
        assert one["reason"] in shown(choice)
        assert one["is_simulated"] == (rejected.step_s is not None)
        assert bool(one["short_bytes"]) == bool(rejected.shortages)
    what_ifs = {one["change"]: one for one in values["what_if"]}
    assert set(what_ifs) == {"memory", "link", "tokens", "micro_batch", "nf4"}
    assert what_ifs["nf4"]["weight_rounding"] == 0.092
    assert what_ifs["link"]["weight_rounding"] == 0
    assert what_ifs["link"]["tokens_per_s"] > 256 / choice.plan.step_s


def test_what_does_not_fit_and_what_takes_as_long_say_so() -> None:
    choice = search(
        CHOICE_FACTS, CARD, ways_of(replace(REQUEST, num_micro_batches=12))[:2], rounding=()
    )
    assert "no faster" in shown(choice)
    alone = search(CHOICE_FACTS, CARD, [replace(REQUEST, num_micro_batches=12)], rounding=())
    tokens = next(line for line in shown(alone).splitlines() if "49,152 tokens" in line)
    assert "short of" in tokens
    assert "GiB of device memory" in tokens


# -------------------------------------------------------------------------------------------- gantt


SVG = "{http://www.w3.org/2000/svg}"


def bars(drawing: str) -> list[ElementTree.Element]:
    """Return what has a tooltip: the ops."""
    root = ElementTree.fromstring(drawing)
    return [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def test_both_steps_are_drawn_over_the_same_seconds() -> None:
    drawing = gantt_svg({"predicted": step(3, 1), "measured": step(3, 1, visit_s=2.0)})
    found = bars(drawing)
    updates = [bar for bar in found if bar.get("fill") == COLOURS[Kind.OPTIMIZER]]
    assert len(found) == 2 * len(step(3, 1).spans)
    short, long = (float(bar.get("width", 0)) for bar in updates)
    assert long == pytest.approx(2 * short, abs=0.02)  # one scale
    ends = [float(bar.get("x", 0)) + float(bar.get("width", 0)) for bar in found]
    assert max(ends) == pytest.approx(WIDTH - 20, abs=0.1)  # the longer one fills the axis
    words = [text.text for text in ElementTree.fromstring(drawing).iter(f"{SVG}text")]
    assert words.index("predicted") < words.index("measured")
    for lane in Lane:
        if lane is Lane.NETWORK:  # of several ranks
            assert lane.value not in words
            continue
        assert words.count(lane.value) == 2
    for kind in {span.kind for span in step(3, 1).spans}:  # the legend
        assert kind.value.replace("_", " ") in words
    titles = [str(bar.findtext(f"{SVG}title")) for bar in found]
    assert "load of layer 2, 100 bytes: " in " ".join(titles)
    assert any(
        title.startswith("backward of layer 1, micro-batch 0, ")
        or title.startswith("backward of layer 1, micro-batch 0: ")
        for title in titles
    )


def test_every_kind_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(Kind)
    assert len(set(COLOURS.values())) == len(COLOURS)


@pytest.mark.thorough
def test_a_step_of_ten_thousand_ops_is_a_small_file_that_hides_nothing() -> None:
    large = step(64, 40)
    drawing = gantt_svg({"predicted": large, "measured": large})
    assert len(large.spans) > 10_000
    assert len(drawing) < 600_000
    found = bars(drawing)
    assert f"{2 * len(large.spans)} ops in {len(found)} bars" in drawing
    titles = [str(bar.findtext(f"{SVG}title")) for bar in found]
    shown = sum(int(t.split(" x ")[0]) if " x " in t else 1 for t in titles)
    assert shown == 2 * len(large.spans)


def test_of_ops_that_share_a_pixel_the_longest_is_drawn_and_the_others_are_counted() -> None:
    large = step(64, 40)
    drawing = gantt_svg({"predicted": large}, width=300)
    titles = [str(bar.findtext(f"{SVG}title")) for bar in bars(drawing)]
    lanes = len({span.lane for span in large.spans})
    assert len(titles) <= 2 * 300 * lanes
    drawn = sum(int(t.split(" x ")[0]) if " x " in t else 1 for t in titles)
    hidden = sum(int(n) for n in re.findall(r"and (\d+) narrower", " ".join(titles)))
    assert drawn + hidden == len(large.spans)
    assert hidden > 0


def test_a_step_without_ops_can_be_drawn() -> None:
    assert "0 ops in 0 bars" in gantt_svg({"nothing": Timeline(spans=())})


def test_headings_cannot_break_the_drawing() -> None:
    words = [t.text for t in ElementTree.fromstring(gantt_svg({"<a&b>": step(2, 1)})).iter()]
    assert "<a&b>" in words


# ----------------------------------------------------------------------------------------- host map


HOST_MAP_CARD = named_machine("rtx5090", ram_bytes=96 * GIB)


def planned(*overrides: str) -> Plan:
    asked = model_subject("qwen3-1.7b", ["train.tokens_per_step=4096", *overrides])
    return plan(asked.facts, HOST_MAP_CARD, full_request(asked.recipe, asked.facts, num_ranks=1))


def test_each_memory_and_link_is_shown_with_its_rate_and_where_that_is_from() -> None:
    rate = Rate(value=8.3e9, source="measured")
    near, far = (
        Node(number=i, num_cpus=8, ram_bytes=48 * GIB, is_near=i == 0, copy_bytes_per_s=rate)
        for i in range(2)
    )
    machine = replace(HOST_MAP_CARD, nodes=(near, far), disk_bytes_per_s=rate)
    assert host_map(machine, None).lines == [
        ("VRAM of rtx5090", "29.84 GiB", "985.6 GB/s (datasheet x 0.55)", ""),
        ("copies to the device", "", "56.0 GB/s (measured by others)", ""),
        ("  while the other direction is busy", "", "51.0 GB/s (assumed: 0.91 x h2d)", ""),
        ("copies to the host", "", "56.0 GB/s (measured by others)", ""),
        ("RAM (92.00 GiB may be page-locked)", "92.00 GiB", "60.0 GB/s (assumed)", ""),
        ("  node 0, 8 CPUs, near the device", "48.00 GiB", "8.3 GB/s (measured)", ""),
        ("  node 1, 8 CPUs", "48.00 GiB", "8.3 GB/s (measured)", ""),
        ("disk", "", "8.3 GB/s (measured)", "layers, with `offload.tier: disk`"),
    ]


def test_a_plan_s_map_tells_what_lies_where() -> None:
    made = planned("offload.num_slots=3")
    peak, in_ram = f"{made.peak_bytes / GIB:.2f} GiB", f"{made.host_bytes / GIB:.2f} GiB"
    placed = {line[0].split()[0]: line[3] for line in host_map(HOST_MAP_CARD, made).lines}
    assert placed["VRAM"] == f"{peak}, 3 slots of 96.0 MiB"
    assert (placed["RAM"], placed["disk"]) == (f"{in_ram}, 2.63 GiB of layers", "nothing")
    stored = replace(made, request=replace(made.request, is_on_disk=True))
    placed = {line[0].split()[0]: line[3] for line in host_map(HOST_MAP_CARD, stored).lines}
    assert (placed["RAM"], placed["disk"]) == (in_ram, "2.63 GiB of layers")


def test_a_cpu_copies_within_its_own_memory() -> None:
    names = [line[0] for line in host_map(replace(HOST_MAP_CARD, device="cpu"), None).lines]
    assert names[0] == "slots, in the RAM of rtx5090"
    assert "  while the CPU computes" in names
    assert "RAM" in names  # nothing is page-locked


# ------------------------------------------------------------------------------------------- energy


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
    assert board_w(named_machine("RTX 4090")) == 450
    assert board_w(named_machine("b200")) is None  # it is sold with several limits


def test_energy_is_written_in_a_unit_that_can_be_read() -> None:
    assert [shown_kwh(0.05), shown_kwh(2.0)] == ["50 Wh", "2 kWh"]
