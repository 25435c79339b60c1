"""A suggested recipe as YAML, with its predicted figures and its settings explained in comments."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from finetune.planning.suggestion import SOME_ROWS, Form, Suggestion
from finetune.report.format import shown_break_even, shown_mib, shown_time
from finetune.report.images import pass_of
from finetune.report.plan import SOURCES
from offload.plan.facts.codec import CODECS, NATIVE
from offload.plan.machine.machine import GIB

EPOCH_TOKENS = 10_000_000
_COMMENTS = {
    "model.init": "a shape without weights: to try the program with",
    "adapter.rank": "columns of A, rows of B",
    "adapter.alpha": "the update is scaled by alpha / rank",
    "data.eval_frac": "held out, never trained on",
    "image.max_tokens": "of each image; larger ones are made smaller",
    "objective.method": "what is learned from such rows",
    "train.seq_len": "longest sequence; short rows share one",
    "train.tokens_per_step": "each layer is loaded once for all of them",
    "train.warmup_ratio": "of all steps",
    "offload.codec": "layers wait in this form, decoded once a visit",
    "offload.tier": "RAM holds less: layers are read from a file",
    "offload.vram_budget": "GiB that the plan may use",
}
_COLUMN, _WIDTH = 32, 80
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_LITERALS = ("true", "True", "TRUE", "false", "False", "FALSE", "null", "Null", "NULL")


def recipe_text(suggestion: Suggestion, *, name: str, of_step: str = "") -> str:
    """Return the recipe as a file.

    Args:
        suggestion: The recipe and its plan.
        name: How commands name the file: a path, or a shipped name.
        of_step: Remark on the tokens of a step; empty where rows are not known.
    """
    lines = [f"# {line}".rstrip() for line in _header(suggestion, name)]
    comments = _COMMENTS | ({"train.tokens_per_step": of_step} if of_step else {})
    return "\n".join([*lines, *_sections(suggestion, comments)])


def figures(form: Form) -> dict[str, str]:
    """Return the predicted figures of a form, by name, as they are written."""
    plan, machine = form.plan, form.plan.machine
    budget = plan.request.vram_budget_bytes
    vram_bytes = machine.vram_bytes if budget is None else min(machine.vram_bytes, budget)
    epoch_s = EPOCH_TOKENS / form.tokens_per_s
    images = {}
    if plan.request.images is not None:
        before = pass_of(plan)
        most, size = before.images.most_tokens, before.images.most_tokens * before.token_bytes
        images["images"] = f"{shown_mib(size)} of features on disk for each, of {most:,} tokens"
    return {
        "step": f"{plan.step_s:.3f} s of {plan.tokens_per_step:,} tokens",
        "speed": f"{form.tokens_per_s:,.1f} tokens/s; {EPOCH_TOKENS // 10**6} million tokens take"
        f" {shown_time(epoch_s)}",
        "VRAM": f"{plan.peak_bytes / GIB:.2f} GiB of {vram_bytes / GIB:.2f}",
        "RAM": f"{plan.host_bytes / GIB:.2f} GiB, to be free, of {machine.ram_bytes / GIB:.2f}",
        "streaming": f"adds less than 1% from {shown_break_even(plan.break_even_tokens)} tokens"
        " per step",
        **images,
    }


def _header(suggestion: Suggestion, name: str) -> Iterator[str]:
    chosen, target, goal = suggestion.chosen, suggestion.target, suggestion.goal
    machine, num_gpus = target.machine, target.num_gpus
    recipe = chosen.recipe
    cards = (
        machine.name if num_gpus == 1 else f"{num_gpus} GPUs of {machine.name}, which share a step,"
    )
    learns = [] if recipe.objective.is_cross_entropy else [recipe.objective.method.upper()]
    trained = "all weights of" if recipe.train.is_full else f"{recipe.adapter.stated.title} on"
    way = " with ".join([*learns, trained])
    yield from _wrapped(
        f"{way[0].upper()}{way[1:]} {suggestion.model.name}, {form_words(chosen)}, for"
        f" {cards} with"
        f" {machine.installed_bytes / GIB:g} GiB of RAM."
    )
    yield ""
    grade, drive = chosen.plan.costs.grade, machine.disk_bytes_per_s
    reads = ""
    if chosen.plan.request.is_on_disk and drive is not None:
        reads = f", and {drive.value / 1e9:g} GB/s from disk ({drive.source})"
    yield from _wrapped(
        f"Predicted, not measured, from {SOURCES[grade]} of {machine.name} ({grade}){reads},"
        f" for sequences of {chosen.seq_len:,} tokens that are full:"
    )
    for key, value in figures(chosen).items():
        yield f"  {key:10} {value}"
    yield ""
    yield from _wrapped(f"Goal {goal.name}, {goal.meaning}:")
    yield from (f"  {line}" for line in reasons(suggestion))
    yield ""
    yield f"  sluice plan {name} {target.options}"
    if num_gpus == 1:
        yield f"  sluice finetune {name}"
    else:
        launch = f"accelerate launch --multi_gpu --num_processes {num_gpus}"
        yield f"  {launch} cli.py finetune {name}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - len("# "))


def form_words(form: Form) -> str:
    """Return the form of the layers and where they wait."""
    codec = form.plan.request.typical.codec
    place = "disk" if form.plan.request.is_on_disk else "RAM"
    packed = f"exact, {codec}" if CODECS[codec].published else "exact, packed"
    exact = packed if CODECS[codec].is_automatic else codec
    return f"{'exact' if codec == NATIVE else exact} from {place}"


def reasons(suggestion: Suggestion) -> Iterator[str]:
    """Yield a line for each form that was planned: its speed, or what it is short of."""
    is_longest = suggestion.goal.is_longest
    for form in suggestion.forms:
        words = f"{form_words(form):24} "
        if form.short:
            yield f"{words}does not fit: short of {' and '.join(form.short)}"
            continue
        words += f"{form.tokens_per_s:,.0f} tokens/s"
        words += f" in sequences of {form.seq_len:,}" if is_longest else ""
        words += f", rounds each weight by {form.rounding:.1%}" if form.rounding else ""
        yield f"{words} <- chosen" if form is suggestion.chosen else words


def _sections(suggestion: Suggestion, comments: Mapping[str, str]) -> Iterator[str]:
    settings = suggestion.chosen.settings
    order = (
        "model",
        "adapter",
        "data",
        "image",
        "objective",
        "train",
        "offload",
        "output",
        "report",
    )
    note, has_experts = suggestion.model.note, suggestion.chosen.plan.facts.has_experts
    for section in order:
        if not settings.get(section):
            continue
        yield ""
        yield f"{section}:"
        for key, value in settings[section].items():
            is_model = section == "model" and key in ("path", "config")
            about = note if is_model and note else comments.get(f"{section}.{key}")
            if value == SOME_ROWS:
                about = "for rows of your own: data.path=my/train.jsonl"
            elif (section, key) == ("data", "path") and "image" in settings:
                about = "rows with images: docs/guides/images.md"
            line = f"  {key}: {_scalar(value)}"
            is_long = len(line) > _COLUMN - 2 or len(f"  # {about}") > _WIDTH - _COLUMN + 2
            if about and is_long:
                yield f"  # {about}:"
            yield f"{line:<{_COLUMN - 2}}  # {about}" if about and not is_long else line
        if section == "adapter" and "experts" not in settings[section] and has_experts:
            yield f"{'  # experts: true':<{_COLUMN - 2}}  # its experts too: this needs more"
    yield ""


def _scalar(value: Any) -> str:
    """Write a value so that the recipe's reader gives the same one."""
    if isinstance(value, str) and _WORD.fullmatch(value) and value not in _LITERALS:
        return value
    is_plain = not isinstance(value, str) or value.isprintable()
    return json.dumps(value, ensure_ascii=not is_plain)
