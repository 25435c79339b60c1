"""Writes the parts of README and docs that come from the code.

    python -m tests.tools.reference            write them
    python -m tests.tools.reference --check    list pages that are not current, exit code 1 if any

A part is the text between `<!-- generated: NAME -->` and `<!-- end of NAME -->`; the rest of a page
is written by hand.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

import finetune
import offload
from finetune import app
from finetune.commands.plan import HostOptions
from finetune.exits import EXIT_DOES_NOT_FIT, EXIT_USER
from finetune.planning.candidates import chosen_plan, full_requests
from finetune.planning.compare import budgeted, slowest_card
from finetune.planning.request import find_machine
from finetune.planning.subject import Subject, model_subject, subject_of
from finetune.recipe.extensions import FORMATS
from finetune.recipe.load import shipped_shapes
from finetune.recipe.recipe import json_schema, shipped_recipes, with_settings
from finetune.report.format import shown_break_even
from finetune.serve.planned import Capacity, plan_serving
from offload.errors import DoesNotFitError, SluiceError
from offload.plan import Machine, Plan
from offload.plan.machine.cards import CARDS
from offload.plan.machine.machine import GIB, Dtype, named_machine
from tests.tools import clusters, compatibility, measured

ROOT = Path(__file__).parents[2]

Json = Mapping[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Return text as it may be in a cell."""
    return " ".join(text.split()).replace("|", "\\|")


def clusters_table() -> str:
    """Return which way of sharing a step the plan takes on four clusters."""
    return table(clusters.HEAD, clusters.rows())


def measured_cards() -> str:
    """Return how far predictions were off, by card."""
    return table(measured.CARDS, measured.cards())


def measured_rows() -> str:
    """Return each step that was predicted and measured."""
    return table(measured.ROWS, measured.rows())


SERVED = (
    "qwen3-8b --machine rtx3090 --ram 64",
    "qwen3-8b --machine rtx3090 --row-tokens 512 --ram 64",
    "qwen3-30b-a3b --machine rtx3090 --ram 64",
    "qwen3-30b-a3b --machine rtx5090 --ram 64",
)


def serving() -> str:
    """Return what a server trains and samples by plan, for some commands."""
    group: Any = typer.main.get_group(app.app)
    rows = []
    for words in SERVED:
        given = (
            group.commands["serve"].make_context("serve", [*words.split(), "--ram", "64"]).params
        )
        capacity = Capacity(
            num_clients=given["clients"],
            num_samplers=given["samplers"],
            max_rank=given["rank"],
            row_tokens=given["row_tokens"],
            cached_tokens=given["cached_tokens"],
        )
        machine = find_machine(
            given["machine"], dtype="bfloat16", ram_bytes=int(given["ram"] * GIB)
        )
        one, *_, every = plan_serving(subject_of(given["model"], ()), machine, capacity).rates
        sampled, grouped = every.sampled, every.grouped
        rows.append(
            [
                f"`sluice serve {words}`",
                f"{one.trained_tokens_per_s:,.0f}",
                f"{every.trained_tokens_per_s:,.0f}",
                f"{every.slowdown:.1f} times",
                f"{sampled.tokens_per_s:,.0f} ({sampled.num_answers} answers)",
                f"{grouped.tokens_per_s:,.0f} ({grouped.num_answers} answers)",
            ]
        )
    head = ("command", "trained tokens/s, alone", "together", "each slower by")
    return table((*head, "sampled tokens/s, an answer to a request", "several to a request"), rows)


# ------------------------------------------------------------------------------- recipe


def settings() -> str:
    """Return a table for each section of a recipe, from its JSON schema."""
    schema = json.loads(json_schema())
    parts = []
    for name, section in schema["properties"].items():
        fields = schema["$defs"][section["$ref"].rsplit("/", 1)[-1]]
        parts.append(f"## `{name}`\n\n{fields['description']}")
        parts += [_table_of(fields)] if "oneOf" not in fields else []
        for choice in fields.get("oneOf", ()):
            method = choice["properties"].pop("method")["const"]
            own = _table_of(choice) if choice["properties"] else "It has no other settings.\n"
            default = "" if "method" in choice.get("required", ()) else " It is the default."
            heading = f"### `{name}.method: {method}`"
            parts.append(f"{heading}\n\n{choice['description']}{default}\n\n{own}")
        parts += [_formats()] if name == "data" else []
    return "\n\n".join(parts).replace("\n\n\n", "\n\n")


