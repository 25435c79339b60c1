"""What a layer keeps, sends and leaves out when it is computed again."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.engine.model.visits import Graph
from offload.engine.recompute import (
    GraphSizes,
    Left,
    SavedTensors,
    Unread,
    can_leave_out,
    is_no_value,
    left_out,
    not_a_value,
)

ALIGNED = 512


def block(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def saved_of(*staying: torch.Tensor) -> SavedTensors:
    return SavedTensors(staying={block(x) for x in staying}, torch_device=torch.device("cpu"))


def test_views_of_one_block_leave_once_and_come_back_with_their_shapes() -> None:
    whole = torch.arange(24.0)
    views = [whole, whole[8:].view(4, 4).t(), whole[:1].expand(5), whole[4:12:2]]
    values = [view.clone() for view in views]
    saved = saved_of()
    notes = [saved.pack(view) for view in views]
    assert (saved.num_blocks, saved.num_bytes) == (1, ALIGNED)
    buffer = torch.empty(saved.num_bytes, dtype=torch.uint8)
    saved.move_to(buffer)
    whole.zero_()
    other = torch.empty(3 * ALIGNED, dtype=torch.uint8)[ALIGNED:][: saved.num_bytes]
    saved.is_in(other.copy_(buffer))
    for note, view, value in zip(notes, views, values, strict=True):
        found = saved.unpack(note)
        assert torch.equal(found, value)
        assert (found.stride(), found.dtype) == (view.stride(), view.dtype)
        assert found.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_weights_and_what_is_not_plain_memory_stay_as_they_are() -> None:
    weight = torch.randn(4, 4)
    staying = [
        weight.t(),
        nn.Parameter(weight),
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.empty(0),
        torch.empty(2, device="meta"),
    ]
    saved = saved_of(weight)
    assert all(saved.pack(x) is x for x in staying)
    assert saved.num_bytes == 0
    assert all(saved.unpack(x) is x for x in staying)


def test_blocks_start_where_torch_would_put_them() -> None:
    saved = saved_of()
    tensors = [torch.zeros(3, dtype=torch.bool), torch.ones(200), torch.full((7,), 2.0).double()]
    notes = [saved.pack(x) for x in tensors]
    assert saved.num_bytes == ALIGNED + 2 * ALIGNED + ALIGNED
    buffer = torch.empty(saved.num_bytes, dtype=torch.uint8)
    saved.move_to(buffer)
    saved.is_in(buffer)
    for note, x in zip(notes, tensors, strict=True):
        found = saved.unpack(note)
        assert torch.equal(found, x)
        assert (found.data_ptr() - buffer.data_ptr()) % ALIGNED == 0


def test_a_write_to_a_saved_tensor_is_seen() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    for is_written in (False, True):
        saved = saved_of(weight)
        with saved.hooked():
            y = (torch.ones(3, 8) @ weight).exp()
        if is_written:
            y.detach().add_(1)
        assert saved.is_unwritten is not is_written


def test_after_the_move_the_device_holds_none_of_the_blocks() -> None:
    layer = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    saved = saved_of(*layer.parameters())
    blocks: list[StorageWeakRef] = []
    pack = saved.pack

    def noting(x: torch.Tensor) -> object:
        note = pack(x)
        if note is not x:
            blocks.append(StorageWeakRef(x.untyped_storage()))
        return note

    saved.pack = noting  # type: ignore[method-assign]
    leaf = torch.randn(5, 8, requires_grad=True)
    with saved.hooked():
        y = layer(leaf).exp()
    assert len(blocks) == 4
    assert not any(one.expired() for one in blocks)
    buffer = torch.empty(saved.num_bytes, dtype=torch.uint8)
    values, other = leaf.detach().clone().requires_grad_(), copy.deepcopy(layer)
    saved.move_to(buffer)
    graph = Graph(input_BTD=leaf, said=(y,))
    graph.let_go()
    assert all(one.expired() for one in blocks)
    saved.is_in(buffer)
    found = graph.backward(torch.ones(5, 8), [])
    other(values).exp().sum().backward()
    assert found is not None
    assert values.grad is not None
    assert torch.equal(found, values.grad)
    for one, same in zip(layer.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert same.grad is not None
        assert torch.equal(one.grad, same.grad)


def test_an_unknown_shape_counts_on_the_next_larger_one() -> None:
    sizes = GraphSizes()
    assert sizes.of(0, (2, 8)) is None
    sizes.add(0, (2, 16), 100)
    sizes.add(0, (2, 32), 200)
    sizes.add(0, (2, 16), 90)
    assert [sizes.of(0, shape) for shape in ((2, 16), (1, 8), (2, 20), (3, 8))] == [
        100,
        100,
        200,
        None,
    ]
    assert sizes.of(1, (2, 16)) is None


# ------------------------------------------------------------------------------------------- unread


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
