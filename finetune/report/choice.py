"""What the planner chose, and what it rejected and why."""

from typing import Any

from finetune.recipe.recipe import Recipe
from finetune.report.energy import plan_cost
from finetune.report.format import shown_count, shown_gib, shown_mib
from finetune.report.plan import outputs_json, ranks_table, rows_of
from finetune.report.rows import BRIEF, VERBOSE, Part, Row, Table, as_json, tables
from offload.plan.facts.codec import CODECS
from offload.plan.facts.facts import WeightInventory
from offload.plan.machine.machine import Machine, Rate
from offload.plan.plan import Plan
from offload.plan.search import Candidate, Choice, WhatIf

SAME_FRAC = 0.0005  # what is shown as 0.0 %
LEAST_GAIN_FRAC = 0.005
ABSENT = {"embeddings": "device", "head": "device"}  # what a setting is that JSON leaves out
NOT_SET = ("memory", "link")  # what-ifs that no setting makes true


def inventory_table(stock: WeightInventory) -> list[Part]:
    """Return a line for each class of weights in each form, and what share of them is encoded."""
    columns = ("class", "form", "parameters", "share", "decoded", "as stored")
    kinds = dict.fromkeys((row.kind, row.codec) for row in stock.rows)
    groups = {key: [row for row in stock.rows if (row.kind, row.codec) == key] for key in kinds} | {
        ("all", ""): list(stock.rows)
    }
    lines = [
        (
            *key,
            shown_count(num := sum(row.num_parameters for row in rows)),
            f"{num / stock.num_parameters:.1%}",
            shown_mib(sum(row.decoded_bytes for row in rows)),
            shown_mib(sum(row.encoded_bytes for row in rows)),
        )
        for key, rows in groups.items()
    ]
    note = (
        f"{stock.encoded_frac:.1%} of all parameters are stored encoded,"
        f" {stock.layers_encoded_frac:.1%} of the decoder layers' bytes"
    )
    return [Table("Weights", columns, lines, note)]


def host_map(machine: Machine, plan: Plan | None) -> Table:
    """Return the memories of a machine from the fastest to the slowest, each rate with its source.

    Args:
        machine: Its rates and capacities.
        plan: What is to be stored in the memories, if it is known.
    """
    is_cuda, device, name = machine.device == "cuda", "", machine.name
    host, disk = "", "layers, with `offload.tier: disk`"
    if plan is not None:
        cargo = [cost.weight_bytes for cost in plan.costs.layers]
        size = shown_gib(sum(cargo))
        device = f"{shown_gib(plan.peak_bytes)}, {plan.num_slots} slots of {shown_gib(max(cargo))}"
        host, disk = f"{shown_gib(plan.host_bytes)}, {size} of layers", "nothing"
        if plan.request.is_on_disk:
            host, disk = shown_gib(plan.host_bytes), f"{size} of layers"
    vram = f"VRAM of {name}" if is_cuda else f"slots, in the RAM of {name}"
    duplex = "while the other direction is busy" if is_cuda else "while the CPU computes"
    locked = f" ({shown_gib(machine.pinned_bytes)} may be page-locked)" if is_cuda else ""
    rates = {
        "copies to the device": machine.h2d_bytes_per_s,
        f"  {duplex}": machine.h2d_duplex_bytes_per_s,
        "copies to the host": machine.d2h_bytes_per_s,
    }
    nodes = [
        (
            f"  node {one.number}, {one.num_cpus} CPUs{', near the device' * one.is_near}",
            *(shown_gib(one.ram_bytes), _rate(one.copy_bytes_per_s), ""),
        )
        for one in machine.nodes
    ]
    lines = [
        (vram, shown_gib(machine.vram_bytes), _rate(machine.memory_bytes_per_s), device),
        *((what, "", _rate(rate), "") for what, rate in rates.items()),
        (
            f"RAM{locked}",
            *(shown_gib(machine.ram_bytes), _rate(machine.host_memory_bytes_per_s), host),
        ),
        *nodes,
        ("disk", "", _rate(machine.disk_bytes_per_s), disk),
    ]
    columns = ("", "size", "rate", "" if plan is None else "planned")
    return Table("Memories, the fastest first", columns, lines)


def _rate(rate: Rate | None) -> str:
    return "not measured" if rate is None else f"{rate.value / 1e9:,.1f} GB/s ({rate.source})"


def plan_rows(choice: Choice, recipe: Recipe, *, num_steps: int | None = None) -> list[Row]:
    """Return all that the chosen plan says, for so many steps or those that the recipe names."""
    steps = num_steps or recipe.train.steps
    rows = rows_of(choice.plan, faster=faster_rows(choice), prices=recipe.report, num_steps=steps)
    return rows + recipe.objective.more_rows(choice.plan, recipe.train, num_steps=steps)


def plan_figures(choice: Choice, recipe: Recipe) -> dict[str, Any]:
    """Return the same with the alternatives for programs; sizes in bytes, times in seconds."""
    figures = as_json(plan_rows(choice, recipe)) | choice_json(choice)
    return figures | {"energy": figures["energy"] | plan_cost(choice.plan, recipe.report)}