def _formats() -> str:
    """Return a table of the formats of rows."""
    rows = [
        [f"`{name}`", one.summary, *(", ".join(map(cell, c)) for c in (one.columns, one.optional))]
        for name, one in FORMATS.items()
    ]
    return "### `data.format`\n\n" + table(("format", "a row is", "columns", "may have"), rows)


def _table_of(fields: Json) -> str:
    """Return a table of the settings of a section, or of one choice of it."""
    required = fields.get("required", ())
    rows = [
        [
            f"`{key}`",
            _limits(field),
            "required" if key in required else f"`{json.dumps(field['default'])}`",
            cell(field["description"] + _example(field)),
        ]
        for key, field in fields["properties"].items()
    ]
    return table(("setting", "value", "default", "meaning"), rows)


def _example(field: Json) -> str:
    examples = field.get("examples")
    return f" Example: `{json.dumps(examples[0])}`." if examples else ""


def _limits(field: Json) -> str:
    """Return what a field takes, in words."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_limits(one) for one in field["anyOf"]))
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "$ref" in field:
        return "sources"
    kind = field["type"]
    if kind == "array":
        return f"list of {_limits(field['items'])}"
    if kind == "object":
        return f"map from names to {_limits(field['additionalProperties'])}"
    if kind in ("integer", "number"):
        return {"integer": "whole number", "number": "number"}[kind] + _range(field)
    return {"string": "text", "boolean": "`true` or `false`", "null": "`null`"}[kind]


def _range(field: Json) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    found = [f"{word} {field[key]:,}" for key, word in words.items() if key in field]
    return f" {', '.join(found)}" if found else ""


def shipped() -> str:
    """Return the shipped recipes, each with the first sentence of its comment, and the models."""
    rows = [
        [f"`{name}`", cell(path.read_text().split(".\n")[0].replace("\n#", "").removeprefix("#"))]
        for name, path in shipped_recipes().items()
    ]
    models = ", ".join(f"`{name}`" for name in shipped_shapes())
    return f"{table(('recipe', 'what it does'), rows)}\nModel configs: {models}.\n"


# ---------------------------------------------------------------------------------- CLI

PLACEHOLDERS = {float: "NUMBER", int: "N", str: "TEXT", Path: "PATH", list[str]: "TEXT"}


def commands() -> str:
    """Return all commands with their arguments and options, from typer."""
    group = typer.main.get_group(app.app)
    return "\n".join(_command(name, command) for name, command in _leaves(group))


def _leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _leaves(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _command(name: str, command: Any) -> str:
    hints = get_type_hints(command.callback)
    params = [p for p in command.params if "--help" not in p.opts]
    arguments = [p for p in params if p.param_type_name == "argument"]
    options = [p for p in params if p.param_type_name == "option"]
    words = [_argument(p) for p in arguments]
    words += [_option(p, hints[p.name]) for p in options if p.required]
    words += ["[OPTIONS]"] if any(not p.required for p in options) else []
    rows = [[f"`{_argument(p)}`", cell(p.help or "")] for p in arguments]
    rows += [[f"`{_option(p, hints[p.name])}`", cell(_about(p))] for p in options]
    return "\n".join(
        [
            f"## `sluice {name}`",
            "",
            inspect.cleandoc(command.help).split("\n\n")[0],
            "",
            f"```text\n{' '.join(['sluice', name, *words])}\n```",
            "",
            table(("argument or option", "meaning"), rows) if rows else "",
        ]
    )


def _argument(param: Any) -> str:
    if param.metavar:
        return str(param.metavar)
    name = param.name.upper()
    return name if param.required else f"[{name}]"


def _option(param: Any, hint: Any) -> str:
    return param.opts[0] if param.is_flag else f"{param.opts[0]} {_placeholder(hint)}"


def _placeholder(hint: Any) -> str:
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    kinds = tuple(get_args(kind)[0] if get_origin(kind) is list else kind for kind in kinds)
    return next(PLACEHOLDERS[kind] for kind in kinds if kind in PLACEHOLDERS)


def _about(param: Any) -> str:
    has_default = not param.is_flag and not param.required and param.default is not None
    default = f" Default: `{param.default}`." if has_default else ""
    return f"{param.help or ''}{' Required.' if param.required else ''}{default}"


# ------------------------------------------------------------------------------- errors


def errors() -> str:
    """Return the tree of errors, from the classes' docstrings."""
    for package in ("finetune.errors", "offload.errors"):
        importlib.import_module(package)
    rows = [
        [
            f"{'&nbsp;' * 4 * depth}`{error.__name__}`",
            f"`{_public_module(error)}`",
            str(EXIT_DOES_NOT_FIT if issubclass(error, DoesNotFitError) else EXIT_USER),
            cell(inspect.cleandoc(error.__doc__ or "").split("\n\n")[0]),
        ]
        for depth, error in _subclasses(SluiceError, 0)
    ]
    return table(("error", "import from", "exit code", "raised for"), rows)


