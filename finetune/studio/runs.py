"""The Runs room: what the runs of a folder are doing, from their files alone.

A run may be written to meanwhile, may have died before its first step, or may be damaged: each is
shown with what there is, and never keeps the others from being shown.
"""

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from html import escape
from importlib import resources
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

from finetune.errors import CheckpointError
from finetune.planning.request import ASSUMED_IMAGE_TOKENS
from finetune.recipe.extensions import OBJECTIVES, ObjectiveSection
from finetune.recipe.load import RUN_RECIPE, published_ids, shipped_facts
from finetune.report.charts import COLOURS, LIBRARIES, STYLE, Chart, curves
from finetune.report.charts import asset as report_asset
from finetune.report.format import shown_time
from finetune.report.images import read_images
from finetune.report.pace import BASIS, FIGURES, Steps
from finetune.report.pages import answers, run_page
from finetune.report.prediction import FIRST, Prediction, read_predictions, start_of
from finetune.run.new_rows import NewRows
from finetune.run.run_dir import RUN_LOG, RunDir
from finetune.run.run_files import EVAL_LOSS
from finetune.run.run_lock import holder
from finetune.studio.answer import CONFIG, CONTROLS, HERE, NAME, TRAINED, counted_by_peft
from finetune.studio.guard import RUN_NAME, inside
from finetune.studio.launcher import at_work, is_stopping
from finetune.studio.servers import CLIENT_COLUMNS, NUM_WORDS, REWARD_COLUMNS, Servers
from finetune.studio.talk import MAX_IMAGE_BYTES
from offload.errors import SluiceError
from offload.plan.facts.codec import CODECS
from offload.plan.machine.cards import CARDS

OWN = ("studio.css", "studio.js", "plan.js", "runs.js", "worker.js")
ASSETS = (*LIBRARIES, STYLE, *OWN)
SEQ_LENS = tuple(2**power for power in range(8, 18))
STEPS = tuple(2**power for power in range(11, 19))
RANKS = tuple(2**power for power in range(2, 9))
SIZES = ("1", "2", "4", "8", "16", "auto")
# A page of a project's site may run its Python, which is WebAssembly, in a worker of its own.
STATIC_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self';"
    " connect-src 'self'; worker-src 'self'; img-src 'self' data:; base-uri 'none';"
    " form-action 'none'"
)


def asset(name: str) -> str:
    """Return a file of the pages, as text."""
    if name not in OWN:
        return report_asset(name)
    return (resources.files("finetune.studio") / "assets" / name).read_text("utf-8")


def plan_page(*, is_static: bool) -> str:
    """Return the Plan room.

    Args:
        is_static: Whether the page answers by itself, with Python in the browser: then there is no
            machine to measure, no torch to count with, and no runs.
    """
    methods = [*TRAINED, *([] if is_static else counted_by_peft())]
    models = [(name, f"{name} ({hub_id})") for hub_id, name in _by_name()]
    cards = [(name, f"{name} ({card.memory_gib:g} GiB)") for name, card in CARDS.items()]
    objectives = [(name, f"{name}: {one.summary}") for name, one in OBJECTIVES.items()]
    more = [] if is_static else [("other", "another: hub id or config.json")]
    here = [] if is_static else [(HERE, HERE)]
    form = "".join(
        (
            _group(
                "Model",
                _select("model", "model", [*models, *more], chosen="qwen3-8b"),
                "" if is_static else _other_model(),
                _select("objective", "learns by", objectives, chosen=ObjectiveSection.default),
                _select("method", "trains", _named(methods, TRAINED)),
                _slider("rank", "rank", RANKS, chosen=16),
            ),
            _group(
                "Machine",
                _select("card", "card", [*here, *cards], chosen="rtx4090"),
                _number("num_cards", "cards", "1", least="1", most="16", step="1"),
                _number("ram_gib", "RAM, GiB", "", least="1", hint="as assumed"),
                _number("link_gb_per_s", "link, GB/s", "", least="0.1", hint="as assumed"),
            ),
            _group(
                "Step",
                _slider("seq_len", "sequence length, tokens", SEQ_LENS, chosen=2048),
                _slider("tokens_per_step", "tokens per step", STEPS, chosen=16384),
                _select("micro_batch_size", CONTROLS["micro_batch_size"], _named(SIZES, {})),
                _select("codec", CONTROLS["codec"], _named(("auto", *CODECS), {})),
            ),
            _images_group(),
            _group(
                "Data and prices",
                _number("data_tokens", "tokens to train on", "10000000", least="0", step="1"),
                _number("price_per_hour", "price per hour of the machine", "0", least="0"),
                _number("power_watts", "power, W (0: that of the card)", "0", least="0"),
                _number("price_per_kwh", "price per kWh", "0", least="0"),
            ),
        )
    )
    waiting = "Loading the planner, once: 9 MB ..." if is_static else "Planning ..."
    rows = _text("rows", "file of rows", "", hint="chats.jsonl")
    run = rows + _text("name", "name of the run", NAME, limits=f' pattern="{RUN_NAME}" required')
    start = "" if is_static else '<button id="start-plan" type="button">Start this run</button>'
    body = f"""<div class="room"><form id="question" autocomplete="off">{form}</form>
<div id="answer">
<section aria-label="Answer"><p id="headline" role="status">{waiting}</p>
<dl id="figures"></dl><div id="rows"></div></section>
<section><h2>Memory by term</h2><div id="memory"></div></section>
<section id="gantt-part"><h2>A step, op by op</h2>
<p><label for="zoom">zoom</label> <input id="zoom" type="range" min="1" max="12" value="1"></p>
<div id="gantt" class="wide" tabindex="0" role="group" aria-label="Drawing of a step"></div>
</section>
<section id="curve-part"><h2>Tokens per second over tokens per step</h2>
<div id="curve" class="chart"></div><p id="curve-note" class="soft"></p></section>
<section id="ways-part"><h2>What if</h2><div id="ways" class="wide" tabindex="0" role="group"
 aria-label="Other ways"></div></section>
<section><h2>The recipe</h2><p><code id="command"></code></p>
<div id="run">{run}<button id="copy" type="button">Copy the recipe</button>{start}</div>
<p id="said" role="status"></p><pre id="recipe" tabindex="0"></pre></section>
</div></div>"""
    return _frame("Plan", body, script="plan.js", is_static=is_static)