def plan_parts(
    choice: Choice, recipe: Recipe, *, is_verbose: bool, num_steps: int | None = None
) -> list[Part]:
    """Return a plan as it is shown: what a user acts on, and where the rest is or the rest.

    Args:
        choice: The plan, and the alternatives to it.
        recipe: The recipe, for its prices and steps.
        is_verbose: Whether details are shown.
        num_steps: Optimizer steps; None means those that the recipe names.
    """
    plan, level = choice.plan, VERBOSE if is_verbose else BRIEF
    num = plan.request.local_ranks
    name = f"{num} x {plan.machine.name}" if num > 1 else plan.machine.name
    rows = plan_rows(choice, recipe, num_steps=num_steps)
    ranks = [ranks_table(plan)] if plan.others else []
    more = choice_tables(choice) if is_verbose else ["Details: `--verbose`"]
    return [*tables(f"Plan for {name}: it fits", rows, level), *ranks, *more]


def choice_tables(choice: Choice) -> list[Table]:
    """Return the best alternatives to what was chosen, and what other options would gain."""
    rejected = [
        (_differences(one, choice.chosen), one.least_s, reason_against(one, choice.chosen))
        for one in choice.rejected
    ]
    what_ifs = [
        (
            in_words(what_if, choice),
            what_if.tokens_per_s,
            reason_against(what_if.best, choice.chosen) if gain is None else f"{gain:+.1%}",
        )
        for what_if, gain in zip(choice.what_ifs, _gains(choice), strict=True)
    ]
    now = ("as planned", choice.chosen.tokens_per_s, "")
    return [
        Table("Rejected", ["with", "step|s", ""], rejected),
        Table("What if", ["", "tokens/s|whole", ""], [now, *what_ifs]),
    ]


def faster_rows(choice: Choice) -> list[Row]:
    """Return what makes the step faster: settings before other machines, the best first."""
    if choice.plan.request.is_on_features:
        return []
    gains = [
        (what_if.change in NOT_SET, -gain, in_words(what_if, choice))
        for what_if, gain in zip(choice.what_ifs, _gains(choice), strict=True)
        if gain is not None and gain >= LEAST_GAIN_FRAC
    ]
    rows = [
        Row("faster_with" if not number else "", "faster with", f"{change}: {-gain:+.1%}")
        for number, (_, gain, change) in enumerate(sorted(gains))
    ]
    nothing = f"nothing that was tried gains as much as {LEAST_GAIN_FRAC:.1%}"
    return rows or [Row("", "faster with", nothing)]


def _gains(choice: Choice) -> list[float | None]:
    """Return by what part each what-if makes the tokens per second more, or fewer, if it fits."""
    now = choice.chosen.tokens_per_s
    rates = [what_if.tokens_per_s for what_if in choice.what_ifs]
    return [None if rate is None else rate / now - 1 for rate in rates]


def choice_json(choice: Choice) -> dict[str, Any]:
    """Return the choice for programs; sizes in bytes, times in seconds."""
    chosen = choice.chosen
    times = {"step_s": choice.plan.step_s, "break_even_tokens": choice.plan.break_even_tokens}
    return {
        "choice": _settings(chosen) | times,
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
                "weight_rounding": CODECS[what_if.best.request.typical.codec].rounding,
            }
            for what_if in choice.what_ifs
        ],
    }


def _settings(one: Candidate) -> dict[str, Any]:
    request, typical = one.request, one.request.typical
    return {
        "codec": typical.codec,
        "num_slots": one.residency.num_slots,
        "kept_graphs": one.residency.num_kept_graphs,
        **outputs_json(one.residency),
        "stash": "host" if request.is_stashed else "device",
        **({"embeddings": "host"} if typical.embeddings == "host" else {}),
        **({"head": "host"} if typical.head == "host" else {}),
        "head_chunk_tokens": typical.head_chunk_tokens,
        "mlp_chunk_tokens": typical.mlp_chunk_tokens,
        "micro_batch_size": typical.micro_batch_size,
        "num_micro_batches": request.num_micro_batches,
        "order": request.order.value,
    }


def _shortages(one: Candidate) -> dict[str, Any]:
    return {"short_bytes": {s.what.removeprefix("of "): s.short_bytes for s in one.shortages}}


def _differences(one: Candidate, chosen: Candidate) -> str:
    """Return the settings in which a candidate differs from the chosen one."""
    own, others = _settings(one), _settings(chosen)
    return ", ".join(
        f"{name.replace('_', ' ')} {own.get(name, ABSENT.get(name, 0))}"
        for name in {**others, **own}
        if own.get(name) != others.get(name)
    )


def reason_against(one: Candidate, chosen: Candidate) -> str:
    """Return why a candidate was not chosen."""
    if one.shortages:
        short = [f"{shown_gib(s.short_bytes)} {s.what}" for s in one.shortages]
        return f"short of {' and '.join(short)}"
    more = one.least_s / chosen.least_s - 1
    return "no faster" if more < SAME_FRAC else f"slower by {100 * more:.1f} %"


def in_words(what_if: WhatIf, choice: Choice) -> str:
    """Return what another machine, step or codec is."""
    then, tokens = what_if.best.request, choice.plan.tokens_per_step
    more = "" if then.tokens_per_step == tokens else f", {then.tokens_per_step:,} tokens per step"
    words = {
        "memory": f"1 GiB more {'VRAM' if choice.plan.machine.device == 'cuda' else 'RAM'}",
        "link": "a link of twice the rate",
        "tokens": f"{2 * tokens:,} tokens per step",
        "fewer_tokens": f"{tokens // 2:,} tokens per step",
        "micro_batch": f"`train.micro_batch_size: {then.typical.micro_batch_size}`{more}",
    }
    rounding = f"rounds each weight by {CODECS[then.typical.codec].rounding:.1%}"
    memory = f"{shown_gib(what_if.best.host_bytes)} of RAM"
    return words.get(what_if.change, f"`offload.codec: {what_if.change}` ({rounding}; {memory})")