def _subclasses(error: type[SluiceError], depth: int) -> Iterator[tuple[int, type[SluiceError]]]:
    yield depth, error
    children = (c for c in error.__subclasses__() if c.__module__.endswith(".errors"))
    for child in sorted(children, key=lambda c: (c.__module__, inspect.getsourcelines(c)[1])):
        yield from _subclasses(child, depth + 1)


def _public_module(error: type) -> str:
    for package in (offload, finetune):
        if error.__name__ in package.__all__:
            return package.__name__
    return error.__module__


# ------------------------------------------------------------------------------- folders


def folders() -> str:
    """Return the packages with the first line of each docstring."""
    rows = []
    for package in (finetune, offload):
        rows.append([f"`{package.__name__}/`", _first_line(package.__name__)])
        found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        rows += [
            [f"`{module.name.replace('.', '/')}/`", _first_line(module.name)]
            for module in found
            if module.ispkg
        ]
    return table(("folder", "what is in it"), rows)


def _first_line(package: str) -> str:
    doc = importlib.import_module(package).__doc__ or ""
    return cell(inspect.cleandoc(doc).split("\n\n")[0])


def contracts() -> str:
    """Return who may import whom, from import-linter's settings."""
    return "\n".join(f"- {_contract(one)}" for one in _tool("importlinter")["contracts"]) + "\n"


def markers() -> str:
    """Return the markers of tests, and whether the default run leaves them out."""
    settings = _tool("pytest")["ini_options"]
    chosen = settings["addopts"][settings["addopts"].index("-m") + 1]
    rows = []
    for line in settings["markers"]:
        name, _, meaning = line.partition(": ")
        rows.append([f"`{name}`", meaning, "no" if f"not {name}" in chosen else "yes"])
    return table(("marker", "meaning", "run by default"), rows)


def _tool(name: str) -> Json:
    tools: Json = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    found: Json = tools[name]
    return found


def _contract(one: Json) -> str:
    title = f"**{one['name']}**"
    if one["type"] == "layers":
        above = " > ".join(f"`{layer.replace(' | ', '`, `')}`" for layer in one["layers"])
        return f"{title}: {above}"
    if one["type"] == "forbidden":
        sources, targets = (
            ", ".join(f"`{module}`" for module in one[f"{which}_modules"])
            for which in ("source", "forbidden")
        )
        doors = [ignored.split(" -> ")[0] for ignored in one.get("ignore_imports", ())]
        but = f", except in {', '.join(f'`{door}`' for door in doors)}" if doors else ""
        return f"{title}: {sources} may not import {targets}{but}"
    assert one["type"] == "acyclic_siblings"
    return f"{title}: no modules or folders next to each other import each other in a circle"


# ------------------------------------------------------------------------ cards and models


def cards() -> str:
    """Return the cards that `--machine` knows, with the rates that a plan takes for them."""
    rows = []
    for name, card in CARDS.items():
        dtype: Dtype = "bfloat16" if card.has_bf16 else "float16"
        machine = named_machine(name, dtype=dtype)
        rows.append(
            [
                f"`{name}`",
                f"{card.memory_gib:g}",
                f"{card.listed_mib:,}" if card.listed_mib else "not found",
                f"{machine.vram_bytes / GIB:.2f}",
                f"{machine.gemm_flops_per_s.value / 1e12:.0f} ({dtype})",
                f"{machine.memory_bytes_per_s.value / 1e9:,.0f}",
                f"{machine.h2d_bytes_per_s.value / 1e9:g}",
            ]
        )
    head = (
        *("card", "GiB as sold", "MiB listed", "GiB to use"),
        *("TFLOP/s of large products", "GB/s of memory", "GB/s host to device"),
    )
    return table(head, rows)


