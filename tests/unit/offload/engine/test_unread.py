"""Linear layers without their values: the same gradients, and an output that nobody mistakes."""

import pytest
import torch
from torch import nn

from offload.engine.unread import Left, Unread, can_leave_out, is_no_value, left_out, not_a_value

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
    return y.detach(), x.grad, seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gradient_is_the_same_to_the_bit_and_the_output_is_nan(
    bias: bool, dtype: torch.dtype
) -> None:
    layer = Layer(bias=bias, dtype=dtype)
    y, gradient, _ = passed(layer, ())
    nothing, same, left = passed(layer, (Unread(module=layer.down, path=PATH),))
    assert nothing.isnan().all()
    assert nothing.shape == y.shape
    assert nothing.dtype == y.dtype
    assert torch.equal(gradient, same)
    assert left is not None
    assert "forward" not in vars(layer.down)
    assert torch.equal(passed(layer, ())[0], y)


def test_an_output_without_value_takes_one_element() -> None:
    y = not_a_value(torch.empty(2, 5, 8, dtype=torch.bfloat16), 6)
    assert y.shape == (2, 5, 6)
    assert y.untyped_storage().nbytes() == 2
    assert is_no_value(y)
    assert not is_no_value(torch.empty(2, 5, 6))
    with pytest.raises(RuntimeError, match="single memory location"):
        y.add_(1.0)


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
