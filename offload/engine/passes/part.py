"""What one run contributes to a step: its micro-batches, checked and on the compute device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from offload.engine.batch import (
    Batch,
    LabelledBatch,
    Vocabulary,
    checked_batches,
    checked_scored,
    require_an_id_each,
    require_divisor,
    require_labels,
    rows_of_labels,
    with_labels,
)
from offload.engine.model.layers import LayeredModel
from offload.engine.model.router import alone, require_whole_step
from offload.engine.objective import OutputObjective
from offload.engine.passes.reference import SwitchedModel, require_owners
from offload.engine.passes.scoring import Scoring
from offload.engine.results import RunState
from offload.engine.run_step import Reducer, RunStep
from offload.engine.seeding import NEWEST, Seeding
from offload.errors import OffloadError
from offload.plan.schedule.passes import Passes, numbered
from offload.plan.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """What one run contributes to a step.

    Attributes:
        passes: Its passes through the layers, numbered in the step.
        batches: Those that are trained on, on the compute device.
        model: How they are computed.
        adapter: The adapter that computes them; None for those that are active.
        num_label_tokens: Divisor of the sum of the losses; an objective divides by itself.
        scoring: What is scored, with an objective.
        seed: Dropout is seeded by (seed, layer, id), so that the recompute repeats it.
        seeding: How these become a generator's seed.
        ids: Number in the run's whole step of each micro-batch that is trained on.
        add_up: As of `RunStep`.
        reducer: Adds up its gradients over processes; None if there is one.
        loss_scale: Factor of all gradients.
        state: What its ops find out.
    """

    passes: Passes
    batches: Sequence[LabelledBatch]
    model: SwitchedModel
    adapter: str | None = None
    num_label_tokens: int
    scoring: Scoring | None = None
    seed: int = 0
    seeding: Seeding = NEWEST
    ids: Sequence[int] = ()
    add_up: Callable[[torch.Tensor], torch.Tensor] = alone
    reducer: Reducer | None = None
    loss_scale: float = 1.0
    state: RunState = field(default_factory=RunState)

    @property
    def labelled(self) -> Sequence[LabelledBatch]:
        """All of the run's micro-batches, those that are only scored last."""
        return self.batches if self.scoring is None else self.scoring.batches

    def given_ids(self, number: int) -> torch.Tensor:
        """Return the tokens (B, T) of a pass, as they were given."""
        return self.labelled[self.passes.micro_batch(number)].given_ids

    @property
    def scored(self) -> Scoring:
        """What is scored, of a run with an objective."""
        assert self.scoring is not None
        return self.scoring

    def visit_seed(self, layer: int, number: int) -> int:
        """Return the dropout seed of one visit of a micro-batch that is trained on."""
        return self.seeding.of_visit(self.seed, layer, self.ids[self.passes.micro_batch(number)])

    def begin(self, model: LayeredModel, schedule: Schedule) -> None:
        """Begin the router loss of a step, if the model has one.

        Raises:
            OffloadError: Its micro-batches pass the layers one after another.
        """
        if model.router_loss is not None and self.batches:
            require_whole_step(schedule)
            self.state.balance = model.router_loss.balance(self.batches, self.add_up)

    def hear(self, layer: int, number: int, logits: Sequence[torch.Tensor]) -> None:
        """Note the router logits of a forward visit."""
        if logits and self.state.balance is not None:
            self.state.balance.hear(layer, self.passes.micro_batch(number), logits)

    def router_gradients(
        self, layer: int, number: int, logits: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the gradients of the router loss by the router logits of a backward visit."""
        if self.state.balance is None:
            return []
        found = self.state.balance.gradients(layer, self.passes.micro_batch(number), logits)
        return found if self.loss_scale == 1 else [self.loss_scale * one for one in found]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Given:
    """A run's batches, checked and on the compute device."""

    run: RunStep
    batches: list[Batch]
    labelled: list[LabelledBatch]
    num_trained: int
    is_shifted: bool

    @classmethod
    def of(
        cls, run: RunStep, vocabulary: Vocabulary, torch_device: torch.device, *, is_trained: bool
    ) -> "_Given":
        is_shifted = not isinstance(run.objective, OutputObjective)
        if not is_shifted:  # labels mark tokens, and are none of the head's
            vocabulary = replace(vocabulary, num_predicted=None)
        trained = checked_batches(run.micro_batches, vocabulary)
        scored = checked_scored(run.scored, vocabulary, has_objective=run.objective is not None)
        batches = [*trained, *scored]
        return cls(
            run=run,
            batches=batches,
            labelled=[with_labels(one, torch_device, is_shifted=is_shifted) for one in batches],
            num_trained=len(trained) if is_trained else 0,
            is_shifted=is_shifted,
        )

    @property
    def passes(self) -> Passes:
        objective = self.run.objective
        return Passes(
            num_trained=self.num_trained,
            num_scored=len(self.batches) - self.num_trained,
            has_reference=objective is not None and objective.reference is not None,
            has_objective=objective is not None,
        )

    def part(
        self,
        model: LayeredModel,
        passes: Passes,
        switched: Callable[[str | None], SwitchedModel],
    ) -> Part:
        run, trained = self.run, self.labelled[: self.num_trained]
        require_divisor(run.num_label_tokens)
        ids = tuple(range(len(trained)) if run.micro_batch_ids is None else run.micro_batch_ids)
        require_an_id_each(len(ids), len(trained))
        num_label_tokens = run.num_label_tokens
        if num_label_tokens is None:
            counted = trained if self.num_trained else self.labelled
            num_label_tokens = sum(batch.num_label_tokens for batch in counted)
        require_labels(num_label_tokens, len(self.labelled))
        scoring = None
        if run.objective is not None:
            scoring = Scoring.of(
                model,
                run.objective,
                rows_of_labels(self.batches, is_shifted=self.is_shifted),
                self.labelled,
                passes=passes,
                adapter=run.adapter,
            )
        seed = run.dropout_seed
        if seed is None:
            seed = int(torch.randint(2**31, ()).item())
        return Part(
            passes=passes,
            batches=trained,
            model=switched(run.adapter),
            adapter=run.adapter,
            num_label_tokens=num_label_tokens,
            scoring=scoring,
            seed=seed,
            seeding=run.seeding,
            ids=ids,
            add_up=run.add_up,
            reducer=run.reducer,
            loss_scale=run.loss_scale,
        )


def parts_of(
    model: LayeredModel,
    runs: Sequence[RunStep],
    vocabulary: Vocabulary,
    torch_device: torch.device,
    *,
    switched: Callable[[str | None], SwitchedModel],
    is_trained: bool,
) -> list[Part]:
    """Check what runs are given for a step, and move it to the compute device.

    Args:
        model: The model.
        runs: The runs.
        vocabulary: The model's.
        torch_device: Where it computes.
        switched: Returns the model as a run with this adapter computes it.
        is_trained: Whether micro-batches are trained on, and only scored if not.

    Raises:
        OffloadError: Something is invalid, or the model has no such reference.
    """
    given = [_Given.of(run, vocabulary, torch_device, is_trained=is_trained) for run in runs]
    passes = numbered([one.passes for one in given])
    return [one.part(model, of, switched) for one, of in zip(given, passes, strict=True)]


def require_apart(model: LayeredModel, runs: Sequence[RunStep], *, are_on_host: bool) -> None:
    """Check that runs share no weight that trains: each has an adapter of its own.

    Args:
        model: The model.
        runs: The runs.
        are_on_host: Whether weights of the layers train on the host.

    Raises:
        OffloadError: They do not.
    """
    adapters = [run.adapter for run in runs if run.adapter is not None]
    if not runs or len(adapters) < len(runs) > 1:
        raise OffloadError(
            f"{len(runs) - len(adapters)} of {len(runs)} runs name no adapter",
            limit="a step has at least one run, and runs that share it train an adapter each",
            hint="`RunStep(micro_batches=..., adapter=...)`",
        )
    double = next((one for one in adapters if adapters.count(one) > 1), None)
    if double is not None:
        raise OffloadError(
            f"two runs train the adapter {double!r}",
            limit="their gradients would be added to each other",
            hint="give their micro-batches to one run, or add an adapter",
        )
    if len(runs) > 1 and are_on_host:
        raise OffloadError(
            f"{len(runs)} runs share a step, and weights of the layers train on the host",
            limit="their gradients leave a layer once per step, for one run",
            hint='`trained_weights="device"`, or train one run at a time',
        )
    if adapters:
        require_owners(model, adapters)