def plan() -> str:
    """Return what `sluice plan` prints of the recipe and card that the guide names."""
    shown = subprocess.run(
        [sys.executable, "cli.py", "plan", "qwen30b_lora_5090", "--machine", "rtx5090"],
        cwd=ROOT,
        env={"COLUMNS": "100", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = (line.rstrip() for line in shown.splitlines())
    return "```text\n" + "\n".join(lines) + "\n```\n"


FIT_MODELS = (
    *("ministral-3-8b", "qwen3.5-9b", "gpt-oss-20b", "gemma-4-26b-a4b", "qwen3.6-27b"),
    *("glm-4.7-flash", "nemotron-3-nano-30b-a3b", "qwen3.6-35b-a3b", "qwen3-8b"),
    *("qwen3-30b-a3b", "llama-3.1-70b", "gpt-oss-120b", "mistral-small-4"),
)
FitCodec = Literal["auto", "nf4"]
FIT_CODECS: tuple[FitCodec, ...] = ("auto", "nf4")
FIT_VRAM_GIB = (8, 12, 16, 24, 32)
FIT_RAM_GIB = 64


def fit_table() -> str:
    """Return what trains in how much device memory, with the predicted tokens per second.

    The figures are those of `sluice fit`.
    """
    host = HostOptions(ram_gib=FIT_RAM_GIB, link_gb_per_s=None)
    names = [slowest_card(vram) for vram in FIT_VRAM_GIB]
    machines = [
        budgeted(host.machine(name, dtype="bfloat16"), vram_gib=vram)
        for name, vram in zip(names, FIT_VRAM_GIB, strict=True)
    ]
    subjects = [model_subject(model, []) for model in FIT_MODELS]
    rows = [[s.name, *(_plainest(s, machine) for machine in machines)] for s in subjects]
    head = [f"{vram} GiB ({name})" for name, vram in zip(names, FIT_VRAM_GIB, strict=True)]
    return table(("model", *head), rows)


FORMS_OF = (("qwen3-8b", 24), ("qwen3-8b", 12), ("qwen3.6-27b", 24), ("qwen3-30b-a3b", 24))


def forms_table() -> str:
    """Return what exact weights cost against 4 bits, and from how many tokens streaming is free."""
    rows = []
    for model, vram in FORMS_OF:
        card = slowest_card(vram)
        host = HostOptions(ram_gib=FIT_RAM_GIB, link_gb_per_s=None)
        machine = budgeted(host.machine(card, dtype="bfloat16"), vram_gib=vram)
        subject = model_subject(model, [])
        exact, rounded = (_planned(subject, machine, codec, "ram") for codec in FIT_CODECS)
        assert exact is not None
        assert rounded is not None
        gain = exact.step_s / rounded.step_s - 1
        free = shown_break_even(exact.break_even_tokens)
        rows.append(
            [
                model,
                f"{vram} GiB ({card})",
                _cell(exact, ()),
                _cell(rounded, ()),
                f"{gain:+.0%}",
                free,
            ]
        )
    return table(("model", "card", "exact", "4 bits", "gain", "streaming is free from"), rows)


def _plainest(subject: Subject, machine: Machine) -> str:
    """Return the speed of the exact form in RAM, else of the faster of exact on disk and nf4."""
    exact = _planned(subject, machine, "auto", "ram")
    if exact:
        return _cell(exact, ())
    others = {
        ("disk",): _planned(subject, machine, "auto", "disk"),
        ("nf4",): _planned(subject, machine, "nf4", "ram"),
        ("nf4", "disk"): _planned(subject, machine, "nf4", "disk"),
    }
    fits = {marks: made for marks, made in others.items() if made}
    if not fits:
        return "-"
    marks = min(fits, key=lambda marks: fits[marks].step_s)
    return _cell(fits[marks], marks)


def _planned(
    subject: Subject, machine: Machine, codec: FitCodec, tier: Literal["ram", "disk"]
) -> Plan | None:
    recipe = with_settings(subject.recipe, {"offload.codec": codec, "offload.tier": tier})
    return chosen_plan(subject.facts, machine, full_requests(recipe, subject.facts, num_ranks=1))


def _cell(made: Plan, marks: Sequence[str]) -> str:
    return f"{made.tokens_per_step / made.step_s:,.0f} {', '.join(marks)}".strip()


# ------------------------------------------------------------------------------ the pages

Part = Callable[[], str]


def pairs() -> str:
    """Return a table for each section of what does not go with its settings."""
    head = ("not possible", "with", "why", "instead")
    return "\n".join(
        f"### {f'With `{section}`' if section else 'At all'}\n\n{_cells(head, rows)}"
        for section, rows in compatibility.pairs().items()
    )


def placed() -> str:
    """Return the table of what does not go with a model, a device or a number of processes."""
    return _cells(("not possible", "with", "why", "instead"), compatibility.placed())


def numbers() -> str:
    """Return the table of numbers that have to add up."""
    return _cells(("setting", "with", "why", "instead"), compatibility.numbers())


def runs() -> str:
    """Return the table of what runs that train together cannot have."""
    return _cells(("not possible", "why", "instead"), compatibility.runs())


def refusals() -> str:
    """Return the settings of a Trainer that are refused, each with the reason and the fix."""
    return _cells(("setting", "why", "instead"), compatibility.trainer())


def _cells(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(head, [[cell(text) for text in row] for row in rows])


def launches() -> str:
    """Return what a visit launches and moves, before and after, for a shape of each family."""
    from finetune.recipe.load import load_shape
    from tests.visits import OFF, ON, SHAPES, counted_visit, priced_visit

    rows = []
    for name in SHAPES:
        fields = load_shape(name)
        before, after = (counted_visit(fields, levers) for levers in (OFF, ON))
        priced = priced_visit(fields, ON)
        moved = [sum(part.num_bytes for part in visit.values()) for visit in (before, after)]
        rows.append(
            [
                f"`{fields['model_type']}`",
                name,
                *(
                    " + ".join(f"{part.num_launches:.0f}" for part in visit.values())
                    for visit in (before, after, priced)
                ),
                *(f"{num_bytes / 1e6:,.0f}" for num_bytes in moved),
                f"{moved[1] / moved[0]:.2f}",
            ]
        )
    head = (
        *("family", "shape", "launches before", "after", "after, by the plan"),
        *("MB before", "MB after", "of it"),
    )
    return table(head, rows)


PARTS: Mapping[str, Mapping[str, Part]] = {
    "README.md": {"fit": fit_table, "forms": forms_table},
    "docs/guides/choose-a-card.md": {"plan": plan},
    "docs/guides/serve.md": {"serving": serving},
    "docs/guides/trainer.md": {"refusals": refusals},
    "docs/guides/several-gpus.md": {"clusters": clusters_table},
    "docs/reference/recipe.md": {"settings": settings, "shipped": shipped},
    "docs/reference/compatibility.md": {
        "pairs": pairs,
        "numbers": numbers,
        "placed": placed,
        "runs": runs,
    },
    "docs/reference/cli.md": {"commands": commands},
    "docs/measured.md": {"measured_cards": measured_cards, "measured_rows": measured_rows},
    "docs/reference/errors.md": {"errors": errors},
    "docs/reference/machine-file.md": {"cards": cards},
    "docs/development/architecture.md": {"folders": folders, "contracts": contracts},
    "docs/development/testing.md": {"markers": markers},
    "docs/development/launches.md": {"launches": launches},
}


def with_part(page: str, name: str, text: str) -> str:
    """Return a page with another text in one of its generated parts."""
    pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end of {name} -->)"
    written, count = re.subn(
        pattern, lambda marks: f"{marks[1]}\n{text}\n{marks[2]}", page, flags=re.DOTALL
    )
    assert count == 1, f"a page has {count} parts called {name}"
    return written


def current(page: str) -> str:
    """Return a page as it should be, by its path in the repository."""
    text = (ROOT / page).read_text()
    for name, part in PARTS[page].items():
        text = with_part(text, name, part())
    return text


def main() -> int:
    """Write the generated parts, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("pages", nargs="*", help="of these pages; all without it")
    options = parser.parse_args()
    unknown = [page for page in options.pages if page not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]} has no generated part; these have: {', '.join(PARTS)}")
    stale = []
    for page in options.pages or PARTS:
        text = current(page)
        if text != (ROOT / page).read_text():
            stale.append(page)
            if not options.check:
                (ROOT / page).write_text(text)
    verb = "is not current: `make generate`" if options.check else "written"
    sys.stdout.writelines(f"{page} {verb}\n" for page in stale)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
