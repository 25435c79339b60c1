"""Readers of a product are found by what they keep, whatever they are."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from offload.engine.model.hooks import Graph
from offload.engine.model.readers import candidates, unread_products
from offload.engine.recompute.unread import Unread, left_out

KEPT: list[Any] = []
After = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """A small MLP; `after` is what becomes of its product."""

    def __init__(self, after: After) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.gate = nn.LayerNorm(8), nn.Parameter(torch.randn(8))
        self.total = nn.Buffer(torch.zeros(()))
        self.last: Any = None
        self.after = after
        for linear in (self.up, self.down):
            linear.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self, x, self.down(torch.nn.functional.silu(self.up(x))))


class Keeps(torch.autograd.Function):
    """Keeps a tensor that autograd does not know of."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.y = y * 1.0
        return y + 0.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Opaque(torch.autograd.Function):
    """Reads values past torch's dispatcher, as kernels do, and scales its gradient by them."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.scale = 1.0 + float(abs(y.detach().numpy()).mean())
        return y + 0.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.scale


def kept_in_a_global(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    KEPT[:] = [y.detach().mean()]
    return x + y


def kept_in_an_attribute(layer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    layer.last = (x + y).detach()
    return x + y


def added_to_a_buffer(layer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    layer.total.copy_(y.detach().mean())
    return x + y


def branched_on(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + (y.clamp(max=1.0) if y.isinf().any() else y)


def seen_by_python(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    random.random() if y.detach().sum().item() > 0 else None
    return x + y


def written_in_place(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.add_(x)


READERS: list[After] = [
    kept_in_a_global,
    kept_in_an_attribute,
    added_to_a_buffer,
    branched_on,
    seen_by_python,
    written_in_place,
    lambda layer, x, y: x + layer.norm(y),  # type: ignore[operator]
    lambda layer, x, y: x + y * layer.gate,  # type: ignore[operator]
    lambda _, x, y: x + y.sigmoid(),
    lambda _, x, y: x * y,
    lambda _, x, y: x + y[y.abs() > 0].view_as(y),
    lambda _, x, y: x + Keeps.apply(y),
    lambda _, x, y: x + Opaque.apply(y),
    lambda _, x, y: x + y + y,
    lambda _, x, y: x + 0.0 * y.detach(),
    lambda _, x, y: torch.where(y > 0, x, x + y),
]
UNPROVED: list[After] = [
    lambda _, x, y: x + torch.nn.functional.dropout(y, 0.3),  # its mask is made like it
]
NOT_READERS: list[After] = [
    lambda _, x, y: x + y,
    lambda _, x, y: y + x,
    lambda _, x, y: x + 0.5 * y,
    lambda _, x, y: x + y.view(-1, 8).view(x.shape),
    lambda _, x, y: x + y.view(-1, 8).reshape(x.shape),
    lambda _, x, y: (x.float() + y.double()).to(x.dtype),
    lambda _, x, y: y,
]


def found_in(layer: nn.Module) -> set[str]:
    torch.manual_seed(1)
    input_BTD = torch.randn(2, 5, 8)

    def visit(unread: Sequence[Unread]) -> Graph:
        torch.manual_seed(2)
        leaf_BTD = input_BTD.clone().requires_grad_()
        with left_out(unread) as left:
            output = layer(leaf_BTD)
        return Graph(input_BTD=leaf_BTD, said=(output,), is_as_found=left.is_as_found(output))

    trained = [p for p in layer.parameters() if p.requires_grad]
    return set(unread_products(layer, visit, trained))


@pytest.mark.parametrize("after", [*READERS, *UNPROVED])
def test_a_product_with_a_reader_is_computed(after: After) -> None:
    layer = Layer(after)
    assert found_in(layer) == set()
    assert not any("forward" in vars(module) for module in layer.modules())
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("after", NOT_READERS)
def test_a_product_that_is_only_added_is_found(after: After) -> None:
    assert found_in(Layer(after)) == {"down"}


def plain() -> Layer:
    return Layer(lambda _, x, y: x + y)


def test_a_linear_that_is_called_twice_is_computed() -> None:
    class Twice(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(x) + self.down(x)

    assert found_in(Twice(lambda _, _x, y: y)) == set()


def test_linears_beside_each_other_are_both_found() -> None:
    class Parallel(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.up(x) + self.down(x)

    assert found_in(Parallel(lambda _, _x, y: y)) == {"up", "down"}


def hook(*_: object) -> None:
    pass


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
@pytest.mark.parametrize("where", ["", "down", "norm"])
def test_a_layer_with_hooks_is_computed(register: str, where: str) -> None:
    layer = plain()
    handle = getattr(layer.get_submodule(where), register)(hook)
    assert candidates(layer) == {}
    handle.remove()
    assert found_in(layer) == {"down"}


def test_global_hooks_hooks_of_parameters_and_replaced_forwards_are_seen() -> None:
    layer = plain()
    handle = nn.modules.module.register_module_forward_hook(hook)
    assert candidates(layer) == {}
    handle.remove()
    handle = layer.gate.register_hook(hook)
    assert candidates(layer) == {}
    handle.remove()
    vars(layer.down)["forward"] = layer.down.forward
    assert set(candidates(layer)) == {"up"}


def test_compiled_layers_are_computed() -> None:
    for compiled in ("", "norm"):
        layer = plain()
        layer.get_submodule(compiled).compile(backend="eager")
        assert candidates(layer) == {}
    wrapped: Any = plain()
    wrapped.norm = torch.compile(wrapped.norm, backend="eager")
    assert candidates(wrapped) == {}


def test_a_linear_that_trains_is_computed() -> None:
    layer = plain()
    layer.down.requires_grad_()
    assert found_in(layer) == set()
