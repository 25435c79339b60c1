"""Optimizer steps on an attached model: rehearsed, run, and validated."""

import gc
import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import nn

from finetune.data.dataset import ExampleSet
from finetune.data.step_rows import StepRows
from finetune.data.steps import Steps, StepShare
from finetune.errors import DivergedError, FinetuneError
from finetune.model.overflow import first_overflow
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
from finetune.training.optimizer import Update, learning_rate
from finetune.training.ranks import Ranks
from offload.engine.engine import Engine
from offload.engine.objective import Objective
from offload.engine.passes.part import RunStep
from offload.engine.randomness import seed_of
from offload.engine.results import ForwardResult
from offload.plan.schedule.timeline import Timeline

if TYPE_CHECKING:
    pass


class StepOutput(Protocol):
    """What an engine found in a step."""

    @property
    def loss(self) -> float:
        """The mean of this rank's share."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Those of the objective, by name."""

    @property
    def timeline(self) -> Timeline:
        """The ops; waits for the device."""

    @property
    def num_loads(self) -> int:
        """Layers that crossed this rank's link."""


class StepEngine(Protocol):
    """What computes steps: layers that are streamed, or ranks that each hold a part of them."""

    def forward_backward_runs(self, runs: Sequence[RunStep], /) -> Sequence[StepOutput]:
        """Compute steps in one pass over the layers and back; add to the gradients."""

    def forward(self, batch: Any, /) -> ForwardResult:
        """Compute a batch without gradients; None takes part without rows, in a sharded model."""

    def wait(self) -> None:
        """Wait for the device."""

    def close(self) -> None:
        """Free what the engine holds."""


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
    """The result of one step."""

    loss: float  # mean over the step's label tokens, those of all ranks
    grad_norm: float  # before clipping
    lr: float  # learning rate
    num_tokens: int  # tokens of the rows of all ranks, padding left out
    num_label_tokens: int  # tokens with a loss, of all ranks
    num_loads: int  # layers that crossed this rank's link
    optimizer_s: float  # adding up the ranks' losses, clipping and update
    step_s: float  # the whole step, without waiting for data
    timeline: Timeline  # the engine's ops
    # The metrics of the objective, by name, over the rows of all ranks.
    metrics: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float = 1.0  # factor of its gradients until they were added up
    # The scale of the next step's loss; None if the model does not compute in float16.
    scaling: LossScale | None = None
    is_skipped: bool = False  # whether nothing was updated, because a gradient overflowed
    # Names of an adapter's tensors that the run's first step gave no gradient.
    unlearned: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """A step of a run before the engine computes it, alone or together with those of others."""

    run: RunStep  # the micro-batches and settings that the engine is given
    share: StepShare  # the rows that it was made of
    order: int  # the number of the request in its run; requests that share a step have the same
    lr: float  # learning rate of the update that follows
    name: str  # the step in words
    prepared_s: float  # seconds that it took to make
    scaling: LossScale | None  # the scale of its loss; None if it has none


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Computed:
    """What the engine found for a request."""

    result: StepOutput  # the engine's result for the run
    computed_s: float  # seconds of the whole step, shared or not


def computed(engine: StepEngine, requests: Sequence[Request]) -> list[Computed]:
    """Compute steps of runs that share an engine, in one pass over its layers and back."""
    start_s = time.perf_counter()
    results = engine.forward_backward_runs([request.run for request in requests])
    _ = results[0].timeline  # waits for the device
    computed_s = time.perf_counter() - start_s
    return [Computed(result=result, computed_s=computed_s) for result in results]


def rehearsed(
    engine: StepEngine, rehearsals: "Mapping[str, Generator[Request, Computed, StepRecord]]"
) -> list[StepRecord]:
    """Run the rehearsals of runs that share an engine together; return the record of each.

    Args:
        engine: Computes their steps.
        rehearsals: By the name of the run.

    Raises:
        FinetuneError: One fails; of several it is named.
    """
    asked = {name: next(rehearsal) for name, rehearsal in rehearsals.items()}
    records: dict[str, StepRecord] = {}
    while asked:
        first = min(request.order for request in asked.values())
        due = [name for name, request in asked.items() if request.order == first]
        found = computed(engine, [asked.pop(name) for name in due])
        for name, result in zip(due, found, strict=True):
            try:
                asked[name] = rehearsals[name].send(result)
            except StopIteration as end:
                records[name] = end.value
            except FinetuneError as error:
                if len(rehearsals) == 1:
                    raise
                raise FinetuneError(
                    f"{name}: {error.what}",
                    limit=error.limit,
                    hint=f"{error.hint}; or leave this run out",
                ) from error
    return [records[name] for name in rehearsals]


