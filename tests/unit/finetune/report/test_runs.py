"""Runs as they are reported: summaries, comparisons, cards and pages."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from rich.console import Console

from finetune.app import main
from finetune.errors import CheckpointError, ConfigError
from finetune.files.manifest import sealed_json
from finetune.recipe.recipe import Recipe, resolved_yaml
from finetune.recipe.sections import MixSource
from finetune.report import charts
from finetune.report.charts import LIBRARIES, Chart, metric_charts, page
from finetune.report.choice import choice_tables, faster_rows, plan_parts, plan_rows
from finetune.report.compare_pages import SweptRun, best_first, compare_page, sweep_page
from finetune.report.compared_runs import (
    COLUMNS,
    best_of,
    figures_of,
    read_runs,
    recipe_changes,
    runs_tables,
    verdict_lines,
)
from finetune.report.explain import compared, explain
from finetune.report.format import shown_gib, shown_time
from finetune.report.memory import MemoryRow
from finetune.report.model_card import public_recipe
from finetune.report.pace import BASIS, FIGURES
from finetune.report.pages import run_page, write_run_page
from finetune.report.plan import plan_json
from finetune.report.prediction import with_timeline
from finetune.report.rows import (
    Row,
    Table,
    as_html,
    as_json,
    as_markdown,
    as_text,
    html_table,
    tables,
)
from finetune.report.rows import shown as shown_figure
from finetune.report.share import shared_row
from finetune.report.verdict import verdict
from finetune.studio.break_even import break_even
from finetune.studio.runs import Runs
from finetune.training.report import PAGE_EVERY_S, page_at_checkpoint
from offload.plan.machine.machine import GIB, Rate, named_machine
from offload.plan.request import ObjectiveCost, with_workload
from offload.plan.search import Choice, search
from tests.builders import qwen3_8b, recipe_values, request, slow_link, ways_of, workload
from tests.unit.finetune.report.made_up import write_run
from tests.unit.finetune.report.seen import Seen, begun, specs

FACTS = qwen3_8b()
CARD = named_machine("rtx4060ti")
REQUEST = request(num_workers=1)
RECIPE = Recipe.model_validate(recipe_values())
SHORT = request(workload(seq_len=256), num_micro_batches=1, num_workers=1)


def lines(choice: Choice, *, is_verbose: bool = False, width: int = 400) -> list[str]:
    """Return a plan as a terminal shows it."""
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(as_text(plan_parts(choice, RECIPE, is_verbose=is_verbose)))
    return [line.rstrip() for line in capture.get().splitlines()]


def rows(choice: Choice) -> dict[str, list[str]]:
    """Return what people read, by its label; settings that are faster are all there."""
    found: dict[str, list[str]] = {}
    for table in tables("", [*plan_rows(choice, RECIPE), *faster_rows(choice)[1:]]):
        for label, text in table.lines:
            found.setdefault(label, []).append(text)
    return found


def test_a_step_that_computes_is_limited_by_the_gpu_and_its_copies_are_hidden() -> None:
    choice = search(FACTS, CARD, ways_of(REQUEST), rounding=())
    found, plan = rows(choice), choice.plan
    assert list(found)[:3] == ["model", "trains", "a step"]
    assert found["speed"] == [f"{plan.tokens_per_step / plan.step_s:,.0f} tokens/s"]
    step = f"{shown_time(plan.step_s)} for 16,384 tokens, predicted from published rates"
    assert found["a step"] == [step]
    (limit,) = found["limited by"]
    assert limit.startswith("computing on the GPU; ")
    assert limit.endswith(" of copies from RAM overlap with it")
    n_star = f"less than 1% from N* = {plan.break_even_tokens:,}"
    assert found["streaming"][0].endswith(n_star)


# A newcomer has to look these up.
JARGON = re.compile(
    r"kept graph|sent graph|sent output|head chunk|slab|stash|N\*|\bR3\b|micro_batch_major"
    r"|rejected|backward|\bslots?\b"
)


@pytest.mark.parametrize("width", [80, 120])
def test_what_is_always_shown_is_short_and_needs_no_glossary(width: int) -> None:
    cpu = replace(CARD, device="cpu", vram_bytes=64 * GIB)
    objective = replace(REQUEST, objective=ObjectiveCost(has_reference=True))
    placed = with_workload(REQUEST, embeddings="host", head="host")
    for machine in (CARD, cpu):
        for asked in (REQUEST, SHORT, objective, placed):
            choice = search(FACTS, machine, [asked], rounding=("nf4",))
            found = lines(choice, width=width)
            assert found[0] == f"Plan for {machine.name}: it fits"
            assert found[-1] == "Details: `--verbose`"
            assert len(found) <= 14
            assert not JARGON.search("\n".join(found))
            assert max(map(len, found)) <= width
    verbose = "\n".join(lines(search(FACTS, CARD, [REQUEST], rounding=()), is_verbose=True))
    assert all(word in verbose for word in ("slots", "bound R3", "Rejected", "What if"))


def test_a_plan_has_the_same_words_in_text_markdown_and_html() -> None:
    choice = search(FACTS, CARD, ways_of(REQUEST), rounding=("nf4",))
    parts = plan_parts(choice, RECIPE, is_verbose=True)
    seen = Seen(as_html(parts))
    assert not seen.open
    text = "\n".join(lines(choice, is_verbose=True))
    for part in parts:
        assert isinstance(part, Table)
        cells = (cell for line in part.cells for cell in line)
        for word in (part.title, *part.heads, *cells):
            assert all(word in form for form in (text, as_markdown([part]), seen.text))


def test_a_page_folds_details_with_the_lines_below_them() -> None:
    details = Table("a", ["", ""], [["a", "###"]])
    always = details._replace(level="brief")
    page = as_html(["first", details, "second", "third", always, "fourth"])
    assert re.sub(r"(?s)<details>.*?</details>", "", page).count("<p>") == 2
    assert not Seen(page).open
    assert '<td class="bar">###</td>' in page
    assert re.search(r"(?s)<details>.*second.*third.*</details>.*fourth", page)


def test_json_has_each_row_at_its_place() -> None:
    rows = [Row("a.b", "x", 1), Row("", "y", 2), Row("a.c", "", None), Row("d", "z", [])]
    assert as_json(rows) == {"a": {"b": 1, "c": None}, "d": []}


def test_times_are_of_the_steps_of_a_run_where_these_are_known() -> None:
    choice = search(FACTS, CARD, [REQUEST], rounding=())
    train = RECIPE.train.model_copy(update={"steps": None, "epochs": 1})
    by_epochs, seconds = RECIPE.model_copy(update={"train": train}), choice.plan.step_s
    for recipe, num_steps, row in (
        (RECIPE, 50, ("all steps", f"{shown_time(50 * seconds)} for 50")),
        (by_epochs, 50, ("all steps", f"{shown_time(50 * seconds)} for 50")),
        (by_epochs, None, ("1 M tokens", shown_time(seconds * 1e6 / choice.plan.tokens_per_step))),
    ):
        assert row in tables("", plan_rows(choice, recipe, num_steps=num_steps), "brief")[0].lines


@pytest.mark.parametrize(
    ("num_micro_batches", "hint"),
    [(8, "`train.micro_batch_size: 8`"), (1, "`train.micro_batch_size: 2`, 512 tokens per step")],
)
def test_launches_limit_a_small_micro_batch_and_a_larger_one_is_named(
    num_micro_batches: int, hint: str
) -> None:
    slow_host = replace(CARD, vram_bytes=80 * GIB, launch_s=Rate(value=1e-4, source="a test"))
    asked = replace(SHORT, num_micro_batches=num_micro_batches)
    choice = search(FACTS, slow_host, [asked], rounding=())
    found = rows(choice)
    (limit,) = found["limited by"]
    assert limit.startswith("the host: the GPU waits for its kernels to be started")
    name, gain = found["faster with"][0].rsplit(": +", 1)
    assert name == hint
    size = int(hint.split("`")[1].split()[1])
    larger = workload(seq_len=256, micro_batch_size=size, label_tokens=256 * size)
    alone = request(larger, num_micro_batches=1, num_workers=1)
    then = search(FACTS, slow_host, [alone], rounding=()).plan
    more = then.tokens_per_step / then.step_s * choice.plan.step_s / choice.plan.tokens_per_step
    assert gain == f"{more - 1:.1%}"


def test_a_step_that_computes_is_told_no_larger_micro_batches() -> None:
    choice = search(FACTS, CARD, [REQUEST], rounding=())
    assert choice.chosen.costs.bound == "compute"
    assert "micro_batch" not in {what_if.change for what_if in choice.what_ifs}


def test_a_step_that_waits_is_limited_by_the_link_and_settings_come_before_a_faster_one() -> None:
    choice = search(FACTS, slow_link(), ways_of(SHORT), rounding=("nf4",))
    found = rows(choice)
    (limit,) = found["limited by"]
    waited = choice.plan.predict().phases()["stall"] / choice.plan.step_s
    assert limit == f"the link: the GPU waits for layers from RAM {waited:.0%} of the step"
    settings = [line for line in found["faster with"] if not line.startswith(("a link", "1 GiB"))]
    assert settings == found["faster with"][: len(settings)]
    percents = [float(line.rsplit("+")[-1].rstrip("%")) for line in settings]
    assert percents == sorted(percents, reverse=True)
    assert any(line.startswith("a link of twice the rate: +") for line in found["faster with"])
    assert any("nf4` (rounds each weight by 9.2%; " in line for line in settings)
    assert "in bf16_packed; slots for" in found["layers"][0]


def test_what_was_rejected_is_named_by_what_differs_and_why() -> None:
    choice = search(FACTS, CARD, ways_of(REQUEST)[:2], rounding=())
    table = choice_tables(choice)[0]
    assert len(table.lines) == len(choice.rejected)
    more = choice.plan.num_slots + 1
    (why,) = [why for with_, _, why in table.lines if with_ == f"num slots {more}"]
    assert why.startswith("short of ")
    assert why.endswith("iB of device memory")
    assert not any("codec" in line[0] or "micro batch" in line[0] for line in table.lines)


DESKTOP = ", 1.50 GiB left to a desktop, 0.50 GiB to the driver"
SYSTEM = ", 4.00 GiB left to the system"


def test_memory_is_shown_against_what_there_is_or_what_may_be_used() -> None:
    plan = search(FACTS, CARD, [REQUEST], rounding=())
    found = rows(plan)
    assert found["VRAM"] == [f"{plan.plan.peak_bytes / GIB:.2f} GiB of 14.00 GiB{DESKTOP}"]
    assert found["RAM"] == [f"{plan.plan.host_bytes / GIB:.2f} GiB of 60.00 GiB{SYSTEM}"]
    assert found["slab"][0].startswith("13,2")
    less = search(FACTS, CARD, [replace(REQUEST, vram_budget_bytes=12 * GIB)], rounding=())
    assert rows(less)["VRAM"][0].endswith(" of 12.00 GiB (`offload.vram_budget`)")
    more = search(FACTS, CARD, [replace(REQUEST, vram_budget_bytes=24 * GIB)], rounding=())
    assert rows(more)["VRAM"][0].endswith(" of 14.00 GiB, less than `offload.vram_budget`")


def test_a_cpu_has_one_memory() -> None:
    rate = Rate(value=1e10, source="drawn")
    cpu = replace(CARD, device="cpu", vram_bytes=64 * GIB, memory_bytes_per_s=rate)
    choice = search(FACTS, cpu, [REQUEST], rounding=())
    found = rows(choice)
    assert "VRAM" not in found
    assert "1 GiB more RAM" in {line[0] for line in choice_tables(choice)[1].lines}
    both = choice.plan.peak_bytes + choice.plan.host_bytes
    assert found["RAM"] == [f"{both / GIB:.2f} GiB of 60.00 GiB{SYSTEM}"]
    assert found["limited by"][0].startswith("computing on the CPU")


def test_resident_layers_are_loaded_once_and_have_no_break_even() -> None:
    found = rows(search(FACTS, replace(CARD, vram_bytes=80 * GIB), [REQUEST], rounding=()))
    assert found["layers"] == ["12.94 GiB in RAM; slots for 36 of 36: loaded once, then resident"]
    assert "streaming" not in found
    assert found["limited by"] == ["computing on the GPU"]
    assert found["faster with"] == ["nothing that was tried gains as much as 0.5%"]


def test_what_an_objective_costs_is_shown_as_time_and_loads() -> None:
    plain = search(FACTS, CARD, [REQUEST], rounding=())
    assert "longer by scoring rows first" not in rows(plain)
    asked = replace(REQUEST, objective=ObjectiveCost(has_reference=True))
    choice = search(FACTS, CARD, [asked], rounding=())
    (line,) = rows(choice)["longer by scoring rows first"]
    time_frac, num_loads = choice.plan.objective_price
    assert 0.1 < time_frac < 0.4
    assert num_loads == 0
    assert line == f"{time_frac:+.0%}"
    assert rows(choice)["rows are scored by a reference"] == ["yes"]


def test_what_an_embedding_in_ram_saves_and_costs_is_shown_and_written() -> None:
    device = search(FACTS, CARD, [replace(REQUEST, num_slots=4)], rounding=())
    assert not any("embedding in RAM" in label for label in rows(device))
    assert "embeddings" not in plan_json(device.plan)
    host = search(FACTS, CARD, [with_workload(device.plan.request, embeddings="host")], rounding=())
    found = rows(host)
    rows_bytes = 2048 * 8 + 2049 * 4096 * 2  # of a micro-batch
    saved = 151936 * 4096 * 2 - 2 * rows_bytes
    added_s = host.plan.step_s - device.plan.step_s
    assert {label: found[label] for label in found if label.startswith("embedding in RAM: ")} == {
        "embedding in RAM: device memory saved": [f"{saved / GIB:.2f} GiB"],
        "embedding in RAM: rows to the device, at most": [shown_gib(8 * rows_bytes)],
        "embedding in RAM: longer by": [shown_time(added_s)],
    }
    written = plan_json(host.plan)["embeddings"]
    assert (written["saved_vram_bytes"], written["h2d_bytes"]) == (saved, 8 * rows_bytes)
    assert written["added_s"] == pytest.approx(added_s, abs=1e-9)
    assert "most_d2h_bytes" not in written
    # it has a few rows, and its buffers take more than all of them
    tiny = replace(qwen3_8b(vocab_size=64), head_parameters=0)
    few = search(tiny, CARD, [host.plan.request], rounding=())
    assert rows(few)["embedding in RAM: device memory saved"][0].startswith("-")


def test_what_a_head_in_ram_saves_and_costs_is_shown_and_written() -> None:
    device = search(FACTS, CARD, [replace(REQUEST, num_slots=4)], rounding=())
    assert not any("head in RAM" in label for label in rows(device))
    assert "head" not in plan_json(device.plan)
    host = search(FACTS, CARD, [with_workload(device.plan.request, head="host")], rounding=())
    found = rows(host)
    size, added_s = 151936 * 4096 * 2, host.plan.step_s - device.plan.step_s
    assert {label: found[label] for label in found if label.startswith("head in RAM: ")} == {
        "head in RAM: device memory saved": [f"{size / GIB:.2f} GiB"],
        "head in RAM: more loads": ["4"],
        "head in RAM: longer by": [shown_time(added_s)],
    }
    written = plan_json(host.plan)["head"]
    loaded = 4 * host.plan.costs.layers[0].weight_bytes
    assert (written["saved_vram_bytes"], written["h2d_bytes"]) == (size, size + loaded)
    assert written["num_loads"] == 4
    assert written["added_s"] == pytest.approx(added_s, abs=1e-9)
    # two slots are smaller than the head: they have room for it and for no more
    few = search(FACTS, CARD, [replace(host.plan.request, num_slots=2)], rounding=()).plan
    slot_bytes = few.costs.layers[0].weight_bytes
    assert plan_json(few)["head"]["saved_vram_bytes"] == 2 * slot_bytes


# ------------------------------------------------------------------------------------ compared runs


PRICE = {"report__price_per_kwh": 0.5, "report__currency": "EUR"}


def a_run(folder: Path, *, slow_s: list[float], more: dict[str, Any], **changes: Any) -> Path:
    folder.mkdir(parents=True)
    write_run(begun(folder, output__name=folder.name, **changes), slow_s=slow_s)
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("".join(f"{json.dumps(json.loads(line) | more)}\n" for line in lines))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    energy = {"energy_j": {"GPU": 1.8e6}, "energy_window_s": 9.0, "energy_per_token_j": 1.8e4}
    fast = a_run(tmp_path / "fast", slow_s=[0.0] * 2, more={"eval_loss": 2.5})
    slow = a_run(
        tmp_path / "slow", slow_s=[1.0] * 4, more={"loss": 0.5, **energy}, train__lr=0.5, **PRICE
    )
    return [fast, slow]


def shown(folders: list[Path]) -> str:
    console = Console(width=200, record=True)
    with console.capture() as found:
        console.print(as_text(runs_tables(read_runs(folders))))
    return found.get()


def test_figures_are_those_of_each_runs_own_files(folders: list[Path]) -> None:
    names = Table("", COLUMNS, []).heads
    fast, slow = (dict(zip(names, figures_of(run), strict=True)) for run in read_runs(folders))
    assert (fast["run"], fast["steps"], fast["loss"], fast["held-out"]) == ("fast", 2, 1.0, 2.5)
    assert (fast["energy"], fast["cost"]) == (None, None)
    assert (slow["steps"], slow["loss"], slow["held-out"]) == (4, 0.5, None)
    assert (slow["J/token"], slow["energy"], slow["cost"]) == (1.8e4, 2.0, "1 EUR")
    assert [fast[name] for name in FIGURES] == ["18", "5.62 s", "5.50 s", "-2%"]
    assert [slow[name] for name in FIGURES] == ["15", "6.62 s", "5.50 s", "-17%"]
    assert (fast["answers right"], fast["held-out accuracy"]) == (None, None)


def with_answers(run: Path, *, after: float = 0.875) -> None:
    for when, share in (("before", 0.0), ("after", after)):
        samples = json.dumps({"exact_match": share, "prompts": {"": 8}, "rows": []}, indent=1)
        (run / f"samples_{when}.json").write_text(sealed_json(samples))


def test_right_answers_and_accuracy_are_compared_before_and_after_training(
    folders: list[Path], tmp_path: Path
) -> None:
    assert "answers right" not in shown(folders)
    (tmp_path / "new").mkdir()
    other = a_run(tmp_path / "new" / "other", slow_s=[0.0], more={"eval_accuracy": 0.75})
    before = sealed_json(json.dumps({"eval_loss": 2.0, "eval_accuracy": 0.0}, indent=1))
    (other / "evaluation_before.json").write_text(before)
    with_answers(folders[0])
    columns = Table("", COLUMNS, []).heads
    fast, slow, new = (
        dict(zip(columns, figures_of(run), strict=True)) for run in read_runs([*folders, other])
    )
    assert fast["answers right"] == "0.0% -> 87.5%"
    assert new["held-out accuracy"] == "0.0% -> 75.0%"
    assert {slow["answers right"], new["answers right"], fast["held-out accuracy"]} == {None}
    runs = read_runs([*folders, other])
    assert "answers right held-out accuracy" in Seen(compare_page(runs)).text
    assert "slow has no held-out loss: no evaluation by step 4." in shown(folders)
    assert "fast has no held-out loss" not in shown(folders)
    with_answers(folders[1], after=0.75)
    unevaluated = [
        replace(
            run, rows=[{key: row[key] for key in row if key != "eval_loss"} for row in run.rows]
        )
        for run in read_runs(folders)
    ]
    assert best_of(unevaluated) == 0
    assert verdict_lines(unevaluated)[0] == "Best: fast, 87.5% of held-out answers right"
    assert best_of([*unevaluated, unevaluated[0]]) is None


def test_a_disturbed_run_is_marked_and_none_is_called_the_fastest(tmp_path: Path) -> None:
    busy = {"load_per_cpu": 4.0}
    fast = a_run(tmp_path / "fast", slow_s=[0.0] * 5, more={})
    slow = a_run(tmp_path / "slow", slow_s=[1.0] * 5, more=busy)
    runs = read_runs([fast, slow])
    said = "Fastest: none is named, as the steps of slow were disturbed, by other programs"
    assert [said in str(line) for line in verdict_lines(runs)] == [True]
    place = COLUMNS.index("disturbed")
    assert [figures_of(run)[place] for run in runs] == [None, "yes"]
    assert "disturbed" not in shown([fast, a_run(tmp_path / "other", slow_s=[1.0] * 5, more={})])


def test_runs_of_other_models_or_rows_are_said_to_be_unlike(folders: list[Path]) -> None:
    fast, slow = read_runs(folders)

    def first_line(**changes: Any) -> str:
        return str(verdict_lines([fast, slow, replace(slow, name="new", recipe=of(**changes))])[0])

    def of(**changes: Any) -> Recipe:
        return Recipe.model_validate(recipe_values(**changes))

    end = " differ (fast, slow against new): their figures say nothing of each other's settings"
    model, rows = {"model__path": "another"}, {"data__path": "others.jsonl"}
    assert first_line(**model) == f"Models{end}"
    assert first_line(**rows) == f"Rows{end}"
    assert first_line(**model, **rows) == f"Models and rows{end}"
    assert first_line(train__lr=0.25).startswith("Fastest: ")


@pytest.mark.parametrize(
    ("slow_s", "said"),
    [
        ([0.0] * 5, "Fastest: fast, other, with no difference larger than the noise of the steps"),
        ([0.5, 0.0, 0.25, 0.0, 0.5], "Fastest: fast, other, with no difference larger"),
        ([1.0] * 5, "Fastest: fast, 18 tokens/s"),
        ([1.0] * 4, "Fastest: fast, other, with no difference larger"),  # too few to know the noise
    ],
)
def test_a_run_is_the_fastest_only_by_more_than_the_noise_of_the_steps(
    tmp_path: Path, slow_s: list[float], said: str
) -> None:
    fast = a_run(tmp_path / "fast", slow_s=[0.0] * 5, more={})
    assert said in shown([fast, a_run(tmp_path / "other", slow_s=slow_s, more={})])


def by_hand(run: Path, *, num_cut: int) -> dict[str, str]:
    """Return a run's figures from the lines of its metrics alone, by the basis that pages name."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [(row["num_tokens"], row["phases_s"]) for row in map(json.loads, lines)]
    rows.sort(key=lambda one: one[1]["step"] + one[1]["data wait"])
    middle = rows[num_cut : len(rows) - num_cut]
    step_s = sum(phases["step"] for _, phases in middle) / len(middle)
    time_s = sum(phases["step"] + phases["data wait"] for _, phases in middle)
    predicted_s = json.loads((run / "predicted.json").read_text())["calibrated"]["predicted"][
        "step_s"
    ]
    return {
        "tokens/s": f"{sum(num for num, _ in middle) / time_s:,.0f}",
        "step measured": f"{step_s:.2f} s",
        "step predicted": f"{predicted_s:.2f} s",
        "error": f"{100 * (predicted_s - step_s) / step_s:+.0f}%",
    }


