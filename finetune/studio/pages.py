"""The pages of the studio, with choices from the planner's own lists, and their files."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import get_args

from finetune.recipe.objective_section import Method
from finetune.recipe.shipped import published_ids
from finetune.report.pages.page import COLOURS, LIBRARIES, STYLE
from finetune.report.pages.page import asset as report_asset
from finetune.studio.question import CONFIG, COUNTED_BY_PEFT, HERE, Trained
from offload.plan.facts.codec import CodecName
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
_OBJECTIVES = {"sft": "sft: repeat the rows", "distill": "distill: follow a teacher"}
_METHODS = {"lora": "LoRA", "dora": "DoRA", "all": "all weights of the model"}


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
    others = () if is_static else COUNTED_BY_PEFT
    methods = [one for one in get_args(Trained) if one in (*_METHODS, *others)]
    models = [(name, f"{name} ({hub_id})") for hub_id, name in _by_name()]
    cards = [(name, f"{name} ({card.memory_gib:g} GiB)") for name, card in CARDS.items()]
    more = [] if is_static else [("other", "another: hub id or config.json")]
    here = [] if is_static else [(HERE, HERE)]
    form = "".join(
        (
            _group(
                "Model",
                _select("model", "model", [*models, *more], chosen="qwen3-8b"),
                "" if is_static else _other_model(),
                _select("objective", "learns by", _named(get_args(Method), _OBJECTIVES)),
                _select("method", "trains", _named(methods, _METHODS)),
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
                _select("micro_batch_size", "sequences per forward", _named(SIZES, {})),
                _select("codec", "layers wait as", _named(("auto", *get_args(CodecName)), {})),
            ),
            _group(
                "Data and prices",
                _number("data_tokens", "tokens to train on", "10000000", least="0", step="1"),
                _number("price_per_hour", "price per hour of the machine", "0", least="0"),
                _number("power_watts", "power, W", "0", least="0"),
                _number("price_per_kwh", "price per kWh", "0", least="0"),
            ),
        )
    )
    waiting = "Loading the planner, once: 9 MB ..." if is_static else "Planning ..."
    body = f"""<div class="room"><form id="question" autocomplete="off">{form}</form>
<div id="answer">
<section aria-label="Answer"><p id="headline" role="status">{waiting}</p>
<dl id="figures"></dl><p id="settings" class="soft"></p></section>
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
<p><button id="copy" type="button">Copy</button> <span id="copied" role="status"></span></p>
<pre id="recipe" tabindex="0"></pre></section>
</div></div>"""
    return _frame("Plan", body, script="plan.js", is_static=is_static)


def runs_page() -> str:
    """Return the Runs room."""
    body = """<p id="folder" class="soft"></p>
<div class="wide" tabindex="0" role="group" aria-label="Runs"><table><thead><tr>
<th scope="col">run</th><th scope="col">state</th><th scope="col" class="figure">steps</th>
<th scope="col" class="figure">loss</th><th scope="col" class="figure">held-out</th>
<th scope="col" class="figure">tokens/s</th><th scope="col" class="figure">ends in</th>
<th scope="col">report</th></tr></thead><tbody id="runs"></tbody></table></div>
<p id="none" role="status"></p>
<section id="one" hidden><h2 id="name"></h2><p id="problem" class="bad"></p>
<table id="settings"></table>
<div class="pair" id="curves"></div>
<section id="samples-part"><h2>Answers to held-out rows</h2><div id="samples" class="wide"
 tabindex="0" role="group" aria-label="Answers to held-out rows"></div></section></section>"""
    return _frame("Runs", body, script="runs.js", is_static=False)


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


def _other_model() -> str:
    return (
        '<div id="other" hidden><label>hub id<input type="text" name="hub_id"'
        ' placeholder="Qwen/Qwen3-8B"></label>'
        f'<label>or the text of its {CONFIG}<textarea name="config" rows="4"></textarea></label>'
        f'<label>or the file<input type="file" id="config-file" accept=".json"></label></div>'
    )
