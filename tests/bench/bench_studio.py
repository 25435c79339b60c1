"""The planning page: how fast a change is drawn, whether its figures are the command's, sizes.

    python -m tests.bench.bench_studio                  the served page
    python -m tests.bench.bench_studio --site           and the static one (network)
    python -m tests.bench.bench_studio --axe            and check all pages with axe-core
    python -m tests.bench.bench_studio --shots FOLDER   and take pictures of all pages
    python -m tests.bench.bench_studio --growing        only the Runs room's cost while runs grow

A change is one control set to a value that is drawn at random; its time is from the event to the
frame in which the answer's figures, memory and step are drawn. The static page has to answer drawn
questions with the figures of `sluice plan --json`, in fields of text and whole numbers equal, and
in seconds and rates to 1e-12: from Python 3.12 on, as in the browser, sums are compensated.
"""

import argparse
import functools
import http.server
import json
import math
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from finetune.commands.plan import HostOptions, planned
from finetune.run.run_files import line_of, read_rows
from finetune.studio.answer import Planner, Question, recipe_text
from finetune.studio.runs import ASSETS, RANKS, SEQ_LENS, STEPS, asset, plan_page, run_names
from offload.errors import SluiceError
from tests.studios import axe_script, browser, question_values, serious_findings, served
from tests.unit.finetune.studio.runs_made import begun, write_run

SEED = 20261124
REL_ERROR = 1e-12
DRAWN: dict[str, Sequence[Any]] = {
    "model": ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "gemma-3-27b-text", "llama-3.1-70b"),
    "num_cards": (1, 1, 2, 4),
    "card": ("rtx3060", "rtx4060ti", "rtx4090", "rtx5090", "h100"),
    "method": ("lora", "dora", "all"),
    "objective": ("sft", "dpo", "kto"),
    "codec": ("auto", "native", "nf4"),
    "rank": RANKS,
    "seq_len": SEQ_LENS[:6],
    "tokens_per_step": STEPS,
    "micro_batch_size": (1, 2, 4, "auto"),
    "ram_gib": (32, 64, 128, 256),
}
SLIDERS = ("rank", "seq_len", "tokens_per_step")
NUM_RUNS, NUM_GROWN, GROWN_S, SETTLED_MS = 5, 20_000, 20, 6000
SIZES = ((1280, 900), (390, 844))


def drawn_changes(num: int) -> Iterator[tuple[str, Any]]:
    """Give controls and their new values."""
    draws = random.Random(SEED)
    for _ in range(num):
        name = draws.choice(list(DRAWN))
        yield name, draws.choice(DRAWN[name])


def drawn_questions(num: int, planner: Planner) -> Iterator[dict[str, Any]]:
    """Give questions with every control drawn, until so many of them have a plan that fits."""
    draws = random.Random(SEED + 1)
    while num:
        values = {name: draws.choice(choices) for name, choices in DRAWN.items()}
        asked = question_values(**values)
        num -= bool(planner.answer("rate", Question.model_validate(asked)).get("tokens_per_s"))
        yield asked


def change(page: Any, name: str, value: Any) -> float:
    """Set a control as a user would, and return the milliseconds until its answer is drawn."""
    before = int(page.get_attribute("body", "data-answered"))
    page.evaluate(
        """([name, value, isSlider]) => {
          const field = document.forms.question.elements[name];
          field.value = isSlider ? field.dataset.values.split(" ").indexOf(String(value)) : value;
          field.dispatchEvent(new Event("input", { bubbles: true }));
        }""",
        [name, value, name in SLIDERS],
    )
    page.wait_for_selector(f'body[data-timed="{before + 1}"]', timeout=120_000)
    return float(page.get_attribute("body", "data-ms"))


def timed(page: Any, address: str, num: int) -> list[float]:
    """Return the milliseconds of each change."""
    page.goto(address)
    page.wait_for_selector("body[data-timed]", timeout=120_000)
    return [change(page, name, value) for name, value in drawn_changes(num)]


