"""Optimizer steps on an attached model: rehearsed, run, and validated."""

import gc
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import numpy as np
import torch
from torch import nn

from finetune.data.dataset import ExampleSet
from finetune.data.steps import Steps, StepShare
from finetune.errors import RunFailedError
from finetune.model.overflow import first_overflow
from finetune.objective.features import Features, PassThrough
from finetune.recipe.sections import TrainSection
from finetune.run.checkpoint import (
    BACKOFF,
    MAX_SKIPPED,
    LossScale,
    Restored,
    Resumable,
    Saved,
    StateForm,
    state_form,
)
from finetune.training.objectives import (
    Evaluation,
    HeadOutputs,
    Objectives,
    RowLogps,
    mean_of,
    parts_of,
)
from finetune.training.optimizer import Update, learning_rate
from finetune.training.ranks import Ranks
from offload.engine.batch import rows_of_labels
from offload.engine.engine import Engine
from offload.engine.objective import Objective
from offload.engine.passes.part import RunStep
from offload.engine.results import StepResult
from offload.engine.seeding import NEWEST
from offload.plan.schedule.timeline import Timeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from finetune.training.sharded.engine import ShardedEngine, ShardedResult
    from finetune.training.shared.head_alone import HeadResult

StepEngine: TypeAlias = "Engine | ShardedEngine"
"""What computes steps: layers that are streamed, or ranks that each hold a part of the model."""

TIMED_S = 5.0  # for steps that are timed in addition to the first
Progress = Callable[[int, int], None]


