"""The studio in a browser: a slider moves, and the page shows what the command says."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from finetune import app
from finetune.recipe.load import load_shape
from finetune.studio.answer import DRAWN_WIDTH
from tests.studios import browser, served
from tests.unit.finetune.studio.runs_made import begun, write_answers, write_run

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.browser


@pytest.fixture(name="opened", scope="module")
def an_opened_page(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("studio")
    write_run(begun(folder / "runs" / "done"), slow_s=[0.0] * 4)
    write_answers(folder / "runs" / "done", "before", "<b>worse</b>")
    write_answers(folder / "runs" / "done", "after", "better")
    begun(folder / "runs" / "dead")
    with (
        browser() as started,
        served(folder / "runs", folder / "configs") as made,
    ):
        page = started.new_page(viewport={"width": 390, "height": 844})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.goto(made.studio.address)
        page.select_option("[name=model]", "qwen3-0.6b")
        yield page, made, problems


def answered(page) -> None:
    """Wait until the newest question's answer is drawn."""
    page.wait_for_selector("#answer:not([aria-busy])")


def shown(page, key: str) -> float:
    return float(page.get_attribute(f'#figures [data-key="{key}"]', "data-value"))


@pytest.mark.thorough
def test_a_slider_moves_and_the_page_shows_the_plan_of_the_command(
    opened, tmp_path: Path, capsys
) -> None:
    page, _, problems = opened
    answered(page)
    before = shown(page, "tokens_per_s")
    page.locator("[name=rank]").press("End")
    page.locator("[name=seq_len]").press("ArrowLeft")
    answered(page)
    assert page.inner_text("#rank-shown") == "256"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(page.text_content("#recipe"))
    words = page.inner_text("#command").split()[3:]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        app.main(["plan", str(recipe), *words, "--json"])
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert shown(page, "tokens_per_s") == predicted["tokens_per_s"] != before
    assert shown(page, "peak_vram_bytes") == predicted["peak_vram_bytes"]
    assert page.inner_text("#headline") == f"Fits, at {predicted['tokens_per_s']:,.0f} tokens/s"
    page.wait_for_selector("#curve svg")
    page.wait_for_selector("#ways table")
    assert page.locator("#gantt rect").count() > 100
    assert page.locator("#ways tr").count() > 10
    assert not problems


def test_only_the_newest_question_is_drawn(opened) -> None:
    page, _, problems = opened
    for key in ("Home", "End", "Home", "ArrowRight"):
        page.locator("[name=rank]").press(key)
    answered(page)
    assert "rank: 8\n" in page.text_content("#recipe")
    assert not problems


def test_a_step_is_drawn_wider_and_a_pasted_config_is_planned(opened) -> None:
    page, _, problems = opened
    answered(page)
    page.locator("#zoom").fill("4")
    page.wait_for_selector(f'#gantt svg[width="{4 * DRAWN_WIDTH}"]')
    of_shape = shown(page, "peak_vram_bytes")
    page.select_option("[name=model]", "other")
    answered(page)
    assert page.inner_text("#headline") == "Give a hub id, or the text of a config.json."
    page.fill("[name=config]", json.dumps(load_shape("qwen3-0.6b")))
    page.locator("[name=config]").blur()
    page.wait_for_selector("#headline.good")
    answered(page)
    assert shown(page, "peak_vram_bytes") == of_shape
    page.select_option("[name=model]", "qwen3-0.6b")
    answered(page)
    assert not problems


def test_a_connection_that_is_lost_once_is_made_again_and_a_server_that_is_gone_is_named(
    opened,
) -> None:
    page, _, problems = opened
    answered(page)
    page.route("**/ask/plan", lambda route: route.abort(), times=1)
    page.select_option("[name=model]", "qwen3-0.6b")
    page.wait_for_selector("#headline.good")
    answered(page)
    page.route("**/ask/plan", lambda route: route.abort())
    page.select_option("[name=model]", "qwen3-8b")
    page.wait_for_selector("#headline.bad")
    answered(page)
    assert page.inner_text("#headline").startswith("There is no answer: ")
    page.unroute_all()
    page.select_option("[name=model]", "qwen3-0.6b")
    page.wait_for_selector("#headline.good")
    problems.clear()  # the browser names each request that was lost


def test_what_does_not_fit_and_what_cannot_be_planned_are_said(opened) -> None:
    page, _, problems = opened
    page.select_option("[name=card]", "t4")
    answered(page)
    assert page.inner_text("#headline").startswith("t4 does not compute in bfloat16")
    assert not page.is_visible("#gantt-part")
    page.select_option("[name=card]", "rtx3060")
    page.select_option("[name=model]", "qwen3-235b-a22b")
    answered(page)
    assert page.inner_text("#headline").startswith("Does not fit: short of ")
    page.wait_for_selector("text=What would fit")
    assert not problems


def test_the_runs_room_draws_a_run_and_reads_well_without_steps(opened) -> None:
    page, made, problems = opened
    page.goto(f"{made.studio.address}runs")
    page.click("text=done")
    page.wait_for_selector("body[data-shown=done]")
    page.wait_for_selector("#run-loss svg")
    cells = page.locator("#samples tbody td").all_inner_texts()
    assert cells == ["p0", "w0", "<b>worse</b>", "better"]
    page.click("#runs button:text('dead')")
    page.wait_for_selector("body[data-shown=dead]")
    assert "ended before its first step" in page.inner_text("#settings")
    assert not page.locator("#curves svg").count()
    assert not page.is_visible("#samples-part")
    page.click("[aria-label='report of done']")
    page.wait_for_selector("html[data-drawn]")
    assert page.inner_text("h1") == "Run small"  # as its recipe calls it
    assert not problems


@pytest.mark.thorough
def test_no_page_is_wider_than_a_phone(opened) -> None:
    page, made, _ = opened
    for room in ("", "runs"):
        page.goto(made.studio.address + room)
        page.wait_for_selector("#headline.good" if not room else "body[data-shown]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.thorough
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "cli.py"), "studio", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        [*command, "--machine", "rtx4090"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/\S+/", process.stdout.readline())
        assert found is not None
        time.sleep(0.2)
        with urllib.request.urlopen(found[0]) as answer:
            assert b"Sluice: Plan" in answer.read()
        process.send_signal(2)
        assert process.wait(timeout=20) == 130
