"""The linear layers of a model that an adapter can be put on."""

import re

from torch import nn
from transformers import PreTrainedModel

_READ_BY_SCANS = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Types whose kernels read the weight of `out_proj` themselves, where peft adapts none."""


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the linear layers inside the decoder layers, by full name.

    A subclass that computes something else, such as a router that returns scores and choices, is
    none of them.
    """
    decoder = model.get_decoder()
    left = "out_proj" if model.config.model_type in _READ_BY_SCANS else None
    prefix = next(f"{name}." if name else "" for name, m in model.named_modules() if m is decoder)
    return {
        prefix + name: module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and name.rpartition(".")[2] != left
        and re.search(r"(^|\.)layers?\.\d+\.", name)
    }
