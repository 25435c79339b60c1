"""What several runs take together: a table for people, and figures for programs."""

from collections.abc import Sequence
from typing import Any

from finetune.report.format import shown_gib, shown_time
from finetune.report.rows import Part, Table
from offload.plan.runs import RunsPlan, Sharing

SHARINGS: tuple[str, ...] = (
    *("runs", "step|s", "tokens/s|whole", "of a run|whole", "of R3|%"),
    *("loads", "slots", "VRAM|bytes", "VRAM of a run|bytes"),
    *("RAM|bytes", "alone|s"),
)
WAVES: tuple[str, ...] = (*("wave", "runs", "step|s", "time|s", "which"),)


def runs_tables(found: RunsPlan, names: Sequence[str], *, are_steps_known: bool) -> list[Part]:
    """Return a line for each number of runs, what they save, and the waves if there are several.

    Args:
        found: The plan.
        names: Of the runs.
        are_steps_known: Whether times are of whole runs; of a step of each if not.
    """
    lines = [
        (
            *(sharing.num_runs, plan.step_s, sharing.tokens_per_s),
            _range([f"{rate:,.0f}" for rate in sorted(sharing.run_tokens_per_s)]),
            *(plan.bound_s / plan.step_s, plan.schedule.num_loads, plan.num_slots, plan.peak_bytes),
            _range([shown_gib(size) for size in sorted(sharing.run_bytes)]),
            *(plan.host_bytes, sharing.alone_s),
        )
        for sharing in found.sharings
        for plan in (sharing.plan,)
    ]
    most, note = found.sharings[-1].num_runs, "alone: a step of each, one after the other."
    if most < found.num_runs:
        more = min(2 * most, found.num_runs)
        note += f" The first {more} cannot share their steps: they do not fit."
    waves = [
        (
            number,
            len(wave.runs),
            wave.plan.step_s,
            wave.time_s,
            ", ".join(names[i] for i in wave.runs),
        )
        for number, wave in enumerate(found.waves, start=1)
    ]
    parts: list[Part] = [
        Table(f"{found.num_runs} runs, so many of them in shared steps", SHARINGS, lines, note),
        _total(found, are_steps_known=are_steps_known),
    ]
    return [*parts, Table("They train in waves", WAVES, waves)] if waves[1:] else parts


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
