"""What several runs take together: a table for people, and figures for programs."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from finetune.report.format import shown_gib, shown_time, table_of
from offload.plan.runs import RunsPlan, Sharing


def runs_tables(found: RunsPlan, names: Sequence[str], *, are_steps_known: bool) -> RenderableType:
    """Return a row for each number of runs, what they save, and the waves if there are several.

    Args:
        found: The plan.
        names: Of the runs.
        are_steps_known: Whether times are of whole runs; of a step of each if not.
    """
    table = table_of(
        f"{found.num_runs} runs, so many of them in shared steps",
        *("runs", "step", "tokens/s", "of a run", "of R3", "loads", "slots"),
        *("VRAM", "VRAM of a run", "RAM", "alone"),
    )
    for sharing in found.sharings:
        plan = sharing.plan
        table.add_row(
            str(sharing.num_runs),
            shown_time(plan.step_s),
            f"{sharing.tokens_per_s:,.0f}",
            _range([f"{rate:,.0f}" for rate in sorted(sharing.run_tokens_per_s)]),
            f"{plan.bound_s / plan.step_s:.0%}",
            str(plan.schedule.num_loads),
            str(plan.num_slots),
            shown_gib(plan.peak_bytes),
            _range([shown_gib(size) for size in sorted(sharing.run_bytes)]),
            shown_gib(plan.host_bytes),
            shown_time(sharing.alone_s),
        )
    table.caption = "alone: a step of each, one after the other."
    most = found.sharings[-1].num_runs
    if most < found.num_runs:
        more = min(2 * most, found.num_runs)
        table.caption += f" The first {more} cannot share their steps: they do not fit."
    table.caption_justify = "left"
    shown: list[RenderableType] = [table, Text(_total(found, are_steps_known=are_steps_known))]
    if len(found.waves) > 1:
        waves = table_of("They train in waves", "wave", "runs", "step", "time", "which")
        waves.columns[-1].justify = "left"
        for number, wave in enumerate(found.waves, start=1):
            which = ", ".join(names[run] for run in wave.runs)
            figures = shown_time(wave.plan.step_s), shown_time(wave.time_s)
            waves.add_row(str(number), str(len(wave.runs)), *figures, which)
        shown.append(waves)
    return Group(*shown)


def runs_json(found: RunsPlan, names: Sequence[str], *, are_steps_known: bool) -> dict[str, Any]:
    """Return the same figures; sizes in bytes, times in seconds."""
    return {
        "runs": list(names),
        "times_are_of": "all steps" if are_steps_known else "a step of each",
        "alone_s": found.alone_s,
        "together_s": found.together_s,
        "sharings": [_sharing_json(sharing) for sharing in found.sharings],
        "waves": [
            {
                "runs": [names[run] for run in wave.runs],
                "step_s": wave.plan.step_s,
                "time_s": wave.time_s,
            }
            for wave in found.waves
        ],
    }


def _sharing_json(sharing: Sharing) -> dict[str, Any]:
    plan = sharing.plan
    return {
        "num_runs": sharing.num_runs,
        "step_s": plan.step_s,
        "bound_s": plan.bound_s,
        "alone_s": sharing.alone_s,
        "tokens_per_s": sharing.tokens_per_s,
        "run_tokens_per_s": list(sharing.run_tokens_per_s),
        "run_bytes": list(sharing.run_bytes),
        "optimizer_s": plan.costs.optimizer_s,
        "num_loads": plan.schedule.num_loads,
        "num_slots": plan.num_slots,
        "kept_graphs": plan.num_kept_graphs,
        "peak_vram_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "device_memory": {term.name: term.num_bytes for term in plan.device_memory},
        "host_memory": {term.name: term.num_bytes for term in plan.host_memory},
    }


def _total(found: RunsPlan, *, are_steps_known: bool) -> str:
    what = f"all {found.num_runs} runs" if are_steps_known else f"a step of all {found.num_runs}"
    in_waves = f" in {len(found.waves)} waves" if len(found.waves) > 1 else ""
    return (
        f"{what} one after the other would take {shown_time(found.alone_s)}, together{in_waves}"
        f" {shown_time(found.together_s)}: {found.alone_s / found.together_s:.2f} times as fast"
    )


def _range(sizes: Sequence[str]) -> str:
    """Return the least and the largest, or one that they all have."""
    return sizes[0] if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