def quantiles(values: Sequence[float]) -> str:
    """Return the median, the 95th percentile and the largest, in seconds."""
    ordered = sorted(values)
    p50, p95 = (ordered[math.ceil(q * len(ordered)) - 1] for q in (0.5, 0.95))
    return f"p50 {p50 / 1e3:.3f} s, p95 {p95 / 1e3:.3f} s, largest {ordered[-1] / 1e3:.3f} s"


def command_s_figures(values: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return what `sluice plan` prints for the recipe of a question; None if it is refused."""
    question = Question.model_validate(values)
    setup, recipe = question.setup, folder / "from-studio.yaml"
    recipe.write_text(recipe_text(question))
    try:
        shown = planned(
            str(recipe),
            [],
            machine=setup.card,
            host=HostOptions(
                ram_gib=setup.ram_gib,
                link_gb_per_s=setup.link_gb_per_s,
                num_gpus=setup.num_cards,
            ),
            wants_ways=False,
            form="json",
            note=print,
        )
    except SluiceError:
        return None
    assert isinstance(shown, str)
    figures: dict[str, Any] = json.loads(shown)
    return figures


def largest_difference(ours: Any, theirs: Any, where: str = "") -> float:
    """Return the largest relative difference of two values' floats; all else has to be equal."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return max(
            (largest_difference(ours[k], theirs[k], f"{where}.{k}") for k in ours), default=0
        )
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = zip(ours, theirs, strict=True)
        return max((largest_difference(a, b, where) for a, b in pairs), default=0)
    if isinstance(ours, float) and isinstance(theirs, float | int) and theirs:
        return abs(ours - theirs) / abs(theirs)
    if ours != theirs:
        raise AssertionError(f"{where}: {ours} in the page, {theirs} by the command")
    return 0.0


def compared(page: Any, num: int) -> str:
    """Ask the static page's worker drawn questions, and compare with the command."""
    with tempfile.TemporaryDirectory() as folder:
        asked = list(drawn_questions(num, Planner(here=None, folder=Path(folder))))
    answers = page.evaluate(
        """async (questions) => {
          const worker = new Worker("assets/worker.js", { type: "module" }), answers = [];
          for (const question of questions) {
            worker.postMessage(["plan", JSON.stringify(question)]);
            const next = (done) => { worker.onmessage = ({ data }) => done(data); };
            answers.push(await new Promise(next));
          }
          return answers;
        }""",
        asked,
    )
    num_fit, worst = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for values, text in zip(asked, answers, strict=True):
            answer, figures = json.loads(text), command_s_figures(values, Path(folder))
            if figures is None:
                assert answer["error"] or not answer["fits"], values
                continue
            num_fit += 1
            ours = answer["figures"]
            theirs = {key: figures[key] for key in ours}
            # the command also has the cost of the energy, at the recipe's price
            theirs["energy"] = {key: theirs["energy"][key] for key in ours["energy"]}
            worst = max(worst, largest_difference(ours, theirs))
    assert worst <= REL_ERROR, worst
    assert num_fit == num
    refused = len(asked) - num_fit
    return f"{num_fit} plans equal, floats within {worst:.1e}; {refused} others refused by both"


def long_run(folder: Path, num_steps: int) -> Callable[[int], None]:
    """Write a run of many steps, and return what appends one more."""
    write_run(begun(folder), slow_s=[0.0])
    metrics = folder / "metrics.jsonl"
    (row,) = read_rows(metrics)

    def lines(steps: range) -> str:
        return "".join(
            line_of(row | {"step": n, "loss": 1 + math.sin(n) / n, "tokens_per_s": 1e3 + n % 97})
            for n in steps
        )

    metrics.write_text(lines(range(1, num_steps + 1)))

    def append(step: int) -> None:
        with metrics.open("a") as file:
            file.write(lines(range(step, step + 1)))

    return append


