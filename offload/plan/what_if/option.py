"""One option for storing and moving a model, and its effect on a step compared with the plan."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from offload.errors import DoesNotFitError
from offload.plan.facts.facts import LayerFacts, ModelFacts
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import Machine
from offload.plan.plan import Plan, plan, with_costs
from offload.plan.request import PlanRequest
from offload.plan.schedule.schedule import MIN_SLOTS
from offload.plan.time.costs import LayerCost

Standing = Literal["in the plan", "a setting", "not done here"]
VAST_BYTES = 2**60


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The time, memory and traffic of a step.

    Attributes:
        step_s: Seconds of a step, optimizer included.
        vram_bytes: Peak of device memory, on each card.
        ram_bytes: Peak of host memory, of all processes together.
        link_bytes: What crosses a card's link per step, both ways, to the host and to other cards.
    """

    step_s: float
    vram_bytes: int
    ram_bytes: int
    link_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One row of a what-if table.

    Attributes:
        name: What the option does.
        standing: Whether the plan uses it, a setting enables it, or this tool only prices it.
        how: The setting, how the price is computed, or why there is none.
        source: The source of the idea or the formula.
        figures: Of the same step with the option; if the plan uses it, of the step without it.
        fits: Whether the figures are within the machine's memory.
    """

    name: str
    standing: Standing
    how: str
    source: str
    figures: Figures | None
    fits: bool


def figures_of(plan: Plan) -> Figures:
    """Return a plan's own figures."""
    return Figures(
        step_s=plan.step_s,
        vram_bytes=plan.peak_bytes,
        ram_bytes=plan.host_bytes,
        link_bytes=plan.schedule.h2d_bytes + plan.schedule.d2h_bytes,
    )


def replanned(
    name: str, how: str, source: str, *, plan: Plan, request: PlanRequest, is_in_plan: bool
) -> Option:
    """Return an option that is a setting: the plan of another request."""
    made, short = plan_anyway(plan.facts, plan.machine, request)
    return Option(
        name=name,
        standing="in the plan" if is_in_plan else "a setting",
        how=how,
        source=source,
        figures=figures_of(made),
        fits=not short,
    )


def priced(
    name: str, how: str, source: str, *, plan: Plan, figures: Figures, is_in_plan: bool = False
) -> Option:
    """Return an option that no setting enables."""
    return Option(
        name=name,
        standing="in the plan" if is_in_plan else "not done here",
        how=how,
        source=source,
        figures=figures,
        fits=not _short(figures, plan.machine, plan.request),
    )


def without_price(name: str, why: str, source: str) -> Option:
    """Return an option that does not apply here, and why."""
    return Option(
        name=name, standing="not done here", how=why, source=source, figures=None, fits=False
    )


def step_at_prices(plan: Plan, change: Callable[[LayerFacts, LayerCost], LayerCost]) -> float:
    """Simulate the plan's ops with other costs for its layers."""
    pairs = tuple(zip(plan.facts.layers, plan.costs.layers, strict=True))
    changed = {pair: change(*pair) for pair in set(pairs)}
    layers = tuple(changed[pair] for pair in pairs)
    return with_costs(plan, replace(plan.costs, layers=layers)).step_s


# ---------------------------------------------------------------------------------------------
# Without regard to memory


def plan_anyway(
    facts: ModelFacts, machine: Machine, request: PlanRequest
) -> tuple[Plan, tuple[str, ...]]:
    """Plan a request; if it does not fit, plan with the fewest slots and unlimited memory.

    Returns:
        The plan, and the names of the memories that are too small for it.
    """
    if fits(facts, machine, request):  # a refusal searches for what would fit, which is slow
        return plan(facts, machine, request), ()
    num_slots = MIN_SLOTS if request.num_slots is None else request.num_slots
    num_graphs = request.num_kept_graphs or 0
    freely = replace(
        request,
        num_slots=num_slots,
        num_kept_graphs=num_graphs,
        vram_budget_bytes=None,
        has_outputs=False,
        has_sent_graphs=False,
    )
    vast = replace(machine, vram_bytes=VAST_BYTES, ram_bytes=VAST_BYTES)
    try:
        made = plan(facts, vast, freely)  # the limit of page-locked memory is unchanged
    except DoesNotFitError:
        made = plan(facts, replace(vast, pinned_bytes=VAST_BYTES), freely)
    short = _short(figures_of(made), machine, request)
    made = replace(made, machine=machine, request=replace(request, num_slots=num_slots))
    return made, tuple(short or ["page-locked RAM"])


def fits(facts: ModelFacts, machine: Machine, request: PlanRequest) -> bool:
    """Return whether there is any plan for a request."""
    return MemoryNeeds.of(facts, machine, request).most_slots is not None


def _short(figures: Figures, machine: Machine, request: PlanRequest) -> list[str]:
    """Name the memories that are too small; on a CPU there is only one."""
    ram_bytes = figures.ram_bytes + (figures.vram_bytes if machine.device == "cpu" else 0)
    limit_bytes = min(machine.vram_bytes, request.vram_budget_bytes or machine.vram_bytes)
    return [
        *(["VRAM"] if figures.vram_bytes > limit_bytes else []),
        *(["RAM"] if ram_bytes > machine.ram_bytes else []),
    ]
