"""Saved tensors that move to a buffer: each block once, weights never, the rest let go of."""

import copy

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.engine.model.hooks import Graph
from offload.engine.recompute.sent_graphs import GraphSizes, SavedTensors

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