def test_every_page_and_table_has_the_same_speed_and_error_of_a_run(tmp_path: Path) -> None:
    slow_s = [9.0, 1.0, 0.0, 0.5, 2.0, 1.5, 0.25, 7.0, 3.0, 0.75]  # the cold first step is no part
    run = a_run(tmp_path / "uneven", slow_s=slow_s, more={})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(lines):
        row["num_tokens"] = 1000 + 100 * number
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    figures = by_hand(run, num_cut=2)
    assert figures["error"] == "-22%"
    rate, measured, predicted, error = (figures[name] for name in FIGURES)
    basis = "mean of the middle 6 of 10 steps"

    page = Seen(run_page(run)).text
    assert f"a step took {measured} predicted {predicted}, error {error}; {basis}" in page
    assert f"speed {rate} tokens/s in the same steps, all waits included" in page
    assert f"step {predicted} {measured} {error}" in page
    console = Console(width=200, record=True)
    with console.capture() as screen:
        console.print(as_text(compared(explain(run))))
    assert re.search(rf"step +{predicted} +{measured} +{error} ", screen.get())
    assert f"{rate} tokens/s in the same steps" in screen.get()
    assert basis in screen.get()

    others = [run, a_run(tmp_path / "other", slow_s=[0.0], more={})]
    cells = f"{rate} {measured} {predicted} {error}"
    for text in (Seen(compare_page(read_runs(others))).text, " ".join(shown(others).split())):
        assert cells in text
        assert "between the 20th and the 80th percentile of time" in text
    swept = SweptRun(
        name="uneven", settings={}, state="done", rows=lines, pace=explain(run).sections[-1].pace
    )
    sweep = Seen(sweep_page("Sweep", [], [swept])).text
    assert cells in sweep
    assert BASIS in sweep
    measured_file = {
        **{"step": 10, "step_s": 1.0, "optimizer_s": 0.5, "bound_s": 0.5, "device": "cpu"},
        **{"device_name": "a processor", "peak_bytes": 2**30, "memory": []},
        "versions": {"torch": "2.13"},
    }
    timeline = explain(run).predicted
    (run / "measured.json").write_text(with_timeline(measured_file, timeline))
    assert (
        f"Predicted: a step of {shown_time(timeline.step_s)}. Measured: step 10, which took 1.00 s;"
        ' the time at "a step took" is the mean of the middle steps.' in Seen(run_page(run)).text
    )
    step = shared_row(run).step
    assert [f"{step.measured_s:.2f} s", f"{step.predicted_s:.2f} s"] == [measured, predicted]
    (room,) = (one for one in Runs(tmp_path).all()["runs"] if one["name"] == "uneven")
    assert room["pace"] == figures


