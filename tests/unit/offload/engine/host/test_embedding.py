"""Lookups in rows of an embedding, in buffers that a step fills as its ops say."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from offload.engine.host.embedding import HostEmbedding
from offload.engine.host.slab import Slab, Stash, lay_out
from offload.engine.streams import CpuDevice
from offload.plan.schedule.op import Kind, Lane, Op

IDS = torch.tensor([[5, 1, 5], [9, 1, 0]])


def stash() -> Stash:
    return Stash(
        "rows",
        allocate_host=lambda num: torch.zeros(num, dtype=torch.uint8),
        free_host=lambda _block: None,
        torch_device=torch.device("cpu"),
    )


def held_on_host(module: nn.Embedding) -> HostEmbedding:
    return HostEmbedding(
        nn.ModuleDict({"table": module}),
        module,
        rows=stash(),
        head=None,
        is_head_on_host=False,
    )


@pytest.fixture
def module() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(12, 6).requires_grad_(requires_grad=False)


@pytest.fixture
def host(module: nn.Embedding) -> Iterator[HostEmbedding]:
    held = held_on_host(module)
    yield held
    held.let_go()


def brought(host: HostEmbedding, ids: torch.Tensor) -> Op:
    """Bring the rows of one pass, and return the op of its front."""
    (num_bytes,) = host.prepare({0: ids})
    look_up = Op(lane=Lane.HOST, kind=Kind.LOOK_UP, micro_batch=0, buffer=1, num_bytes=num_bytes)
    host.look_up(look_up)
    host.bring(look_up._replace(lane=Lane.H2D, kind=Kind.ROWS), CpuDevice())
    return look_up._replace(lane=Lane.COMPUTE, kind=Kind.FRONT)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_any_tokens_of_a_pass_are_looked_up_in_its_rows_and_nowhere_else(
    module: nn.Embedding, host: HostEmbedding, dtype: torch.dtype
) -> None:
    expected = module.weight.detach().clone()
    front = brought(host, IDS.to(dtype))
    module.weight.data.zero_()  # what is read from now on was brought
    with host.present(front):
        assert torch.equal(module(IDS.to(dtype)), expected[IDS])
        assert torch.equal(module(IDS[:1, 1:]), expected[IDS[:1, 1:]])  # a part, as of packed rows
        assert torch.equal(module(IDS.repeat(1, 2)), expected[IDS.repeat(1, 2)])
    assert not module(IDS).any()  # without rows, from the weight itself


def test_a_token_whose_row_was_not_brought_is_no_number(
    module: nn.Embedding, host: HostEmbedding
) -> None:
    with host.present(brought(host, IDS)):
        found = module(torch.tensor([0, 2, 9, 11]))
    assert found.isnan().all(dim=1).tolist() == [False, True, False, True]
    assert torch.equal(found[0], module.weight[0])


def test_what_nobody_reads_takes_no_lookup(module: nn.Embedding, host: HostEmbedding) -> None:
    with host.unread():
        found = module(torch.full((2, 3), 10**6))  # no such token
    assert found.shape == (2, 3, 6)
    assert not found.any()


def test_a_weight_that_ranks_share_is_not_copied(module: nn.Embedding) -> None:
    expected = module.weight.detach().clone()
    own = Slab([lay_out(list(module.parameters()))])
    own.take(0)
    other = nn.Embedding(12, 6).requires_grad_(requires_grad=False)
    opened = Slab.open(own.handle, [lay_out(list(other.parameters()))])
    opened.take(0)
    for slab in (own, opened):
        slab.close()  # both have mapped it
    places = [one.weight.data_ptr() for one in (module, other)]
    for one in (module, other):
        held = held_on_host(one)
        assert torch.equal(one(IDS), expected[IDS])
        held.let_go()
    assert [one.weight.data_ptr() for one in (module, other)] == places
    module.weight.data[5] = 7.0
    assert other.weight[5].tolist() == [7.0] * 6  # it is the same memory


def test_buffers_grow_to_the_largest_step_and_are_kept(host: HostEmbedding) -> None:
    few, many = torch.tensor([[1]]), torch.arange(12)[None]
    sizes = [host.prepare({0: ids}) for ids in (few, many, few)]
    assert sizes == [(256 + 2 * 24,), (256 + 13 * 24,), (256 + 2 * 24,)]
    assert host.arenas[1].num_bytes == 2 * sizes[1][0]
    assert host.prepare({0: many, 1: few}) == (*sizes[1], *sizes[0])
