"""Leaves out products whose values nothing reads when a layer is recomputed.

Problem. A backward visit recomputes its layer to have the graph. In most models the last product of
a layer is only added to the hidden state, and in a recompute nothing reads the sum. The gradients
of the product need its weight and its input. So its value is computed and thrown away: 8 to 9 % of
a layer's arithmetic, in a step with a recompute.

Idea. In a recompute such a linear layer returns a `NotAValue`: shape, dtype, graph, and no memory.
Sums and views of one are of the same kind, so the layer's output is too. Any other use is an error,
then the layer is computed again with all values. So it is if the graph from the layer's output to
the product is not the one that was found. Which products to try is found before the first step, by
`offload.engine.model.readers`. That is not enough: a layer may do something else for long rows,
above a threshold, or by its number.

Rejected: a NaN in one element for all places. `NaN > 1` is False, so a layer that halves what is
large took the other branch in its recompute, and kernels that take a pointer read past the element.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map_only

Path = tuple[tuple[str, int], ...]
"""From node to node of a graph: a node's name, and which of its inputs comes next."""


@runtime_checkable
class WithoutValue(Protocol):
    """A linear layer of another kind, or all experts of a layer, that can leave its value out."""

    def without_value(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a `not_a_value` with the output's graph; or the output if that differs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unread:
    """A linear layer whose product nothing reads in a recompute.

    Attributes:
        module: It.
        path: From the node of the decoder layer's output to that of the product.
    """

    module: nn.Module | WithoutValue
    path: Path


class Left:
    """What was left out of one visit."""

    def __init__(self, unread: Sequence[Unread]) -> None:
        """Expect these to be left out, once each."""
        self._unread = unread
        self._num_refused = _refused.count
        self._nodes: list[tuple[object, Node | None]] = []

    def call(self, module: nn.Module | WithoutValue, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call a linear layer, without its value where it can leave it out."""
        y = _output(module, *args, **kwargs)
        if is_no_value(y):
            self._nodes.append((module, y.grad_fn))
        return y

    def is_as_found(self, output: torch.Tensor) -> bool:
        """Return whether the graph of a layer's output leads to each product as it was found."""
        nodes = dict(self._nodes)
        return (
            _refused.count == self._num_refused  # the layer may have caught the error
            and len(self._nodes) == len(nodes) == len(self._unread)
            and is_no_value(output) == bool(self._unread)
            and all(_leads(output.grad_fn, one.path, nodes.get(one.module)) for one in self._unread)
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


class ReadError(RuntimeError):
    """Something used a value that was left out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        _refused.count += 1


class _Refused(threading.local):
    """How many uses were refused in this thread."""

    count = 0


_refused = _Refused()


_aten = torch.ops.aten
_SUMS = {_aten.add.Tensor, _aten.sub.Tensor}
_SCALED = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar}
_SHAPED = {
    *(_aten.view.default, _aten._unsafe_view.default, _aten.transpose.int, _aten.permute.default),
    *(_aten.unsqueeze.default, _aten.squeeze.dim, _aten.t.default, _aten.detach.default),
    *(_aten.clone.default, _aten._to_copy.default),
}


class NotAValue(torch.Tensor):
    """The output of a linear layer without its values, or a sum of one: it cannot be read."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device) -> "NotAValue":
        """Take shape, strides and dtype from a tensor, and no memory."""
        y: NotAValue = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        torch._C._set_throw_on_mutable_data_ptr(y)  # for code that takes its address
        return y

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is no class method
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> "NotAValue":
        """Return what a sum, a product with a constant or a view of it has of a shape and a dtype.

        Raises:
            ReadError: It is another operation, or its gradient needs the value.
        """
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        others = [x for x in given if not isinstance(x, cls)]
        is_scaled = (
            func in _SCALED
            and len(given) - len(others) == 1
            and (isinstance(args[0], cls) or func is _aten.mul.Tensor)
            and not any(x.requires_grad for x in others)
        )
        if not (is_scaled or func in _SUMS or func in _SHAPED):
            raise ReadError(
                f"`{func}` uses the output of a linear layer whose value was left out of a"
                " recompute; a layer does this only in some of its calls"
            )
        y = next(x for x in given if isinstance(x, cls))
        if func not in _SHAPED and all(x.shape == y.shape and x.dtype == y.dtype for x in given):
            return cls(_shape_of(y), device=y.device)  # torch's shapes for it take 0.2 ms in Python
        args, kwargs = tree_map_only(torch.Tensor, _shape_of, (args, kwargs or {}))
        return cls(func(*args, **kwargs), device=y.device)

    def register_hook(self, hook: Any) -> Any:
        """Raise an error: a hook on the gradient may read the value in the backward.

        Raises:
            ReadError: Always.
        """
        raise ReadError(f"{hook} is registered on an output whose value was left out")


def not_a_value(x: torch.Tensor, num_features: int) -> torch.Tensor:
    """Return an output of a linear layer without values.

    Args:
        x: The layer's input, (..., K).
        num_features: Features of the output.
    """
    shape = (*x.shape[:-1], num_features)
    return NotAValue(torch.empty(shape, dtype=x.dtype, device="meta"), device=x.device)


def is_no_value(y: torch.Tensor) -> bool:
    """Return whether a tensor is from `not_a_value`, or a sum of one."""
    return isinstance(y, NotAValue)


def _shape_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def can_leave_out(module: nn.Module) -> bool:
    """Return whether a module is a frozen linear layer that can leave its value out."""
    if type(module) is nn.Linear:
        return not any(parameter.requires_grad for parameter in module.parameters())
    return hasattr(type(module), "without_value")  # `isinstance` would ask each of its tables


def _output(module: nn.Module | WithoutValue, *args: Any, **kwargs: Any) -> torch.Tensor:
    own = cast("Any", type(module))
    if not args or torch.compiler.is_compiling():
        return cast("torch.Tensor", own.forward(module, *args, **kwargs))
    if isinstance(module, WithoutValue):
        return module.without_value(*args, **kwargs)
    if len(args) > 1 or kwargs:
        return cast("torch.Tensor", own.forward(module, *args, **kwargs))
    (x,) = args
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
