"""Every page read by axe-core, in light and dark: nothing serious that keeps a reader out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from finetune.report import pages
from finetune.report.memory import MemoryRow
from finetune.report.pages import page as page_of
from finetune.report.pages import write_run_page
from finetune.studio.answer import Planner
from offload.plan.machine.machine import GIB
from tests.bench.bench_studio import Quiet, website
from tests.studios import axe_script, browser, serious_findings, served
from tests.tools.site import write_page
from tests.unit.finetune.studio.runs_made import begun, write_answers, write_run

pytestmark = pytest.mark.browser
DRAWN = {
    "report": "html[data-drawn]",
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
PAGES = ["report", "runs", *(pytest.param(name, marks=slow) for name in ("plan", "static"))]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_serious_finding_in_light_or_dark(opened, name: str) -> None:
    with opened(name) as page:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert (scheme, serious_findings(page, axe_script())) == (scheme, [])


@pytest.mark.thorough
@pytest.mark.parametrize("limit_gib", [3, 900])
def test_a_limit_of_memory_has_no_serious_finding_near_or_far(
    tmp_path: Path, started, limit_gib: int
) -> None:
    row = MemoryRow(
        name="peak memory", grade="", predicted=2 * GIB, measured=GIB, how="", limit=limit_gib * GIB
    )
    chart = pages.memory([row])
    file = tmp_path / "memory.html"
    file.write_text(page_of("Memory", chart.html, [chart]))
    shown = started.new_page()
    shown.goto(file.as_uri())
    shown.wait_for_selector(DRAWN["report"], state="attached")
    assert serious_findings(shown, axe_script()) == []
    shown.close()


@pytest.mark.thorough
def test_axe_finds_text_that_is_too_pale(opened) -> None:
    with opened("runs") as page:
        page.evaluate("document.getElementById('folder').style.color = '#ccc'")
        (found,) = serious_findings(page, axe_script())
        assert found.startswith("color-contrast: ")
