"""Predicted against measured, from the files of a run alone: no torch, no model, no machine.

Steps are compared with the prediction that was there when they were run, so a run that was resumed
has a comparison for each start. *Measured* is the mean of the middle steps, as in `pace`. The 20th,
50th and 80th percentile are shown next to each mean; an error between them is within the spread of
the steps.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from finetune.errors import CheckpointError
from finetune.files.atomic import write_atomically
from finetune.recipe.recipe import Recipe
from finetune.report import prediction
from finetune.report.energy import RunEnergy, run_energy
from finetune.report.format import (
    shown_gib,
    shown_mib,
    shown_span,
    shown_time,
    signed,
)
from finetune.report.gantt import gantt_svg
from finetune.report.memory import PEAKS, MemoryRow, memory_rows
from finetune.report.pace import HIGH, LOW, Pace, Steps
from finetune.report.plan import SOURCES
from finetune.report.prediction import Prediction, start_of
from finetune.report.rows import Part, Row, Table, shown
from finetune.run import run_files
from finetune.run.probe_folder import read_features, read_probe
from finetune.run.run_files import EVAL_LOSS, EVAL_PREFIX, IMAGE_FIGURES, read_rows
from offload.plan.schedule import timeline
from offload.plan.schedule.op import Kind
from offload.plan.schedule.timeline import Parts, Timeline, perfetto_trace
from offload.plan.time.costs import Grade

if TYPE_CHECKING:
    from finetune.report.images import ImageFigures
    from finetune.report.rounds import Rounds

METRICS, MEASURED, REPORT = "metrics.jsonl", "measured.json", "report.json"
GANTT, TRACE = "gantt.svg", "trace.json"
SAMPLED, ROUNDS = "sample_s", "finetune.report.rounds"  # of rows with their own answers; read there
IMAGES = "finetune.report.images"  # read where rows have some
LOAD = "load_per_cpu"  # of a row: runnable processes per processor
BUSY_LOAD = 1.5  # more than this run's own threads
DISTURBED_SPREAD, FEWEST_SPREAD = 0.2, 5  # of equal steps, and how many are needed to measure it
_SHARES = ("accuracy", "rewards/accuracies")
"""Metrics that are shares of rows or words."""
# Phases by lane, in the order of the report; the compute lane's and the last ones make up the step.
LANES = {
    "compute": ("forward", "decode", "head and loss", "backward", "stall", "optimizer"),
    "h2d": ("h2d",),
    "d2h": ("d2h",),
    "network": ("network", "exposed network"),
    "host": ("reads", "updates", "exposed updates", "data wait"),
}
OPTIONAL = (
    *("decode", "d2h", "reads", "updates", "exposed updates"),
    *("network", "exposed network"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One phase, in seconds."""

    lane: str  # where it runs; `all` for the step
    name: str  # the name of the phase
    predicted: float  # before step 1
    measured: float  # mean of the steps in the middle
    p20: float  # 20th percentile of all steps, and so on
    p50: float  # the median
    p80: float  # the 80th percentile

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None where nothing was measured."""
        return (self.predicted - self.measured) / self.measured if self.measured else None

    @property
    def is_within_spread(self) -> bool:
        """Whether the prediction is between the 20th and the 80th percentile of the steps."""
        return self.p20 <= self.predicted <= self.p80


@dataclass(frozen=True, kw_only=True, slots=True)
class Miss:
    """One part of the difference between a measured and the predicted step, in seconds."""

    term: str  # what kind of part: compute, decode, copy, stall, head and loss, optimizer, ..
    name: str  # the kind of op, or what was waited for
    predicted_s: float  # the predicted time of all layers
    measured_s: float  # the measured time of all layers
    difference_s: float  # measured less predicted
    layers: tuple[int, ...]  # the fewest layers that make up most of the difference


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """What one start of a run predicted, and the steps that were run after it."""

    prediction: int  # which start
    sha256: str  # the prediction's seal
    grade: Grade  # how times were predicted
    first_grade: Grade  # how they were predicted before a step was timed
    first_step_s: float  # the step's time by that prediction
    machine: str  # where it ran
    steps: tuple[int, int]  # first and last step that is compared
    pace: Pace  # the time of a step and tokens/s
    num_cold: int  # steps that loaded more layers than planned
    comparison: tuple[Comparison, ...]  # the phases, predicted and measured
    wall_s: float  # measured step with its wait for data
    bound_s: float  # R3 as predicted
    misses: tuple[Miss, ...]  # parts of `wall_s` less the predicted step, the largest first
    # Spread of the steps, p20 to p80 over the median: of their time or of their time per token,
    # whichever is less.
    spread_frac: float
    load_per_cpu: float | None  # median over the steps; None if it was not measured

    @property
    def is_disturbed(self) -> bool:
        """Whether something other than the plan affected the steps' times."""
        is_busy = self.load_per_cpu is not None and self.load_per_cpu > BUSY_LOAD
        is_spread = self.pace.num_steps >= FEWEST_SPREAD and self.spread_frac > DISTURBED_SPREAD
        return is_busy or is_spread

    @property
    def predicted_s(self) -> float:
        """The predicted step."""
        return self.comparison[0].predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """The step after which a checkpoint was written: its R3 at its own rates, and its ops."""

    step: int
    step_s: float
    bound_s: float
    timeline: Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """All that a run's files say about its prediction."""

    num_done: int  # steps that are done
    num_steps: int  # steps of the whole run
    changes: tuple[str, ...]  # which predictions were changed since; none in an honest run
    sections: tuple[Section, ...]  # one for each start after which a step was run
    measured_step: MeasuredStep | None  # None before the first checkpoint
    memory: tuple[MemoryRow, ...]  # the terms of memory; nothing before the first checkpoint
    predicted: Timeline  # the prediction of the newest section, to be drawn
    energy: RunEnergy  # the energy of all steps, those before a resume included
    # The version of each package that ran; nothing before the first checkpoint.
    versions: Mapping[str, str]
    # What a probe before step 1 took and learned; None if there was none.
    probe: Mapping[str, Any] | None = None
    # What features took of a head that trains alone; None if they were not taken.
    features: Mapping[str, Any] | None = None
    # What the pass over the images of rows took; None without images.
    images: "ImageFigures | None" = None
    # Of a run that samples its own answers; its sections are of learning alone.
    rounds: "Rounds | None" = None

    def to_json(self) -> dict[str, Any]:
        """Return the figures for programs: seconds and bytes."""
        step = self.measured_step
        return {
            "num_done": self.num_done,
            "num_steps": self.num_steps,
            "changes": list(self.changes),
            "sections": [_section_json(section) for section in self.sections],
            "measured_step": None
            if step is None
            else {"step": step.step, "step_s": step.step_s, "bound_s": step.bound_s},
            "memory": [asdict(row) | {"error": row.error} for row in self.memory],
            "energy": self.energy.to_json(),
            "versions": dict(self.versions),
            **({} if self.probe is None else {"probe": dict(self.probe)}),
            **({} if self.features is None else {"features": dict(self.features)}),
            **({"images": self.images.model_dump()} if self.images else {}),
            **({"rounds": self.rounds.to_json(self.sections[-1])} if self.rounds else {}),
        }