def test_settings_that_differ_are_named_but_not_the_names(folders: list[Path]) -> None:
    changes = recipe_changes(read_runs(folders))
    assert [line.split(":")[0] for line in changes["slow"]] == [
        *("train.lr", "report.price_per_kwh", "report.currency")
    ]
    text = shown(folders)
    assert "Settings that differ from those of fast" in text
    assert "report.price_per_kwh: null -> 0.5" in text


def test_columns_of_energy_are_shown_only_if_a_run_has_it(
    folders: list[Path], tmp_path: Path
) -> None:
    other = a_run(tmp_path / "other", slow_s=[0.0], more={})
    assert "J/token" in shown(folders)
    assert "J/token" not in shown([folders[0], other])
    assert ["other", "none"] in [line.split() for line in shown([folders[0], other]).splitlines()]


def test_a_run_without_a_step_is_a_row_of_dashes(folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    runs = read_runs([folders[0], begun(tmp_path / "new")])
    assert figures_of(runs[1]) == ("new", 0, *[None] * (len(COLUMNS) - 2))
    text = compare_page(runs)
    assert "new has done no step yet." in Seen(text).text
    assert {point["run"] for point in specs(text)["loss"]["data"]["values"]} == {"fast"}


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    paths = [a_run(tmp_path / top / "same", slow_s=[0.0], more={}) for top in ("a", "b")]
    assert [run.name for run in read_runs(paths)] == [str(path) for path in paths]


def test_the_page_has_the_curves_of_every_run(folders: list[Path]) -> None:
    drawn = specs(compare_page(read_runs(folders)))
    assert set(drawn) == {"eval", "loss", "rate", "lr", "energy"}
    steps = [(p["run"], p["step"]) for p in drawn["loss"]["data"]["values"]]
    assert steps == [*(("fast", i) for i in (1, 2)), *(("slow", i) for i in (1, 2, 3, 4))]
    assert {p["run"] for p in drawn["energy"]["data"]["values"]} == {"slow"}
    for chart in drawn.values():  # a run has the same colour in all of them
        assert chart["encoding"]["color"]["scale"]["domain"] == ["fast", "slow"]


def test_what_cannot_be_compared_is_refused(folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one run"):
        read_runs(folders[:1])
    with pytest.raises(ConfigError, match="again"):
        read_runs([folders[0], folders[0].parent / "x" / ".." / "fast"])
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="holds no run"):
            read_runs([folders[0], folder])


def test_the_command_shows_a_table_and_writes_a_page(
    folders: list[Path], tmp_path: Path, capsys
) -> None:
    page = tmp_path / "compare.html"
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, folders), "--out", str(page)])
    assert ended.value.code in (0, None)
    assert not Seen(page.read_text("utf-8")).loaded
    assert "Settings that differ" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, folders), "--out", str(folders[0] / "metrics.jsonl")])
    assert ended.value.code == 1
    assert "NAME.html" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- model card