def runs_page() -> str:
    """Return the Runs room."""
    figures = "".join(f'<th scope="col" class="figure">{name}</th>' for name in FIGURES)
    body = f"""<form id="start" autocomplete="off">
<label>recipe<select name="recipe"></select></label>
<label>name of the run<input name="name" maxlength="100" required></label>
<button>Start</button> <span id="said" role="status"></span></form>
<p id="folder" class="soft"></p>
<div class="wide" tabindex="0" role="group" aria-label="Runs"><table><thead><tr>
<th scope="col">run</th><th scope="col">state</th><th scope="col" class="figure">steps</th>
<th scope="col" class="figure">loss</th><th scope="col">loss curve</th>
<th scope="col" class="figure">held-out</th>{figures}<th scope="col" class="figure">time left</th>
<th scope="col">pages</th><th scope="col">actions</th></tr></thead>
<tbody id="runs"></tbody></table></div>
<p class="soft">{BASIS}</p>
<p id="none" role="status"></p>
{_servers()}
<section id="one" hidden><h2 id="name"></h2><p id="problem" class="bad"></p>
<table id="settings"></table>
<details id="log-part"><summary>What it printed</summary><pre id="log" tabindex="0"></pre></details>
<div id="how"><label>points in a mean <output id="smooth-shown">1</output>
<input id="smooth" type="range" min="0" max="8" value="0" aria-valuetext="1"></label>
<label><input id="is-log" type="checkbox"> logarithmic</label></div>
<div class="pair" id="curves"></div>
<section id="chat-part" hidden><h2>Talk with it</h2>
<div id="talk" role="log" aria-label="Conversation"></div>
<form id="chat" autocomplete="off"><label>message<input name="said" required></label>
<label id="attach" hidden>image, if any<input name="image" type="file" accept="image/*"
 data-most-bytes="{MAX_IMAGE_BYTES}"></label><button>Send</button></form></section>
<section id="samples-part"><h2>Answers to held-out rows</h2><div id="samples" class="wide"
 tabindex="0" role="group" aria-label="Answers to held-out rows"></div></section></section>"""
    return _frame("Runs", body, script="runs.js", is_static=False)


def _servers() -> str:
    """Return the places of servers, of their clients, and of the rewards of recipes."""

    def place(name: str, words: str, columns: Sequence[str]) -> str:
        kinds = ("" if i < NUM_WORDS else ' class="figure"' for i in range(len(columns)))
        heads = "".join(f'<th scope="col"{k}>{c}</th>' for k, c in zip(kinds, columns, strict=True))
        return (
            f'<div id="{name}-part" class="wide" tabindex="0" role="group" aria-label="{words}">'
            f'<table><thead><tr>{heads}</tr></thead><tbody id="{name}"></tbody></table></div>'
        )

    return f"""<section id="serving" hidden><h2>Servers</h2><div id="servers"></div>
{place("clients", "Clients of servers", CLIENT_COLUMNS)}</section>
<section id="rewarded" hidden><h2>Rewards</h2>
{place("rewards", "Rewards of recipes", REWARD_COLUMNS)}</section>"""


