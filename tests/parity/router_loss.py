"""Steps of models whose loss has the router's auxiliary loss in it."""

import copy
from collections.abc import Sequence

from torch import nn

from offload.engine.batch import Batch
from tests.parity.architectures import (
    Gradients,
    gradients,
)


def plain(model: nn.Module, batches: Sequence[Batch]) -> tuple[float, Gradients]:
    """Return loss and gradients of the model's own losses, weighted by label tokens."""
    model = copy.deepcopy(model)
    weights = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    loss = 0.0
    for weight, batch in zip(weights, batches, strict=True):
        output = model(**batch, use_cache=False)
        assert output.aux_loss > 0
        part = output.loss * (weight / sum(weights))
        part.backward()
        loss += part.item()
    return loss, gradients(model)
