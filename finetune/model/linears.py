"""The linear layers of a model that an adapter can be put on."""

import re

import torch
from torch import nn
from transformers import PreTrainedModel

_READ_BY_SCANS = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Types whose kernels read the weight of `out_proj` themselves, where peft adapts none."""


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the linear layers inside the decoder layers, by full name.

    A subclass that computes something else, such as a router that returns scores and choices, is
    none of them; nor is one whose name is a number, which peft would take for a layer's.
    """
    decoder: nn.Module = model.get_decoder()
    if isinstance(decoder, nn.Linear):  # of modernbert-decoder, which calls its head so
        decoder = model.base_model
    left = "out_proj" if model.config.model_type in _READ_BY_SCANS else None
    prefix = next(f"{name}." if name else "" for name, m in model.named_modules() if m is decoder)
    return {
        prefix + name: module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear)
        and _is_linear(type(module))
        and not name.rpartition(".")[2].isdigit()
        and name.rpartition(".")[2] != left
        and re.search(r"(^|\.)(layers?|h|blocks?)\.\d+\.", name)
    }


def _is_linear(kind: type[nn.Linear]) -> bool:
    """Return whether a class of linear layers computes their product, tried on a small one."""
    if kind.forward is nn.Linear.forward:
        return True
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        try:
            small, x = kind(3, 2), torch.randn(4, 3)
            found = small(x)
        except (TypeError, ValueError, AttributeError, RuntimeError):  # it is made of a config
            return False
        expected = nn.functional.linear(x, small.weight, small.bias)
    return isinstance(found, torch.Tensor) and torch.allclose(found, expected)