HOME = "/home/alice/secret-project"
PROMPT = "/no_think You are Bob's private tutor."


def with_paths(part: BaseModel) -> Any:
    """Return a part of a recipe in which each text that can be a path is one."""
    changed: dict[str, Any] = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            changed[name] = with_paths(value)
        elif field.annotation in (str, str | None) and name != "system":
            changed[name] = f"{HOME}/{name}"
        elif name == "mix":
            changed[name] = (with_paths(MixSource(path="x")),)
    return part.model_copy(update=changed)


def test_no_setting_s_path_is_in_a_card() -> None:
    """That of `adapter.init_from` was: settings with paths were listed by hand (#41)."""
    recipe = with_paths(Recipe.model_validate(recipe_values()))
    assert recipe.adapter.init_from.startswith(HOME)
    text = resolved_yaml(public_recipe(recipe))
    assert "alice" not in text
    assert "secret" not in text
    assert "init_from: init_from\n" in text


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("place", ["data", "mix"])
def test_system_prompts_are_shown_where_a_recipe_asks_for_it(place: str, is_asked: bool) -> None:
    recipe = Recipe.model_validate(recipe_values())
    update = (
        {"system": PROMPT} if place == "data" else {"mix": (MixSource(path="x", system=PROMPT),)}
    )
    recipe = recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update=update),
            "output": recipe.output.model_copy(update={"card_system": is_asked}),
        }
    )
    text = resolved_yaml(public_recipe(recipe))
    assert (PROMPT in text) is is_asked
    assert ("(left out of this card)" in text) is not is_asked
    assert recipe.data.system == (PROMPT if place == "data" else None)