def explain(run_dir: Path) -> Explanation:
    """Compare what a run predicted with the steps that it has run so far.

    Raises:
        CheckpointError: There is no run, no prediction, or no step yet; or a file is damaged.
    """
    predictions = prediction.read_predictions(run_dir)
    rows = read_rows(run_dir / METRICS)
    if not rows:
        raise CheckpointError(
            f"{run_dir} holds no step",
            limit=f"predicted is compared with the steps in {METRICS}",
            hint=f"`sluice finetune {run_dir / 'recipe.yaml'} --resume` runs them",
        )
    # if a prediction was changed, steps are compared with the start after which they were run
    groups: dict[int, list[Mapping[str, Any]]] = {}
    rounds = import_module(ROUNDS).Rounds.of(run_dir, rows) if SAMPLED in rows[0] else None
    for row in rows:
        groups.setdefault(start_of(predictions, row).number, []).append(row)
    by_number = {p.number: p for p in predictions}
    newest = by_number[max(groups)]
    measured = _measured(run_dir / MEASURED)
    return Explanation(
        num_done=rows[-1]["step"],
        num_steps=newest.num_steps,
        changes=tuple(prediction.changes(run_dir, rows)),
        sections=tuple(_section(by_number[n], groups[n], rounds) for n in sorted(groups)),
        measured_step=_measured_step(measured) if measured else None,
        memory=memory_rows(newest.calibrated, newest.memory_grade, measured) if measured else (),
        predicted=newest.timeline.with_optimizer(_phases(newest)["optimizer"]),
        energy=run_energy(
            rows,
            (measured or {}).get("energy_missing", {}),
            newest.calibrated["energy"],
        ),
        versions=(measured or {}).get("versions", {}),
        probe=read_probe(run_dir),
        features=read_features(run_dir),
        images=import_module(IMAGES).read_images(run_dir)
        if (run_dir / IMAGE_FIGURES).exists()
        else None,
        rounds=rounds,
    )