def unseen(_done: int, _total: int) -> None:
    """Show no progress."""


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Freeze the objects created so far (`gc.freeze`).

    Otherwise a full collection takes about 0.2 s of an arbitrary step.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The result of one step.

    Attributes:
        loss: Mean over the step's label tokens, those of all ranks.
        grad_norm: Before clipping.
        lr: Learning rate.
        num_tokens: Tokens of the rows of all ranks, padding left out.
        num_label_tokens: Tokens with a loss, of all ranks.
        num_loads: Layers that crossed this rank's link.
        optimizer_s: Adding up the ranks' losses, clipping and update.
        step_s: The whole step, without waiting for data.
        timeline: The engine's ops.
        metrics: Those of the objective, by name, over the rows of all ranks.
        loss_scale: Factor of its gradients until they were added up.
        scaling: How the loss of the next step is scaled; None if the model does not compute in
            float16.
        is_skipped: Whether nothing was updated, because a gradient overflowed.
        unlearned: Names of an adapter's tensors that the run's first step gave no gradient.
    """

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    num_label_tokens: int
    num_loads: int
    optimizer_s: float
    step_s: float
    timeline: Timeline
    metrics: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float = 1.0
    scaling: LossScale | None = None
    is_skipped: bool = False
    unlearned: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """A step of a run before the engine computes it, alone or together with those of others.

    Attributes:
        run: What the engine is given.
        share: What it was made of.
        order: Of a run's requests; in a step that is shared, all have the same.
        lr: Learning rate of the update that follows.
        name: The step in words.
        prepared_s: How long it took to make.
        scaling: How its loss is scaled; None if it is not.
    """

    run: RunStep
    share: StepShare
    order: int
    lr: float
    name: str
    prepared_s: float
    scaling: LossScale | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Computed:
    """What the engine found for a request.

    Attributes:
        result: Of the run.
        computed_s: Of the whole step, shared or not.
    """

    result: "StepResult | ShardedResult | HeadResult"
    computed_s: float


def computed(engine: StepEngine, requests: Sequence[Request]) -> list[Computed]:
    """Compute steps of runs that share an engine, in one pass over its layers and back."""
    start_s = time.perf_counter()
    results: Sequence[StepResult | ShardedResult] = engine.forward_backward_runs(
        [request.run for request in requests]
    )
    _ = results[0].timeline  # waits for the device
    computed_s = time.perf_counter() - start_s
    return [Computed(result=result, computed_s=computed_s) for result in results]


class Loop:
    """A model, its engine and its update; all ranks call it alike."""

    def __init__(  # noqa: PLR0913 - all that a run is
        self,
        *,
        model: nn.Module,
        engine: StepEngine,
        update: Update,
        train: TrainSection,
        num_steps: int,
        ranks: Ranks,
        objectives: Objectives | None = None,
        adapter: str | None = None,
        scaling: LossScale | None = None,
        head: PassThrough | None = None,
    ) -> None:
        """Take the parts.

        The form of the optimizer's states is known once a step is rehearsed.

        Args:
            model: On its engine, with its trainable tensors.
            engine: Of the model.
            update: Of what trains, with a fresh optimizer.
            train: Settings of training.
            num_steps: Of the run.
            ranks: The processes that share each step.
            objectives: The losses of steps; None for cross-entropy.
            adapter: The model's adapter that this run trains; None if it has no other.
            scaling: How the loss of the first step is scaled, of a model in float16.
            head: On a new head, of a run that takes features.
        """
        self._model = model
        self._engine = engine
        self._update = update
        self._has_begun = False
        self._train = train
        self._num_steps = num_steps
        self._ranks = ranks
        self._objectives = objectives
        self._adapter = adapter
        self._head = head
        self.state_form: StateForm = {}
        self.seeding = NEWEST  # a resumed run has that of its checkpoint, and
        self.scaling = scaling  # this as well

    @property
    def _streamed(self) -> Engine:
        """The engine, of a run with settings that only this one has."""
        assert isinstance(self._engine, Engine), "a rule of recipes"
        return self._engine

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """What is updated, by name: with the optimizer's states, all that a resume needs."""
        return self._update.weights

    @property
    def update(self) -> Update:
        """What changes the weights."""
        return self._update

    @property
    def optimizer(self) -> Resumable:
        """The optimizer."""
        return self._update.optimizer

    def saved(self) -> Saved:
        """Return what a checkpoint is made of; all ranks call it, and the main one writes."""
        return self._update.saved()

    def restore(self, restored: Restored) -> None:
        """Go on from what a checkpoint holds."""
        self._update.restore(restored)
        self.seeding, self.scaling = restored.seeding, restored.scaling

    def require_same(self, *, step: int) -> None:
        """Check that what trains is the same on all ranks, to the bit, where each has a copy."""
        if self._ranks.num > 1:
            self._ranks.require_same_weights(self._update.copies, step=step)

    def step(self, number: int, share: StepShare) -> StepRecord:
        """Run optimizer step `number`, counted from 0, of which this rank does a share."""
        request = self.request(number, share)
        (found,) = computed(self._engine, [request])
        return self.complete(request, found)

    def using(self) -> AbstractContextManager[None]:
        """Compute with this run's adapter in a context, whichever others the model has."""
        return nullcontext() if self._adapter is None else self._streamed.using(self._adapter)

    def request(self, number: int, share: StepShare) -> Request:
        """Return what the engine is to compute for step `number`, counted from 0."""
        return self._request(
            share,
            order=number,
            lr=learning_rate(number, self._train, num_steps=self._num_steps),
            dropout_seed=self.seeding.of_step(self._train.seed, number),
            name=f"step {number + 1}",
            scaling=self.scaling,
        )

    def rehearse(self, longest: StepShare, typical: Sequence[StepShare]) -> StepRecord:
        """Rehearse alone; see `rehearsal`."""
        rehearsal = self.rehearsal(longest, typical)
        request = next(rehearsal)
        while True:
            (found,) = computed(self._engine, [request])
            try:
                request = rehearsal.send(found)
            except StopIteration as end:
                record: StepRecord = end.value
                return record

    def rehearsal(
        self, longest: StepShare, typical: Sequence[StepShare]
    ) -> Generator[Request, Computed, StepRecord]:
        """Run the longest step, then typical ones, and leave no trace in weights or optimizer.

        If memory runs out, it runs out here. No step is timed twice: kernels compiled for its
        shapes, such as the number of tokens of each expert, would already exist the second time.

        Args:
            longest: The step that takes most memory.
            typical: The first is timed only if it is the only one; the others as time allows.

        Returns:
            Of the later half of the timed steps the one with the median time, for calibration: the
            first steps of a mixture are slower, as kernels are compiled for each number of rows.
        """
        undo, scaling = self._update.rehearsal(), self.scaling
        yield from self._rehearsed(0, typical[0])  # from here on the optimizer has its states
        yield from self._rehearsed(1, longest)
        first, *others = typical[1:] or typical
        records = [(yield from self._rehearsed(2, first))]
        num_more = int(TIMED_S / max(self._ranks.exchange(records[0].step_s)))
        for order, share in enumerate(others[:num_more], 3):
            records.append((yield from self._rehearsed(order, share)))
        self.state_form = state_form(self.optimizer)
        undo()
        self.scaling = scaling
        self._has_begun = False
        later = sorted(records[len(records) // 2 :], key=lambda record: record.step_s)
        return later[len(later) // 2]

    def _rehearsed(self, order: int, share: StepShare) -> Generator[Request, Computed, StepRecord]:
        """Run a step, in float16 at a lower scale of the loss each time its gradients overflow.

        A step that is skipped makes no states, and shows not all of what a step takes.
        """
        while True:
            request = self._request(
                share,
                order=order,
                lr=0.0,
                dropout_seed=0,
                name="the rehearsal",
                scaling=self.scaling,
            )
            record = self.complete(request, (yield request))
            if not record.is_skipped:
                return record

    def validation_loss(
        self, examples: ExampleSet, *, steps: Steps, progress: Progress = unseen
    ) -> float:
        """Return the mean loss over the label tokens of all held-out rows, shared by the ranks.

        Args:
            examples: The rows.
            steps: Of the run; they make micro-batches of rows.
            progress: Called with the rows that are done, and all.

        Raises:
            RunFailedError: It is not finite.
        """
        size = self._train.sequences
        loss_sum, num_label_tokens = 0.0, 0
        with self._evaluated():
            for first in range(0, len(examples), size * self._ranks.num):
                start = first + size * self._ranks.index
                rows = [examples[i] for i in range(start, min(start + size, len(examples)))]
                if not rows:  # those of the last round are of other ranks
                    if not isinstance(self._engine, Engine):
                        self._engine.forward(None)
                    continue
                result = self._engine.forward(steps.padded_batch(rows))
                loss_sum += result.loss_sum
                num_label_tokens += result.num_label_tokens
                progress(min(start + size * self._ranks.num, len(examples)), len(examples))
        shares = self._ranks.exchange((loss_sum, num_label_tokens))
        loss = sum(loss for loss, _ in shares) / sum(num for _, num in shares)
        self._require_finite_held_out(loss)
        return loss

    def validation(self, held_out: Steps, *, progress: Progress = unseen) -> Evaluation:
        """Return the mean of the objective's loss and metrics over held-out rows.

        Args:
            held_out: Their steps, all this rank's; the ranks share them out by their numbers.
            progress: Called with the rows that are done, and all.

        Raises:
            RunFailedError: The loss is not finite.
        """
        assert self._objectives is not None
        found: dict[int, tuple[int, Evaluation]] = {}
        num_rows = 0
        with self._evaluated():
            for number, (num_groups, rows) in enumerate(parts_of(held_out)):
                num_rows += len(rows)
                if number % self._ranks.num != self._ranks.index:
                    continue
                share = held_out.share_of(rows)
                assert share.rows is not None
                result = self._streamed.evaluate(
                    share.micro_batches,
                    objective=self._objectives.of_held_out(share.rows),
                    scored=share.scored,
                )
                found[number] = (
                    self._objectives.weight(
                        num_groups=num_groups,
                        num_rows=len(rows),
                        num_label_tokens=result.num_label_tokens,
                    ),
                    self._objectives.evaluation(
                        share.rows,
                        label_lens=rows_of_labels(share.micro_batches)[0].bincount().tolist(),
                        loss=result.loss,
                        metrics=result.metrics,
                    ),
                )
                progress(num_rows, len(held_out.rows))
        parts = {
            number: part for one in self._ranks.exchange(found) for number, part in one.items()
        }
        mean = mean_of([parts[number] for number in sorted(parts)])
        self._require_finite_held_out(mean.loss)
        return mean

    def row_logps(self, steps: Steps, *, max_parts: int | None = None) -> "NDArray[np.float64]":
        """Return the log-probability of each row's label tokens, by the model as it is, in nats.

        Args:
            steps: Of the rows, all this rank's; the ranks share them out by their numbers.
            max_parts: The first parts of the rows, at most, each of about a step; those of other
                rows are 0. None takes all.
        """
        found = np.zeros(len(steps.rows))
        with self._evaluated():
            for number, (_, rows) in enumerate(islice(parts_of(steps), max_parts)):
                if number % self._ranks.num != self._ranks.index:
                    continue
                logps = RowLogps()
                batches = steps.share_of(rows).micro_batches
                self._streamed.evaluate(batches, objective=logps)
                found[list(steps.in_order(rows))] = logps.sums_R.numpy()
        return np.asarray(sum(self._ranks.exchange(found)))

    def features(
        self, steps: Steps, *, dtype: torch.dtype, progress: Progress = unseen
    ) -> Features:
        """Return what a new head reads at each label token of rows, by the model as it is.

        The layers compute each row once, in parts of about a step, each a pass over the layers.

        Args:
            steps: Of the rows, all this rank's.
            dtype: Of the features.
            progress: Called with the rows that are done, and all.
        """
        assert self._head is not None
        num_rows, num = len(steps.rows), int(steps.rows.loss_tokens.sum())
        # it does not count the first token of a row, which may have a class
        found = Features(num_rows=num_rows, max_features=num + num_rows, dtype=dtype)
        done = 0
        with self._evaluated(), self._head.on():
            for _, rows in parts_of(steps):
                outputs, batches = HeadOutputs(), steps.share_of(rows).micro_batches
                self._streamed.evaluate(batches, objective=outputs)
                lens = rows_of_labels(batches, is_shifted=False)[0].bincount()
                found.add(steps.in_order(rows), lens.tolist(), outputs.outputs_NC)
                done += len(rows)
                progress(done, num_rows)
        return found

    @contextmanager
    def _evaluated(self) -> Iterator[None]:
        """Compute with this run's adapter, in evaluation mode, once all ranks' updates are made."""
        if isinstance(self._engine, Engine):
            self._engine.updates.flush()
        self._model.eval()
        with self.using():
            yield
        self._model.train()

    def _require_finite_held_out(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise RunFailedError(
                f"the loss on held-out rows is {loss}",
                limit="it must be finite; earlier checkpoints are good",
                hint=self._lower_rate(),
            )

    def _request(
        self,
        share: StepShare,
        *,
        order: int,
        lr: float,
        dropout_seed: int,
        name: str,
        scaling: LossScale | None,
    ) -> Request:
        start_s = time.perf_counter()
        run = RunStep(
            micro_batches=share.micro_batches,
            adapter=self._adapter,
            objective=self._objective_of(share),
            scored=share.scored,
            dropout_seed=dropout_seed,
            seeding=self.seeding,
            num_label_tokens=share.num_label_tokens,
            micro_batch_ids=share.micro_batch_ids,
            add_up=self._ranks.add_up,
            reducer=self._update.reducer,
            loss_scale=1.0 if scaling is None else scaling.factor,
        )
        return Request(
            run=run,
            share=share,
            order=order,
            lr=lr,
            name=name,
            prepared_s=time.perf_counter() - start_s,
            scaling=scaling,
        )

    def complete(self, request: Request, found: Computed) -> StepRecord:
        """Update what trains with the gradients of a step that the engine has computed.

        A step whose loss was scaled and whose gradients overflowed is skipped, on all ranks alike:
        all have the same sums of gradients.

        Raises:
            RunFailedError: The loss or the gradients are not finite; nothing was updated. Or too
                many steps in a row were skipped.
        """
        share, result, scaling = request.share, found.result, request.scaling
        update_start_s = time.perf_counter()
        loss, grad_norm = self._update.gather(result.loss, loss_scale=request.run.loss_scale)
        if self.scaling is not None and not math.isfinite(loss):
            self._refuse_overflow(request)
        unlearned = () if self._has_begun else self._update.without_gradient()
        self._has_begun = True
        is_skipped = scaling is not None and not math.isfinite(grad_norm)
        if scaling is not None and is_skipped:
            scaling = self.scaling = scaling.skipped()
            self._skip(request.name, scaling)
        else:
            self._require_finite(request.name, loss, grad_norm)
            self._update.apply(lr=request.lr)
            if scaling is not None:
                self.scaling = scaling.applied()
        self._engine.wait()
        optimizer_s = time.perf_counter() - update_start_s
        return StepRecord(
            loss=loss,
            grad_norm=grad_norm,
            lr=request.lr,
            num_tokens=share.num_tokens,
            num_label_tokens=share.num_label_tokens,
            num_loads=result.num_loads,
            optimizer_s=optimizer_s,
            step_s=request.prepared_s + found.computed_s + optimizer_s,
            timeline=result.timeline,
            metrics=result.metrics,
            loss_scale=request.run.loss_scale,
            scaling=None if scaling is None else self.scaling,
            is_skipped=is_skipped,
            unlearned=unlearned,
        )

    def _objective_of(self, share: StepShare) -> Objective | None:
        if self._objectives is None:
            return None
        assert share.rows is not None
        return self._objectives.of_step(share.rows)

    def _require_finite(self, name: str, loss: float, grad_norm: float) -> None:
        """Stop before an update that would ruin the weights and, in time, every checkpoint."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RunFailedError(
                f"in {name} the loss is {loss} and the norm of the gradients {grad_norm}",
                limit="both must be finite; the step was not applied, and checkpoints are good",
                hint=self._lower_rate(),
            )

    def _skip(self, name: str, scaling: LossScale) -> None:
        """Let go of a step's gradients.

        Raises:
            RunFailedError: As many were skipped in a row as may be.
        """
        tensor = self._update.skip()
        if scaling.num_in_a_row == MAX_SKIPPED:
            raise RunFailedError(
                f"in {name} the gradient of {tensor} overflows in float16, with the loss times"
                f" {scaling.factor / BACKOFF:g}",
                limit=f"{MAX_SKIPPED} steps in a row were skipped; checkpoints are good",
                hint="`model.dtype: bfloat16` or `float32`",
            )

    def _refuse_overflow(self, request: Request) -> NoReturn:
        """Compute a step's rows again, each module watched.

        Raises:
            RunFailedError: Always; it names the first module that overflows.
        """
        run = request.run
        with self._evaluated(), first_overflow(self._model) as found:
            if run.objective is not None:
                self._streamed.evaluate(
                    run.micro_batches, objective=run.objective, scored=run.scored
                )
            else:
                for batch in run.micro_batches:
                    self._engine.forward(batch)
        names = [name for names in self._ranks.exchange(found) for name in names]
        where = "the loss, for all modules are finite without dropout"
        if names:
            where = names[0].removeprefix("base_model.model.")  # peft's
        raise RunFailedError(
            f"the forward of {request.name} overflows in float16, first in {where}",
            limit="its largest number is 65504; the step was not applied, checkpoints are good",
            hint="`model.dtype: bfloat16` or `float32`",
        )

    def _lower_rate(self) -> str:
        return f"start again with a lower rate: `train.lr: {self._train.lr / 4:.1e}`"
