"""The module whose output is the first that is not finite."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def first_overflow(model: nn.Module) -> Iterator[list[str]]:
    """Note the first module of a model whose output is not finite, by name, while it computes.

    Modules inside another return first, so it is the innermost. One that was given such a tensor is
    left out: an engine that inspects a model also tries its layers on rows that are NaN. Each
    output is waited for.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: list[str] = []

    def check(module: nn.Module, inputs: tuple[Any, ...], named: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is None or found:
            return
        parts = output if isinstance(output, tuple) else (output,)
        if not _are_finite(parts) and _are_finite((*inputs, named.get("hidden_states"))):
            found.append(name)

    hook = nn.modules.module.register_module_forward_hook(check, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


def _are_finite(values: Iterable[object]) -> bool:
    tensors = (one for one in values if isinstance(one, torch.Tensor) and one.is_floating_point())
    return all(bool(torch.isfinite(one).all()) for one in tensors)