# -------------------------------------------------------------------------------------------- pages


def test_the_page_of_a_run_says_what_it_did_and_draws_every_step(tmp_path: Path) -> None:
    write_run(begun(tmp_path), slow_s=[1.0] * 5)
    rows = [{"prompt": f"p{i}", "wanted": "w", "got": "<b>g</b>"} for i in range(9)]
    prompts = {"enable_thinking=False": 7, "": 2}
    answers = json.dumps({"exact_match": 0.5, "prompts": prompts, "rows": rows}, indent=1)
    (tmp_path / "samples_after.json").write_text(sealed_json(answers))
    text = run_page(tmp_path)
    seen, drawn = Seen(text), specs(text)
    assert "held-out answers right 50.0% after training" in seen.text
    assert "training loss 1.0000 -> 1.0000 step 1 -> step 5" in seen.text
    assert "5 of 12 steps, 500 tokens" in seen.text
    order = ("a step took", "Answers to held-out", "Training loss", "Predicted from", "The run")
    assert sorted(order, key=seen.text.index) == list(order)
    assert "<b>g</b>" in seen.text
    assert (
        "Answers were drawn: 7 after the prompt with enable_thinking=False, 2 after the chat"
        " template's default prompt." in seen.text
    )
    assert seen.tags.count("b") == seen.tags.count("summary") + seen.tags.count("dt")
    assert "p4" in seen.text
    assert "p5" not in seen.text
    assert [point["step"] for point in drawn["loss"]["data"]["values"]] == [1, 2, 3, 4, 5]
    parts = drawn["parts"]["data"]["values"]
    backward = {bar["which"]: bar["ms"] for bar in parts if bar["part"] == "backward"}
    assert backward["measured"] - backward["predicted"] == pytest.approx(1000)
    bars = drawn["gantt"]["data"]["values"]
    assert {bar["row"] for bar in bars} == {"predicted: compute", "predicted: h2d"}
    assert all(f'id="{name}"' in text for name in drawn)


