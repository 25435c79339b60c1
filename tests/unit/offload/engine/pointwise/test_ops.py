"""The fused operators as torch sees them: one each, its shapes without values, what it saves."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from offload.engine.pointwise import ops
from tests.counted import Counted


def norm(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(x.shape[-1], dtype=x.dtype)
    return ops.norm(x, weight, eps=1e-6, offset=0.0, is_cast_first=True)


def rotate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    heads = x.view(2, 3, 4, 8).transpose(1, 2)
    angles = torch.ones(1, 3, 8, dtype=x.dtype)
    return ops.rotate(heads, heads, angles, angles)


def norm_rotate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    heads = x.view(2, 3, 4, 8).transpose(1, 2)
    angles = torch.ones(1, 3, 8, dtype=x.dtype)
    return ops.norm_rotate(
        heads,
        heads,
        angles,
        angles,
        weights_D=(torch.ones(8, dtype=x.dtype), torch.ones(8, dtype=x.dtype)),
        eps=1e-6,
        offset=0.0,
        is_cast_first=True,
    )


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return ops.gated(gate, up, "silu")


def test_a_cross_entropy_passes_torchs_own_checks() -> None:
    arguments = (torch.randn(3, 32), torch.tensor([0, 5, 31]), torch.tensor(2.0))
    operator = torch.ops.sluice.cross_entropy
    for has_gradient in (True, False):
        torch.library.opcheck(
            operator, (*arguments, has_gradient), test_utils=("test_schema", "test_faketensor")
        )


FUNCTIONS: dict[str, Any] = {
    "norm": norm,
    "rotate": rotate,
    "norm_rotate": norm_rotate,
    "gated": gated,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operator_passes_torchs_own_checks(name: str) -> None:
    x = torch.randn(2, 3, 32)
    arguments: dict[str, tuple[Any, ...]] = {
        "norm": (x, torch.randn(32), 1e-6, 0.0, True),
        "rotate": (
            *(x.view(2, 3, 4, 8).transpose(1, 2),) * 2,
            *(torch.randn(2, 3, 8),) * 2,
            False,
        ),
        "norm_rotate": (
            *(x.view(2, 3, 4, 8).transpose(1, 2),) * 2,
            *(torch.randn(8),) * 2,
            *(torch.randn(2, 3, 8),) * 2,
            *(1e-6, 0.0, True),
        ),
        "gated": (x, x.clone(), "gelu"),
    }
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.sluice, name), arguments[name], test_utils=tests)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(FUNCTIONS[name], (x,))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_without_values_are_those_with(name: str, dtype: torch.dtype) -> None:
    def found(x: torch.Tensor) -> list[Any]:
        y = FUNCTIONS[name](x)
        both = y if isinstance(y, tuple) else (y,)
        back = torch.autograd.grad([each.sum() for each in both], x)
        return [(t.shape, t.stride(), t.dtype) for t in (*both, *back)]

    values = found(torch.randn(2, 3, 32, dtype=dtype, requires_grad=True))
    with FakeTensorMode():
        assert found(torch.randn(2, 3, 32, dtype=dtype, requires_grad=True)) == values


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_is_one_operation_forward_and_backward(name: str) -> None:
    x = torch.randn(2, 3, 32, dtype=torch.bfloat16, requires_grad=True)
    forward, backward = Counted(), Counted()
    with forward:
        y = FUNCTIONS[name](x)
    first = y[0] if isinstance(y, tuple) else y
    gradient = torch.ones_like(first)
    with backward:
        torch.autograd.grad(first, x, gradient)
    assert forward.num_ops[name] == 1
    back = name if name == "rotate" else f"{name}_backward"
    assert backward.num_ops[back] == 1
    rows = 2 * 3
    small = 2 * 3 * 8 * 2 + 2 * 8 * 2 + 2 * rows * 4 * 4  # angles, weights, a factor per head
    expected = {
        "norm": (2 * x.nbytes + 32 * 2 + rows * 4, 3 * x.nbytes + 32 * 2 + rows * 4),
        "rotate": (4 * x.nbytes + 2 * 3 * 8 * 2, 4 * x.nbytes + 2 * 3 * 8 * 2),
        "norm_rotate": (4 * x.nbytes + small, 6 * x.nbytes + small),
        "gated": (3 * x.nbytes // 2, 5 * x.nbytes // 2),
    }
    assert (forward.num_bytes[name], backward.num_bytes[back]) == expected[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_keeps_what_it_says_and_nothing_is_written_over(name: str) -> None:
    saved: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    x = torch.randn(2, 3, 32, dtype=torch.bfloat16, requires_grad=True)
    before = x.detach().clone()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = FUNCTIONS[name](x)
    first = y[0] if isinstance(y, tuple) else y
    kept = first.detach().clone()
    for _ in range(2):  # the second would see what the first has written over
        (one,) = torch.autograd.grad(first, x, torch.ones_like(first), retain_graph=True)
        (two,) = torch.autograd.grad(first, x, torch.ones_like(first), retain_graph=True)
        assert torch.equal(one, two)
    assert torch.equal(first.detach(), kept)
    assert torch.equal(x.detach(), before)
    own = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    own.pop(x.untyped_storage().data_ptr(), None)
    tables = {"norm": 32 * 2 + 2 * 3 * 4, "rotate": 2 * 3 * 8 * 2 // 2, "gated": 0}
    tables["norm_rotate"] = tables["rotate"] + 2 * 8 * 2 + 2 * 2 * 3 * 4 * 4
    assert sum(own.values()) == tables[name]
