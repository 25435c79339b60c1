"""Models whose weights are what a codec makes of them."""

import copy
from typing import TypeVar

import torch
from torch import nn

from offload.engine.codec import NATIVE, form_named
from offload.engine.model.encoding import Encoding
from offload.engine.model.layers import LayeredModel

M = TypeVar("M", bound=nn.Module)


def matrices(model: nn.Module, codec: str) -> dict[str, nn.Parameter]:
    """Return the weights of a model's layers that a codec writes, by name."""
    layered = LayeredModel(model)
    encoding = Encoding(layered, codec)
    inside = set(map(id, layered.layers.parameters()))
    named = {n: p for n, p in model.named_parameters() if id(p) in inside and not p.requires_grad}
    codecs = encoding.codecs(list(named.values()))
    return {
        name: parameter
        for (name, parameter), own in zip(named.items(), codecs, strict=True)
        if own is not NATIVE
    }


def rounded(model: M, codec: str) -> M:
    """Return a copy whose weights are what the codec makes of them."""
    model = copy.deepcopy(model)
    for parameter in matrices(model, codec).values():
        values, form = parameter.data, form_named(codec)
        written = torch.empty(form.num_bytes(values.shape, values.dtype), dtype=torch.uint8)
        form.encode(values, written)
        form.decode(written, values)
    return model
