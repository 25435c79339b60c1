"""What a plan and a run look like, as tables and as JSON."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finetune.files import write_atomically
from offload.plan.costs import break_even_tokens, r3_bound_s
from offload.plan.facts import adapter_parameters
from offload.plan.machine import GIB, Machine, Rate
from offload.plan.memory import MemoryTerm
from offload.plan.plan import Plan
from offload.plan.roofline import Count, layer_flops
from offload.plan.timeline import Timeline, perfetto_trace

if TYPE_CHECKING:
    from finetune.loop import StepRecord
    from finetune.sampling import Answers

NUM_SHOWN_SAMPLES = 5
REFERENCE_FLOPS_PER_S = 250e12
COUNTS: dict[Count, str] = {"causal": "attention counted exactly", "lecture": "attention as 3 S x h products"}
PHASES = ("step", "forward", "head and loss", "backward", "optimizer", "h2d", "stall", "data wait")

# -------------------------------------------------------------------------------------------- plan


def predicted_phases(plan: Plan) -> dict[str, float]:
    """Return predicted seconds by phase; all but `h2d`, which runs beside them, make up `step`."""
    phases = plan.predict().phases()
    phases["step"] += plan.costs.optimizer_s
    return phases | {"optimizer": plan.costs.optimizer_s, "data wait": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeFigure:
    """The matrix products and attention of one layer's forward, by one way of counting."""

    name: str
    flops: float
    seconds: float


def compute_figures(plan: Plan) -> list[ComputeFigure]:
    """Count a layer's forward in both known ways, at the machine's rate and at a round 250 TFLOP/s.

    Neither holds adapters, norms or launches, which the plan prices too.
    """
    typical = plan.request.typical
    rate = plan.machine.gemm_flops_per_s
    figures = []
    for count, words in COUNTS.items():
        flops = layer_flops(
            plan.facts,
            plan.facts.layers[0],
            num_tokens=typical.num_tokens,
            context_tokens=typical.seq_len,
            count=count,
        )
        rates = [(rate.value, rate.source)]
        if plan.machine.device == "cuda":
            rates.append((REFERENCE_FLOPS_PER_S, "a round figure"))
        for flops_per_s, source in rates:
            name = f"{words}, {flops_per_s / 1e12:,.2f} TFLOP/s ({source})"
            figures.append(ComputeFigure(name=name, flops=flops, seconds=flops / flops_per_s))
    return figures


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan's figures for programs; sizes in bytes, times in seconds."""
    facts, typical = plan.facts, plan.request.typical
    layer, cost = facts.layers[0], plan.costs.layers[0]
    classes = {
        name: count * typical.dtype_bytes for name, count in layer.parameters_by_class().items()
    }
    phases = predicted_phases(plan)
    return {
        "machine": plan.machine.name,
        "grade": plan.costs.grade,
        "model": {
            "type": facts.model_type,
            "num_layers": facts.num_layers,
            "num_parameters": facts.num_parameters,
            "num_active_parameters": facts.num_active_parameters,
            "num_adapter_parameters": adapter_parameters(facts, typical.adapter),
        },
        "per_layer": {
            "weight_bytes": sum(
                classes[name] for name in ("attention", "mlp", "experts", "shared_experts")
            ),
            "norm_bytes": classes["norm"],
            "router_bytes": classes["router"],
            "other_bytes": classes["bias"] + classes["sinks"],
            "cargo_bytes": cost.weight_bytes,
            "forward_s": cost.forward_s,
            "backward_s": cost.backward_s,
            "h2d_s": plan.costs.load_s(0),
            "bound": cost.bound,
            "compute_figures": [
                {"name": figure.name, "flops": figure.flops, "seconds": figure.seconds}
                for figure in compute_figures(plan)
            ],
        },
        "schedule": {
            "num_slots": plan.num_slots,
            "num_micro_batches": plan.request.num_micro_batches,
            "tokens_per_step": plan.tokens_per_step,
            "num_loads": plan.schedule.num_loads,
            "h2d_bytes": plan.schedule.h2d_bytes,
            "break_even_tokens": _break_even(plan),
        },
        "predicted": {
            "step_s": phases["step"],
            "tokens_per_s": plan.tokens_per_step / phases["step"],
            "bound_s": _bound_s(plan),
            "phases_s": phases,
            "peak_vram_bytes": plan.peak_bytes,
            "host_bytes": plan.host_bytes,
            "device_memory": _memory_json(plan.device_memory),
            "host_memory": _memory_json(plan.host_memory),
        },
    }


def plan_tables(plan: Plan) -> RenderableType:
    """Return what is shown of a plan before a run."""
    return Group(_route_table(plan), _time_table(plan), _memory_table(plan))


