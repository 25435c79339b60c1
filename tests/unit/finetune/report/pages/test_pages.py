"""Pages of runs that are made up: what they say, that nothing is loaded, and nothing injected."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.app import main
from finetune.errors import CheckpointError
from finetune.files.manifest import sealed_json
from finetune.report import pages
from finetune.report.compare_pages import SweptRun, best_first, sweep_page
from finetune.report.memory import MemoryRow
from finetune.report.pages import LIBRARIES, Chart, page, run_page, table, write_run_page
from finetune.training.report import PAGE_EVERY_S, page_at_checkpoint
from offload.plan.machine.machine import GIB
from tests.unit.finetune.report.made_up import write_run
from tests.unit.finetune.report.seen import Seen, begun, specs


def test_the_page_of_a_run_says_what_it_did_and_draws_every_step(tmp_path: Path) -> None:
    write_run(begun(tmp_path), slow_s=[1.0] * 5)
    rows = [{"prompt": f"p{i}", "wanted": "w", "got": "<b>g</b>"} for i in range(9)]
    prompts = {"enable_thinking=False": 7, "": 2}
    answers = json.dumps({"exact_match": 0.5, "prompts": prompts, "rows": rows}, indent=1)
    (tmp_path / "samples_after.json").write_text(sealed_json(answers))
    text = run_page(tmp_path)
    seen, drawn = Seen(text), specs(text)
    assert "5 of 12 done" in seen.text
    assert "loss 1.0000 at first, 1.0000 at last" in seen.text
    assert "<b>g</b>" in seen.text
    assert (
        "Answers were drawn: 7 after the prompt with enable_thinking=False, 2 after the chat"
        " template's default prompt." in seen.text
    )
    assert seen.tags.count("b") == seen.tags.count("summary")
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
    file = tmp_path / "metrics.jsonl"
    energy = {"energy_j": {"GPU": 7.2e6}, "energy_window_s": 36000.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | energy) + "\n")
    text = Seen(run_page(tmp_path)).text
    assert "GPU: 2 kWh, 7.2e+04 J per token, 200 W on average" in text
    assert "cost of GPU: 1.00 EUR at 0.5 EUR per kWh" in text


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
    chart = pages.break_even(points, break_even_tokens=tokens)
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
        return SweptRun(name=name, settings={"train.lr": loss}, state="done", rows=rows)

    none = SweptRun(name="none", settings={}, state="no step", rows=[])
    runs = [run("b", 0.1, 3.0, 2.0), none, run("d", 0.3), run("a", 0.4, 1.5), run("c", 0.2)]
    assert [one.name for one in best_first(runs)] == ["a", "b", "c", "d", "none"]
    text = sweep_page("Sweep", [("together", "1 s")], runs)
    seen = Seen(text)
    assert seen.text.index(" a ") < seen.text.index(" b ") < seen.text.index("none")
    assert {point["run"] for point in specs(text)["eval"]["data"]["values"]} == {"a", "b"}


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    points = [{"step": i, "run": run} for run in "ab" for i in range(10_000)]
    kept = pages.thinned(points, "run")
    assert len(kept) <= 2 * (pages.MOST_POINTS + 1)
    for run in "ab":
        steps = [point["step"] for point in kept if point["run"] == run]
        assert steps[0] == 0
        assert steps[-1] == 9_999
        assert steps == sorted(set(steps))


def test_figures_in_tables_are_right_aligned_and_absent_ones_are_dashes() -> None:
    text = table("Figures", ("name", "value"), [("a", 1234), ("b", None), ("c", 0.12345)])
    assert Seen(text).text == "name value a 1,234 b - c 0.1235"
    assert text.count('class="figure"') == 4


def test_a_chart_has_words_for_those_who_cannot_see_it() -> None:
    chart = Chart(name="x", title="T", summary="falls from 2 to 1", spec={"mark": "line"})
    assert specs(page("P", chart.html, [chart]))["x"]["description"] == "falls from 2 to 1"


def test_a_limit_of_memory_is_drawn_at_its_total_if_it_is_near() -> None:
    def drawn(limit: int) -> Chart:
        row = MemoryRow(name="peak memory", grade="", predicted=2 * GIB, measured=GIB, how="")
        return pages.memory([replace(row, limit=limit)])

    near, far = drawn(8 * GIB), drawn(9 * GIB)
    line = {"term": "peak memory", "which": "limit", "GiB": 8.0}
    assert near.spec["layer"][1]["data"]["values"] == [line]
    assert near.note == "Limits: peak memory 8 GiB. One that is near is a line at the total."
    assert "layer" not in far.spec
    assert far.note == "Limits: peak memory 9 GiB."
