"""Pages in a browser: the studio, the static planner, and what axe-core says of them."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from finetune import app
from finetune.recipe.load import load_shape
from finetune.report import charts
from finetune.report.charts import page as page_of
from finetune.report.compare_pages import SweptRun, compare_page, sweep_page
from finetune.report.compared_runs import read_runs
from finetune.report.explain import explain
from finetune.report.memory import MemoryRow
from finetune.report.pages import run_page, write_run_page
from finetune.run.run_files import line_of, read_rows
from finetune.studio.answer import DRAWN_WIDTH, Planner
from offload.plan.machine.machine import GIB
from tests.bench.bench_studio import Quiet, compared, website
from tests.studios import axe_script, browser, serious_findings, served
from tests.tools.site import write_page, write_site
from tests.unit.finetune.report.made_up import a_run_of_rounds, write_round
from tests.unit.finetune.studio.runs_made import begun, write_answers, write_run

DRAWN = {
    **dict.fromkeys(("report", "online", "compare", "sweep"), "html[data-drawn]"),
    "plan": "body[data-complete]",
    "runs": "body[data-shown]",
    "static": "body[data-complete]",
}
# The static page's Python is not here: a server plans in its place, and all else is the page's own.
WORKER = """
self.onmessage = async ({ data: [kind, question] }) => {
  const answer = await fetch(`../ask/${kind}`, { method: "POST", body: question });
  self.postMessage(await answer.text());
};
"""


class Answering(Quiet):
    """A web server that also plans."""

    planner = Planner(here=None, folder=Path("unused"))

    def do_POST(self) -> None:  # noqa: N802  # http.server calls it so
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        answer = self.planner.answered(self.path.rpartition("/")[2], asked).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def finished_run(folder: Path) -> Path:
    """Write a small run with its samples and its report."""
    write_run(begun(folder), slow_s=[0.5, 0.0, 0.0, 0.0])
    for when in ("before", "after"):
        write_answers(folder, when, "first", "second")
    return write_run_page(folder)


def pages_of_runs(folder: Path) -> dict[str, str]:
    """Write the page of a run that samples its answers, and those of several runs."""
    online = a_run_of_rounds(folder / "online")
    write_round(online, 1, [("p", "good", 1.0), ("p", "bad", 0.0)])
    finished = [folder / name for name in ("a", "b")]
    for run in finished:
        run.mkdir()
        write_run(begun(run), slow_s=[0.5, 0.0, 0.0, 0.0])
        file = run / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [line | {"eval_loss": 1 / line["step"]} for line in lines]
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    long = [
        SweptRun(
            name=name,
            settings={"train.lr": 0.1},
            state="done",
            rows=[{"step": n, "loss": 1 / n, "tokens_per_s": 9.0} for n in range(1, num_steps)],
            pace=explain(finished[0]).sections[-1].pace,
        )
        for name, num_steps in (("long, of 1,387 steps", 1388), ("one step, with a long name", 2))
    ]
    texts = {
        "online": run_page(online),
        "compare": compare_page(read_runs(finished)),
        "sweep": sweep_page("Sweep", [("directory", "runs/sweep")], long),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: (folder / f"{name}.html").as_uri() for name in texts}


@pytest.fixture(name="addresses", scope="module")
def addresses_of_pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("pages")
    report = finished_run(folder / "runs" / "done")
    begun(folder / "runs" / "dead")
    write_page(folder / "site")
    (folder / "site" / "assets" / "worker.js").write_text(WORKER)
    with (
        served(folder / "runs", folder / "configs") as made,
        website(folder / "site", handler=Answering) as site,
    ):
        yield {
            "report": report.as_uri(),
            **pages_of_runs(tmp_path_factory.mktemp("runs")),
            "plan": made.studio.address,
            "runs": f"{made.studio.address}runs#run=done",
            "static": site,
        }


@pytest.fixture(name="started", scope="module")
def browser_that_is_started() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(name="opened")
def pages_that_are_opened(addresses: dict[str, str], started: Any) -> Callable[[str], Any]:
    @contextmanager
    def opened(name: str) -> Iterator[Any]:
        page = started.new_page(viewport={"width": 390, "height": 844}, color_scheme="light")
        page.goto(addresses[name])
        page.wait_for_selector(DRAWN[name], state="attached")
        yield page
        page.close()

    return opened


slow = pytest.mark.slow  # the planner first answers all that is drawn
OF_RUNS = ["report", "online", "compare", "sweep"]
PAGES = [*OF_RUNS, "runs", *(pytest.param(name, marks=slow) for name in ("plan", "static"))]


@pytest.mark.browser
@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_serious_finding_in_light_or_dark(opened, name: str) -> None:
    with opened(name) as page:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert (scheme, serious_findings(page, axe_script())) == (scheme, [])


TOUCHING = """
[...document.querySelectorAll(".role-axis-label")].flatMap((axis) => {
  const shown = [...axis.querySelectorAll("text")].filter((label) => label.style.opacity !== "0"
    && label.getAttribute("opacity") !== "0");
  const boxes = shown.map((label) => [label.getBoundingClientRect(), label.textContent]);
  return boxes.flatMap(([a, name], i) => boxes.slice(i + 1).filter(([b]) => a.left < b.right + 2
    && b.left < a.right + 2 && a.top < b.bottom && b.top < a.bottom)
    .map(([, other]) => [name, other]));
})
"""


CUT_LEGENDS = """
[...document.querySelectorAll(".role-legend-entry text")].filter((text) => {
  const [inner, outer] = [text, text.closest("svg")].map((one) => one.getBoundingClientRect());
  return inner.top < outer.top || inner.right > outer.right;
}).map((text) => text.textContent)
"""


@pytest.mark.browser
@pytest.mark.parametrize("name", OF_RUNS)
def test_labels_of_a_chart_do_not_touch_and_no_page_of_runs_is_wider_than_its_screen(
    opened, name: str
) -> None:
    with opened(name) as page:
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 844})
            page.reload()
            page.wait_for_selector(DRAWN[name], state="attached")
            assert page.locator(".role-axis-label text").count() > 5
            assert page.evaluate(TOUCHING) == []
            assert page.evaluate(CUT_LEGENDS) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width


BEYOND = """
[...document.querySelectorAll("td, td a, td button")].filter((one) => one.checkVisibility()
  && one.getBoundingClientRect().right > window.innerWidth).map((one) => one.textContent)
