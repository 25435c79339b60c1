"""Leaves out products whose values nothing reads when a layer is recomputed.

Problem. A backward visit recomputes its layer to have the graph. In most models the last product of
a layer is only added to the hidden state, and in a recompute nothing reads the sum. The gradients
of the product need its weight and its input. So its value is computed and thrown away: 8 to 9 % of
a layer's arithmetic, in a step with a recompute.

Idea. In a recompute such a linear layer returns a tensor of the right shape, dtype and graph that
holds one element, a NaN, for all places. If its value were read after all, the gradients would be
NaN, and not wrong. Which products these are is found by `offload.engine.model.readers`. At each
visit the graph from the layer's output to the product must be the one that was found; otherwise
the layer is computed again with all values.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

Path = tuple[tuple[str, int], ...]
"""From node to node of a graph: a node's name, and which of its inputs comes next."""


@runtime_checkable
class WithoutValue(Protocol):
    """A linear layer of another kind that can leave its value out."""

    def without_value(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output from `not_a_value`, with its graph; or the output if that differs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unread:
    """A linear layer whose product nothing reads in a recompute.

    Attributes:
        module: It.
        path: From the node of the decoder layer's output to that of the product.
    """

    module: nn.Module
    path: Path


class Left:
    """What was left out of one visit."""

    def __init__(self, unread: Sequence[Unread]) -> None:
        """Expect these to be left out, once each."""
        self._unread = unread
        self._nodes: list[tuple[nn.Module, Node | None]] = []

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call a linear layer, without its value where it can leave it out."""
        y = _output(module, *args, **kwargs)
        if is_no_value(y):
            self._nodes.append((module, y.grad_fn))
        return y

    def is_as_found(self, output: torch.Tensor) -> bool:
        """Return whether the graph of a layer's output leads to each product as it was found."""
        nodes = dict(self._nodes)
        return len(self._nodes) == len(nodes) == len(self._unread) and all(
            _leads(output.grad_fn, one.path, nodes.get(one.module)) for one in self._unread
        )


@contextmanager
def left_out(unread: Sequence[Unread]) -> Iterator[Left]:
    """Leave products out meanwhile."""
    left = Left(unread)
    for one in unread:
        vars(one.module)["forward"] = partial(left.call, one.module)
    try:
        yield left
    finally:
        for one in unread:
            vars(one.module).pop("forward", None)


def not_a_value(x: torch.Tensor, num_features: int) -> torch.Tensor:
    """Return an output of a linear layer that takes one element of memory: NaN.

    Args:
        x: The layer's input, (..., K).
        num_features: Features of the output.
    """
    y = x.new_empty_strided((*x.shape[:-1], num_features), (0,) * x.dim())
    y.as_strided((), ()).fill_(torch.nan)
    return y


def is_no_value(y: torch.Tensor) -> bool:
    """Return whether a tensor is from `not_a_value`."""
    return y.dim() > 0 and not any(y.stride())


def can_leave_out(module: nn.Module) -> bool:
    """Return whether a module is a frozen linear layer that can leave its value out."""
    if isinstance(module, WithoutValue):
        return True
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    return type(module) is nn.Linear and not is_trained


def _output(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    own = cast("Any", type(module))
    if not args or len(args) > 1 or kwargs or torch.compiler.is_compiling():
        return cast("torch.Tensor", own.forward(module, *args, **kwargs))
    (x,) = args
    if isinstance(module, WithoutValue):
        return module.without_value(x)
    weight_MK: Any = module.weight
    is_plain = (
        type(x) is torch.Tensor
        and type(weight_MK) is nn.Parameter
        and x.dim() > 1
        and x.is_contiguous()
        and x.dtype == weight_MK.dtype
        and not torch.is_autocast_enabled(x.device.type)
    )
    if not is_plain:
        return cast("torch.Tensor", own.forward(module, x))
    return cast("torch.Tensor", _Product.apply(x, weight_MK))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """A frozen linear layer without its value; its backward is the product that torch's has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_MK: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        ctx.save_for_backward(weight_MK)
        return not_a_value(x, len(weight_MK))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight_MK,) = ctx.saved_tensors
        return (gradient.flatten(0, -2) @ weight_MK).view(ctx.shape), None


def _leads(node: Node | None, path: Path, end: Node | None) -> bool:
    for name, index in path:
        if node is None or node.name() != name or index >= len(node.next_functions):
            return False
        node = node.next_functions[index][0]
    return node is not None and node is end
