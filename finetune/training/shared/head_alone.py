"""A head that trains alone: linear probing. No step of it moves or computes a layer.

All else is as in a run of an adapter: its rows, optimizer, clipping, schedule, checkpoints and
evaluations, and the file that plain peft loads. Features are taken anew by each process that runs
the steps, so a run that was stopped goes on from its checkpoint, to the bit.
"""

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import nn

from finetune.run.probe_folder import FeatureFigures
from finetune.training.loop import Computed, Request
from finetune.training.objectives import Evaluation, Objectives
from finetune.training.shared.head_rows import Head, HeadRows, featured, head_of, objectives_of
from offload.plan.plan import Plan, calibrate, with_costs
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.timeline import Span, Timeline
from offload.plan.scoring import feature_pass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from finetune.training.session import Session

NUM_TIMED = 5
"""Steps that are timed before the first; the median is what the plan then predicts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadResult:
    """What a step found, as an engine's step returns it."""

    loss: float
    metrics: "Mapping[str, float]"
    timeline: Timeline
    num_loads: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadAlone:
    """The steps of a head on features.

    Attributes:
        head: On the weights that the run updates.
        trained: Rows to train on.
        held_out: Rows to evaluate on; None if there are none.
        objectives: The losses.
        figures: What the features took.
    """

    head: Head
    trained: HeadRows
    held_out: HeadRows | None
    objectives: Objectives
    figures: FeatureFigures = field(repr=False)

    def computed(self, request: Request) -> Computed:
        """Add the gradients of a step to those of the weights."""
        start_s = time.perf_counter()
        objective = request.run.objective
        assert objective is not None, "a head of its own has an objective"
        rows = self.trained.steps.order.rows(request.order)
        found = self.trained.loss(rows, objective, self.head)
        found.value.backward()
        loss = float(found.value.detach())  # waits for the device
        metrics = {name: float(value) for name, value in found.metrics.items()}
        took_s = time.perf_counter() - start_s
        span = Span(
            lane=Lane.COMPUTE,
            kind=Kind.TAIL,
            layer=None,
            micro_batch=0,
            num_bytes=0,
            start_s=0.0,
            end_s=took_s,
        )
        result = HeadResult(loss=loss, metrics=metrics, timeline=Timeline(spans=(span,)))
        return Computed(result=result, computed_s=took_s)

    def evaluation(self) -> Evaluation:
        """Return what held-out rows say."""
        assert self.held_out is not None, "a rule of recipes"
        return self.held_out.evaluation(self.objectives, self.head)


def with_features(session: "Session", plan: Plan) -> "tuple[Session, Plan]":
    """Take the features of a head that trains alone, and time some of its steps.

    Args:
        session: The run, whose layers are timed.
        plan: At the prices of its layers.

    Returns:
        The run with its features, and the plan at the price of the head's steps.
    """
    cost = feature_pass(plan, plan.request)
    assert cost is not None, "such a run asks for features"
    start_s = time.perf_counter()
    trained, held_out = featured(session)
    tables = [one.features for one in (trained, held_out) if one is not None]
    weights = {n: w for n, w in head_of(session).items() if isinstance(w, nn.Parameter)}
    head = Head(weights)
    alone = HeadAlone(
        head=head,
        trained=trained,
        held_out=held_out,
        objectives=objectives_of(session),
        figures=FeatureFigures(
            num_features=sum(table.num for table in tables),
            num_parameters=head.num_parameters,
            feature_bytes=sum(table.num_bytes for table in tables),
            predicted_pass_s=cost.pass_s or 0.0,
            pass_s=time.perf_counter() - start_s,
        ),
    )
    return replace(session, head_alone=alone), _timed(session, alone, plan)


def _timed(session: "Session", alone: HeadAlone, plan: Plan) -> Plan:
    """Return the plan at the price of a step, timed on some that leave no trace."""
    loop, steps = session.loop, session.steps
    undo = loop.update.rehearsal()
    records = []
    for number in range(NUM_TIMED):
        step = number % steps.num
        request = loop.request(step, steps.share_of(steps.order.rows(step)))
        records.append(loop.complete(request, alone.computed(request)))
    undo()
    typical = sorted(records, key=lambda record: record.step_s)[NUM_TIMED // 2]
    costs = calibrate(
        plan.costs, typical.timeline, optimizer_s=typical.optimizer_s, num_kept_graphs=0
    )
    return with_costs(plan, costs)
