"""A run that samples its own answers: rewards, answers and time by round, from its files alone.

A round is sampling, rewards, and a step that learns from them. Metrics count the first two as a
step's wait for its rows; here they are apart, so that a step is compared with its prediction.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from finetune.errors import CheckpointError
from finetune.files.atomic import JsonFile
from finetune.recipe.recipe import Recipe
from finetune.report.charts import Chart, curves
from finetune.report.data_view import printable, shortened
from finetune.report.explain import REPORT, Section
from finetune.report.format import shown_span, shown_time
from finetune.report.pace import LOW, learning_wait_s
from finetune.report.rows import Part, Row, Table, shown
from finetune.report.verdict import against, change
from finetune.run.run_dir import RunDir
from finetune.run.run_files import (
    EVAL_PREFIX,
    EVALUATION,
    EVALUATION_BEFORE,
    ROW,
    Number,
    Seconds,
    read_sealed,
)
from offload.plan.schedule.timeline import DATA_WAIT

FOLDER = "rounds"
"""Of a run's directory: the answers of each round, as text with their rewards."""
MOST_MARKED = 200  # points of a chart that are marked, so that one alone is seen
_EVAL_REWARD, _LENGTH = f"{EVAL_PREFIX}reward", "completions/mean_length"
_SAMPLED, _HELD_OUT = "sampled answers", "held-out prompts"


class _RoundContent(BaseModel):
    """What a line of metrics has in addition."""

    reward: Number
    sample_s: Seconds
    predicted_sample_s: Seconds | None = None  # None where a server samples
    reward_s: Seconds
    mean_length: Number = Field(alias=_LENGTH)
    eval_reward: Number = 0.0


class _AnswerContent(BaseModel):
    """A line of a round's file."""

    row: str
    prompt: str
    answer: str
    reward: Number | None
    is_cut: bool