def _frame(title: str, body: str, *, script: str, is_static: bool) -> str:
    rooms = "" if is_static else _rooms(title)
    policy = (
        f'<meta http-equiv="Content-Security-Policy" content="{STATIC_POLICY}">\n'
        if is_static
        else ""
    )
    libraries = "".join(f'<script src="assets/{name}"></script>\n' for name in LIBRARIES)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{policy}<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} - Sluice</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="assets/{STYLE}">
<link rel="stylesheet" href="assets/studio.css">
</head>
<body data-static="{"yes" if is_static else "no"}" data-colours="{" ".join(COLOURS)}">
<header><h1>Sluice: {escape(title)}</h1>{rooms}</header>
<main>
{body}
</main>
{libraries}<script type="module" src="assets/{script}"></script>
</body>
</html>
"""


def _rooms(title: str) -> str:
    links = "".join(
        f'<a href="{href}"{" aria-current=page" if name == title else ""}>{name}</a>'
        for name, href in (("Plan", "./"), ("Runs", "runs"))
    )
    return f'<nav aria-label="Rooms">{links}</nav>'


def _by_name() -> list[tuple[str, str]]:
    return [(hub_id, name) for name, hub_id in published_ids().items()]


def _named(values: Iterable[str], names: dict[str, str]) -> list[tuple[str, str]]:
    return [(value, names.get(value, value)) for value in values]


def _group(title: str, *controls: str) -> str:
    return f"<fieldset><legend>{title}</legend>{''.join(controls)}</fieldset>"


def _select(
    name: str, words: str, options: Sequence[tuple[str, str]], *, chosen: str | None = None
) -> str:
    listed = "".join(
        f'<option value="{escape(value)}"{" selected" if value == chosen else ""}>'
        f"{escape(shown)}</option>"
        for value, shown in options
    )
    return f'<label>{words}<select name="{name}">{listed}</select></label>'


def _slider(name: str, words: str, values: Sequence[int], *, chosen: int) -> str:
    """Return a slider over given values; the page shows the value in its output."""
    return (
        f'<label>{words} <output id="{name}-shown">{chosen:,}</output>'
        f'<input type="range" name="{name}" min="0" max="{len(values) - 1}"'
        f' value="{values.index(chosen)}" data-values="{" ".join(map(str, values))}"'
        f' aria-valuetext="{chosen}"></label>'
    )


def _number(
    name: str,
    words: str,
    value: str,
    *,
    least: str,
    most: str = "",
    step: str = "any",
    hint: str = "",
) -> str:
    largest = f' max="{most}"' if most else ""
    return (
        f'<label>{words}<input type="number" name="{name}" value="{value}" min="{least}"{largest}'
        f' step="{step}" placeholder="{hint}"></label>'
    )


def _images_group() -> str:
    """Return what is asked of rows with images; models that see them are named for the page."""
    seeing = " ".join(name for name, facts in shipped_facts().items() if facts.get("tower"))
    controls = _number("num_images", "distinct images", "0", least="0", step="1") + _number(
        "image_tokens",
        "image.max_tokens",
        "",
        least="1",
        step="1",
        hint=f"{ASSUMED_IMAGE_TOKENS:,} are assumed",
    )
    return (
        f'<fieldset id="images" data-seeing="{seeing}" hidden disabled><legend>Images</legend>'
        f"{controls}</fieldset>"
    )


def _text(name: str, words: str, value: str, *, hint: str = "", limits: str = "") -> str:
    """Return a text of the form, which need not be inside it."""
    return (
        f'<label>{words}<input type="text" form="question" name="{name}" value="{value}"{limits}'
        f' placeholder="{hint}"></label>'
    )


def _other_model() -> str:
    hub_id = _text("hub_id", "hub id, or a folder here", "", hint="Qwen/Qwen3-8B")
    return (
        f'<div id="other" hidden>{hub_id}'
        f'<label>or the text of its {CONFIG}<textarea name="config" rows="4"></textarea></label>'
        f'<label>or the file<input type="file" id="config-file" accept=".json"></label></div>'
    )


DEPTH = 2  # the runs of a sweep are in a folder of their own
MOST_RUNS = 200
LOG_BYTES = 4096  # of the end of a log, which are shown
NUM_SPARK = 32  # points of a sparkline
NUM_LAST = 20  # steps whose time tells when the run will end
Json = dict[str, Any]


def run_names(folder: Path) -> list[str]:
    """Return the runs of a folder, the one written last first; no link leads out of it.

    A run that the page has started is one before it has its recipe: its log may say why it has not.
    """
    root = folder.resolve()
    found = {
        file.parent
        for depth in range(DEPTH)
        for name in (RUN_RECIPE, RUN_LOG)
        for file in root.glob("/".join(["*"] * (depth + 1)) + f"/{name}")
    }
    named = [(run.relative_to(root).as_posix(), _written_s(run)) for run in found]
    inner = [
        pair
        for pair in named
        if all(inside(folder, f"{pair[0]}/{name}") is not None for name in (RUN_RECIPE, RUN_LOG))
    ]
    return [name for name, _ in sorted(inner, key=lambda pair: (-pair[1], pair[0]))][:MOST_RUNS]


class Runs:
    """The runs of a folder. Whoever looks again and again reads only what is new of each."""

    def __init__(self, folder: Path) -> None:
        """Name the folder; nothing is read yet."""
        self.folder = folder
        self._progress: dict[str, _Progress] = {}
        self._servers = Servers(folder)
        self._lock = Lock()

    def all(self) -> Json:
        """Return each run in a line, and servers: its state, its last loss, when it will end."""
        with self._lock:
            names = run_names(self.folder)
            known = {name: self._progress.get(name) for name in names}
            self._progress = {n: p or _Progress(self.folder / n) for n, p in known.items()}
            runs = [self._line(name, one) for name, one in self._progress.items()]
            servers = self._servers.all()
        return {"folder": str(self.folder), "runs": runs, **servers}

    def one(self, name: str) -> Json:
        """Return one run: its line, its curves, its samples.

        Raises:
            CheckpointError: No run of the folder is called so.
        """
        run = self.folder / require_run(self.folder, name)
        with self._lock:
            progress = self._progress.setdefault(name, _Progress(run))
            found = self._line(name, progress) | {"charts": {}, "samples": [], "settings": []}
            found["sees"] = False
            charts = {chart.name: chart.complete_spec for chart in progress.charts()}
        found["log"] = _tail(run / RUN_LOG)
        if "problem" in found or not (run / RUN_RECIPE).is_file():
            return found
        try:
            recipe = RunDir(run).recipe()
            found["settings"] = [
                ["model", str(recipe.model.path or recipe.model.config)],
                ["learns by", recipe.objective.method],
            ]
            if (run / FIRST).exists():  # planned from the rows, whose lengths differ
                schedule = read_predictions(run)[-1].calibrated["schedule"]
                found["settings"].append(["tokens per step", f"{schedule['tokens_per_step']:,}"])
            if (images := read_images(run)) is not None:
                found["sees"] = True
                found["settings"].append(["images", images.line])
            found["charts"] = charts
            found["samples"] = [asdict(answer) for answer in answers(run)]
        except (SluiceError, OSError) as error:
            found["problem"] = str(error)
        return found

    def _line(self, name: str, progress: "_Progress") -> Json:
        """Return a run's line, and what may be done with it."""
        is_begun = (self.folder / name / RUN_RECIPE).is_file()
        line = progress.line() | {"can": None, "is_begun": is_begun}
        is_at_work = at_work(self.folder, name) is not None
        if is_at_work and line["state"] not in ("training", "damaged"):
            line["state"] = "starting"
        if is_stopping(self.folder, name):
            line["state"] = "stopping"
        elif is_at_work:
            line["can"] = "stop"
        elif line["state"] in ("stopped", "died before step 1") and "/" not in name and is_begun:
            line["can"] = "resume"
        return {"name": name, **line}