def draw(run_dir: Path, explanation: Explanation) -> list[Path]:
    """Write the predicted and the measured step as a drawing and as a trace."""
    timelines = {"predicted": explanation.predicted}
    headings = {f"predicted: {explanation.predicted.step_s * 1e3:,.2f} ms": explanation.predicted}
    if (step := explanation.measured_step) is not None:
        timelines["measured"] = step.timeline
        took = f"measured, step {step.step}: {step.timeline.step_s * 1e3:,.2f} ms"
        headings[took] = step.timeline
    write_atomically(run_dir / GANTT, gantt_svg(headings))
    write_atomically(run_dir / TRACE, perfetto_trace(timelines))
    return [run_dir / GANTT, run_dir / TRACE]


# ------------------------------------------------------------------------------------------- parts


def _section(
    predicted: Prediction, rows: Sequence[Mapping[str, Any]], rounds: "Rounds | None"
) -> Section:
    phases, steps = _phases(predicted), Steps(rows)
    rows = rows if rounds is None else rounds.learning(rows)
    middle = [rows[place] for place in steps.middle()]
    comparison = [_comparison("all", "step", phases, rows, middle)]
    for lane, names in LANES.items():
        comparison += [
            _comparison(lane, name, phases, rows, middle)
            for name in names
            if name not in OPTIONAL or phases.get(name)
        ]
    expected = predicted_parts(predicted)
    found = timeline.mean_parts([timeline.parts_from_json(row["parts_s"]) for row in middle])
    num_loads = predicted.calibrated["schedule"]["num_loads"]
    first = predicted.before_measuring
    loads = [row[LOAD] for row in rows if row.get(LOAD) is not None]
    return Section(
        prediction=predicted.number,
        sha256=predicted.sha256,
        grade=predicted.calibrated["grade"],
        first_grade=first["grade"],
        first_step_s=first["predicted"]["step_s"],
        machine=predicted.calibrated["machine"],
        steps=(rows[0]["step"], rows[-1]["step"]),
        pace=steps.pace(phases["step"]),
        num_cold=sum(row["num_loads"] > num_loads for row in rows),
        comparison=tuple(comparison),
        wall_s=sum(found.values()),
        bound_s=predicted.calibrated["predicted"]["bound_s"],
        misses=tuple(misses(expected, found)),
        spread_frac=_spread_frac(rows),
        load_per_cpu=_percentiles(loads)[1] if loads else None,
    )


