"""Losses of preferences, and plain loops that compute a step of them without the engine.

R rows of a step; those at even places are chosen, the next one is what was rejected.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from finetune.adapter.linear_lora import compute_beside, compute_in_base_dtype
from offload.engine.engine import Engine, EngineOptions
from offload.engine.objective import Reference, Scores, StepLoss
from tests.parity.steps import OPTIONS, tiny

Batches = Sequence[dict[str, torch.Tensor]]
Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Loss of a step from the log-ratios of the rows that train, and of those that are only scored."""


def sigmoid(ratio_R: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid(0.3 * (ratio_R[0::2] - ratio_R[1::2])).mean()


def in_order(ratio_R: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Compare the sorted ratios of all rows: each row's gradient depends on all others."""
    chosen, rejected = ratio_R[0::2].sort().values, ratio_R[1::2].sort().values
    return F.softplus(0.3 * (rejected - chosen)).sum() / len(chosen)


def against_scored(ratio_R: torch.Tensor, scored_R: torch.Tensor) -> torch.Tensor:
    """Compare each row with the mean of all that are only scored."""
    return torch.sigmoid(0.3 * (scored_R.mean().clamp(min=-5) - ratio_R)).mean()


@dataclass(frozen=True)
class ByRow:
    """A loss of the sums of log-probabilities of each row."""

    formula: Formula
    num_trained: int
    reference: Reference | None = field(default_factory=Reference)
    seen: list[Scores] = field(default_factory=list)

    def loss(self, scores: Scores) -> StepLoss:
        self.seen.append(scores)
        ratio_N = scores.policy_N
        if scores.reference_N is not None:
            ratio_N = ratio_N - scores.reference_N
        zeros_R = torch.zeros(scores.num_rows, dtype=ratio_N.dtype)
        ratio_R = zeros_R.index_add(0, scores.rows_N, ratio_N)
        value = self.formula(ratio_R[: self.num_trained], ratio_R[self.num_trained :].detach())
        return StepLoss(value=value, metrics={"ratio": ratio_R.detach().mean()})


def attached(model: nn.Module, options: EngineOptions = OPTIONS) -> Engine:
    return Engine(model, device=torch.device("cpu"), options=options)


def adapted(name: str, **options: Any) -> Any:
    """Return a tiny model whose adapters our own branches compute."""
    model = tiny(name, **options)
    compute_in_base_dtype(model)
    return compute_beside(model)


def pairs(*sizes: int, width: int = 12, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of so many pairs; the same rows however they are cut."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = 2 * sum(sizes)
    input_ids = torch.randint(0, 64, (num_rows, width), generator=generator)
    labels = input_ids.clone()
    for row in range(num_rows):
        labels[row, : 3 + row % 3] = -100
    parts = zip(*(x.split([2 * size for size in sizes]) for x in (input_ids, labels)), strict=True)
    return [{"input_ids": ids, "labels": labels} for ids, labels in parts]


def alone(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return each row of a micro-batch, packed or not, as a batch of its own."""
    lens = batch["row_lens"].tolist() if "row_lens" in batch else None
    rows: Any = (
        zip(*(batch[name].split(1) for name in ("input_ids", "labels")), strict=True)
        if lens is None
        else zip(*(batch[name].split(lens, 1) for name in ("input_ids", "labels")), strict=True)
    )
    return [{"input_ids": ids, "labels": labels} for ids, labels in rows]


def plain_scores(model: nn.Module, batches: Batches) -> torch.Tensor:
    """Return the sum of label log-probabilities of each row, which is computed by itself."""
    found = []
    for row in (row for batch in batches for row in alone(batch)):
        logits_1TV = model(input_ids=row["input_ids"], use_cache=False).logits[:, :-1]
        next_T = row["labels"][0, 1:]
        log_TV = logits_1TV[0].log_softmax(-1)
        is_label = next_T != -100
        found.append(log_TV[is_label].gather(1, next_T[is_label, None]).sum())
    return torch.stack(found)


def plain_step(
    model: Any, batches: Batches, formula: Formula, *, scored: Batches = (), is_double: bool = True
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of a step by autograd over all its rows at once."""
    model = copy.deepcopy(model)
    if is_double:
        model = model.double()
        model.config._experts_implementation = "eager"
    model.eval()  # the tests that compare with it have no dropout
    with torch.no_grad():
        with model.disable_adapter():
            reference_R = plain_scores(model, [*batches, *scored])
        further_R = plain_scores(model, scored) if scored else reference_R[:0]
    policy_R = plain_scores(model, batches)
    num = len(policy_R)
    loss = formula(policy_R - reference_R[:num], further_R - reference_R[num:])
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