def test_the_page_of_a_run_that_goes_on_says_so_and_when_it_was_written(tmp_path: Path) -> None:
    write_run(begun(tmp_path), slow_s=[0.0] * 2)
    assert (
        "Written after step 2, when the run went on" in Seen(run_page(tmp_path, goes_on=True)).text
    )
    assert "went on" not in Seen(run_page(tmp_path)).text


def test_while_a_run_goes_on_its_page_is_written_once_a_minute_and_never_stops_it(
    tmp_path: Path,
) -> None:
    write_run(begun(tmp_path), slow_s=[0.0] * 2)
    page, notes = tmp_path / "report.html", list[str]()

    def is_written(*, age_s: float, is_left: bool = False) -> bool:
        page.write_text("old")
        now_s = (tmp_path / "metrics.jsonl").stat().st_mtime
        os.utime(page, (now_s - age_s, now_s - age_s))
        page_at_checkpoint(tmp_path, is_left=is_left, note=notes.append)
        return page.read_text() != "old"

    assert is_written(age_s=PAGE_EVERY_S + 1)
    assert not is_written(age_s=PAGE_EVERY_S - 1)
    assert is_written(age_s=PAGE_EVERY_S - 1, is_left=True)
    assert not notes
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert not is_written(age_s=100)
    assert "was not written" in notes[0]