def _spread_frac(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the spread of equal steps: the time of visits depends on tokens, that of loads not."""

    def spread(values: Sequence[float]) -> float:
        p20, p50, p80 = _percentiles(values)
        return (p80 - p20) / p50

    times = [row["phases_s"]["step"] for row in rows]
    by_token = [t / row["num_tokens"] for t, row in zip(times, rows, strict=True)]
    return min(spread(times), spread(by_token))


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    p20, p50, p80 = (ordered[round(q * (len(ordered) - 1))] for q in (LOW, 0.5, HIGH))
    return p20, p50, p80


def predicted_parts(predicted: Prediction) -> Parts:
    """Return the parts of the predicted step, its update among them."""
    optimizer_s = _phases(predicted)["optimizer"]
    return timeline.parts_of(predicted.timeline.with_optimizer(optimizer_s))


def misses(predicted: Parts, measured: Parts) -> list[Miss]:
    """List all parts of the difference between two steps, the largest first."""
    apart = timeline.difference(predicted, measured)
    predicted_s, measured_s = timeline.by_name(predicted), timeline.by_name(measured)
    found = [
        Miss(
            term=timeline.term_of(name),
            name=name,
            predicted_s=predicted_s.get(name, 0.0),
            measured_s=measured_s.get(name, 0.0),
            difference_s=difference_s,
            layers=timeline.layers_of(apart, name),
        )
        for name, difference_s in timeline.by_name(apart).items()
    ]
    return sorted(found, key=lambda miss: -abs(miss.difference_s))


def _comparison(
    lane: str,
    name: str,
    predicted_s: Mapping[str, float],
    rows: Sequence[Mapping[str, Any]],
    middle: Sequence[Mapping[str, Any]],
) -> Comparison:
    # a step after an evaluation waits for no update: these are made already
    seconds = {row["step"]: row["phases_s"].get(name, 0.0) for row in rows}
    p20, p50, p80 = _percentiles([*seconds.values()])
    return Comparison(
        lane=lane,
        name=name,
        predicted=predicted_s[name],
        measured=sum(seconds[row["step"]] for row in middle) / len(middle),
        p20=p20,
        p50=p50,
        p80=p80,
    )


def _phases(predicted: Prediction) -> Mapping[str, float]:
    phases: Mapping[str, float] = predicted.calibrated["predicted"]["phases_s"]
    return phases


def _measured(file: Path) -> dict[str, Any] | None:
    if not os.path.lexists(file):
        return None
    content: dict[str, Any] = run_files.read_sealed(run_files.MEASURED, file)
    return content


def _measured_step(measured: Mapping[str, Any]) -> MeasuredStep:
    timeline = Timeline.from_json(json.dumps(measured["timeline"]))
    return MeasuredStep(
        step=measured["step"],
        step_s=measured["step_s"],
        bound_s=measured["bound_s"],
        timeline=timeline.with_optimizer(measured["optimizer_s"]),
    )


def _section_json(section: Section) -> dict[str, Any]:
    rows = [
        asdict(row) | {"error": row.error, "is_within_spread": row.is_within_spread}
        for row in section.comparison
    ]
    return asdict(section) | {
        "comparison": rows,
        "pace": asdict(section.pace) | {"error": section.pace.error},
        "predicted_s": section.predicted_s,
        "is_disturbed": section.is_disturbed,
    }


def features_took(figures: Mapping[str, Any]) -> str:
    """Return what features took, by the names of `FeatureFigures`."""
    return (
        f"{figures['num_features']:,} features in {shown_time(figures['pass_s'])} (predicted"
        f" {shown_time(figures['predicted_pass_s'])}), {shown_mib(figures['feature_bytes'])} of RAM"
    )


def probe_took(probe: Mapping[str, Any]) -> str:
    """Return what a probe took, as `read_probe` returns it."""
    head = f"{probe['num_steps']:,} steps of the head ({probe['num_parameters']:,} weights)"
    return f"{features_took(probe)}; {head} in {shown_time(probe['steps_s'])}"


def probe_learned(probe: Mapping[str, Any]) -> str:
    """Return what a head has learned: first and last loss and accuracy, and held-out rows."""
    first, last = probe["first"], probe["last"]
    said = [f"loss {first['loss']:.4f} -> {last['loss']:.4f}"]
    for name in _SHARES:
        if name in last:
            said.append(f"{name} {shown(first[name], 'share')} -> {shown(last[name], 'share')}")
        if EVAL_PREFIX + name in last:
            said.append(f"{name} of held-out rows {shown(last[EVAL_PREFIX + name], 'share')}")
    if EVAL_LOSS in last:
        said.append(f"loss of held-out rows {last[EVAL_LOSS]:.4f}")
    return ", ".join(said)


NUM_NAMED = 3  # parts of a miss that are described in words
NUM_LAYERS_NAMED = 6


def learned_rows(rows: Sequence[Mapping[str, Any]], *, step: int | None = None) -> list[Row]:
    """Return what the steps of a run have learned, up to the one whose weights are its result.

    Args:
        rows: Its metrics.
        step: The number of that step; None means the last one.
    """
    if not rows:
        return []
    until = [row for row in rows if step is None or row["step"] <= step]
    first, last, done = until[0], until[-1], rows[-1]["step"]
    result = "" if last["step"] == done else f"; the result is that of step {last['step']:,}"
    tokens, at = sum(row["num_tokens"] for row in until), f"step {last['step']:,}"
    evaluated = [row for row in until if EVAL_LOSS in row]
    best = min(evaluated, key=lambda row: float(row[EVAL_LOSS]), default=last)
    # a loss of rounds is a reward with its sign changed
    held_out = {row["step"]: row for row in (best, last) if EVAL_LOSS in row and SAMPLED not in row}
    return [
        Row("", "steps", done, "", result),
        Row("", "tokens trained on", tokens),
        *(import_module(ROUNDS).reward_rows(until) if SAMPLED in first else ()),
        Row("", f"training loss, step {first['step']:,}", first["loss"], "loss"),
        Row("", f"training loss, {at}", last["loss"], "loss"),
        *(
            Row("", f"held-out loss, step {step:,}", row[EVAL_LOSS], "loss", note)
            for step, row in held_out.items()
            for note in ("" if row is last else "(the lowest)",)
        ),
    ]


def rows_of(run: Explanation, recipe: Recipe) -> list[Row]:
    """Return what is to say of a run besides its losses.

    Args:
        run: What its files say.
        recipe: The run's recipe, which has the price of energy.
    """
    lines = {}
    if run.features is not None:
        lines["features"] = features_took(run.features)
    if run.probe is not None:
        lines |= {"probe": probe_took(run.probe), "head of the probe": probe_learned(run.probe)}
    lines["machine"] = run.sections[-1].machine
    named = [*lines.items(), *(("energy", line) for line in run.energy.lines(recipe.report))]
    if run.versions:
        packages = (f"{name} {version}" for name, version in run.versions.items())
        named.append(("versions", ", ".join(packages)))
    return [Row("", *line) for line in named]


def changes(explanation: Explanation) -> list[Part]:
    """Return which predictions were changed since the steps were run, as warnings."""
    return [Text(f"PREDICTION CHANGED: {one}", style="bold red") for one in explanation.changes]


def compared(explanation: Explanation) -> list[Part]:
    """Return step time and peaks, predicted against measured, and where they differ."""
    found, parts = explanation, changes(explanation)
    if found.num_done < found.num_steps:
        left = f"{found.num_done} of {found.num_steps} steps are done"
        parts.append(f"{left}; `--resume` runs the others")
    for section in found.sections:
        newest = found.memory if section is found.sections[-1] else ()
        peaks = [row for row in newest if row.name in PEAKS and row.error is not None]
        parts += [
            _comparison_table(section, peaks),
            *disturbance(section),
            largest_misses(section),
            *(found.rounds.took(section) if found.rounds else ()),
        ]
    return [*parts, *(found.rounds.learned() if found.rounds else ())]


def details_of(explanation: Explanation) -> list[Part]:
    """Return what else is known: phases, parts of the difference, memory by term, the bound."""
    found = explanation
    parts: list[Part] = found.rounds.time(found.sections) if found.rounds else []
    if found.features is not None:
        parts.append(f"Features: {features_took(found.features)}")
    if found.probe is not None:
        parts.append(f"Probe: {probe_took(found.probe)}")
        parts.append(f"Its head: {probe_learned(found.probe)}")
    parts += [f"Images: {found.images.line}"] if found.images is not None else []
    if found.memory:
        parts.append(_memory_table(found.memory))
    for section in found.sections:
        parts += [_phases_table(section), _miss_table(section)]
        parts += _section_lines(section)
    section, own = found.sections[-1], found.measured_step
    step = section.comparison[0]
    parts.append(
        f"Bound R3 ({section.grade}): {shown_time(section.bound_s)}; the measured step reached"
        f" {section.bound_s / step.measured:.0%} of it, the predicted one"
        f" {section.bound_s / step.predicted:.0%}"
    )
    if own is not None:
        parts.append(
            f"Step {own.step} took {shown_time(own.step_s)}: {own.bound_s / own.step_s:.0%} of the"
            f" R3 that its own visits and loads set, {shown_time(own.bound_s)}"
        )
    if not found.changes:
        seals = ", ".join(section.sha256[:12] for section in found.sections)
        parts.append(f"Prediction unchanged since before step 1: SHA-256 {seals}...")
    return parts


def _comparison_table(section: Section, peaks: Sequence[MemoryRow]) -> Table:
    """Compare the time of a step, and peaks of memory."""
    (first, last), step = section.steps, section.comparison[0]
    title = (
        f"Predicted from {SOURCES[section.grade]} against measured"
        f" ({section.pace.basis}, {shown_span(first, last)})"
    )
    lines = [(row.name, row.predicted, row.measured, row.error, "", "") for row in peaks]
    times = (step.name, *map(shown_time, (step.predicted, step.measured)), step.error)
    columns = ("", "predicted|MiB", "measured|MiB", "error|error", "p20|s", "p80|s")
    rate = f"{section.pace.shown['tokens/s']} tokens/s in the same steps, all waits included"
    return Table(title, columns, [(*times, step.p20, step.p80), *lines], rate, level="brief")


def _phases_table(section: Section) -> Table:
    def error(row: Comparison) -> str:
        return "" if row.error is None else shown(row.error, "error")

    lines = [
        (
            *(row.lane, row.name, row.predicted, row.measured),
            f"({error(row)})" if row.is_within_spread and row.error is not None else error(row),
            *(row.p20, row.p80),
        )
        for row in section.comparison
    ]
    columns = ("lane", "phase", "predicted|s", "measured|s", "error|s", "p20|s", "p80|s")
    return Table("A step, phase by phase", columns, lines)


def _miss_table(section: Section) -> Table:
    """Every part of the difference, and their sum, which is the difference."""
    lines = [
        (
            *(_part_name(miss), miss.predicted_s, miss.measured_s),
            *(signed(miss.difference_s, shown_time), shown_layers(miss.layers)),
        )
        for miss in section.misses
        if miss.predicted_s or miss.measured_s
    ]
    apart_s = sum(miss.difference_s for miss in section.misses)
    total = ("all", section.predicted_s, section.wall_s, signed(apart_s, shown_time), "")
    title = "Where the difference is: wall time of a step, its wait for data included"
    columns = ("term (part)", "predicted|s", "measured|s", "difference|s", "layers")
    return Table(title, columns, [*lines, total])


def _section_lines(section: Section) -> Iterator[str]:
    """Say what else a reader has to know of the figures."""
    step = section.comparison[0]
    if step.is_within_spread:
        yield "An error in brackets is within the spread of the steps themselves (p20 to p80)"
    if section.first_grade != section.grade:
        first = replace(section.pace, predicted_s=section.first_step_s).shown
        yield (
            f"Before a step was timed ({section.first_grade}):"
            f" {first['step predicted']}, error {first['error']}"
        )
    if section.num_cold:
        yield (
            f"{section.num_cold} of {section.pace.num_steps} steps loaded more than planned: the"
            " slots were cold, or an evaluation had been through them"
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
    took = f"With its wait for data a step took {shown_time(abs(apart_s))} {how} than predicted"
    return took + (f": {causes}" if causes else "")


def _cause(miss: Miss) -> str:
    where = shown_layers(miss.layers)
    of = f" (mostly layers {where})" if where else ""
    return f"{signed(miss.difference_s, shown_time)} {_part_name(miss)}{of}"


def _part_name(miss: Miss) -> str:
    """Name a part in words: by its term alone where that is enough."""
    is_all = miss.name in (miss.term, Kind.TAIL.value)
    return miss.term if is_all else f"{miss.term} ({miss.name.replace('_', ' ')})"


def _memory_table(rows: Sequence[MemoryRow]) -> Table:
    lines = [
        (
            *(row.name, row.grade, row.predicted, row.measured, row.error),
            row.how if row.limit is None else f"{row.how}; limit {shown_gib(row.limit)}",
        )
        for row in rows
    ]
    sizes = ("predicted|MiB", "measured|MiB", "error|error")
    columns = ("term", "grade", *sizes, "how it was measured")
    return Table("Memory, term by term", columns, lines)


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
