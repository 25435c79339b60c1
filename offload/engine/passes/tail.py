"""What comes after the last layer: norm, head and loss of the labelled tokens, chunk by chunk."""

import torch

from offload.engine.batch import LabelledBatch
from offload.engine.model.layers import LayeredModel
from offload.engine.passes.part import Part
from offload.engine.passes.scoring import ScoredTail
from offload.engine.results import PassState, RunState
from offload.engine.visit_cache import VISIT_CACHE


class Tail:
    """Computes the loss of a pass, and its gradient by the last layer's output."""

    def __init__(
        self, model: LayeredModel, *, head_chunk_tokens: int, loss_scale: float = 1.0
    ) -> None:
        """Keep the model, of how many tokens logits exist at a time, and a gradient's factor."""
        self._model, self._loss_scale = model, loss_scale
        self._chunk_tokens = head_chunk_tokens
        self._last = len(model.layers)

    def train(
        self,
        state: PassState,
        run: RunState,
        m: int,
        batch: LabelledBatch,
        num_items: torch.Tensor,
    ) -> None:
        """Add the loss of a micro-batch, and keep its gradient for the backward visits.

        Args:
            state: Of the pass.
            run: Of its run.
            m: Which micro-batch of the step.
            batch: The micro-batch.
            num_items: Divisor of the sum of the losses, on the device.
        """
        hidden_BTD = state.inputs.pop((self._last, m))
        gradient_BTD = torch.zeros_like(hidden_BTD)
        self.loss(run, hidden_BTD, batch, num_items, gradient_BTD.flatten(0, 1))
        state.gradient[m] = gradient_BTD

    def loss(
        self,
        run: RunState,
        hidden_BTD: torch.Tensor,
        batch: LabelledBatch,
        num_items: torch.Tensor,
        gradient_ND: torch.Tensor | None,
    ) -> None:
        """Add the loss of the labelled tokens by chunks, and write its gradient if requested."""
        flat_ND = hidden_BTD.flatten(0, 1)
        chunks = zip(
            batch.positions.split(self._chunk_tokens),
            batch.next_tokens.split(self._chunk_tokens),
            strict=True,
        )
        for positions_N, next_N in chunks:
            if not positions_N.numel():
                continue
            loss = self._model.tail_loss(
                flat_ND,
                positions_N=positions_N,
                next_N=next_N,
                num_items=num_items,
                gradient_ND=gradient_ND,
                loss_scale=self._loss_scale,
            )
            run.losses.append(loss)


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