def _tail(log: Path) -> str:
    """Return the end of a log; nothing if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def report_of(folder: Path, name: str) -> str:
    """Return a run's report page as its files are now, finished or not.

    Raises:
        CheckpointError: No run of the folder is called so, or a file of it is damaged.
    """
    return run_page(folder / require_run(folder, name))


def require_run(folder: Path, name: str) -> str:
    """Return the name of a run that is in the folder.

    Raises:
        CheckpointError: None is called so.
    """
    if name not in run_names(folder):
        raise CheckpointError(
            f"{name!r} is no run of {folder}",
            limit="only runs of this folder are shown",
            hint="choose one of the list, or `sluice studio DIR` with another folder",
        )
    return name


class _Progress:
    """How far a run is, and its curves."""

    def __init__(self, run: Path) -> None:
        self._run = RunDir(run)
        self._new_rows = NewRows(self._run.metrics_file)
        self._clear()

    def _clear(self) -> None:
        self._steps = array("q")
        self._curves = {"loss": array("d"), "tokens_per_s": array("d")}
        self._evaluated: list[tuple[int, float]] = []
        self._last_s: deque[float] = deque(maxlen=NUM_LAST)  # times of steps, with their data
        self._unplaced: list[Json] = []  # rows that were not yet added to their start's
        self._start, self._of_start, self._predicted_s = 0, Steps(), 0.0
        self._figures: dict[str, str] = {}

    def _read(self) -> None:
        """Read the rows that are new.

        Raises:
            CheckpointError: One is damaged.
        """
        is_another, rows = self._new_rows.read()
        if is_another:
            self._clear()
        for row in rows:
            self._steps.append(row["step"])
            for key, curve in self._curves.items():
                curve.append(row[key])
            if EVAL_LOSS in row:
                self._evaluated.append((row["step"], row[EVAL_LOSS]))
            self._last_s.append(row["phases_s"]["step"] + row["phases_s"]["data wait"])
        self._unplaced += rows

    def _take_pace(self, predictions: Sequence[Prediction]) -> None:
        """Take the pace of the newest start, if a step is new."""
        for row in self._unplaced:
            start = start_of(predictions, row)
            if start.number > self._start:
                self._start, self._of_start = start.number, Steps()
                self._predicted_s = start.calibrated["predicted"]["step_s"]
            if start.number == self._start:
                self._of_start.add(row)
        if self._unplaced:
            self._figures = self._of_start.pace(self._predicted_s).shown
        self._unplaced = []

    def line(self) -> Json:
        """Return how far the run is; what is damaged is said and not raised."""
        found: Json = {
            "state": "stopped",
            "steps": 0,
            "of": None,
            "loss": None,
            "eta_s": None,
            "can": None,
            "pace": dict.fromkeys(FIGURES, "-"),
        }
        try:
            self._read()
            if (self._run.path / FIRST).exists():
                *_, newest = predictions = read_predictions(self._run.path)
                self._take_pace(predictions)
                found["of"] = newest.num_steps
                step_s = newest.calibrated["predicted"]["step_s"]
                found["pace"] |= self._figures or {"step predicted": shown_time(step_s)}
        except (SluiceError, OSError) as error:
            return {**found, "state": "damaged", "problem": str(error)}
        is_written = holder(self._run.path) is not None
        if self._steps:
            found["steps"] = self._steps[-1]
            found["loss"] = self._curves["loss"][-1]
            found["eval_loss"] = self._evaluated[-1][1] if self._evaluated else None
            found["spark"] = self._spark()
        if is_written:
            found["state"] = "training" if self._steps else "starting"
            found["eta_s"] = self._eta_s(found["of"])
        elif self._run.adapter.is_dir() or self._run.model.is_dir():
            found["state"] = "finished"
        elif not self._steps:
            found["state"] = "died before step 1"
        return found

    def _spark(self) -> list[float]:
        """Return the loss in a few numbers, the mean of each stretch of steps."""
        losses = self._curves["loss"]
        num = min(NUM_SPARK, len(losses))
        ends = [len(losses) * i // num for i in range(num + 1)]
        means = (sum(losses[a:b]) / (b - a) for a, b in pairwise(ends))
        return [mean for mean in means if math.isfinite(mean)]

    def _eta_s(self, num_steps: int | None) -> float | None:
        """Return the seconds of the steps to come, at the pace of the last ones."""
        if not self._steps or num_steps is None:
            return None
        each_s = sum(self._last_s) / len(self._last_s)
        return each_s * max(0, num_steps - self._steps[-1])

    def charts(self) -> Iterator[Chart]:
        """Return the curves."""
        for name, title, key, y in (
            ("run-loss", "Training loss", "loss", "loss"),
            ("run-rate", "Tokens per second", "tokens_per_s", "tokens/s"),
        ):
            if self._steps:
                pairs = zip(self._steps, self._curves[key], strict=True)
                yield _curve(name, title, list(pairs), y=y)
        if self._evaluated:
            yield _curve("run-eval", "Held-out loss", self._evaluated, y="loss", is_held_out=True)


def _curve(
    name: str, title: str, points: Sequence[tuple[int, float]], *, y: str, is_held_out: bool = False
) -> Chart:
    values = [{"step": step, y: value} for step, value in points]
    return curves(name, title, values, y=y, is_held_out=is_held_out)


def _written_s(run: Path) -> float:
    """Return when a run was last written, for the order of the list."""
    times = [0.0]
    for name in ("metrics.jsonl", RUN_RECIPE, RUN_LOG):
        with suppress(OSError):  # it may be removed meanwhile
            times.append((run / name).stat().st_mtime)
    return max(times)
