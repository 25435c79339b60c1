"""A new head that learns on features of frozen layers: first, or alone (linear probing).

What does not train gives a row the same features in every step. So one forward over the layers
computes those of all rows; they are kept in RAM, and no step of the head moves or computes a layer.

Probe: before the first step only the head learns, and the run begins with what was found: linear
probing, then fine-tuning (LP-FT). A drawn head would first distort what the layers know. The head's
steps have the rows, the optimizer, the clipping and the schedule of a run's, and compute in
float32; the result is rounded once into the type of the model. A probe that is stopped leaves
nothing, and starts again to the bit; one that has ended is read from its folder.

Alone: all else is as in a run of an adapter: its rows, optimizer, clipping, schedule, checkpoints
and evaluations, and the file that plain peft loads. Features are taken anew by each process that
runs the steps, so a run that was stopped goes on from its checkpoint, to the bit.

Shapes: N label tokens of some rows, D model dim, C outputs of the head.

Source: arXiv:2202.10054, section 3.4.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional

from finetune.data.step_rows import StepRows
from finetune.data.steps import Steps, parts_of
from finetune.errors import DivergedError
from finetune.recipe.recipe import Recipe
from finetune.recipe.sections import TrainSection
from finetune.report.explain import features_took, probe_learned, probe_took
from finetune.run.checkpoint import LossScale
from finetune.run.probe_folder import (
    FeatureFigures,
    ProbeFigures,
    read_head,
    read_probe,
    write_features,
    write_probe,
)
from finetune.run.run_files import Evaluation
from finetune.training import report
from finetune.training.kinds.adapter import AdapterRun
from finetune.training.kinds.features import Features, PassThrough
from finetune.training.loop import Computed, Request, StepEngine, is_due
from finetune.training.objectives import HeadOutputs, Objectives, mean_of
from finetune.training.optimizer import AdapterUpdate, learning_rate
from finetune.training.run import Run
from finetune.training.session import Adapted, Session
from offload.engine.batch import rows_of_labels
from offload.engine.engine import Engine
from offload.engine.objective import Objective, OutputObjective, Scores, StepLoss
from offload.plan.facts.trainable import SCORE
from offload.plan.feature_pass import FeaturePass, feature_pass
from offload.plan.plan import Plan, calibrate, with_costs
from offload.plan.request import PlanRequest
from offload.plan.schedule.op import Kind
from offload.plan.schedule.timeline import Span, Timeline

if TYPE_CHECKING:
    from peft import PeftModel


class Head:
    """A head's weights in float32."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Take weights, by their names in a checkpoint."""
        self.weights = dict(weights)
        by_kind = {name.rpartition(".")[2]: weight for name, weight in weights.items()}
        self._weight_CD, self._bias_C = by_kind["weight"], by_kind.get("bias")

    @property
    def num_parameters(self) -> int:
        """Of all weights."""
        return sum(weight.numel() for weight in self.weights.values())

    def outputs(self, values_ND: torch.Tensor) -> torch.Tensor:
        """Return the outputs (N, C) of features."""
        values_ND = values_ND.to(self._weight_CD.device).float()
        return functional.linear(values_ND, self._weight_CD, self._bias_C)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadRows:
    """Rows with their features."""

    steps: Steps  # the steps of the rows, all this rank's
    features: Features  # the features of each row

    def loss(self, rows: tuple[int, ...], objective: Objective, head: Head) -> StepLoss:
        """Return an objective's loss of rows, of which it knows in the order of a step's share."""
        places = self.steps.in_order(rows)
        values_ND, rows_N = self.features.of(places)
        outputs_NC = head.outputs(values_ND)
        assert isinstance(objective, OutputObjective), "a head of its own has outputs"
        index = objective.output_index
        return objective.loss(
            Scores(
                policy_N=outputs_NC if index is None else outputs_NC[:, index],
                reference_N=None,
                rows_N=rows_N,
                num_rows=len(places),
            )
        )

    @torch.no_grad()
    def evaluation(self, objectives: Objectives, head: Head) -> Evaluation:
        """Return what all rows say of a head, cut into the parts of an evaluation."""
        parts = []
        for num_groups, rows in parts_of(self.steps):
            share = self.steps.share_of(rows)
            relations = cast("StepRows", share.rows)
            found = self.loss(rows, objectives.of_held_out(relations), head)
            weight = objectives.section.weight(
                num_groups=num_groups, num_rows=len(rows), num_label_tokens=share.num_label_tokens
            )
            evaluation = objectives.evaluation(
                relations,
                label_lens=(),
                loss=float(found.value),
                metrics={name: float(value) for name, value in found.metrics.items()},
            )
            parts.append((weight, evaluation))
        return mean_of(parts, objectives.section)


def head_of(session: Session) -> dict[str, torch.Tensor]:
    """Return the weights of the head that a run updates, by their names in a checkpoint."""
    return {n: weight for n, weight in session.loop.weights.items() if SCORE in n.split(".")}


def featured(session: Session) -> tuple[HeadRows, HeadRows | None]:
    """Compute the features of the rows that are trained on, and of those that are held out."""
    trained = _features_of(session, session.steps, "Taking features")
    if session.held_out is None or session.run.recipe.output.eval_every is None:
        return trained, None
    return trained, _features_of(session, session.held_out, "Taking features of held-out rows")


