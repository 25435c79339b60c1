"""What the planner chose, and what it rejected and why: as tables and as JSON."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from finetune.report.format import (
    free_streaming,
    shown_gib,
    shown_graphs,
    shown_outputs,
    shown_sent_graphs,
    shown_time,
    table_of,
)
from finetune.report.plan import outputs_json
from offload.plan.facts.codec import ROUNDING
from offload.plan.fit import Shortage
from offload.plan.request import HEAD_CHUNK_TOKENS
from offload.plan.schedule.schedule import Order
from offload.plan.search import Candidate, Choice, WhatIf

SAME_PERCENT = 0.05  # what is shown as 0.0 %


def choice_tables(choice: Choice) -> RenderableType:
    """Return what was chosen, the best alternatives, and what other options would gain."""
    return Group(_choice_table(choice), _what_if_table(choice))


def choice_json(choice: Choice) -> dict[str, Any]:
    """Return the same for programs; sizes in bytes, times in seconds."""
    chosen = choice.chosen
    return {
        "choice": _settings(chosen)
        | {
            "step_s": choice.plan.step_s,
            "break_even_tokens": choice.plan.break_even_tokens,
        },
        "rejected": [
            _settings(one)
            | _shortages(one)
            | {
                "least_step_s": one.least_s,
                "is_simulated": one.step_s is not None,
                "reason": reason_against(one, chosen),
            }
            for one in choice.rejected
        ],
        "what_if": [
            _settings(what_if.best)
            | _shortages(what_if.best)
            | {
                "change": what_if.change,
                "tokens_per_s": what_if.tokens_per_s,
                "weight_rounding": ROUNDING.get(what_if.best.request.typical.codec, 0.0),
            }
            for what_if in choice.what_ifs
        ],
    }


def _settings(one: Candidate) -> dict[str, Any]:
    request = one.request
    return {
        "codec": request.typical.codec,
        "num_slots": one.residency.num_slots,
        "kept_graphs": one.residency.num_kept_graphs,
        **outputs_json(one.residency),
        "stash": "host" if request.is_stashed else "device",
        **({"embeddings": "host"} if request.typical.embeddings == "host" else {}),
        **({"head": "host"} if request.typical.head == "host" else {}),
        "head_chunk_tokens": request.typical.head_chunk_tokens,
        "mlp_chunk_tokens": request.typical.mlp_chunk_tokens,
        "micro_batch_size": request.typical.micro_batch_size,
        "num_micro_batches": request.num_micro_batches,
        "order": request.order.value,
    }


def _shortages(one: Candidate) -> dict[str, Any]:
    return {"short_bytes": {_memory(s): s.short_bytes for s in one.shortages}}


def _memory(shortage: Shortage) -> str:
    return shortage.what.removeprefix("of ")


def _words(one: Candidate) -> dict[str, str]:
    """Return a candidate's settings in words, by name."""
    request = one.request
    chunk, tile = request.typical.head_chunk_tokens, request.typical.mlp_chunk_tokens
    return {
        "codec": request.typical.codec,
        "slots": f"{one.residency.num_slots} slots",
        "graphs": shown_graphs(one.residency.num_kept_graphs),
        "sent graphs": shown_sent_graphs(one.residency),
        "outputs": shown_outputs(one.residency),
        "inputs": f"inputs {_place('host' if request.is_stashed else 'device')}",
        "sequences": (
            f"{request.num_micro_batches} x {request.typical.micro_batch_size} sequences"
        ),
        "chunk": f"head chunks of {chunk}",
        "tiles": f"MLPs in tiles of {tile} tokens" if tile else "MLPs whole",
        "embeddings": f"embeddings {_place(request.typical.embeddings)}",
        "head": f"head {_place(request.typical.head)}",
        "order": f"order {request.order.value}",
    }


def _place(where: str) -> str:
    return "in RAM" if where == "host" else "on the device"


