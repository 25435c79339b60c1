"""What "exact" means where one model is compared: to the bit resident, within rounding plain."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from offload.engine.model.layers import LayeredModel
from tests.parity.architectures import micro_batches, plain, rel_error, streamed
from tests.parity.tiny_models import tiny_model, with_adapters

Batches = Sequence[dict[str, torch.Tensor]]


def adapted(base: PreTrainedModel) -> nn.Module:
    return with_adapters(base, LayeredModel(base).layers)


def llama(**changes: Any) -> nn.Module:
    return adapted(tiny_model("llama", **changes))


def assert_exact(
    model: nn.Module, batches: Batches | None = None, *, limit: float = 2e-6
) -> Mapping[str, torch.Tensor]:
    """Check streamed against resident to the bit, and against the plain model within rounding."""
    batches = micro_batches() if batches is None else batches
    loss, ours = streamed(model, batches, num_slots=2)
    resident_loss, resident = streamed(model, batches, num_slots=8)
    assert loss == resident_loss
    assert all(torch.equal(ours[name], resident[name]) for name in ours)
    plain_loss, reference = plain(model, batches)
    assert loss == pytest.approx(plain_loss, rel=limit)
    assert rel_error(ours, reference) < limit
    return ours