"""


@pytest.mark.browser
@pytest.mark.parametrize("name", [*OF_RUNS, "runs"])
def test_on_a_phone_no_cell_of_a_table_is_beyond_the_screen(opened, name: str) -> None:
    with opened(name) as page:
        assert page.locator("td[data-name]:visible").count() > 5
        assert page.evaluate(BEYOND) == []


@pytest.mark.browser
@pytest.mark.thorough
@pytest.mark.parametrize("limit_gib", [3, 900])
def test_a_limit_of_memory_has_no_serious_finding_near_or_far(
    tmp_path: Path, started, limit_gib: int
) -> None:
    row = MemoryRow(
        name="peak memory", grade="", predicted=2 * GIB, measured=GIB, how="", limit=limit_gib * GIB
    )
    chart = charts.memory([row])
    file = tmp_path / "memory.html"
    file.write_text(page_of("Memory", chart.html, [chart]))
    shown = started.new_page()
    shown.goto(file.as_uri())
    shown.wait_for_selector(DRAWN["report"], state="attached")
    assert serious_findings(shown, axe_script()) == []
    shown.close()


@pytest.mark.browser
@pytest.mark.thorough
def test_axe_finds_text_that_is_too_pale(opened) -> None:
    with opened("runs") as page:
        page.evaluate("document.getElementById('folder').style.color = '#ccc'")
        (found,) = serious_findings(page, axe_script())
        assert found.startswith("color-contrast: ")


# --------------------------------------------------------------------------------------------- site


@pytest.mark.browser
@pytest.mark.network
def test_the_static_page_plans_what_the_command_plans(tmp_path: Path, started: Any) -> None:
    write_site(tmp_path / "site")
    page = started.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    with website(tmp_path / "site") as address:
        loaded: list[str] = []
        page.on("request", lambda request: loaded.append(request.url))
        page.goto(address)
        page.wait_for_selector("#headline.good", timeout=120_000)
        assert compared(page, 4).startswith("4 plans equal")
    assert not problems
    own = (address, "data:", "blob:")
    assert [url for url in loaded if not url.startswith(own)] == []


# ------------------------------------------------------------------------------------------- studio


ROOT = Path(__file__).parents[2]


@pytest.fixture(name="room", scope="module")
def an_opened_page(tmp_path_factory: pytest.TempPathFactory, started: Any):
    folder = tmp_path_factory.mktemp("studio")
    write_run(begun(folder / "runs" / "done"), slow_s=[0.0] * 4)
    metrics = folder / "runs" / "done" / "metrics.jsonl"
    rows = [
        row | {"loss": 9.0 / row["step"], "tokens_per_s": 1000.1 * row["step"]}
        for row in read_rows(metrics)
    ]
    metrics.write_text("".join(map(line_of, rows)))
    write_answers(folder / "runs" / "done", "before", "<b>worse</b>")
    write_answers(folder / "runs" / "done", "after", "better")
    begun(folder / "runs" / "dead")
    with served(folder / "runs", folder / "configs") as made:
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


@pytest.mark.browser
@pytest.mark.thorough
def test_a_slider_moves_and_the_page_shows_the_plan_of_the_command(
    room, tmp_path: Path, capsys
) -> None:
    page, _, problems = room
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
    assert page.locator("#gantt rect").count() > 2 * 28  # each layer forward and backward
    assert page.locator("#ways tr").count() > 10
    assert not problems


@pytest.mark.browser
def test_images_are_asked_of_models_that_see_alone(room) -> None:
    page, _, problems = room
    answered(page)
    assert page.is_hidden("#images")
    page.select_option("[name=model]", "qwen3-vl-8b")
    page.select_option("[name=card]", "rtx4090")
    page.fill("[name=num_images]", "10000")
    page.fill("[name=image_tokens]", "512")
    page.wait_for_selector("[data-key=pass_s]")
    answered(page)
    assert shown(page, "feature_bytes") == 10_000 * 512 * 4096 * 2 * 4  # width, bytes, deepstack
    assert 100 < shown(page, "pass_s") < 1000
    assert page.inner_text("#command").endswith("--images 10000")
    assert "max_tokens: 512" in page.text_content("#recipe")
    page.fill("[name=image_tokens]", "")
    page.wait_for_selector("#rows p:text('Images are assumed to have at most 1,024 tokens')")
    assert "max_tokens: 1024" in page.text_content("#recipe")
    page.fill("[name=image_tokens]", "512")
    page.wait_for_selector("#rows p", state="detached")
    page.select_option("[name=model]", "qwen3-0.6b")
    answered(page)
    assert page.is_hidden("#images")
    assert "images" not in page.inner_text("#answer")
    page.select_option("[name=model]", "other")
    page.fill("[name=config]", json.dumps(load_shape("qwen3-vl-8b")))
    page.locator("[name=config]").blur()
    page.wait_for_selector("[data-key=pass_s]")
    assert page.is_visible("#images")
    page.fill("[name=num_images]", "0")
    page.fill("[name=config]", "")
    page.select_option("[name=model]", "qwen3-0.6b")
    page.select_option("[name=card]", "rtx4090")
    answered(page)
    assert not problems


@pytest.mark.browser
def test_only_the_newest_question_is_drawn(room) -> None:
    page, _, problems = room
    for key in ("Home", "End", "Home", "ArrowRight"):
        page.locator("[name=rank]").press(key)
    answered(page)
    assert "rank: 8\n" in page.text_content("#recipe")
    assert not problems


@pytest.mark.browser
def test_a_step_is_drawn_wider_and_a_pasted_config_is_planned(room) -> None:
    page, _, problems = room
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


@pytest.mark.browser
def test_a_connection_that_is_lost_once_is_made_again_and_a_server_that_is_gone_is_named(
    room,
) -> None:
    page, _, problems = room
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


@pytest.mark.browser
def test_what_does_not_fit_and_what_cannot_be_planned_are_said(room) -> None:
    page, _, problems = room
    page.select_option("[name=card]", "this machine")
    answered(page)
    assert page.inner_text("#headline").startswith("this machine was not measured")
    assert not page.is_visible("#gantt-part")
    page.select_option("[name=card]", "rtx3060")
    page.select_option("[name=model]", "qwen3-235b-a22b")
    answered(page)
    assert page.inner_text("#headline").startswith("Does not fit: short of ")
    page.wait_for_selector("text=What would fit")
    page.fill("[name=num_cards]", "0")
    page.wait_for_selector("#headline:has-text('The field \"cards\": ')")
    page.fill("[name=num_cards]", "1")
    page.select_option("[name=model]", "qwen3-0.6b")
    page.wait_for_selector("#ways td")
    assert page.locator("#ways td[data-name=VRAM]:visible").count()
    assert page.evaluate(BEYOND) == []
    page.wait_for_selector("#curve text:text-is('256k')", state="attached")
    assert not problems


def curve_is_asked_for(page, losses: list[float]) -> None:
    """Check the point under the pointer, the mean and the axis of a curve of four losses."""
    page.locator("#run-loss svg").scroll_into_view_if_needed()
    box = page.locator("#run-loss svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 25, box["y"] + box["height"] / 2)
    page.wait_for_selector("#run-loss text:text-matches('^step 4: [0-9.]+$')")
    axes = (
        "[...document.querySelectorAll('#run-loss .role-axis')].map((one) => one.innerHTML).join()"
    )
    linear = page.evaluate(axes)
    page.locator("#smooth").fill("2")
    assert page.inner_text("#smooth-shown") == "4"
    page.wait_for_function("document.querySelectorAll('#run-loss .mark-line path').length === 2")
    page.mouse.move(box["x"] + box["width"] - 26, box["y"] + box["height"] / 2)
    said = page.wait_for_selector("#run-loss text:text-matches('mean')").text_content()
    assert float(said.rpartition(" ")[2]) == pytest.approx(sum(losses) / 4, rel=1e-4)
    page.check("#is-log")
    page.wait_for_function(f"(before) => {axes} !== before", arg=linear)
    page.locator("#smooth").fill("0")


@pytest.mark.browser
def test_the_runs_room_draws_a_run_and_reads_well_without_steps(room) -> None:
    page, made, problems = room
    page.goto(f"{made.studio.address}runs")
    page.click("text=done")
    page.wait_for_selector("body[data-shown=done]")
    page.wait_for_selector("#run-loss svg")
    attach = page.locator("#attach")  # of a model that sees no images
    assert attach.evaluate("(one) => getComputedStyle(one).display") == "none"
    cells = page.locator("#samples tbody td").all_inner_texts()
    assert cells == ["p0", "w0", "<b>worse</b>", "better"]
    folder = Path(page.inner_text("#folder").split(" ")[2].rstrip(","))
    rows = read_rows(folder / "done" / "metrics.jsonl")
    curve_is_asked_for(page, [row["loss"] for row in rows])
    assert "4,000" in page.locator("#run-rate .role-axis-label text").all_text_contents()
    rate = page.locator("figure", has=page.locator("#run-rate")).locator("figcaption")
    assert rate.inner_text() == "Tokens per second: 4,000 in step 4."
    page.locator("#run-rate svg").hover()
    page.wait_for_selector("#run-rate text:text-matches('step [1-4]: [1-4],000')")
    heads = page.locator("table:has(#runs) th").all_inner_texts()
    assert {"loss curve", "time left", "actions"} <= set(heads)
    assert "tokens per step" in page.inner_text("#settings")
    row = page.locator("#runs tr", has=page.locator("button:text-is('done')"))
    assert row.locator("progress").get_attribute("value") == "4"
    assert len(row.locator("polyline").get_attribute("points").split()) == 4
    assert re.fullmatch(r"[+-]\d+%", row.locator("td").nth(9).inner_text())
    page.click("#runs button:text('dead')")
    page.wait_for_selector("body[data-shown=dead]")
    assert "ended before its first step" in page.inner_text("#settings")
    assert not page.locator("#curves svg").count()
    assert not page.is_visible("#samples-part")
    page.click("[aria-label='report of done']")
    page.wait_for_selector("html[data-drawn]")
    assert page.inner_text("h1") == "Run done"  # as its folder is called
    assert not problems


@pytest.mark.browser
@pytest.mark.thorough
def test_no_page_is_wider_than_a_phone(room) -> None:
    page, made, _ = room
    for room in ("", "runs"):
        page.goto(made.studio.address + room)
        page.wait_for_selector("#headline.good" if not room else "body[data-shown]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.browser
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