def growing(started: Any, scratch: Path) -> str:
    """Return what an open Runs room takes of the page's thread and of the server's process."""
    folder = scratch / "runs"
    runs = [long_run(folder / f"run{n}", NUM_GROWN) for n in range(NUM_RUNS)]
    with served(folder, scratch) as made:
        page = started.new_page()
        page.goto(f"{made.studio.address}runs")
        page.wait_for_selector("#run-loss svg", timeout=120_000)
        metrics = page.context.new_cdp_session(page)
        metrics.send("Performance.enable")

        def taken() -> dict[str, float]:
            found = metrics.send("Performance.getMetrics")["metrics"]
            return {one["name"]: one["value"] for one in found}

        page.wait_for_timeout(SETTLED_MS)
        before, server_s = taken(), time.process_time()
        for step in range(GROWN_S):
            for append in runs:
                append(NUM_GROWN + 1 + step)
            page.wait_for_timeout(1000)
        after, server_s = taken(), time.process_time() - server_s
        elapsed_s = after["Timestamp"] - before["Timestamp"]
        page_s = after["TaskDuration"] - before["TaskDuration"]
    return (
        f"{NUM_RUNS} runs of {NUM_GROWN:,} steps, one step a second each, {elapsed_s:.0f} s: page"
        f" {page_s / elapsed_s:.1%} of a core, server {server_s / elapsed_s:.1%}"
    )


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A web server that logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def website(folder: Path, *, handler: type[Quiet] = Quiet) -> Iterator[str]:
    """Serve the static page."""
    of_folder = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), of_folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def looked_at(started: Any, addresses: dict[str, str], args: argparse.Namespace) -> None:
    """Check each page in each size and scheme, and take its picture."""
    for width, height in SIZES:
        for scheme in ("light", "dark"):
            context = started.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=True
            )
            for name, address in addresses.items():
                page = context.new_page()
                page.goto(address)
                is_done = {
                    "runs": "body[data-shown], #none:not(:empty)",
                    "report": "html[data-drawn]",
                }
                done = is_done.get(name, "body[data-complete]")
                page.wait_for_selector(done, state="attached", timeout=120_000)
                page.wait_for_timeout(300)
                if args.shots:
                    args.shots.mkdir(parents=True, exist_ok=True)
                    file = args.shots / f"{name}_{width}_{scheme}.png"
                    page.screenshot(path=file, full_page=True)
                if args.axe:
                    found = serious_findings(page, axe_script())
                    sys.stdout.write(
                        f"axe, {name} {width} {scheme}: {found or 'nothing serious'}\n"
                    )
                page.close()
            context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=60)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--site", action="store_true")
    parser.add_argument("--growing", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--axe", action="store_true")
    parser.add_argument("--shots", type=Path)
    args = parser.parse_args()
    if args.growing:
        with tempfile.TemporaryDirectory() as scratch, browser() as started:
            sys.stdout.write(f"{growing(started, Path(scratch))}\n")
        return
    size = len(plan_page(is_static=False)) + sum(len(asset(n)) for n in ASSETS if n != "worker.js")
    sys.stdout.write(f"the page and its files: {size / 1e6:.2f} MB\n")
    with tempfile.TemporaryDirectory() as scratch, browser() as started:
        with served(args.runs, Path(scratch)) as made:
            address = made.studio.address
            took = timed(started.new_page(), address, args.changes)
            sys.stdout.write(f"served, {len(took)} changes: {quantiles(took)}\n")
            rooms = {"plan": address, "runs": f"{address}runs"}
            for run in run_names(args.runs)[:1]:
                rooms["report"] = f"{address}report?{urlencode({'name': run})}"
            looked_at(started, rooms, args)
        if args.site:
            from tests.tools.site import write_site

            folder = Path(scratch) / "site"
            write_site(folder)
            files = [file for file in folder.rglob("*") if file.is_file()]
            total = sum(file.stat().st_size for file in files)
            sys.stdout.write(f"the site: {len(files)} files, {total / 1e6:.1f} MB\n")
            with website(folder) as address:
                page = started.new_page()
                took = timed(page, address, args.changes)
                sys.stdout.write(f"static, {len(took)} changes: {quantiles(took)}\n")
                sys.stdout.write(f"static and command: {compared(page, args.questions)}\n")
                looked_at(started, {"static": address}, args)


if __name__ == "__main__":
    main()
