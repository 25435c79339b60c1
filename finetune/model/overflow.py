"""The module whose output is the first that is not finite."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def first_overflow(model: nn.Module) -> Iterator[list[str]]:
    """Note the first module of a model whose output is not finite, by name, while it computes.

    Modules inside another return first, so it is the innermost. Each output is waited for.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: list[str] = []

    def check(module: nn.Module, _inputs: Any, output: Any) -> None:
        name = names.get(id(module))
        parts = output if isinstance(output, tuple) else (output,)
        tensors = (one for one in parts if isinstance(one, torch.Tensor))
        if name is not None and not found and not all(map(_is_finite, tensors)):
            found.append(name)

    hook = nn.modules.module.register_module_forward_hook(check)
    try:
        yield found
    finally:
        hook.remove()


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
