"""Pure planning: sizes, costs, schedule and simulation. No torch, no clock, no environment.

    from offload.plan import Machine, ModelFacts, PlanRequest, plan

`offload.plan.plan` is both this function and a module: the names below are bound when the package
is imported, not on first use, because the two share a name.
"""

from offload.plan.facts.facts import AdapterSpec, ModelFacts
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import Machine, Rate, described_machine, named_machine
from offload.plan.plan import Plan, plan
from offload.plan.request import PlanRequest
from offload.plan.schedule.timeline import Timeline
from offload.plan.search import Choice, search

__all__ = [
    "AdapterSpec",
    "Choice",
    "Machine",
    "ModelFacts",
    "Plan",
    "PlanRequest",
    "Rate",
    "Timeline",
    "Workload",
    "described_machine",
    "named_machine",
    "plan",
    "search",
]
