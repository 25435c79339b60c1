"""A model whose tensors have shapes and no values, and what transformers does otherwise with it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from offload.engine.host.layer_layout import is_stand_in
from offload.engine.model.layers import LayeredModel


def fake_copy(model: Any, mode: FakeTensorMode) -> Any:
    """Copy a model, on the meta device or with weights, as one on a CPU without weights.

    Tensors that are shared stay shared. Nothing of the model itself is changed or read.
    """
    copies: dict[int, object] = {}
    with torch.no_grad(), mode:
        for tensor in (*model.parameters(), *model.buffers()):
            if is_stand_in(tensor):  # for weights that wait encoded, and compute side by side
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            else:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            copies[id(tensor)] = fake
    return copy.deepcopy(model, copies)


def num_experts(layered: LayeredModel) -> int:
    """Return how many experts a layer has at most, as their modules say."""
    counts = [getattr(m, "num_experts", None) for m in layered.layers.modules()]
    return max((count for count in counts if isinstance(count, int)), default=0)


@contextmanager
def rows_are_whole() -> Iterator[None]:
    """Let transformers take each row for one sequence.

    It looks at the values of the positions for the ends of packed sequences. Fake ones have none:
    it would then write out a mask, which it does not for rows without padding.
    """
    with mock.patch("transformers.masking_utils.find_packed_sequence_indices", _find_none):
        yield


def _find_none(_: torch.Tensor) -> None:
    """Find no packed sequences. A mock would keep the positions, which would then count."""