def _route_table(plan: Plan) -> Table:
    facts, typical = plan.facts, plan.request.typical
    cost = plan.costs.layers[0]
    is_resident = plan.num_slots == facts.num_layers
    table = _table(f"Plan for {plan.machine.name}")
    rows = [
        (
            "model",
            f"{facts.model_type}, {facts.num_layers} layers, {_count(facts.num_parameters)}"
            f" parameters, {_count(facts.num_active_parameters)} active per token",
        ),
        (
            "adapter",
            f"LoRA rank {typical.adapter.rank} on {', '.join(typical.adapter.targets)}"
            + (" and the experts" if typical.adapter.experts else "")
            + f": {_count(adapter_parameters(facts, typical.adapter))} trained",
        ),
        ("layer 0", _layer_line(plan)),
        (
            "tiers",
            f"{_gib(sum(c.weight_bytes for c in plan.costs.layers))} of layers in RAM,"
            f" {plan.num_slots} slots of {_mib(cost.weight_bytes)} on the device"
            + (" (resident)" if is_resident else ""),
        ),
        (
            "step",
            f"{plan.tokens_per_step:,} tokens in {plan.request.num_micro_batches} micro-batches"
            f" of {typical.micro_batch_size} x {typical.seq_len}",
        ),
        (
            "link",
            f"{plan.schedule.num_loads} loads, {_gib(plan.schedule.h2d_bytes)} per step",
        ),
    ]
    if not is_resident:
        rows.append(
            ("break-even", f"streaming costs nothing from {_break_even(plan):,.0f} tokens per step")
        )
    rows += [
        ("compute", f"{_time(f.seconds)} per layer and micro-batch: {f.name}")
        for f in compute_figures(plan)
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _layer_line(plan: Plan) -> str:
    layer, dtype_bytes = plan.facts.layers[0], plan.request.typical.dtype_bytes
    classes = {name: n * dtype_bytes for name, n in layer.parameters_by_class().items() if n}
    small = {
        name: classes.pop(name) for name in ("norm", "router", "bias", "sinks") if name in classes
    }
    return f"{sum(classes.values()):,} bytes of {' and '.join(classes)} weights" + "".join(
        f", {num_bytes:,} of {name}" for name, num_bytes in small.items()
    )


def _time_table(plan: Plan) -> Table:
    phases = predicted_phases(plan)
    table = _table(f"Predicted step ({plan.costs.grade})", "lane", "time", "share")
    for name, lane in (
        ("forward", "compute: forward"),
        ("head and loss", "compute: head and loss"),
        ("backward", "compute: backward"),
        ("stall", "compute: waits for weights"),
        ("optimizer", "compute: optimizer"),
        ("h2d", "h2d: loads, beside compute"),
    ):
        table.add_row(lane, _time(phases[name]), f"{phases[name] / phases['step']:.0%}")
    table.add_row("step", _time(phases["step"]), "")
    table.add_row("bound R3", _time(_bound_s(plan)), "")
    table.add_row("tokens/s", f"{plan.tokens_per_step / phases['step']:,.0f}", "")
    return table


def _memory_table(plan: Plan) -> Table:
    table = _table("Predicted peak memory", "term", "size")
    for place, terms, total in (
        ("device", plan.device_memory, plan.peak_bytes),
        ("host", plan.host_memory, plan.host_bytes),
    ):
        for term in terms:
            if term.num_bytes:
                table.add_row(f"{place}: {term.name}", _mib(term.num_bytes))
        table.add_row(f"{place}: all", _mib(total), style="bold")
    return table


def machine_table(machine: Machine) -> Table:
    """Return a machine's rates and capacities, each with its source."""
    table = _table(f"{machine.name} ({machine.device}, {machine.dtype})", "", "value", "source")
    for field in fields(machine):
        value = getattr(machine, field.name)
        if isinstance(value, Rate):
            table.add_row(field.name, f"{value.value:.4g}", value.source)
        elif field.name.endswith("_bytes"):
            table.add_row(field.name, _gib(value), "")
    return table


# --------------------------------------------------------------------------------------------- run


def promise(plan: Plan, *, num_steps: int) -> str:
    """Return the prediction in one line."""
    step_s = plan.step_s
    return (
        f"Predicted ({plan.costs.grade}): {_time(step_s)} per step,"
        f" {plan.tokens_per_step / step_s:,.0f} tokens/s,"
        f" {_time(step_s * num_steps)} for {num_steps} steps"
    )


def write_prediction(run_dir: Path, *, first: Plan, calibrated: Plan) -> None:
    """Write what was predicted before step 1; a prediction that is there is left as it is."""
    file = run_dir / "predicted.json"
    if file.exists():
        return
    both = {"before measuring": plan_json(first), "calibrated": plan_json(calibrated)}
    write_atomically(file, json.dumps(both, indent=1))
    write_atomically(run_dir / "predicted_timeline.json", calibrated.predict().to_json())


def metrics_row(record: "StepRecord", *, step: int, data_wait_s: float) -> dict[str, Any]:
    """Return a line of metrics.jsonl: what was learned, and where the time went."""
    phases = record.timeline.phases() | {
        "step": record.step_s,
        "optimizer": record.optimizer_s,
        "data wait": data_wait_s,
    }
    return {
        "step": step,
        "loss": record.loss,
        "lr": record.lr,
        "grad_norm": record.grad_norm,
        "num_tokens": record.num_tokens,
        "num_label_tokens": record.num_label_tokens,
        "num_loads": record.num_loads,
        "tokens_per_s": record.num_tokens / (record.step_s + data_wait_s),
        "phases_s": phases,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One row of the report: predicted and measured, in seconds or bytes."""

    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None where nothing was measured."""
        return (self.predicted - self.measured) / self.measured if self.measured else None


def compare(plan: Plan, rows: Sequence[Mapping[str, Any]], *, peak_bytes: int) -> list[Comparison]:
    """Set a plan beside the medians of the steps that were run.

    Args:
        plan: With the costs that were predicted before step 1.
        rows: Lines of metrics.jsonl.
        peak_bytes: Measured peak: allocated on a GPU, the resident set on a CPU.
    """
    predicted = predicted_phases(plan)
    table = [
        Comparison(
            name=name,
            predicted=predicted[name],
            measured=statistics.median(row["phases_s"][name] for row in rows),
            unit="s",
        )
        for name in PHASES
    ]
    is_shared = plan.machine.device == "cpu"  # device memory is host memory
    own_host_bytes = plan.host_bytes - sum(
        term.num_bytes for term in plan.host_memory if term.name == "data workers"
    )
    table.append(
        Comparison(
            name="peak memory" if is_shared else "peak VRAM",
            predicted=plan.peak_bytes + (own_host_bytes if is_shared else 0),
            measured=peak_bytes,
            unit="bytes",
        )
    )
    return table


def write_report(
    run_dir: Path, plan: Plan, rows: Sequence[Mapping[str, Any]], *, peak_bytes: int
) -> Table:
    """Write report.json and trace.json, and return the table that a run ends with."""
    comparisons = compare(plan, rows, peak_bytes=peak_bytes)
    content = {
        "num_steps": len(rows),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "grade": plan.costs.grade,
        "machine": plan.machine.name,
        "exact_match": {
            when: json.loads(file.read_text())["exact_match"]
            for when in ("before", "after")
            if (file := run_dir / f"samples_{when}.json").exists()
        },
        "comparison": [
            {"name": r.name, "predicted": r.predicted, "measured": r.measured, "unit": r.unit}
            for r in comparisons
        ],
    }
    write_atomically(run_dir / "report.json", json.dumps(content, indent=1))
    measured_file = run_dir / "measured_timeline.json"
    measured = Timeline.from_json(measured_file.read_text())
    trace = perfetto_trace({"predicted": plan.predict(), "measured": measured})
    write_atomically(run_dir / "trace.json", trace)
    return _comparison_table(comparisons, grade=plan.costs.grade, num_steps=len(rows))


def _comparison_table(rows: Sequence[Comparison], *, grade: str, num_steps: int) -> Table:
    title = f"Predicted ({grade}) against measured (median of {num_steps} steps)"
    table = _table(title, "", "predicted", "measured", "error")
    for row in rows:
        shown = _time if row.unit == "s" else _mib
        error = "" if row.error is None else f"{row.error:+.0%}"
        table.add_row(row.name, shown(row.predicted), shown(row.measured), error)
    return table


def samples_table(when: str, answers: "Answers") -> Table:
    """Return the exact match and some (prompt, wanted, got) rows as a table."""
    title = f"{when.capitalize()} training: {answers.exact_match:.1%} of {len(answers.rows)} right"
    table = _table(title, "prompt", "wanted", "got")
    for prompt, wanted, got in answers.rows[:NUM_SHOWN_SAMPLES]:
        style = "green" if wanted.strip() == got.strip() else "red"
        table.add_row(Text(prompt), Text(wanted), Text(got, style=style))
    return table


def samples_json(answers: "Answers") -> dict[str, Any]:
    """Return all answers for samples_before.json and samples_after.json."""
    return {
        "exact_match": answers.exact_match,
        "rows": [{"prompt": p, "wanted": w, "got": g} for p, w, g in answers.rows],
    }


# ----------------------------------------------------------------------------------------- figures


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE, show_header=any(columns), pad_edge=False
    )
    for number, column in enumerate(columns or ("", "")):
        is_figure = bool(columns) and number > 0 and column not in ("wanted", "got")
        table.add_column(column, justify="right" if is_figure else "left", overflow="fold")
    return table


def _bound_s(plan: Plan) -> float:
    bound_s = r3_bound_s(
        plan.costs,
        num_slots=plan.num_slots,
        num_micro_batches=plan.request.num_micro_batches,
    )
    return bound_s + plan.costs.optimizer_s


def _break_even(plan: Plan) -> float:
    return break_even_tokens(
        plan.facts,
        plan.machine,
        codec_ratio=plan.request.typical.codec_ratio,
        num_slots=plan.num_slots,
        dtype_bytes=plan.request.typical.dtype_bytes,
    )


def _memory_json(terms: Sequence[MemoryTerm]) -> dict[str, int]:
    return {term.name: term.num_bytes for term in terms}


def _time(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:,.1f} h"
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else _mib(num_bytes)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _count(number: int) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.2f} B"
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{number:,}"
