"""The tables of an explanation in a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finetune.report.explain import (
    Explanation,
    Miss,
    Section,
    features_took,
    probe_learned,
    probe_took,
)
from finetune.report.format import shown_mib, shown_time, table_of
from finetune.report.memory import MemoryRow
from offload.plan.schedule.op import Kind

NUM_NAMED = 3  # parts of a miss that are described in words
NUM_LAYERS_NAMED = 6


def explanation_tables(explanation: Explanation) -> RenderableType:
    """Return a run's comparison with its prediction: time, where it went, memory, the bound."""
    parts: list[RenderableType] = [*notices(explanation)]
    if explanation.features is not None:
        parts.append(Text(f"Features: {features_took(explanation.features)}"))
    if explanation.probe is not None:
        parts.append(Text(f"Probe: {probe_took(explanation.probe)}"))
        parts.append(Text(f"Its head: {probe_learned(explanation.probe)}"))
    for section in explanation.sections:
        parts += [_time_table(section), _miss_table(section)]
        parts += [Text(line) for line in _section_lines(section)]
    if explanation.memory:
        parts.append(_memory_table(explanation.memory))
    parts += [Text(line) for line in _bound_lines(explanation)]
    if not explanation.changes:
        seals = ", ".join(section.sha256[:12] for section in explanation.sections)
        parts.append(Text(f"Prediction unchanged since before step 1: SHA-256 {seals}..."))
    return Group(*parts)


def notices(explanation: Explanation) -> list[Text]:
    """Return what comes before any figure: changed predictions, and steps that are not done."""
    found = [
        Text(f"PREDICTION CHANGED: {change}", style="bold red") for change in explanation.changes
    ]
    if explanation.num_done < explanation.num_steps:
        left = f"{explanation.num_done} of {explanation.num_steps} steps are done"
        found.append(Text(f"{left}; `--resume` runs the others"))
    return found


def section_title(section: Section) -> str:
    """Return what is compared: the prediction's grade, and which steps."""
    first, last = section.steps
    return (
        f"Predicted ({section.grade}) against measured"
        f" (mean of the middle {section.num_middle} of {section.num_steps} steps,"
        f" {first} to {last})"
    )


def shown_error(error: float | None) -> str:
    """Write a relative error; nothing where there is none."""
    return "" if error is None else f"{error:+.0%}"


def _time_table(section: Section) -> Table:
    columns = ("lane", "phase", "predicted", "measured", "error", "p20", "p80")
    table = table_of(section_title(section), *columns)
    table.columns[1].justify = "left"
    for row in section.comparison:
        error = shown_error(row.error)
        if error and row.is_within_spread:
            error = f"({error})"
        times = (row.p20, row.p80)
        table.add_row(
            row.lane,
            row.name,
            shown_time(row.predicted),
            shown_time(row.measured),
            error,
            *map(shown_time, times),
        )
    return table


def _miss_table(section: Section) -> Table:
    """Every part of the difference, and their sum, which is the difference."""
    table = table_of(
        "Where the difference is: wall time of a step, its wait for data included",
        *("term (part)", "predicted", "measured", "difference", "layers"),
    )
    table.columns[-1].justify = "left"
    for miss in section.misses:
        if miss.predicted_s or miss.measured_s:
            table.add_row(
                _part_name(miss),
                shown_time(miss.predicted_s),
                shown_time(miss.measured_s),
                _signed(miss.difference_s),
                shown_layers(miss.layers),
            )
    apart_s = sum(miss.difference_s for miss in section.misses)
    table.add_section()
    total = (shown_time(section.predicted_s), shown_time(section.wall_s), _signed(apart_s))
    table.add_row("all", *total, "", style="bold")
    return table


def _section_lines(section: Section) -> Iterator[str]:
    """Describe the largest parts of the miss in words, and what else a reader has to know."""
    step = section.comparison[0]
    yield from disturbance(section)
    yield largest_misses(section)
    if step.is_within_spread:
        yield "An error in brackets is within the spread of the steps themselves (p20 to p80)"
    if section.first_grade != section.grade:
        error = (section.first_step_s - step.measured) / step.measured
        yield (
            f"Before a step was timed ({section.first_grade}):"
            f" {shown_time(section.first_step_s)}, {error:+.0%}"
        )
    if section.num_cold:
        yield (
            f"{section.num_cold} of {section.num_steps} steps loaded more than planned: the slots"
            " were cold, or an evaluation had been through them"
        )


def disturbance(section: Section) -> list[str]:
    """Return the warning that something other than the plan affected the steps, if it did."""
    if not section.is_disturbed:
        return []
    load = section.load_per_cpu
    return [
        "This run was disturbed, by other programs or by changing clock rates: steps of one size"
        f" differ by {section.spread_frac:.0%} (p20 to p80)"
        + ("" if load is None else f", with {load:.1f} runnable processes per processor")
        + ". It explains part of the differences below"
    ]


def largest_misses(section: Section) -> str:
    """Return how far the step is from its prediction, and the parts that differ most."""
    apart_s = section.wall_s - section.predicted_s
    how = "longer" if apart_s >= 0 else "shorter"
    largest = [miss for miss in section.misses[:NUM_NAMED] if miss.difference_s]
    causes = "; ".join(_cause(miss) for miss in largest)
    return (
        f"A step took {shown_time(abs(apart_s))} {how} than predicted"
        f" ({apart_s / section.predicted_s:+.1%})" + (f": {causes}" if causes else "")
    )


def _cause(miss: Miss) -> str:
    where = shown_layers(miss.layers)
    of = f" (mostly layers {where})" if where else ""
    return f"{_signed(miss.difference_s)} {_part_name(miss)}{of}"


def _part_name(miss: Miss) -> str:
    """Name a part in words: by its term alone where that is enough."""
    is_all = miss.name in (miss.term, Kind.TAIL.value)
    return miss.term if is_all else f"{miss.term} ({miss.name.replace('_', ' ')})"


def _memory_table(rows: Sequence[MemoryRow]) -> Table:
    table = table_of("Memory", "term", "grade", "predicted", "measured", "error", "how")
    table.columns[1].justify = table.columns[5].justify = "left"
    for row in rows:
        table.add_row(
            row.name,
            row.grade,
            "-" if row.predicted is None else shown_mib(row.predicted),
            "-" if row.measured is None else shown_mib(row.measured),
            shown_error(row.error),
            row.how,
        )
    return table


def _bound_lines(explanation: Explanation) -> Iterator[str]:
    section = explanation.sections[-1]
    step = section.comparison[0]
    yield (
        f"Bound R3 ({section.grade}): {shown_time(section.bound_s)}; the measured step reached"
        f" {section.bound_s / step.measured:.0%} of it, the predicted one"
        f" {section.bound_s / step.predicted:.0%}"
    )
    own = explanation.measured_step
    if own is not None:
        yield (
            f"Step {own.step} took {shown_time(own.step_s)}: {own.bound_s / own.step_s:.0%} of the"
            f" R3 that its own visits and loads set, {shown_time(own.bound_s)}"
        )


def shown_layers(layers: Sequence[int]) -> str:
    """Write layers as ranges: 0-3, 7."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1].append(layer)
        else:
            ranges.append([layer])
    words = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ranges[:NUM_LAYERS_NAMED]]
    return ", ".join(words) + (", ..." if len(ranges) > NUM_LAYERS_NAMED else "")


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{shown_time(abs(seconds))}"