_ANSWER = JsonFile(
    holds=_AnswerContent,
    error=CheckpointError,
    limit="it is written whole, after its answers were given rewards",
    hint="remove it: the report then leaves it out",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of a round."""

    name: str  # what is done in it
    predicted_s: float | None  # None where nothing is predicted
    measured_s: float  # mean of the rounds between the 20th and the 80th percentile of its time

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None where there is none."""
        if self.predicted_s is None or not self.measured_s:
            return None
        return (self.predicted_s - self.measured_s) / self.measured_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """What a run's files say of its rounds."""

    run_dir: Path  # where they are
    rows: Sequence[Mapping[str, Any]]  # of its metrics, one for each round
    num_answers: int  # that a round samples
    before: float | None  # mean reward of held-out prompts before step 1; None if none was taken

    @classmethod
    def of(cls, run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> "Rounds":
        """Return the rounds of a run.

        Raises:
            CheckpointError: A file is damaged.
        """
        for row in rows:
            try:
                _RoundContent.model_validate(row)
            except ValueError as error:
                raise ROW.refusal(str(run_dir), f"step {row['step']} is no round") from error
        file, before = run_dir / EVALUATION_BEFORE, None
        if file.exists():
            before = read_sealed(EVALUATION, file).get(_EVAL_REWARD)
        num_answers = RunDir(run_dir).recipe().train.global_batch_size
        return cls(run_dir=run_dir, rows=rows, num_answers=num_answers, before=before)

    @staticmethod
    def learning(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return rows with waits from which sampling and rewards are taken."""
        found: list[Mapping[str, Any]] = []
        for row in rows:
            wait = {DATA_WAIT: learning_wait_s(row)}
            parts = {"phases_s": row["phases_s"] | wait, "parts_s": row["parts_s"] | wait}
            found.append({**row, **parts})
        return found

    def to_json(self, section: Section) -> dict[str, Any]:
        """Return the figures for programs.

        Args:
            section: The newest start of the run, whose times are taken.
        """
        return {
            "num_answers": self.num_answers,
            "phases": {
                one.name: {"predicted_s": one.predicted_s, "measured_s": one.measured_s}
                for one in self.phases(section)
            },
            "sampled_tokens_per_s": self.tokens_per_s(section),
            "reward": {"first": self.rows[0]["reward"], "last": self.rows[-1]["reward"]},
            "held_out_reward": {"before": self.before, "last": self._evaluated()[1]},
        }

    # ------------------------------------------------------------------------------------- time

    def _sampled(self, section: Section) -> list[Mapping[str, Any]]:
        """Return the rounds of a start that have sampled: one that was resumed may have before."""
        first, last = section.steps
        rows = [row for row in self.rows if first <= row["step"] <= last]
        return _middle([row for row in rows if row["sample_s"]], "sample_s")

    def tokens_per_s(self, section: Section) -> float | None:
        """Return the tokens of answers per second of sampling; None if nothing was sampled."""
        rows = self._sampled(section)
        num_tokens = self.num_answers * sum(row[_LENGTH] for row in rows)
        return num_tokens / sum(row["sample_s"] for row in rows) if rows else None

    def phases(self, section: Section) -> list[Phase]:
        """Return the parts of a round, in their order."""
        first, last = section.steps
        rows = [row for row in self.rows if first <= row["step"] <= last]
        step, found = section.comparison[0], []
        if sampled := self._sampled(section):
            found.append(
                Phase(
                    name="sampling",
                    predicted_s=_mean(sampled, "predicted_sample_s")
                    if "predicted_sample_s" in sampled[0]
                    else None,
                    measured_s=_mean(sampled, "sample_s"),
                )
            )
        reward_s = _mean(_middle(rows, "reward_s"), "reward_s")
        wait_s = section.wall_s - step.measured
        return [
            *found,
            Phase(name="rewards", predicted_s=None, measured_s=reward_s),
            Phase(name="other waits", predicted_s=None, measured_s=max(0.0, wait_s)),
            Phase(name="learning", predicted_s=step.predicted, measured_s=step.measured),
        ]

    def took(self, section: Section) -> list[Part]:
        """Return what the rounds of a start took before their steps, in words."""
        phases = {one.name: one for one in self.phases(section)}
        total_s = sum(one.measured_s for one in phases.values())
        sampling, rate = phases.get("sampling"), self.tokens_per_s(section)
        if sampling is None:
            return []
        error = "" if sampling.error is None else f", error {shown(sampling.error, 'error')}"
        predicted = "by a server"
        if sampling.predicted_s is not None:
            predicted = f"predicted {shown_time(sampling.predicted_s)}{error}"
        return [
            f"Before each step, sampling took {shown_time(sampling.measured_s)} ({predicted}),"
            f" {rate:,.0f} tokens/s, and rewards"
            f" {shown_time(phases['rewards'].measured_s)}; a whole round took {shown_time(total_s)}"
        ]

    def time(self, sections: Sequence[Section]) -> list[Part]:
        """Return a table of a round's time, of each start of a run."""
        return [self._time(section) for section in sections]

    def _time(self, section: Section) -> Table:
        phases = self.phases(section)
        total_s = sum(one.measured_s for one in phases)
        lines = [
            (
                *(one.name, "" if one.predicted_s is None else shown_time(one.predicted_s)),
                *(one.measured_s, one.measured_s / total_s),
            )
            for one in phases
        ]
        lines.append(("all", "", total_s, 1.0))
        columns = ("phase", "predicted|s", "measured|s", "share|%")
        note = (
            "Sampling is predicted for the passes over the layers that were made: as many as the"
            " longest answer had tokens. The mean of each phase is over the middle of its times."
        )
        return Table("A round, phase by phase", columns, lines, note, level="brief")

    # ---------------------------------------------------------------------------------- rewards

    def _evaluated(self) -> tuple[int, float | None]:
        """Return the last evaluation of held-out prompts: its step, and their mean reward."""
        found = [(row["step"], row[_EVAL_REWARD]) for row in self.rows if _EVAL_REWARD in row]
        return found[-1] if found else (0, None)

    @property
    def reward_span(self) -> str:
        """The mean reward of sampled answers in the first and the last step."""
        return f"{self.rows[0]['reward']:.4f} -> {self.rows[-1]['reward']:.4f}"

    def verdict(self, section: Section) -> list[Row]:
        """Return what was learned by reward, and what sampling took.

        Args:
            section: The newest start of the run, whose times are taken.
        """
        before = [] if self.before is None else [("before training", self.before)]
        rewards = {
            "reward of held-out prompts": [*before, *self._at(_EVAL_REWARD)],
            "reward of sampled answers": self._at("reward"),
        }
        sampled = [one for one in self.phases(section) if one.name == "sampling"]
        return [
            *(change(label, values) for label, values in rewards.items() if values),
            *(
                against("sampling took", one.predicted_s, one.measured_s, shown_time)
                for one in sampled
                if one.predicted_s is not None
            ),
        ]

    def _at(self, key: str) -> list[tuple[str, float]]:
        return [(f"step {step:,}", value) for step, value in _points(self.rows, key)]

    def learned(self) -> list[Part]:
        """Return in words how rewards have changed."""
        first, last = self.rows[0]["step"], self.rows[-1]["step"]
        said = f"Mean reward of sampled answers, step {shown_span(first, last)}: {self.reward_span}"
        step, after = self._evaluated()
        if after is None:
            return [said]
        begun = "" if self.before is None else f"{self.before:.4f} before training, "
        return [f"{said}; of held-out prompts: {begun}{after:.4f} after step {step:,}"]

    def charts(self) -> list[Chart]:
        """Return rewards, lengths, shares and the KL divergence by round."""
        rows, before = self.rows, [] if self.before is None else [(0, self.before)]
        evaluated = [(row["step"], row[_EVAL_REWARD]) for row in rows if _EVAL_REWARD in row]
        rewards = {
            _SAMPLED: [(row["step"], row["reward"]) for row in rows],
            _HELD_OUT: [*before, *evaluated],
        }
        of_functions = {
            name.removeprefix("rewards/").removesuffix("/mean"): _points(rows, name)
            for name in dict.fromkeys(name for row in rows for name in row)
            if name.startswith("rewards/") and name.endswith("/mean")
        }
        shares = {
            "answers cut off": _points(rows, "completions/clipped_ratio"),
            "prompts of equal rewards": _points(rows, "frac_reward_zero_std"),
        }
        found = [
            _chart("reward", "Mean reward", rewards, y="reward"),
            _chart("lengths", "Mean length of answers", {"": _points(rows, _LENGTH)}, y="tokens"),
            _chart("shares", "Shares of a round", shares, y="share"),
            _chart("kl", "KL divergence to the reference", {"": _points(rows, "kl")}, y="nats"),
        ]
        if len(of_functions) > 1:
            of_each = "Mean reward by function, unweighted"
            found.append(_chart("functions", of_each, of_functions, y="reward"))
        return [chart for chart in found if chart is not None]

    # ---------------------------------------------------------------------------------- answers

    def answers(self) -> list[Part]:
        """Return the best and the worst answer to a prompt, of the first, a middle, the last round.

        The prompt is the one whose answers differ most in reward.

        Raises:
            CheckpointError: A file is damaged.
        """
        steps = [row["step"] for row in self.rows]
        some = dict.fromkeys((steps[0], steps[(len(steps) - 1) // 2], steps[-1]))
        lines = [line for step in some for line in self._answers_of(step)]
        if not lines:
            return []
        note = (
            "Of each round the prompt whose answers differ most in reward; all answers are in"
            f" {FOLDER}/."
        )
        columns = ("round", "prompt", "answer", "reward|loss")
        return [Table("Answers by round", columns, lines, note, level="brief")]

    def _answers_of(self, step: int) -> list[Sequence[Any]]:
        file = self.run_dir / FOLDER / f"{step:06d}.jsonl"
        if not file.exists():
            return []
        by_prompt: dict[str, list[Mapping[str, Any]]] = {}
        for number, line in enumerate(_ANSWER.content(file).split(b"\n"), start=1):
            if line:
                one = _ANSWER.parsed(line, source=f"{file}:{number}")
                if one["reward"] is not None:
                    by_prompt.setdefault(one["row"], []).append(one)
        if not by_prompt:
            return []
        ordered = [sorted(of, key=lambda one: -one["reward"]) for of in by_prompt.values()]
        answers = max(ordered, key=lambda of: of[0]["reward"] - of[-1]["reward"])
        is_one = answers[0]["reward"] == answers[-1]["reward"]
        num = f"of {len(answers)}"
        which = [f"all {len(answers)}"] if is_one else [f"best {num}", f"worst {num}"]
        return [
            (
                f"{step:,}, {name}{', cut off' if one['is_cut'] else ''}",
                *(_text(one["prompt"]), _text(one["answer"]) or "(nothing)", one["reward"]),
            )
            for name, one in zip(which, (answers[0], answers[-1]), strict=False)
        ]


def reward_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rewards of steps, as `finetune.report.explain.learned_rows` returns losses.

    Args:
        rows: Of metrics, up to the step whose weights are the result.
    """
    first, last = rows[0], rows[-1]
    evaluated = [row for row in rows if _EVAL_REWARD in row]
    best = max(evaluated, key=lambda row: float(row[_EVAL_REWARD]), default=last)
    held_out = {row["step"]: row for row in (best, last) if _EVAL_REWARD in row}
    return [
        *(
            Row("", f"mean reward, step {step:,}", row["reward"], "loss")
            for step, row in {first["step"]: first, last["step"]: last}.items()
        ),
        *(
            Row("", f"mean reward of held-out prompts, step {step:,}", row[_EVAL_REWARD], "loss")
            for step, row in held_out.items()
        ),
    ]


def learned_by(recipe: Recipe, run_dir: Path) -> str:
    """Return what a finished run has learned from, in a sentence of its card."""
    section: Any = recipe.objective
    report = json.loads((run_dir / REPORT).read_text())
    step, held_out = report["adapter_step"], report["held_out"]
    num_prompts = recipe.train.global_batch_size // section.num_answers
    said = (
        f"It learned by reward: {', '.join(section.labels)}, {step:,} rounds of {num_prompts:,}"
        f" prompts with {section.num_answers} answers each"
    )
    values = [held_out[when].get(_EVAL_REWARD) for when in ("before", "after") if when in held_out]
    if len(values) == 2:
        said += f"; mean reward of held-out prompts {values[0]:.2f} -> {values[1]:.2f}"
    return f"\n{said}.\n"


def _chart(
    name: str, title: str, lines: Mapping[str, Sequence[tuple[int, float]]], *, y: str
) -> Chart | None:
    """Return curves over rounds, or nothing if there is no point.

    Args:
        name: The chart's id.
        title: Its heading.
        lines: Step and value of each point, by the name of the line.
        y: Name of the value.
    """
    points = [
        {"run": line, "step": step, y: value} for line, of in lines.items() for step, value in of
    ]
    if not points:
        return None
    drawn = [line for line, of in lines.items() if of]
    is_marked = len(points) <= MOST_MARKED
    chart = curves(name, title, points, y=y, runs=drawn, is_held_out=is_marked)
    ends = (
        f"{line} {of[0][1]:.5g} in step {of[0][0]}, {of[-1][1]:.5g} in step {of[-1][0]}".strip()
        for line, of in lines.items()
        if of
    )
    return replace(chart, summary=f"{title}: {'; '.join(ends)}.")


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if key in row]


def _middle(rows: Sequence[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    """Return the rows between the 20th and the 80th percentile of a value."""
    ordered = sorted(rows, key=lambda row: float(row[key]))
    cut = int(LOW * len(ordered))
    return ordered[cut : len(ordered) - cut]


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def _text(text: str) -> str:
    """Return a text that is short, without control characters."""
    return printable(shortened(text))