def is_due(step: int, every: int | None) -> bool:
    """Return whether what is done every so many steps is due after a step; None is never."""
    return every is not None and step % every == 0


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
        objective_of: Callable[[StepRows], Objective] | None = None,
        adapter: str | None = None,
        scaling: LossScale | None = None,
    ) -> None:
        """Take the parts.

        The form of the optimizer's states is known once a step is rehearsed.

        Args:
            model: On its engine, with its trainable tensors.
            engine: The engine of the model.
            update: The update of what trains, with a fresh optimizer.
            train: Settings of training.
            num_steps: The number of the run's steps.
            ranks: The processes that share each step.
            objective_of: Makes the loss of a step by its rows; None for cross-entropy.
            adapter: The model's adapter that this run trains; None if it has no other.
            scaling: The scale of the first step's loss, of a model in float16.
        """
        self._model = model
        self.engine = engine
        self._update = update
        self._has_begun = False
        self._train = train
        self._num_steps = num_steps
        self._ranks = ranks
        self._objective = objective_of
        self._adapter = adapter
        self.state_form: StateForm = {}
        self.scaling = scaling  # a resumed run has that of its checkpoint

    @property
    def _streamed(self) -> Engine:
        """The engine, of a run with settings that only this one has."""
        assert isinstance(self.engine, Engine), "a rule of recipes"
        return self.engine

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
        self.scaling = restored.scaling

    def require_same(self, *, step: int) -> None:
        """Check that what trains is the same on all ranks, to the bit, where each has a copy."""
        what = f"the trained weights after step {step}"
        self._ranks.require_same(what, lambda: digest_of(self._update.copies))

    def step(self, number: int, share: StepShare) -> StepRecord:
        """Run optimizer step `number`, counted from 0, of which this rank does a share."""
        request = self.request(number, share)
        (found,) = computed(self.engine, [request])
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
            dropout_seed=seed_of(self._train.seed, number),
            name=f"step {number + 1}",
            scaling=self.scaling,
        )

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
            steps: The run's steps; they make micro-batches of rows.
            progress: Called with the rows that are done, and all.

        Raises:
            DivergedError: It is not finite.
        """
        size = self._train.sequences
        loss_sum, num_label_tokens = 0.0, 0
        with self.evaluated():
            for first in range(0, len(examples), size * self._ranks.num):
                start = first + size * self._ranks.index
                rows = [examples[i] for i in range(start, min(start + size, len(examples)))]
                if not rows:  # those of the last round are of other ranks
                    if not isinstance(self.engine, Engine):
                        self.engine.forward(None)
                    continue
                result = self.engine.forward(steps.padded_batch(rows))
                loss_sum += result.loss_sum
                num_label_tokens += result.num_label_tokens
                progress(min(start + size * self._ranks.num, len(examples)), len(examples))
        shares = self._ranks.exchange((loss_sum, num_label_tokens))
        loss = sum(loss for loss, _ in shares) / sum(num for _, num in shares)
        self.require_finite_held_out(loss)
        return loss

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Compute with this run's adapter, in evaluation mode, once all ranks' updates are made."""
        if isinstance(self.engine, Engine):
            self.engine.updates.flush()
        self._model.eval()
        with self.using():
            yield
        self._model.train()

    def require_finite_held_out(self, loss: float) -> None:
        """Refuse a loss on held-out rows that is not finite."""
        if not math.isfinite(loss):
            raise DivergedError(
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
            DivergedError: The loss or the gradients are not finite; nothing was updated. Or too
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
        self.engine.wait()
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
        if self._objective is None:
            return None
        assert share.rows is not None
        return self._objective(share.rows)

    def _require_finite(self, name: str, loss: float, grad_norm: float) -> None:
        """Stop before an update that would ruin the weights and, in time, every checkpoint."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise DivergedError(
                f"in {name} the loss is {loss} and the norm of the gradients {grad_norm}",
                limit="both must be finite; the step was not applied, and checkpoints are good",
                hint=self._lower_rate(),
            )

    def _skip(self, name: str, scaling: LossScale) -> None:
        """Let go of a step's gradients.

        Raises:
            DivergedError: The most steps were skipped in a row.
        """
        tensor = self._update.skip()
        if scaling.num_in_a_row == MAX_SKIPPED:
            raise DivergedError(
                f"in {name} the gradient of {tensor} overflows in float16, with the loss times"
                f" {scaling.factor / BACKOFF:g}",
                limit=f"{MAX_SKIPPED} steps in a row were skipped; checkpoints are good",
                hint="`model.dtype: bfloat16` or `float32`",
            )

    def _refuse_overflow(self, request: Request) -> NoReturn:
        """Compute a step's rows again, each module watched.

        Raises:
            DivergedError: Always; it names the first module that overflows.
        """
        run = request.run
        with self.evaluated(), first_overflow(self._model) as found:
            if run.objective is not None:
                self._streamed.evaluate(
                    run.micro_batches, objective=run.objective, scored=run.scored
                )
            else:
                for batch in run.micro_batches:
                    self.engine.forward(batch)
        names = [name for names in self._ranks.exchange(found) for name in names]
        where = "the loss, for all modules are finite without dropout"
        if names:
            where = names[0].removeprefix("base_model.model.")  # peft's
        raise DivergedError(
            f"the forward of {request.name} overflows in float16, first in {where}",
            limit="its largest number is 65504; the step was not applied, checkpoints are good",
            hint="`model.dtype: bfloat16` or `float32`",
        )

    def _lower_rate(self) -> str:
        return f"start again with a lower rate: `train.lr: {self._train.lr / 4:.1e}`"


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of tensors' names, types, shapes and bytes."""
    digest = sha256()
    for name, tensor in tensors.items():
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        values: torch.Tensor = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(values.numpy().data)
    return str(digest.hexdigest())
