"""The log-probability of each label under several adapters, in one forward pass over the layers.

Adapters of one base differ by a few matrices, and its weights cross the link once for all of them:
each visit of a layer computes every micro-batch with every adapter before the next layer is
visited. So the number of loads depends on neither.

A pass is a micro-batch with an adapter. All micro-batches of an adapter come first, so that what a
visit derives from an adapter is derived once. Until the last layer, each pass has one hidden state
on the device: (B, T, D) for each micro-batch and adapter.

Shapes: N label tokens of a micro-batch or chunk, D hidden features, V tokens of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload.engine.batch import Batch, LabelledBatch, rows_of_labels
from offload.engine.model.layers import LayeredModel
from offload.engine.passes.reference import SwitchedModel, adapted_model
from offload.engine.passes.scoring import has_fused_loss, log_probabilities
from offload.engine.results import PassState
from offload.engine.visit_cache import VISIT_CACHE
from offload.errors import OffloadError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenScores:
    """What an adapter gives the label tokens of a micro-batch, on the host.

    Attributes:
        logps_N: Log-probability of each, in fp32, or in fp64 where the model is.
        is_greedy_N: Whether it is the most probable token.
        rows_N: Its row, counted within the micro-batch.
        num_rows: Rows of the micro-batch.
    """

    logps_N: torch.Tensor
    is_greedy_N: torch.Tensor
    rows_N: torch.Tensor
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreResult:
    """Result of scoring.

    Attributes:
        scores: By adapter in the order that was asked for, and by micro-batch.
        num_loads: Layers copied from host to device.
        num_passes: Visits of each layer: micro-batches times adapters.
        pass_s: Measured seconds from the first op to the last.
    """

    scores: tuple[tuple[TokenScores, ...], ...]
    num_loads: int
    num_passes: int
    pass_s: float


class ScoredPasses:
    """The passes of one scoring, and what they have found."""

    def __init__(
        self,
        model: LayeredModel,
        batches: Sequence[Batch],
        labelled: Sequence[LabelledBatch],
        adapters: Sequence[str | None],
    ) -> None:
        """Prepare the passes; nothing is computed.

        Args:
            model: The model.
            batches: The micro-batches, on the host.
            labelled: The same on the compute device.
            adapters: Names of the model's adapters; None for the model without them.

        Raises:
            OffloadError: There is none, one is named twice or unknown, or a row has no label.
        """
        names = list(adapters)
        twice = next((name for name in names if names.count(name) > 1), "")
        if not names or twice != "":
            raise OffloadError(
                "adapters is empty" if not names else f"adapters names {twice!r} twice",
                limit="rows are scored once with each adapter",
                hint='`adapters=[None, "default"]`: the model without adapters, and with one',
            )
        self._rows = [rows_of_labels([batch]) for batch in batches]
        self._labelled = labelled
        self._models = [adapted_model(model, name) for name in names]
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num(self) -> int:
        """How many passes there are."""
        return len(self._labelled) * len(self._models)

    def batch(self, number: int) -> LabelledBatch:
        """Return the rows of a pass."""
        return self._labelled[number % len(self._labelled)]

    def of_pass(self, number: int) -> SwitchedModel:
        """Return how a pass is computed."""
        return self._models[number // len(self._labelled)]

    def add(self, number: int, logps_N: torch.Tensor, is_greedy_N: torch.Tensor) -> None:
        """Keep the scores of a pass, still on the device."""
        self._found[number] = logps_N, is_greedy_N

    def scores(self) -> tuple[tuple[TokenScores, ...], ...]:
        """Return the scores of all passes on the host, by adapter and micro-batch; this waits."""
        num = len(self._labelled)
        return tuple(
            tuple(self._on_host(adapter * num + m, *self._rows[m]) for m in range(num))
            for adapter in range(len(self._models))
        )

    def _on_host(self, number: int, rows_N: torch.Tensor, num_rows: int) -> TokenScores:
        logps_N, is_greedy_N = self._found[number]
        return TokenScores(
            logps_N=logps_N.cpu(),
            is_greedy_N=is_greedy_N.cpu(),
            rows_N=rows_N.cpu(),
            num_rows=num_rows,
        )


class EachTail:
    """Runs norm and head of each pass, a chunk of label tokens at a time."""

    def __init__(
        self, model: LayeredModel, passes: ScoredPasses, *, head_chunk_tokens: int
    ) -> None:
        """Keep the parts, and of how many tokens logits exist at a time."""
        self._model, self._passes = model, passes
        self._chunk_tokens = head_chunk_tokens
        self._last = len(model.layers)

    def score(self, state: PassState, number: int) -> None:
        """Score the labels of a pass; its hidden states are let go."""
        VISIT_CACHE.enter(("score", number))
        del state.fronts[number]
        flat_ND = state.inputs.pop((self._last, number)).flatten(0, 1)
        batch, found = self._passes.batch(number), list[tuple[torch.Tensor, torch.Tensor]]()
        with self._passes.of_pass(number).around_layers():
            for positions_N, next_N in zip(
                batch.positions.split(self._chunk_tokens),
                batch.next_tokens.split(self._chunk_tokens),
                strict=True,
            ):
                found.append(self._chunk(flat_ND[positions_N].unsqueeze(0), next_N))
        logps, are_greedy = zip(*found, strict=True)
        self._passes.add(number, torch.cat(logps), torch.cat(are_greedy))

    def _chunk(
        self, chunk_1ND: torch.Tensor, next_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NV = self._model.tail_logits(chunk_1ND).flatten(0, 1)
        is_greedy_N = logits_NV.argmax(-1) == next_N
        is_fused = has_fused_loss(self._model, chunk_1ND)
        return log_probabilities(logits_NV, next_N, is_fused=is_fused), is_greedy_N
