"""Steps whose loss is taken over all their rows: log-probabilities first, then what they are worth.

Problem. A loss of preferences compares rows, so the gradient by one token is known only when all
rows are scored. The logits of all rows would be pairs x tokens x vocabulary.

Idea. The loss depends on a row's tokens through one number each. Norm and head run twice on each
chunk of labelled tokens: once without a graph for the log-probabilities, and once more, after the
loss and its gradient by each of them are known, for the gradient by the hidden states. In between
only these numbers exist, so the loss may be any function of them; torch differentiates it.

Both times a chunk gives the same logits: the model's inspection has refused a tail that draws.

Precision. Log-probabilities are computed in fp32 from the head's outputs, as in a cross-entropy,
and in fp64 where the model is.

Shapes: N label tokens of a chunk or of the step, D hidden features, V tokens of the vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from offload.engine.batch import LabelledBatch
from offload.engine.low_rank import VISIT_CACHE
from offload.engine.model.layers import LayeredModel
from offload.engine.objective import Objective, Scores, StepLoss
from offload.engine.passes.reference import ReferenceModel, ScoringModel
from offload.engine.pointwise.ops import cross_entropy
from offload.engine.pointwise.recognise import DTYPES
from offload.engine.results import PassState
from offload.errors import OffloadError
from offload.plan.schedule.schedule import Passes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scoring:
    """What a step with an objective scores.

    Attributes:
        objective: Its loss.
        batches: Its micro-batches, those that are only scored last.
        rows_N: The row of each label token, on the compute device.
        num_rows: Rows of all micro-batches.
        passes: Through the layers.
        model: How rows are computed that are only scored.
        reference: How the reference computes them; None if there is none.
        num_label_tokens: Of all micro-batches that are trained on; with several processes, of all
            of theirs. A router loss counts by them.
    """

    objective: Objective
    batches: Sequence[LabelledBatch]
    rows_N: torch.Tensor
    num_rows: int
    passes: Passes
    model: ScoringModel
    reference: ReferenceModel | None
    num_label_tokens: int

    @classmethod
    def of(
        cls,
        model: LayeredModel,
        objective: Objective,
        rows: tuple[torch.Tensor, int],
        batches: Sequence[LabelledBatch],
        *,
        num_trained: int,
        num_label_tokens: int,
    ) -> "Scoring":
        """Prepare the scoring of a step.

        Args:
            model: The model.
            objective: The loss.
            rows: As `rows_of_labels` returns them.
            batches: On the compute device, those that are only scored last.
            num_trained: How many of them are trained on.
            num_label_tokens: See the attribute.

        Raises:
            OffloadError: The model has no such reference.
        """
        asked = objective.reference
        return cls(
            objective=objective,
            batches=batches,
            rows_N=rows[0].to(batches[0].positions.device, non_blocking=True),
            num_rows=rows[1],
            passes=Passes(
                num_trained=num_trained,
                num_scored=len(batches) - num_trained,
                has_reference=asked is not None,
            ),
            model=ScoringModel(model),
            reference=None if asked is None else ReferenceModel(model, asked),
            num_label_tokens=num_label_tokens,
        )

    def batch(self, number: int) -> LabelledBatch:
        """Return the rows of a pass."""
        return self.batches[self.passes.micro_batch(number)]

    def of_pass(self, number: int) -> ScoringModel:
        """Return how a pass is computed that is not trained on."""
        if number in self.passes.reference:
            assert self.reference is not None
            return self.reference
        return self.model


class ScoredTail:
    """Runs what comes after the last layer where the loss is an objective's."""

    def __init__(
        self,
        model: LayeredModel,
        scoring: Scoring,
        *,
        head_chunk_tokens: int,
    ) -> None:
        """Keep the parts, and of how many tokens logits exist at a time."""
        self._model, self._scoring = model, scoring
        self._chunk_tokens = head_chunk_tokens
        self._last = len(model.layers)
        self._scores: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    # ---------------------------------------------------------------------------------------- ops

    def score(self, state: PassState, number: int) -> None:
        """Compute the log-probabilities of a pass; its hidden states stay if it is trained on."""
        VISIT_CACHE.enter(("score", number))
        with torch.no_grad():
            if number in self._scoring.passes.trained:
                hidden_BTD = state.inputs[self._last, number]
                self._scores[number] = self._scores_of(hidden_BTD, number)
                return
            del state.fronts[number]
            hidden_BTD = state.inputs.pop((self._last, number))
            with self._scoring.of_pass(number).around_layers():
                self._scores[number] = self._scores_of(hidden_BTD, number)

    def weigh(self, state: PassState) -> None:
        """Compute the loss of the step, and its gradient by each log-probability."""
        VISIT_CACHE.enter(None)
        passes, scoring = self._scoring.passes, self._scoring
        policy = [self._scores[number] for number in range(passes.num_policy)]
        reference = [self._scores[number] for number in passes.reference]
        self._scores.clear()
        trained = policy[: passes.num_trained]
        with torch.set_grad_enabled(bool(trained)):
            leaves = [one.requires_grad_() for one in trained]
            loss = scoring.objective.loss(
                Scores(
                    policy_N=torch.cat(policy),
                    reference_N=torch.cat(reference) if reference else None,
                    rows_N=scoring.rows_N,
                    num_rows=scoring.num_rows,
                )
            )
            _require_scalars(scoring.objective, loss)
            if leaves:
                _require_graph(scoring.objective, loss.value)
                self._gradients = dict(enumerate(torch.autograd.grad(loss.value, leaves)))
        state.losses.append(loss.value.detach())
        state.metrics.update({name: value.detach() for name, value in loss.metrics.items()})

    def train(self, state: PassState, m: int) -> None:
        """Compute the gradient of the loss by a micro-batch's hidden states."""
        VISIT_CACHE.enter(("tail", m))
        hidden_BTD = state.inputs.pop((self._last, m))
        gradient_BTD = torch.zeros_like(hidden_BTD)
        gradient_ND, gradients_N = gradient_BTD.flatten(0, 1), self._gradients.pop(m)
        weights = gradients_N.split(self._chunk_tokens)
        for (positions_N, next_N), weight_N in zip(self._chunks(m), weights, strict=True):
            chunk_1ND = hidden_BTD.flatten(0, 1)[positions_N].unsqueeze(0).requires_grad_()
            self._pass_back(chunk_1ND, next_N, weight_N)
            assert chunk_1ND.grad is not None
            gradient_ND[positions_N] = chunk_1ND.grad[0]
        state.gradient[m] = gradient_BTD

    # ------------------------------------------------------------------------------------- chunks

    def _chunks(self, number: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Return positions and labels of each chunk of a pass."""
        batch = self._scoring.batch(number)
        positions = batch.positions.split(self._chunk_tokens)
        return zip(positions, batch.next_tokens.split(self._chunk_tokens), strict=True)

    def _scores_of(self, hidden_BTD: torch.Tensor, number: int) -> torch.Tensor:
        flat_ND = hidden_BTD.flatten(0, 1)
        return torch.cat(
            [
                self._scores_of_chunk(flat_ND[positions_N].unsqueeze(0), next_N)
                for positions_N, next_N in self._chunks(number)
            ]
        )

    def _scores_of_chunk(self, chunk_1ND: torch.Tensor, next_N: torch.Tensor) -> torch.Tensor:
        logits_NV = self._model.tail_logits(chunk_1ND).flatten(0, 1)
        if self._is_fused(chunk_1ND):
            one = torch.ones((), device=next_N.device)
            losses_N, _ = cross_entropy(logits_NV, next_N, num_items=one, has_gradient=False)
            return losses_N.neg_()
        return _cross_entropies(logits_NV, next_N).neg_()

    def _pass_back(
        self, chunk_1ND: torch.Tensor, next_N: torch.Tensor, gradient_N: torch.Tensor
    ) -> None:
        """Compute the gradients by some hidden states, given those by their log-probabilities."""
        logits_NV = self._model.tail_logits(chunk_1ND).flatten(0, 1)
        if self._is_fused(chunk_1ND):
            _, of_logits_NV = cross_entropy(
                logits_NV.detach(), next_N, num_items=-1 / gradient_N, has_gradient=True
            )
            logits_NV.backward(of_logits_NV)
            return
        losses_N = _cross_entropies(logits_NV, next_N)
        del logits_NV  # no name holds them in the backward
        losses_N.backward(-gradient_N)

    def _is_fused(self, chunk_1ND: torch.Tensor) -> bool:
        return self._model.fused is not None and chunk_1ND.dtype in DTYPES


def _cross_entropies(logits_NV: torch.Tensor, next_N: torch.Tensor) -> torch.Tensor:
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return torch.nn.functional.cross_entropy(wide_NV, next_N, reduction="none")


def _require_scalars(objective: Objective, loss: StepLoss) -> None:
    """Check that a loss and its metrics are tensors of one number each.

    Raises:
        OffloadError: One is not.
    """
    values: dict[str, object] = {"loss": loss.value, **loss.metrics}
    for name, value in values.items():
        found = type(value).__name__
        if isinstance(value, torch.Tensor):
            found = f"of shape {tuple(value.shape)}" if value.dim() else ""
        if found:
            raise OffloadError(
                f"{type(objective).__name__} returns a {name} {found}",
                limit="a loss and its metrics are tensors of one number each",
                hint="`.mean()`, or `torch.tensor(...)` for a metric that is no tensor",
            )


def _require_graph(objective: Objective, value: torch.Tensor) -> None:
    """Check that a loss depends on the log-probabilities.

    Raises:
        OffloadError: It is not.
    """
    if not value.requires_grad:
        raise OffloadError(
            f"{type(objective).__name__} returns a loss without a graph",
            limit="torch differentiates it by `scores.policy_N`",
            hint="look for `detach`, `no_grad` or `item` in its `loss`",
        )
