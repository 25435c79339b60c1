"""Separates hooks that change what a layer computes from those that only record.

A hook that returns nothing may count and keep tensors freely. One that returns a value on any path
through its code, or writes to its arguments, is part of the layer: what it returns may depend on
its state.
"""

import dis
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

from offload.engine.model.watch import Watch

_KINDS = ("_forward_pre_hooks", "_forward_hooks")


class JudgedHooks:
    """Classifies the hooks of layers as they are called.

    Attributes:
        acting: Hooks that changed something.
    """

    def __init__(self, watch: Watch) -> None:
        """Classify nothing yet.

        Args:
            watch: It must ignore what recording hooks read and write.
        """
        self._watch = watch
        self.acting: list[Any] = []

    @contextmanager
    def judged(self, layer: nn.Module) -> Iterator[None]:
        """Classify the hooks of a layer's modules, and global module hooks, while it is called."""
        tables = [vars(module)[kind] for module in layer.modules() for kind in _KINDS]
        tables += [getattr(torch_module, f"_global{kind}") for kind in _KINDS]
        before = [(table, key, hook) for table in tables for key, hook in table.items()]
        for table, key, hook in before:
            table[key] = partial(self._call, hook)
        try:
            yield
        finally:
            for table, key, hook in before:
                if key in table:  # it may have removed itself
                    table[key] = hook

    def _call(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        given = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, torch.Tensor)]
        versions = [_version(tensor) for tensor in given]
        mark = self._watch.mark()
        result = hook(*args, **kwargs)
        has_written = versions != [_version(tensor) for tensor in given]
        if not (has_written or result is not None or _may_return_more(hook)):
            self._watch.return_to(mark)
        elif not any(hook is other for other in self.acting):
            self.acting.append(hook)
        return result


def _may_return_more(hook: Any) -> bool:
    """Return whether a hook that has returned nothing has another return path."""
    while isinstance(hook, partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    function = function if hasattr(function, "__code__") else type(hook).__call__
    code = getattr(function, "__code__", None)
    steps = list(dis.get_instructions(code)) if code else []
    ends = [i for i, step in enumerate(steps) if step.opname.startswith("RETURN_")]
    has_one = len(ends) == 1 and not steps[ends[0]].is_jump_target
    return not has_one and not all(_returns_none(steps[i - 1], steps[i]) for i in ends)


def _returns_none(before: dis.Instruction, step: dis.Instruction) -> bool:
    if step.opname == "RETURN_CONST":
        return step.argval is None
    is_none = before.opname == "LOAD_CONST" and before.argval is None
    return step.opname == "RETURN_VALUE" and is_none and not step.is_jump_target


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def is_same_code(one: list[Any], other: list[Any]) -> bool:
    """Return whether two lists of `all_hooks` hold the same functions."""
    return len(one) == len(other) and all(map(is_, one, other))


def all_hooks(model: nn.Module, outside: Iterable[nn.Module]) -> list[Any]:
    """Return the functions that a model runs: hooks, `forward`s, and attributes such as its loss.

    Args:
        model: The model.
        outside: Its modules outside the layers, whose attributes are searched.
    """
    found = [hook for kind in _KINDS for hook in getattr(torch_module, f"_global{kind}").values()]
    for module in model.modules():
        own = vars(module)
        found.append(own.get("forward", type(module).forward))
        for kind in _KINDS:
            found.extend(own[kind].values())
    for module in outside:
        found.extend(value for value in vars(module).values() if callable(value))
    return found
