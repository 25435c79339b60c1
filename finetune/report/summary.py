"""One screen: what a user acts on, of a plan before its run and of a run after its last step.

All tables are shown with `--verbose`, and those of a run by `sluice explain` too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finetune.recipe.sections import ReportSection
from finetune.report.choice import changed_settings, gains, reason_against
from finetune.report.energy import plan_energy_line
from finetune.report.explain import (
    Explanation,
    Section,
    disturbance,
    largest_misses,
    notices,
    section_title,
    shown_error,
)
from finetune.report.format import (
    compact_table,
    free_streaming,
    shown_count,
    shown_gib,
    shown_mib,
    shown_time,
)
from finetune.report.memory import PEAKS, MemoryRow
from finetune.report.plan import (
    adapter_line,
    embeddings_line,
    gpus_lines,
    head_line,
    kept_line,
    network_line,
    objective_line,
    outputs_line,
    place_of_layers,
    predicted_phases,
    probe_line,
    sharded_line,
)
from offload.plan.facts.codec import CODECS, NATIVE
from offload.plan.facts.workload import FusedPart
from offload.plan.feature_pass import feature_pass
from offload.plan.memory.memory import MemoryTerm, total_bytes
from offload.plan.place_cost import EmbeddingCost, HeadCost
from offload.plan.plan import Plan
from offload.plan.schedule.schedule import NUM_STAGING
from offload.plan.search import Candidate, Choice
from offload.plan.time.costs import Grade

SOURCES: dict[Grade, str] = {
    "spec": "published rates",
    "probed": "rates measured on the machine",
    "calibrated": "timed steps",
}
COMPUTE = ("forward", "decode", "head and loss", "backward", "optimizer")
LEAST_WAIT_FRAC = 0.02  # of a step: below it, waits for weights are not what limits it
LEAST_SHARE_FRAC = 0.01  # of a step, for a phase to be named
LEAST_GAIN_FRAC = 0.005
STASHED = "in RAM until the backward (`offload.stash: host`)"
NUM_TERMS = 3


def plan_summary(choice: Choice, prices: ReportSection) -> Table:
    """Return how fast a plan is, what limits it, its memory and energy, and what runs and why."""
    num = choice.plan.request.local_ranks
    name = f"{num} x {choice.plan.machine.name}" if num > 1 else choice.plan.machine.name
    table = compact_table(f"Plan for {name}: it fits")
    for name, lines in _plan_rows(choice, prices):
        for number, line in enumerate(lines):
            table.add_row("" if number else name, line)
    return table


def run_summary(explanation: Explanation) -> RenderableType:
    """Return step time and memory, predicted against measured, and where they differ."""
    parts: list[RenderableType] = [*notices(explanation)]
    for section in explanation.sections:
        is_newest = section is explanation.sections[-1]
        parts.append(_comparison_table(section, explanation.memory if is_newest else ()))
        parts += [Text(line) for line in disturbance(section)]
        parts.append(Text(largest_misses(section)))
    return Group(*parts)


# --------------------------------------------------------------------------------------- before


def _plan_rows(choice: Choice, prices: ReportSection) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield names and their lines; a name without lines is not shown."""
    plan = choice.plan
    facts, kernel = plan.facts, plan.machine.experts_implementation
    yield "step", [_step_line(plan)]
    yield "limited by", [_limit_line(plan)]
    yield "faster with", [] if plan.request.is_on_features else _gain_lines(choice)
    yield "GPUs", gpus_lines(plan)
    yield from _memory_rows(plan)
    yield "energy", [plan_energy_line(plan, prices)]
    model = f"{facts.model_type}, {facts.num_layers} layers, {shown_count(facts.num_parameters)}"
    active = shown_count(facts.num_active_parameters)
    yield "model", [f"{model} parameters, {active} active per token"]
    is_full = plan.request.typical.adapter.whole is not None
    adapters = [adapter_line(replace(plan, request=run)) for run in plan.request.runs]
    yield "weights" if is_full else "adapter", list(dict.fromkeys(adapters))
    yield "layers", [_layers_line(plan)]
    yield "layer inputs", [STASHED] if plan.request.is_stashed else []
    embedding = EmbeddingCost.of(plan)
    is_tied = plan.facts.tie_word_embeddings
    yield "embeddings", [] if embedding is None else [embeddings_line(embedding, is_tied=is_tied)]
    head = HeadCost.of(plan)
    yield "head", [] if head is None else [head_line(head)]
    yield "tokens", [_tokens_line(plan)]
    yield "network", [network_line(plan, plan.network)] if plan.network is not None else []
    has_objective = plan.request.objective is not None and not plan.request.is_on_features
    yield "objective", [objective_line(plan)] if has_objective else []
    costs = [feature_pass(plan, run) for run in plan.request.runs]
    name = "features" if plan.request.is_on_features else "probe"
    yield name, [probe_line(cost) for cost in costs if cost is not None]
    has_graphs = plan.num_kept_graphs or plan.saved.graphs
    graphs = [kept_line(plan)] if has_graphs and not plan.request.is_on_features else []
    yield "backward", [*graphs, *([outputs_line(plan)] if plan.residency.has_outputs else [])]
    yield "expert kernels", [f"{kernel.value} ({kernel.source})"] if facts.has_experts else []
    yield "layer kernels", _layer_kernels(plan)
    yield "rejected", [_rejected_line(one, choice.chosen) for one in choice.rejected]


