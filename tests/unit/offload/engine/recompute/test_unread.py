"""Linear layers without their values: the same gradients, and an output that nobody mistakes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from offload.engine.recompute.unread import (
    Left,
    Unread,
    can_leave_out,
    is_no_value,
    left_out,
    not_a_value,
)

PATH = (("AddBackward0", 1),)


class Layer(nn.Module):
    """Adds a linear layer's output to its input."""

    def __init__(self, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Linear(8, 8, bias=bias, dtype=dtype).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(x.tanh())


def passed(layer: Layer, left: tuple[Unread, ...]) -> tuple[torch.Tensor, torch.Tensor, Left]:
    torch.manual_seed(1)
    x = torch.randn(2, 5, 8, dtype=layer.down.weight.dtype).requires_grad_()
    with left_out(left) as seen:
        y = layer(x)
    y.backward(torch.randn_like(x))
    assert x.grad is not None
    return y, x.grad, seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gradient_is_the_same_to_the_bit_and_the_output_has_no_value(
    bias: bool, dtype: torch.dtype
) -> None:
    layer = Layer(bias=bias, dtype=dtype)
    y, gradient, _ = passed(layer, ())
    nothing, same, left = passed(layer, (Unread(module=layer.down, path=PATH),))
    assert is_no_value(nothing)
    assert nothing.shape == y.shape
    assert nothing.dtype == y.dtype
    assert torch.equal(gradient, same)
    assert left.is_as_found(nothing)
    assert "forward" not in vars(layer.down)
    assert torch.equal(passed(layer, ())[0], y)


def nothing() -> torch.Tensor:
    y = not_a_value(torch.empty(2, 5, 8, dtype=torch.bfloat16), 6)
    return y.requires_grad_()


def test_sums_views_and_products_with_constants_have_no_value_either() -> None:
    y, x = nothing(), torch.ones(2, 5, 6)
    for sum_ in (x + y, y - x, 0.5 * y, x[0, 0] * y, y / 2, y.float(), y.view(-1, 6), y + y):
        assert is_no_value(sum_)
    assert not is_no_value(x)
    assert (y.float() + x).dtype is torch.float32
    assert y.view(10, 6).t().shape == (6, 10)
    assert (y + torch.empty(3, 1, 1, 1)).shape == (3, 2, 5, 6)


USES: list[Callable[[torch.Tensor], object]] = [
    lambda y: y > 1,
    lambda y: y.isinf().any(),
    lambda y: y.relu(),
    lambda y: torch.ones(2, 5, 6).add_(y),
    lambda y: y.add_(1.0),
    lambda y: y * y,
    lambda y: 1 / y,
    lambda y: y * torch.ones(6, requires_grad=True),
    lambda y: y.float().detach().numpy(),
    lambda y: np.asarray(y.float().detach()),
    lambda y: y.tolist(),
    lambda y: y.sum().item(),
    lambda y: y.data_ptr(),
    lambda y: y.detach().untyped_storage().data_ptr(),
    lambda y: y.detach().__dlpack__(),
    lambda y: y.register_hook(lambda gradient: gradient * y),
    lambda y: torch.nn.functional.dropout(y, 0.5),
    lambda y: str(y),
    lambda y: torch.where(y > 0, y, 0),
]


@pytest.mark.parametrize("use", USES)
def test_a_value_that_was_left_out_cannot_be_used(use: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError):
        use(nothing())


def seen_by(layer: Layer, path: tuple[tuple[str, int], ...], num_calls: int = 1) -> bool:
    x = torch.randn(2, 5, 8).requires_grad_()
    with left_out((Unread(module=layer.down, path=path),)) as left:
        y = x
        for _ in range(num_calls):
            y = layer(x)
    return left.is_as_found(y)


def test_only_the_graph_that_was_found_counts() -> None:
    layer = Layer(bias=False, dtype=torch.float32)
    assert seen_by(layer, PATH)
    assert not seen_by(layer, (("AddBackward0", 0),))
    assert not seen_by(layer, (("MulBackward0", 1),))
    assert not seen_by(layer, (("AddBackward0", 2),))
    assert not seen_by(layer, ())
    assert not seen_by(layer, PATH, num_calls=2)
    assert not seen_by(layer, PATH, num_calls=0)


def test_an_input_of_another_type_is_computed() -> None:
    layer = Layer(bias=False, dtype=torch.float32)
    x = torch.randn(5, 8).requires_grad_()
    with left_out((Unread(module=layer.down, path=PATH),)) as left:
        for y in (layer.down(x[0]), layer.down(x.t().contiguous().t())):
            assert y.isfinite().all()
        with torch.autocast("cpu", torch.bfloat16):
            assert layer.down(x).isfinite().all()
        assert not left.is_as_found(layer(x.detach()))
    assert layer(x).isfinite().all()


@pytest.mark.parametrize(
    ("module", "can"),
    [
        (nn.Linear(2, 2).requires_grad_(requires_grad=False), True),
        (nn.Linear(2, 2), False),
        (nn.Bilinear(2, 2, 2).requires_grad_(requires_grad=False), False),
    ],
)
def test_frozen_plain_linears_can_leave_their_value_out(module: nn.Module, can: bool) -> None:
    assert can_leave_out(module) is can