def _features_of(session: Session, steps: Steps, name: str) -> HeadRows:
    """Return what a new head reads at each label token of rows, by the model as it is.

    The layers compute each row once, in parts of about a step, each a pass over the layers.

    Args:
        session: The run.
        steps: The steps of the rows, all this rank's.
        name: The work in words.
    """
    engine, kind = session.engine, session.kind
    assert isinstance(engine, Engine)
    assert isinstance(kind, ProbedRun)
    num_rows, num = len(steps.rows), int(steps.rows.loss_tokens.sum())
    dtype: torch.dtype = getattr(torch, session.run.recipe.model.dtype)
    # it does not count the first token of a row, which may have a class
    found = Features(num_rows=num_rows, max_features=num + num_rows, dtype=dtype)
    done = 0
    with (
        session.run.screen.working(name, "rows") as progress,
        session.loop.evaluated(),
        kind.reads.on(),
    ):
        for _, rows in parts_of(steps):
            outputs, batches = HeadOutputs(), steps.share_of(rows).micro_batches
            engine.evaluate(batches, objective=outputs)
            lens = rows_of_labels(batches, is_shifted=False)[0].bincount()
            found.add(steps.in_order(rows), lens.tolist(), outputs.outputs_NC)
            done += len(rows)
            progress(done, num_rows)
    return HeadRows(steps=steps, features=found)


def objectives_of(session: Session) -> Objectives:
    """Return the losses of a run whose head learns."""
    recipe, ranks = session.run.recipe, session.run.ranks
    return Objectives(section=recipe.objective, seq_len=recipe.train.seq_len, ranks=ranks)


NUM_TIMED = 5
"""Steps that are timed before the first; the median is what the plan then predicts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadResult:
    """What a step found, as an engine's step returns it."""

    loss: float
    metrics: Mapping[str, float]
    timeline: Timeline
    num_loads: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class HeadAlone:
    """The steps of a head on features."""

    head: Head  # the head, on the weights that the run updates
    trained: HeadRows  # rows to train on
    held_out: HeadRows | None  # rows to evaluate on; None if there are none
    objectives: Objectives  # the losses

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


def _timed(session: Session, alone: HeadAlone, plan: Plan) -> Plan:
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
    costs = calibrate(plan.costs, typical.timeline, optimizer_s=typical.optimizer_s)
    return with_costs(plan, costs)


def _learned(
    session: Session, train: TrainSection, cost: FeaturePass
) -> Mapping[str, torch.Tensor]:
    """Take the features, run all steps of the head, and write what was found.

    Args:
        session: The run.
        train: Settings of the head's steps.
        cost: The predicted cost of the features.
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
        session: Session,
        train: TrainSection,
        head: Head,
        trained: HeadRows,
        held_out: HeadRows | None,
    ) -> None:
        """Take the parts, and make a fresh optimizer of the head.

        Args:
            session: The run.
            train: Settings of the steps.
            head: The head, which trains.
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
            DivergedError: The loss is not finite.
        """
        rows = self._steps.order.rows(number)
        relations = self._steps.share_of(rows).rows
        assert relations is not None, "a head of its own has an objective"
        objective = self._objectives.of_step(relations)
        found = self._rows.loss(rows, objective, self._head)
        found.value.backward()
        loss, norm = self._update.gather(float(found.value.detach()), loss_scale=1.0)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(
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
        if self._held_out is not None and (is_last or is_due(number + 1, self._eval_every)):
            row |= report.evaluation_row(self._held_out.evaluation(self._objectives, self._head))
        return row


class ProbedRun(AdapterRun):
    """An adapter and a new head, which learns before the first step."""

    reads: PassThrough
    """Lets the head return what it reads."""

    def engine(self, run: Run, plan: Plan, adapted: Adapted) -> StepEngine:
        """Stream the layers; the head may return what it reads."""
        engine = super().engine(run, plan, adapted)
        self.reads = PassThrough(getattr(cast("PeftModel", adapted.model).get_base_model(), SCORE))
        return engine

    def begin(self, session: Session, plan: Plan, request: PlanRequest) -> None:
        """Let the head learn, unless the run has begun or its probe is there.

        Raises:
            DivergedError: A loss is not finite.
            CheckpointError: The result cannot be written.
        """
        run = session.run
        train, cost = run.recipe.train.of_probe, feature_pass(plan, request)
        if train is None or session.first_step:
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


class HeadRun(ProbedRun):
    """A new head alone: no step moves or computes a layer."""

    _figures: FeatureFigures

    def scaling(self, recipe: Recipe) -> LossScale | None:
        """Return nothing: the head computes in float32."""
        return None

    def timed(self, session: Session, plan: Plan) -> Plan:
        """Take the features, and return the plan at the price of the head's steps."""
        cost = feature_pass(plan, plan.request)
        assert cost is not None, "such a run asks for features"
        start_s = time.perf_counter()
        trained, held_out = featured(session)
        tables = [one.features for one in (trained, held_out) if one is not None]
        head = Head({n: w for n, w in head_of(session).items() if isinstance(w, nn.Parameter)})
        self._figures = FeatureFigures(
            num_features=sum(table.num for table in tables),
            num_parameters=head.num_parameters,
            feature_bytes=sum(table.num_bytes for table in tables),
            predicted_pass_s=cost.pass_s or 0.0,
            pass_s=time.perf_counter() - start_s,
        )
        alone = HeadAlone(head, trained, held_out, objectives_of(session))
        session.head = alone
        return _timed(session, alone, plan)

    def begin(self, session: Session, plan: Plan, request: PlanRequest) -> None:
        """Write what the features took."""
        write_features(session.run.dir.path, self._figures)
        session.run.screen.note(f"Features: {features_took(asdict(self._figures))}")