def test_the_page_of_a_run_has_its_energy_and_its_cost(tmp_path: Path) -> None:
    write_run(begun(tmp_path, report__price_per_kwh=0.5, report__currency="EUR"), slow_s=[0.0])
    text = Seen(run_page(tmp_path)).text
    assert "energy not counted energy GPU predicted: at most" in text
    assert "J per token, of 170 W board power (published)" in text
    file = tmp_path / "metrics.jsonl"
    energy = {"energy_j": {"GPU": 7.2e6}, "energy_window_s": 36000.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | energy) + "\n")
    text = Seen(run_page(tmp_path)).text
    assert "GPU: 2 kWh, 7.2e+04 J per token, 200 W on average" in text
    assert "cost of GPU: 1.00 EUR at 0.5 EUR per kWh" in text


def test_a_page_begins_with_what_was_learned_and_how_well_it_was_predicted(tmp_path: Path) -> None:
    write_run(begun(tmp_path), slow_s=[1.0] * 5)
    file = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, loss in zip(rows, (None, 0.5, 0.25, None, 0.375), strict=True):
        row |= {} if loss is None else {"eval_loss": loss}
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def tiles() -> dict[str, tuple[str, str]]:
        found = verdict(tmp_path, rows, explain(tmp_path))
        return {row.label: (shown_figure(row.value, row.unit), row.note) for row in found}

    assert list(tiles()) == [
        *("held-out loss", "training loss", "training took", "a step took", "speed")
    ]
    lowest = "; lowest 0.2500, step 3"
    assert tiles()["held-out loss"] == ("0.5000 -> 0.3750", f"step 2 -> step 5{lowest}")
    assert tiles()["a step took"] == (
        "6.62 s",
        "predicted 5.50 s, error -17%; mean of the middle 3 of 5 steps",
    )
    assert tiles()["speed"] == ("15 tokens/s", "in the same steps, all waits included")
    took_s = sum(row["phases_s"]["step"] + row["phases_s"]["data wait"] for row in rows)
    assert tiles()["training took"][0] == shown_time(took_s)
    before = sealed_json(json.dumps({"eval_loss": 2.0}, indent=1))
    (tmp_path / "evaluation_before.json").write_text(before)
    assert tiles()["held-out loss"] == ("2.0000 -> 0.3750", f"before training -> step 5{lowest}")
    for when, share in (("before", 0.0), ("after", 0.875)):
        samples = json.dumps({"exact_match": share, "prompts": {"": 8}, "rows": []}, indent=1)
        (tmp_path / f"samples_{when}.json").write_text(sealed_json(samples))
    assert tiles()["held-out answers right"] == ("0.0% -> 87.5%", "before -> after training")
    busy = [row | {"load_per_cpu": 4.0} for row in rows]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in busy))
    assert tiles()["a step took"][1].endswith("of 5 steps; the run was disturbed")


def test_a_curve_of_one_point_or_one_value_is_seen() -> None:
    (one,) = metric_charts({"": [{"step": 7, "loss": 0.5}]}, ("loss",))
    assert one.spec["mark"]["point"] is True
    scales = {axis: one.spec["encoding"][axis]["scale"]["domain"] for axis in ("x", "y")}
    assert scales == {"x": [6, 8], "y": [0.25, 0.75]}
    (many,) = metric_charts({"": [{"step": n, "loss": n} for n in (1, 2)]}, ("loss",))
    assert many.spec["mark"]["point"] is False
    assert "domain" not in many.spec["encoding"]["y"]["scale"]


def test_the_best_run_is_named_and_marked_where_losses_can_be_compared(
    folders: list[Path], tmp_path: Path
) -> None:
    better = a_run(tmp_path / "better", slow_s=[0.0], more={"eval_loss": 1.25})
    runs = read_runs([*folders, better])
    text = compare_page(runs)
    assert Seen(text).text.startswith("3 runs 3 runs Best: better, held-out loss 1.2500 Fastest: ")
    assert text.index('<tr class="best"><td>better<') < text.index("Held-out loss")
    assert best_of(runs[:2]) is None  # one alone was evaluated
    method = runs[0].recipe.objective.model_copy(update={"method": "dpo"})
    of_other = runs[0].recipe.model_copy(update={"objective": method})
    assert best_of([replace(runs[0], recipe=of_other), runs[2]]) is None


