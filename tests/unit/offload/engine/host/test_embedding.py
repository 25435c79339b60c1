"""Lookups in rows of an embedding, in buffers that a step fills as its ops say."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from offload.engine.host.embedding import HostEmbedding, RowSums
from offload.engine.host.layer_layout import lay_out
from offload.engine.host.slab import Slab
from offload.engine.host.stash import Stash
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


def held_on_host(module: nn.Embedding, *, may_train: bool = False) -> HostEmbedding:
    return HostEmbedding(
        nn.ModuleDict({"table": module}),
        module,
        rows=stash(),
        may_train=may_train,
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
    (num_bytes,) = host.prepare({0: ids}, trained=())
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
    sizes = [host.prepare({0: ids}, trained=()) for ids in (few, many, few)]
    assert sizes == [(256 + 2 * 24,), (256 + 13 * 24,), (256 + 2 * 24,)]
    assert host.arenas[1].num_bytes == 2 * sizes[1][0]
    assert host.prepare({0: many, 1: few}, trained=()) == (*sizes[1], *sizes[0])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"padding_idx": 5},
        {"padding_idx": -11},
        {"padding_idx": 7},
        {"scale_grad_by_freq": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_by_rows_are_those_of_the_whole_table(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """The reference is torch's own embedding, in two micro-batches with tokens that repeat."""
    torch.manual_seed(0)
    plain = nn.Embedding(12, 6, dtype=dtype, **settings)
    own = copy.deepcopy(plain)
    host = held_on_host(own, may_train=True)
    assert host.sums is not None
    passes = {0: IDS, 1: torch.tensor([[5, 2, 2, 2, 7, 5]])}
    row_bytes = host.prepare(passes, trained=passes)
    upwards = {number: torch.randn(*ids.shape, 6).to(dtype) for number, ids in passes.items()}
    for number, ids in passes.items():
        (plain(ids) * upwards[number]).sum().backward()
        op = Op(lane=Lane.HOST, kind=Kind.LOOK_UP, micro_batch=number, buffer=number)
        host.look_up(op)
        host.bring(op._replace(num_bytes=row_bytes[number]), CpuDevice())
        with host.present(op):
            found = own(ids)
        (found * upwards[number]).sum().backward()
        host.take_gradients(op)
        host.send_back(op._replace(num_bytes=host.gradient_bytes(row_bytes)[number]), CpuDevice())
        host.add(op)
    host.publish()
    assert plain.weight.grad is not None
    assert own.weight.grad is not None
    assert torch.equal(own.weight.grad, plain.weight.grad)
    assert own.weight.grad.any(dim=1).sum() in (4, 5, 6)
    own.weight.grad = None
    host.begin_step()
    assert not host.sums.total.any()
    host.let_go()


def test_gradients_by_rows_are_of_as_many_bytes_as_there_are_tokens() -> None:
    module = nn.Embedding(12, 6)
    host = held_on_host(module, may_train=True)
    row_bytes = host.prepare({0: IDS, 1: IDS[:, :1]}, trained=(0, 1))
    assert host.gradient_bytes(row_bytes) == (4 * 24, 2 * 24)
    host.let_go()
    module.requires_grad_(requires_grad=False)
    frozen = held_on_host(module, may_train=True)
    assert frozen.gradient_bytes(frozen.prepare({0: IDS}, trained=(0,))) == ()
    frozen.let_go()


# ------------------------------------------------------------------------ of several processes


class Exchange:
    """Processes in one: each puts its rows here, and an owner adds up those of all."""

    def __init__(self) -> None:
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def num_bytes(self, num_rows: int) -> int:
        return 100 + num_rows

    def gather(
        self,
        tokens_N: torch.Tensor,
        rows_ND: torch.Tensor,
        add: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        self.rows.append((tokens_N.clone(), rows_ND.clone()))
        for one_N, one_ND in self.rows:
            add(one_N, one_ND)


def rows_of(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tokens and gradients of two micro-batches, some of which have the same tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.tensor([0, 3, 5]) + seed % 2, torch.tensor([3, 4, 9])]
    return [(ids, torch.randn(3, 6, generator=generator)) for ids in tokens]


def test_an_owner_has_the_sums_of_all_and_a_step_begins_with_none() -> None:
    """The reference adds up whole tables, of each process and then of both."""
    exchange, weight = Exchange(), torch.zeros(12, 6)
    one, owner = RowSums(weight), RowSums(weight)
    one.share_with(exchange, is_own=False)
    owner.share_with(exchange, is_own=True)
    for step in range(3):
        exchange.rows.clear()
        tables = []
        for number, sums in enumerate((one, owner)):
            table = torch.zeros(12, 6)
            sums.clear()
            sums.begin([tokens_N for tokens_N, _ in rows_of(2 * step + number)])
            for tokens_N, rows_ND in rows_of(2 * step + number):
                sums.add(tokens_N, rows_ND)
                table[tokens_N] += rows_ND
            assert sums.reduced_bytes == 100 + int(table.any(dim=1).sum())
            tables.append(table)
        exchange.gather(one._of_step.tokens_N, one._of_step.rows_ND, lambda *_: None)
        owner.reduce()
        assert torch.equal(owner.total, tables[0] + tables[1])
        assert one.total.shape == (0, 6)
    owner.clear()
    assert not owner.total.any()


def test_a_process_that_updates_nothing_has_rows_of_its_largest_step_alone() -> None:
    weight = torch.zeros(12, 6)
    sums = RowSums(weight)
    assert not sums.is_shared
    assert sums.reduced_bytes == 0
    assert sum(block.nbytes for block in sums.blocks) == weight.nbytes
    sums.share_with(Exchange(), is_own=False)
    assert sums.is_shared
    for num in (2, 7, 3):
        sums.begin([torch.arange(num)])
    assert sum(block.nbytes for block in sums.blocks) == 7 * 6 * 4 + 3 * 8
    sums.begin([])  # a step that only scores
    assert sums.reduced_bytes == 100


def test_gradients_in_16_bits_are_added_up_over_processes_in_fp32() -> None:
    """Of 1 + 300 x 2^-9, bf16 would keep 1."""
    sums = RowSums(torch.zeros(2, 1, dtype=torch.bfloat16))
    sums.share_with(Exchange(), is_own=True)
    sums.begin([torch.tensor([1])])
    for number in [1.0] + [2.0**-9] * 300:
        sums.add(torch.tensor([1]), torch.full((1, 1), number, dtype=torch.bfloat16))
    sums.reduce()
    assert sums.total.tolist() == [[0.0], [1.0 + 300 * 2.0**-9]]