def _layer_kernels(plan: Plan) -> list[str]:
    """Return what computes norms, rotary embedding and gates, where it is not the model's code."""
    code = plan.request.typical.code_on(plan.machine.device)
    is_assumed = plan.request.typical.layer_code == "auto"
    trial = " (assumed until a run tries them)" if is_assumed else ""
    if code == "plain":
        return []
    parts = [x for x in get_args(FusedPart) if code == "fused" or x != "loss"]
    plain = plan.request.typical.plain_parts
    fused = [part for part in parts if part not in plain]
    own = [part for part in parts if part in plain]
    rest = f"; {', '.join(own)} by the model's code" if own else ""
    return [f"{code}: {', '.join(fused)}{rest}{trial}"]


def _step_line(plan: Plan) -> str:
    step_s, grade = plan.step_s, plan.costs.grade
    return (
        f"{shown_time(step_s)} for {plan.tokens_per_step:,} tokens:"
        f" {plan.tokens_per_step / step_s:,.0f} tokens/s, predicted from {SOURCES[grade]} ({grade})"
    )


def _limit_line(plan: Plan) -> str:
    """Return what a step takes its time with: computing, or waiting for weights."""
    device = "GPU" if plan.machine.device == "cuda" else "CPU"
    phases = predicted_phases(plan)
    shares = {name: phases[name] / phases["step"] for name in COMPUTE}
    computing = ", ".join(
        f"{name} {share:.0%}"
        for name, share in sorted(shares.items(), key=lambda one: -one[1])
        if share >= LEAST_SHARE_FRAC
    )
    copies = "reads from disk" if plan.request.is_on_disk else "copies from RAM"
    copy_s = max(phases["h2d"], phases["reads"])
    wait_frac = phases["stall"] / phases["step"]
    if wait_frac >= LEAST_WAIT_FRAC and plan.request.is_sharded:
        return f"network: the {device} waits for layers {wait_frac:.0%} of the step; {computing}"
    if wait_frac >= LEAST_WAIT_FRAC:
        return f"{copies}: the {device} waits for weights {wait_frac:.0%} of the step; {computing}"
    hidden = f"; {shown_time(copy_s)} of {copies} hide behind it" if copy_s else ""
    if device == "GPU" and plan.costs.bound == "launch":
        return f"launches: the GPU waits for the host to start its kernels; {computing}{hidden}"
    return f"{device} compute: {computing}{hidden}"


def _gain_lines(choice: Choice) -> list[str]:
    """Return what makes the step faster, the best first, or what was tried and does not."""
    found = gains(choice)
    best = sorted(found.items(), key=lambda one: -one[1])
    lines = [f"{change}: {gain:+.1%}" for change, gain in best if gain >= LEAST_GAIN_FRAC]
    if lines or not found:
        return lines
    return [f"nothing tried: {', '.join(found)} gain less than {LEAST_GAIN_FRAC:.1%}"]


def _rejected_line(one: Candidate, chosen: Candidate) -> str:
    at_least = f"at least {shown_time(one.least_s)}, " if one.shortages else ""
    return f"{changed_settings(one, chosen)}: {at_least}{reason_against(one, chosen)}"