def _settings_line(one: Candidate) -> str:
    """Return a candidate's settings in one line, without those of every usual plan."""
    words = _words(one)
    if not one.residency.num_kept_graphs:
        del words["graphs"]
    if not one.residency.num_sent_graphs:
        del words["sent graphs"]
    if not one.residency.has_outputs:
        del words["outputs"]
    if one.request.typical.head_chunk_tokens >= HEAD_CHUNK_TOKENS:
        del words["chunk"]
    if one.request.typical.mlp_chunk_tokens is None:
        del words["tiles"]
    if one.request.typical.embeddings == "device":
        del words["embeddings"]
    if one.request.typical.head == "device":
        del words["head"]
    if one.request.order is Order.LAYER_MAJOR:
        del words["order"]
    return ", ".join(words.values())


def changed_settings(one: Candidate, chosen: Candidate) -> str:
    """Return the settings in which a candidate differs from the chosen one."""
    others = _words(chosen)
    return ", ".join(words for name, words in _words(one).items() if words != others[name])


def gains(choice: Choice) -> dict[str, float]:
    """Return by what part each change that fits makes the tokens per second more, or fewer."""
    now = choice.chosen.tokens_per_s
    return {
        _change(what_if, choice): what_if.tokens_per_s / now - 1
        for what_if in choice.what_ifs
        if what_if.tokens_per_s is not None
    }


def reason_against(one: Candidate, chosen: Candidate) -> str:
    """Return why a candidate was not chosen."""
    if one.shortages:
        return "short of " + " and ".join(
            f"{shown_gib(s.short_bytes)} {s.what}" for s in one.shortages
        )
    percent = 100 * (one.least_s / chosen.least_s - 1)
    return "no faster" if percent < SAME_PERCENT else f"slower by {percent:.1f} %"


def _choice_table(choice: Choice) -> Table:
    plan, chosen = choice.plan, choice.chosen
    table = table_of("The choice", "", "step", "")
    table.columns[2].justify = "left"
    table.add_row(_settings_line(chosen), shown_time(chosen.least_s), "chosen")
    for one in choice.rejected:
        limit = "" if one.step_s is not None else "at least "
        table.add_row(
            _settings_line(one), limit + shown_time(one.least_s), reason_against(one, chosen)
        )
    if plan.num_slots < plan.facts.num_layers:
        table.caption_justify = "left"
        typical = plan.request.typical
        table.caption = (
            f"In micro-batches of {typical.size}, streaming "
            + free_streaming(plan.break_even_tokens, is_in_rounds=plan.request.num_rounds > 1)
            + f"; this step has {plan.tokens_per_step:,} tokens."
        )
    return table


def _what_if_table(choice: Choice) -> Table:
    plan = choice.plan
    table = table_of("What if", "", "tokens/s", "")
    table.columns[2].justify = "left"
    now = plan.tokens_per_step / choice.chosen.least_s
    table.add_row("as chosen", f"{now:,.0f}", "")
    for what_if in choice.what_ifs:
        rate = what_if.tokens_per_s
        if rate is None:
            table.add_row(
                _change(what_if, choice), "-", reason_against(what_if.best, choice.chosen)
            )
        else:
            table.add_row(
                _change(what_if, choice), f"{rate:,.0f}", f"{100 * (rate / now - 1):+.1f} %"
            )
    return table


def _change(what_if: WhatIf, choice: Choice) -> str:
    machine = choice.plan.machine
    if what_if.change == "memory":
        return f"1 GiB more {'VRAM' if machine.device == 'cuda' else 'RAM'}"
    if what_if.change == "link":
        return "a link of twice the rate"
    if what_if.change == "tokens":
        return f"{2 * choice.plan.tokens_per_step:,} tokens per step"
    if what_if.change == "fewer_tokens":
        return f"{choice.plan.tokens_per_step // 2:,} tokens per step"
    if what_if.change == "micro_batch":
        then = what_if.best.request
        size = f"`train.micro_batch_size: {then.typical.micro_batch_size}`"
        is_same = then.tokens_per_step == choice.plan.tokens_per_step
        return size if is_same else f"{size}, {then.tokens_per_step:,} tokens per step"
    rounding = ROUNDING[what_if.change]
    return f"offload.codec: {what_if.change}, which rounds each weight, by {rounding:.1%} RMS"
