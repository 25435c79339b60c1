"""Energy and money: what a run took by its counters, and what a plan can take at most.

A plan's bound is the most that its card may draw, times the predicted step: of the GPU alone. Where
the board's power is not known, or nothing was counted, the figures are None and words say why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.recipe.sections import ReportSection
from finetune.report.format import shown_kwh
from offload.plan.machine.machine import board_w
from offload.plan.plan import Plan
from offload.probe.energy import LEAST_WINDOW_S

J_PER_KWH = 3.6e6
PARTS = ("GPU", "CPU")
Row = Mapping[str, Any]


# ------------------------------------------------------------------------------------------ a run


@dataclass(frozen=True, kw_only=True, slots=True)
class PartEnergy:
    """What one part of the machine took, over the steps of a run that counted it."""

    part: str  # GPU or CPU
    joules: float  # the energy of all ranks
    num_steps: int  # steps with a count
    num_tokens: int  # the tokens of these steps
    # The time from the end of the step before them to the end of theirs, evaluations and
    # checkpoints included.
    window_s: float

    @property
    def j_per_token(self) -> float:
        """Joules per token, padding left out."""
        return self.joules / self.num_tokens

    @property
    def mean_w(self) -> float:
        """Mean power, with what is drawn when idle."""
        return self.joules / self.window_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnergy:
    """What a run's steps took."""

    num_steps: int  # steps that are done
    parts: tuple[PartEnergy, ...]  # the parts that were counted
    missing: Mapping[str, str]  # the parts that were not counted, or not to the end, and why
    predicted: Mapping[str, Any] = field(default_factory=dict)  # as `plan_energy` returns it

    @property
    def joules(self) -> float | None:
        """Of all parts that were counted; None if none was."""
        return sum(one.joules for one in self.parts) if self.parts else None

    @property
    def kwh(self) -> float | None:
        """The same in kWh."""
        return None if self.joules is None else self.joules / J_PER_KWH

    @property
    def j_per_token(self) -> float | None:
        """Of all parts that were counted; None if none was."""
        return sum(one.j_per_token for one in self.parts) if self.parts else None

    def to_json(self) -> dict[str, Any]:
        """Return the figures for programs; None where nothing was counted."""
        return {
            "j_per_token": self.j_per_token,
            "kwh": self.kwh,
            "parts": {
                one.part: {
                    "joules": one.joules,
                    "j_per_token": one.j_per_token,
                    "mean_w": one.mean_w,
                    "num_steps": one.num_steps,
                }
                for one in self.parts
            },
            "missing": dict(self.missing),
            "at_most_j_per_token": self.predicted.get("at_most_j_per_token"),
        }

    def lines(self, prices: ReportSection | None = None) -> list[str]:
        """Return the same in words."""
        of = f" of {self.num_steps:,}"
        found = [
            f"{one.part}: {shown_kwh(one.joules / J_PER_KWH)}, {one.j_per_token:.3g} J per token,"
            f" {one.mean_w:,.0f} W on average"
            + ("" if one.num_steps == self.num_steps else f", in {one.num_steps:,} steps{of}")
            for one in self.parts
        ] + [f"{part} not counted: {why}" for part, why in self.missing.items()]
        found = found or ["not counted"]
        if (most := self.predicted.get("at_most_j_per_token")) is not None:
            found.append(
                f"GPU predicted: at most {most:.3g} J per token, of {self.predicted['board_w']} W"
                " board power (published)"
            )
        cost = None if prices is None else cost_of(self.kwh, prices)
        if cost is not None and prices is not None:
            counted = " and ".join(one.part for one in self.parts)
            found.append(f"cost of {counted}: {shown_cost(cost, prices)}")
        return found


def run_energy(
    rows: Sequence[Row], missing: Mapping[str, str], predicted: Mapping[str, Any] | None = None
) -> RunEnergy:
    """Add up a run's rows, those before a resume among them.

    Args:
        rows: Of metrics.jsonl.
        missing: Parts that the run could not measure, and why.
        predicted: What `plan_energy` returned for the run.
    """
    parts, why = [], dict(missing)
    for part in PARTS:
        counted = [row for row in rows if part in row.get("energy_j", {})]
        window_s = sum(row["energy_window_s"] for row in counted)
        if not counted:
            continue
        if window_s < LEAST_WINDOW_S:
            why[part] = f"the steps took {window_s:.2f} s, and a count needs {LEAST_WINDOW_S:g} s"
            continue
        parts.append(
            PartEnergy(
                part=part,
                joules=sum(row["energy_j"][part] for row in counted),
                num_steps=len(counted),
                num_tokens=sum(row["num_tokens"] for row in counted),
                window_s=window_s,
            )
        )
    return RunEnergy(
        num_steps=len(rows),
        parts=tuple(parts),
        missing=why,
        predicted=predicted or {},
    )


# ----------------------------------------------------------------------------------------- a plan


def plan_energy(plan: Plan) -> dict[str, Any]:
    """Return what a plan's cards can take at most, for programs; None where that is not known."""
    watts, num = board_w(plan.machine), plan.request.num_ranks
    if plan.others:
        every = [watts, *(board_w(other.machine) for other in plan.others)]
        known = [one for one in every if one is not None]
        watts, num = sum(known) if len(known) == len(every) else None, 1
    joules = None if watts is None else watts * num * plan.step_s
    per_token = None if joules is None else joules / plan.tokens_per_step
    return {
        "board_w": watts,
        "board_w_source": "not known" if watts is None else "published",
        "at_most_j_per_token": per_token,
        "at_most_kwh_per_million_tokens": None
        if per_token is None
        else per_token * 1e6 / J_PER_KWH,
    }


def plan_cost(plan: Plan, prices: ReportSection) -> dict[str, Any]:
    """Return what a plan's energy costs at most."""
    kwh = plan_energy(plan)["at_most_kwh_per_million_tokens"]
    cost = cost_of(kwh, prices)
    return {"at_most_cost_per_million_tokens": cost, "currency": prices.currency}


def plan_energy_line(plan: Plan, prices: ReportSection) -> str:
    """Return the same in words."""
    found = plan_energy(plan)
    kwh, watts = found["at_most_kwh_per_million_tokens"], found["board_w"]
    if kwh is None:
        return f"not predicted: no board power is known of {plan.machine.name}"
    cost = cost_of(kwh, prices)
    money = "" if cost is None else f", {shown_cost(cost, prices)}"
    cards = f"{plan.request.num_ranks} x " if plan.request.num_ranks > 1 else ""
    if plan.others:
        cards = "all ranks: "
    return (
        f"at most {shown_kwh(kwh)} per million tokens{money}: {cards}{watts} W board power"
        " (published) x step time, without the host"
    )


# ---------------------------------------------------------------------------------------- figures


def cost_of(kwh: float | None, prices: ReportSection) -> float | None:
    """Return what energy costs; None without a price."""
    return None if kwh is None or prices.price_per_kwh is None else kwh * prices.price_per_kwh


def shown_cost(cost: float, prices: ReportSection) -> str:
    """Write money with its currency, and its price."""
    currency = f" {prices.currency}" if prices.currency else ""
    amount = f"{cost:,.2f}" if cost >= 1 else f"{cost:.2g}"
    return f"{amount}{currency} at {prices.price_per_kwh:g}{currency} per kWh"
