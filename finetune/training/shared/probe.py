"""A probe: before the first step only a new head learns, on features of the layers as they are.

What does not train gives a row the same features in every step. So one forward over the layers
computes those of all rows; they are kept in RAM, and no step of the head moves or computes a layer.
The run then begins with the head that was found: linear probing, then fine-tuning (LP-FT). A drawn
head would first distort what the layers know.

The head's steps have the rows, the optimizer, the clipping and the schedule of a run's, and compute
in float32; the result is rounded once into the type of the model. A probe that is stopped leaves
nothing, and starts again to the bit; one that has ended is read from its folder.

Source: arXiv:2202.10054, section 3.4.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune.errors import RunFailedError
from finetune.recipe.sections import TrainSection
from finetune.report.explain import features_took, probe_learned, probe_took
from finetune.run.probe_folder import (
    ProbeFigures,
    read_head,
    read_probe,
    write_features,
    write_probe,
)
from finetune.training import report
from finetune.training.optimizer import AdapterUpdate, learning_rate
from finetune.training.shared.head_rows import Head, HeadRows, featured, head_of, objectives_of
from offload.plan.plan import Plan
from offload.plan.request import PlanRequest
from offload.plan.scoring import FeaturePass, feature_pass

if TYPE_CHECKING:
    from finetune.training.session import Session
    from finetune.training.shared.member import Begun


def probe(begun: "Begun", plan: Plan, request: PlanRequest) -> None:
    """Let the head of a run learn before its first step, if the recipe has a probe.

    Of a run whose head trains alone, write what its features took.

    Args:
        begun: The run, whose model is on its engine.
        plan: Of all runs that share its stream.
        request: Of this run.

    Raises:
        RunFailedError: A loss is not finite.
        CheckpointError: The result cannot be written.
    """
    session, run = begun.session, begun.session.run
    if session.head_alone is not None:
        figures = session.head_alone.figures
        write_features(run.dir.path, figures)
        run.screen.note(f"Features: {features_took(asdict(figures))}")
        return
    train, cost = run.recipe.train.of_probe, feature_pass(plan, request)
    if train is None or begun.first_step:
        return
    assert cost is not None, "a recipe with a probe asks for one"
    kept, note = read_head(run.dir.path, rows=session.rows_hash)
    if note:
        run.screen.note(note)
    found = _learned(session, train, cost) if kept is None else kept
    with torch.no_grad():
        for name, weight in head_of(session).items():
            weight.copy_(found[name])
    session.loop.update.publish()


def _learned(
    session: "Session", train: TrainSection, cost: FeaturePass
) -> Mapping[str, torch.Tensor]:
    """Take the features, run all steps of the head, and write what was found.

    Args:
        session: The run.
        train: Settings of the head's steps.
        cost: What the features are predicted to take.
    """
    run, start_s = session.run, time.perf_counter()
    trained, held_out = featured(session)
    pass_s, start_s = time.perf_counter() - start_s, time.perf_counter()
    head = Head(
        {n: nn.Parameter(one.detach().clone().float()) for n, one in head_of(session).items()}
    )
    learning = _Learning(session, train, head, trained, held_out)
    rows = [learning.step(number) for number in range(learning.num_steps)]
    tables = [one.features for one in (trained, held_out) if one is not None]
    figures = ProbeFigures(
        rows=session.rows_hash,
        num_steps=len(rows),
        num_features=sum(table.num for table in tables),
        num_parameters=head.num_parameters,
        feature_bytes=sum(table.num_bytes for table in tables),
        predicted_pass_s=cost.pass_s or 0.0,
        pass_s=pass_s,
        steps_s=time.perf_counter() - start_s,
    )
    write_probe(run.dir.path, head.weights, figures, rows)
    found = read_probe(run.dir.path)
    assert found is not None, "written just now"
    run.screen.note(f"Probe: {probe_took(found)}: {probe_learned(found)}")
    return head.weights


class _Learning:
    """The steps of a head on features."""

    def __init__(
        self,
        session: "Session",
        train: TrainSection,
        head: Head,
        trained: HeadRows,
        held_out: HeadRows | None,
    ) -> None:
        """Take the parts, and make a fresh optimizer of the head.

        Args:
            session: The run.
            train: Settings of the steps.
            head: What trains.
            trained: Rows to train on.
            held_out: Rows to evaluate on; None if there are none.
        """
        run = session.run
        self.num_steps = session.steps.num if train.steps is None else train.steps
        self._train, self._head, self._held_out = train, head, held_out
        self._rows = trained
        self._steps = trained.steps.lasting(self.num_steps)
        self._eval_every = run.recipe.output.eval_every
        self._objectives = objectives_of(session)
        self._update = AdapterUpdate(
            head.weights, train=train, loraplus_ratio=None, ranks=run.ranks
        )

    def step(self, number: int) -> dict[str, Any]:
        """Run step `number`, counted from 0, and return what was learned.

        Raises:
            RunFailedError: The loss is not finite.
        """
        rows = self._steps.order.rows(number)
        relations = self._steps.share_of(rows).rows
        assert relations is not None, "a head of its own has an objective"
        objective = self._objectives.of_step(relations)
        found = self._rows.loss(rows, objective, self._head)
        found.value.backward()
        loss, norm = self._update.gather(float(found.value.detach()), loss_scale=1.0)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise RunFailedError(
                f"in step {number + 1} of the probe the loss is {loss} and the norm of the"
                f" gradients {norm}",
                limit="both must be finite",
                hint=f"start again with a lower rate: `train.probe_lr: {self._train.lr / 4:.1e}`",
            )
        lr = learning_rate(number, self._train, num_steps=self.num_steps)
        self._update.apply(lr=lr)
        row = {"step": number + 1, "loss": loss, "lr": lr, "grad_norm": norm}
        row |= {name: float(value) for name, value in found.metrics.items()}
        is_last = number + 1 == self.num_steps
        if self._held_out is not None and (is_last or _is_due(number + 1, self._eval_every)):
            row |= report.evaluation_row(self._held_out.evaluation(self._objectives, self._head))
        return row


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