def test_a_run_without_a_step_has_a_page_too(tmp_path: Path) -> None:
    text = run_page(begun(tmp_path))
    assert "The run has done no step yet." in Seen(text).text
    assert "<script" not in text


def test_a_page_loads_nothing_and_closes_what_it_opens(tmp_path: Path) -> None:
    write_run(begun(tmp_path), slow_s=[0.0] * 3)
    file = write_run_page(tmp_path)
    text = file.read_text("utf-8")
    seen = Seen(text)
    assert not seen.loaded
    assert not seen.open
    assert text.count("</script>") == len(LIBRARIES) + 1
    assert "default-src 'none'" in text
    assert "unsafe-eval" not in text
    assert file.stat().st_size < 2**20


@pytest.mark.parametrize(
    ("tokens", "num_layers", "words"),
    [(5000, 2, "5,000 tokens"), (None, 1, "fewer tokens."), (0, 1, "nothing is streamed")],
)
def test_the_break_even_is_a_line_where_there_is_one(tokens, num_layers, words) -> None:
    points = [{"tokens per step": 1024, "tokens/s": 10.0}]
    chart = break_even(points, break_even_tokens=tokens)
    assert len(chart.spec["layer"]) == num_layers
    assert words in chart.summary


def test_text_of_a_run_cannot_become_markup_or_code(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    runs = [
        SweptRun(
            name=evil,
            settings={evil: evil},
            state=evil,
            rows=[{"step": 1, "loss": 1.0, "eval_loss": 2.0, "tokens_per_s": 3.0}],
            pace=None,
        )
    ]
    text = sweep_page(evil, [(evil, evil)], runs)
    assert text.count("<script>") == len(LIBRARIES) + 1
    assert specs(text)["loss"]["data"]["values"][0]["run"] == evil
    assert Seen(text).text.count(evil) >= 4


def test_explain_writes_the_page(tmp_path: Path, capsys) -> None:
    write_run(begun(tmp_path), slow_s=[0.0] * 3)
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(tmp_path), "--html"])
    assert ended.value.code in (0, None)
    assert (tmp_path / "report.html").exists()
    assert "report.html" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        run_page(tmp_path)


def test_the_runs_of_a_sweep_are_listed_the_best_first() -> None:
    def run(name: str, loss: float, *evaluated: float) -> SweptRun:
        rows = [{"step": 1, "loss": loss, "tokens_per_s": 10.0}]
        rows += [
            {"step": 2 + i, "loss": loss, "tokens_per_s": 10.0, "eval_loss": value}
            for i, value in enumerate(evaluated)
        ]
        return SweptRun(name=name, settings={"train.lr": loss}, state="done", rows=rows, pace=None)

    none = SweptRun(name="none", settings={}, state="no step", rows=[], pace=None)
    runs = [run("b", 0.1, 3.0, 2.0), none, run("d", 0.3), run("a", 0.4, 1.5), run("c", 0.2)]
    assert [one.name for one in best_first(runs)] == ["a", "b", "c", "d", "none"]
    text = sweep_page("Sweep", [("together", "1 s")], runs)
    seen = Seen(text)
    assert "Best: a (train.lr 0.4), with a held-out loss of 1.5000." in seen.text
    assert text.count('<tr class="best">') == text.count('<tr class="best"><td>a<') == 1
    assert 'class="best"' not in sweep_page("Sweep", [], [none])
    assert seen.text.index(" a ") < seen.text.index(" b ") < seen.text.index("none")
    assert {point["run"] for point in specs(text)["eval"]["data"]["values"]} == {"a", "b"}


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    points = [{"step": i, "run": run} for run in "ab" for i in range(10_000)]
    kept = charts.thinned(points, "run")
    assert len(kept) <= 2 * (charts.MOST_POINTS + 1)
    for run in "ab":
        steps = [point["step"] for point in kept if point["run"] == run]
        assert steps[0] == 0
        assert steps[-1] == 9_999
        assert steps == sorted(set(steps))


def test_figures_in_tables_are_right_aligned_and_absent_ones_are_dashes() -> None:
    table = Table("Figures", ("name", "value"), [("a", 1234), ("b", None), ("c", 0.12345)])
    text = html_table(table)
    assert Seen(text).text == "name value a 1,234 b - c 0.1235"
    assert text.count('class="figure"') == 4


def test_a_chart_has_words_for_those_who_cannot_see_it() -> None:
    chart = Chart(name="x", title="T", summary="falls from 2 to 1", spec={"mark": "line"})
    assert specs(page("P", chart.html, [chart]))["x"]["description"] == "falls from 2 to 1"


def test_a_limit_of_memory_is_drawn_at_its_total_if_it_is_near() -> None:
    def drawn(limit: int) -> Chart:
        row = MemoryRow(name="peak memory", grade="", predicted=2 * GIB, measured=GIB, how="")
        return charts.memory([replace(row, limit=limit)])

    near, far = drawn(8 * GIB), drawn(9 * GIB)
    line = {"term": "peak memory", "which": "limit", "GiB": 8.0}
    assert near.spec["layer"][1]["data"]["values"] == [line]
    assert near.note == "Limits: peak memory 8 GiB. One that is near is a line at the total."
    assert "layer" not in far.spec
    assert far.note == "Limits: peak memory 9 GiB."