def _memory_rows(plan: Plan) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each memory, what there is of it, and what takes most; a CPU has only one."""
    machine, budget_bytes = plan.machine, plan.request.vram_budget_bytes
    is_cuda, limit_bytes, limit = machine.device == "cuda", machine.vram_bytes, ""
    if budget_bytes is not None and budget_bytes < limit_bytes:
        limit_bytes, limit = budget_bytes, " (`offload.vram_budget`)"
    elif is_cuda and budget_bytes is not None and budget_bytes > limit_bytes:
        limit = ", less than `offload.vram_budget`"
    if is_cuda or limit:
        name = "VRAM" if is_cuda else "computing"
        yield name, [_memory_line(plan.device_memory, limit_bytes, limit)]
    in_ram = plan.host_memory if is_cuda else (*plan.device_memory, *plan.host_memory)
    yield "RAM", [_memory_line(in_ram, machine.ram_bytes, "")]


def _memory_line(terms: Sequence[MemoryTerm], limit_bytes: int, limit: str) -> str:
    largest = sorted(terms, key=lambda term: -term.num_bytes)[:NUM_TERMS]
    named = {term.name: term.num_bytes for term in largest if term.num_bytes}
    all_bytes = total_bytes(terms)
    named["others"] = all_bytes - sum(named.values())
    parts = ", ".join(f"{shown_gib(size)} {name}" for name, size in named.items() if size)
    return f"{shown_gib(all_bytes)} of {shown_gib(limit_bytes)}{limit}: {parts}"


def _layers_line(plan: Plan) -> str:
    num_layers, schedule = plan.facts.num_layers, plan.schedule
    if plan.request.is_sharded:
        return sharded_line(plan)
    codec = plan.request.typical.codec
    rounding = f", each weight rounded by {CODECS[codec].rounding:.1%} RMS"
    form = "" if codec == NATIVE else f" in {codec}{rounding if CODECS[codec].rounding else ''}"
    size = shown_gib(sum(cost.weight_bytes for cost in plan.costs.layers))
    staged = f", through {NUM_STAGING} page-locked buffers" if schedule.is_staged else ""
    slots = f"slots for {plan.num_slots} of {num_layers}"
    loads = f"{schedule.num_loads} loads, {shown_gib(schedule.h2d_bytes)} per step"
    back = f", {shown_gib(schedule.d2h_bytes)} back" if schedule.d2h_bytes else ""
    moved = loads if schedule.num_loads else "loaded once, then resident"
    if plan.request.is_on_features:
        moved = "visited for the features, and in no step"
    order = ", each micro-batch through all layers by itself" if plan.request.num_rounds > 1 else ""
    return f"{size} {place_of_layers(plan)}{form}; {slots}: {moved}{staged}{back}{order}"


def _tokens_line(plan: Plan) -> str:
    request = plan.request
    ranks = f", shared by {request.num_ranks} ranks" if request.num_ranks > 1 else ""
    is_streamed = plan.num_slots < plan.facts.num_layers and not request.is_on_features
    free = (
        "; in micro-batches of this size streaming "
        + free_streaming(plan.break_even_tokens, is_in_rounds=request.num_rounds > 1)
        if is_streamed
        else ""
    )
    num = sum(run.num_micro_batches for run in request.runs)
    runs = f" of {len(request.runs)} runs" if request.others else ""
    sizes = " and ".join(dict.fromkeys(run.typical.size for run in request.runs))
    return f"{plan.tokens_per_step:,} in {num} micro-batches{runs} of {sizes}{ranks}{free}"


# ---------------------------------------------------------------------------------------- after


def _comparison_table(section: Section, memory: Sequence[MemoryRow]) -> Table:
    """Compare the time of a step, and peaks of memory."""
    columns = ("", "predicted", "measured", "error", "p20", "p80")
    table = compact_table(section_title(section), *columns)
    step = section.comparison[0]
    times = [shown_time(value) for value in (step.predicted, step.measured)]
    spread = [shown_time(value) for value in (step.p20, step.p80)]
    table.add_row(step.name, *times, shown_error(step.error), *spread)
    for row in memory:
        if row.name in PEAKS and row.predicted is not None and row.measured is not None:
            sizes = [shown_mib(size) for size in (row.predicted, row.measured)]
            table.add_row(row.name, *sizes, shown_error(row.error), "", "")
    return table
