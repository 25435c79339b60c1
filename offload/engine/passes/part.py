"""What one run contributes to a step: its micro-batches, its loss, and how they are computed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from offload.engine.batch import LabelledBatch
from offload.engine.low_rank import VISIT_CACHE
from offload.engine.model.layers import LayeredModel
from offload.engine.model.router import RouterScope, require_whole_step
from offload.engine.passes.reducer import Reducer
from offload.engine.passes.reference import SwitchedModel
from offload.engine.passes.scoring import ScoredTail, Scoring
from offload.engine.passes.tail import Tail
from offload.engine.results import PassState, RunState
from offload.engine.seeding import NEWEST, Seeding
from offload.plan.schedule.passes import Passes
from offload.plan.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """What one run contributes to a step.

    Attributes:
        passes: Its passes through the layers, numbered in the step.
        batches: Those that are trained on, on the compute device.
        model: How they are computed.
        adapter: The adapter that computes them; None for those that are active.
        num_label_tokens: Divisor of the sum of the losses; with an objective only of a router loss.
        scoring: What is scored, with an objective.
        seed: Dropout is seeded by (seed, layer, id), so that the recompute repeats it.
        seeding: How these become a generator's seed.
        ids: Number in the run's whole step of each micro-batch that is trained on.
        router_loss: What a router loss is taken over.
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
    router_loss: RouterScope = field(default_factory=RouterScope)
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
            OffloadError: It is over a step whose micro-batches pass the layers one after another.
        """
        if model.router_loss is not None and self.batches:
            require_whole_step(schedule, self.router_loss)
            self.state.balance = model.router_loss.balance(
                self.router_loss, self.batches, self.num_label_tokens
            )

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


class PartTail:
    """Runs what comes after the last layer for one run."""

    def __init__(self, model: LayeredModel, part: Part, *, head_chunk_tokens: int) -> None:
        """Keep the parts; nothing is computed yet."""
        self._part = part
        self._plain = Tail(model, head_chunk_tokens=head_chunk_tokens, loss_scale=part.loss_scale)
        scoring = part.scoring
        self._scored: ScoredTail | None = None
        if scoring is not None:
            self._scored = ScoredTail(
                model, scoring, head_chunk_tokens=head_chunk_tokens, loss_scale=part.loss_scale
            )
        # Filled on the device: `torch.tensor` would copy the number and wait for the device.
        torch_device = part.batches[0].positions.device if part.batches else torch.device("cpu")
        self._num_items = torch.full((), part.num_label_tokens, device=torch_device)

    @property
    def scored(self) -> ScoredTail:
        """That of the run's objective."""
        assert self._scored is not None
        return self._scored

    def score(self, state: PassState, number: int) -> None:
        """Compute the log-probabilities of a pass."""
        if number in self._part.passes.trained:
            with self._part.model.around_layers():
                self.scored.score(state, number)
        else:
            self.scored.score(state, number)

    def weigh(self) -> None:
        """Compute the loss of an objective."""
        self.scored.weigh(self._part.state)

    def train(self, state: PassState, number: int) -> None:
        """Compute the gradient of the run's loss by a micro-batch's hidden states."""
        part, m = self._part, self._part.passes.micro_batch(number)
        with part.model.around_layers():
            if self._scored is not None:
                self._scored.train(state, number)
            else:
                VISIT_CACHE.enter(("tail", number))
                self._plain.train(state, part.state, number, part.batches[m], self._num_items)
        if part.state.balance is not None:
            part.state.losses.append(part.state.balance.loss(m))
