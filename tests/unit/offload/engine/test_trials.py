"""Trials and what they compare: closeness, seeds, streams, memory, low-rank products."""

import ctypes
import math
import mmap
import os
import struct
import threading
from hashlib import blake2b
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from offload.engine.closeness import are_close
from offload.engine.host.pagelock import aligned_empty, map_file
from offload.engine.low_rank import AdaptedLinear, LowRank, apply_linears
from offload.engine.memory_meter import (
    Arena,
    held_bytes,
    resident_bytes,
    torch_pinned_bytes,
)
from offload.engine.passes.scoring import OTHERS, TOP, logits_gradient, top_scores
from offload.engine.randomness import FRONT_LAYER, seed_of
from offload.engine.safety.tail_trial import subsets_apart
from offload.engine.streams import CpuDevice
from offload.engine.tracing.tracer import LiveBytes, Tracer
from offload.engine.verdict import TrialSize
from offload.engine.visit_cache import VISIT_CACHE
from offload.errors import TransferError
from offload.plan.schedule.op import Lane


@pytest.mark.parametrize("num", [1, 2, 3, 6, 7, 20, 21, 70])
def test_of_any_two_things_a_subset_has_the_first_and_not_the_second(num: int) -> None:
    subsets = subsets_apart(num)
    assert subsets.shape[1] == num
    for one in range(num):
        for other in range(num):
            assert one == other or (subsets[:, one] & ~subsets[:, other]).any()


def test_a_few_subsets_are_enough_for_many_things() -> None:
    assert len(subsets_apart(4096)) == 15
    assert len(subsets_apart(65_536)) == 19


def batch(num_rows: int, num_tokens: int, *lens: int) -> dict[str, torch.Tensor]:
    found = {"input_ids": torch.zeros(num_rows, num_tokens, dtype=torch.long)}
    return {**found, "row_lens": torch.tensor(lens)} if lens else found


def size(*batches: dict[str, torch.Tensor], max_row_tokens: int = 10_000) -> TrialSize:
    return TrialSize.of(batches, max_row_tokens=max_row_tokens)


def test_a_trial_is_at_least_as_large_as_the_micro_batches_and_at_most_a_third_larger() -> None:
    for num in range(1, 300):
        found = size(batch(2, num))
        assert 2 * num <= found.num_tokens <= max(2 * num + 1, 2 * num * 4 / 3)
        assert num <= found.row_tokens <= max(num + 1, num * 4 / 3)
        assert found.num_rows * found.row_tokens >= found.num_tokens


def test_micro_batches_that_grow_need_few_trials() -> None:
    assert len({size(batch(1, num)) for num in range(1024, 8193)}) <= 3 * 4 + 1


def test_rows_are_no_longer_than_a_model_has_positions() -> None:
    found = size(batch(1, 72, 30, 42), max_row_tokens=43)
    assert (found.num_tokens, found.row_tokens) == (80, 43)
    assert size(batch(1, 50), max_row_tokens=41).row_tokens == 50


def test_a_size_covers_smaller_ones_only() -> None:
    large, long = size(batch(8, 64)), size(batch(1, 256))
    assert not large.covers(long)
    assert not long.covers(large)
    assert large.join(long).covers(large)
    assert large.join(long).covers(long)


@pytest.mark.parametrize("lens", [(128, 128), (256, 128, 128), (1, 1), (2,), (1,), (1000, 300)])
def test_packed_rows_of_a_trial_end_where_no_block_does(lens: tuple[int, ...]) -> None:
    found = size(batch(1, sum(lens), *lens))
    rows = found.row_lens
    assert sum(rows) >= max(2, found.num_tokens)
    assert len(rows) >= 2
    assert max(rows) >= min(max(lens), sum(lens) - 1)
    ends = [sum(rows[: n + 1]) for n in range(len(rows) - 1)]
    assert math.gcd(*ends) == 1


# ---------------------------------------------------------------------------------------- closeness


VOCABULARY = 151_936


def terms() -> torch.Tensor:
    """Return what a head's backward adds up: for 40 features, a term of each token."""
    generator = torch.Generator().manual_seed(0)
    weight, cotangent = (torch.randn(40, VOCABULARY, generator=generator) for _ in range(2))
    return 0.02 * weight * cotangent


def one_after_the_other(terms: torch.Tensor) -> torch.Tensor:
    """Return sums in float32 without blocks, the least precise order."""
    return torch.from_numpy(np.cumsum(terms.numpy(), axis=-1, dtype=np.float32)[:, -1].copy())


def test_rounding_of_a_sum_over_a_vocabulary_is_within_the_bound_of_its_terms() -> None:
    true = terms().double().sum(-1).float()
    found, backwards = one_after_the_other(terms()), one_after_the_other(terms().flip(-1))
    for one, other in ((found, true), (found, backwards)):
        assert are_close(one, other, steps=1, num_terms=VOCABULARY)
    assert not are_close(found, backwards, steps=64)  # so the bound has to grow with the terms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gradient_that_is_off_by_more_than_rounding_is_seen(dtype: torch.dtype) -> None:
    true = terms().double().sum(-1).to(dtype)
    assert not are_close(true, true * 2, steps=64, num_terms=VOCABULARY)
    if dtype is torch.float32:
        assert not are_close(true, true * 1.0001, steps=64, num_terms=VOCABULARY)


def test_the_bound_of_16_bits_grows_by_no_more_than_that_of_float32() -> None:
    """Sums are made in float32, whatever they are rounded to."""
    one = torch.ones(4, dtype=torch.bfloat16)
    other = one + 2 * torch.finfo(torch.bfloat16).eps
    assert not are_close(one, other, steps=1, num_terms=VOCABULARY)
    assert are_close(one, other, steps=2, num_terms=1)


# ------------------------------------------------------------------------------------------ seeding


MAX_SEED = 2**63 - 1


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0, 0), 1041621211125469266),
        ((0, 1), 8118103383084794603),
        ((1, 0), 2743968511113885123),
        ((2**32 - 1, 9_999), 6566966585929852217),
    ],
)
def test_a_step_has_the_seed_that_is_promised(numbers, expected) -> None:
    assert seed_of(*numbers) == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0, 0, 0), 2891389769238885931),
        ((5, FRONT_LAYER, 1), 8572597718141032380),
        ((MAX_SEED, 47, 31), 4894146317200358153),
        ((-7, 3, 2), 560847751865936322),
    ],
)
def test_a_visit_has_the_seed_that_is_promised(numbers, expected) -> None:
    assert seed_of(*numbers) == expected


def test_seeds_are_blake2b_of_64_bit_words() -> None:
    numbers = 1_234_567_890_123, 11, 3
    digest = blake2b(struct.pack("<3q", *numbers), digest_size=8).digest()
    assert seed_of(*numbers) == struct.unpack("<Q", digest)[0] % 2**63


def test_no_two_visits_share_a_seed_and_torch_takes_each() -> None:
    steps = [seed_of(seed, step) for seed, step in product(range(3), range(20))]
    visits = list(product(steps, range(-1, 8), range(8)))
    seeds = {seed_of(*visit) for visit in visits}
    assert len(seeds) == len(visits)
    assert min(seeds) >= 0
    assert max(seeds) <= MAX_SEED


# ------------------------------------------------------------------------------------------ streams


@pytest.fixture
def device():
    device = CpuDevice()
    yield device
    device.close()


def test_a_copy_leaves_later_threads_all_their_cores(device: CpuDevice) -> None:
    source, target = torch.arange(4096).to(torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    device.submit(Lane.H2D, [], lambda: device.copy(target, source))
    device.finish()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert torch.equal(source, target)
    assert found == [torch.get_num_threads()]


def test_a_copy_waits_for_what_it_was_told_to(device: CpuDevice) -> None:
    order: list[str] = []
    gate = threading.Event()

    def load() -> None:
        gate.wait()
        order.append("load")

    first = device.submit(Lane.H2D, [], load)
    device.submit(Lane.H2D, [first], lambda: order.append("next load"))
    gate.set()
    device.submit(Lane.COMPUTE, [first], lambda: order.append("visit"))
    device.finish()
    assert order.index("load") < order.index("visit")
    assert order.index("load") < order.index("next load")


def test_what_fails_on_the_copy_lane_is_raised_and_can_be_aborted(device: CpuDevice) -> None:
    def fail() -> None:
        raise OSError("no such page")

    failed = device.submit(Lane.H2D, [], fail)
    device.submit(Lane.COMPUTE, [failed], lambda: None)
    with pytest.raises(TransferError, match="no such page"):
        device.settle()
    device.abort()
    device.submit(Lane.H2D, [], lambda: None)
    device.finish()


def test_what_fails_last_on_a_lane_is_raised_too(device: CpuDevice) -> None:
    def fail() -> None:
        raise OSError("the network is down")

    device.begin()
    device.submit(Lane.NETWORK, [], fail)
    with pytest.raises(TransferError, match=r"the network lane failed: .*the network is down"):
        device.settle()
    device.abort()
    device.settle()


def test_the_lanes_end_when_the_device_is_closed() -> None:
    before = threading.active_count()
    device = CpuDevice()
    assert threading.active_count() == before + 4
    device.close()
    assert threading.active_count() == before


# ------------------------------------------------------------------------------------- memory meter


MIB = 2**20
SLACK_BYTES = 4 * MIB  # what else the process does, and counters that the kernel sums lazily


def fill(area: mmap.mmap) -> None:
    """Touch all pages, by small pieces: a large one may come from memory that was freed before."""
    for _ in range(len(area) // MIB):
        area.write(bytes(MIB))


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED])
def test_pages_are_held_from_their_first_touch_and_shared_ones_too(flags: int) -> None:
    before = held_bytes()
    anonymous = flags | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, 64 * MIB, flags=anonymous) as area:
        assert held_bytes() - before < SLACK_BYTES
        fill(area)
        assert held_bytes() - before == pytest.approx(64 * MIB, abs=SLACK_BYTES)


@pytest.mark.disk
def test_pages_of_a_mapped_file_are_not_held(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * (32 * MIB))
    before = held_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as area:
        assert area[:: mmap.PAGESIZE].count(b"x") == 32 * MIB // mmap.PAGESIZE
        assert held_bytes() - before < SLACK_BYTES


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="there is a CUDA device in use")
def test_without_a_gpu_torch_has_locked_nothing() -> None:
    assert torch_pinned_bytes() == 0


def unaligned_empty(num_bytes: int) -> torch.Tensor:
    """Return untouched memory that begins within a page; `torch.empty` may reuse touched memory."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes + 64), dtype=torch.uint8)[64:]


@pytest.mark.parametrize("make", [aligned_empty, unaligned_empty])
def test_what_is_resident_of_a_tensor_is_what_was_touched(make) -> None:
    block = make(64 * MIB)
    assert (resident_bytes(block) or 0) < SLACK_BYTES
    block[: 16 * MIB].fill_(1)
    assert resident_bytes(block) == pytest.approx(16 * MIB, abs=SLACK_BYTES)
    assert (resident_bytes(block[16 * MIB :]) or 0) < SLACK_BYTES
    block.fill_(1)
    assert resident_bytes(block) == block.nbytes
    assert resident_bytes(block[5:7]) == 2
    assert resident_bytes(block[:0]) == 0


def test_pages_of_a_shared_file_are_counted_too() -> None:
    descriptor = os.memfd_create("pages")
    os.truncate(descriptor, 8 * MIB)
    block = map_file(descriptor, 8 * MIB, is_writable=True)
    os.close(descriptor)
    assert resident_bytes(block) == 0
    block.fill_(1)
    assert resident_bytes(block) == 8 * MIB


def test_a_kernel_that_does_not_tell_is_not_taken_for_empty_memory() -> None:
    area = aligned_empty(2 * MIB)
    beside = torch.frombuffer(
        (ctypes.c_char * MIB).from_address(1 << 46), dtype=torch.uint8
    )  # nothing is mapped there
    assert resident_bytes(beside) is None
    assert Arena(name="slab", blocks=[area, beside]).resident_bytes is None
    assert Arena(name="slab", blocks=[area, beside]).num_bytes == 3 * MIB


# ----------------------------------------------------------------------------------------- low rank


SHAPES = ((24, 3), (8, 5), (16, 2))  # of a group: features out, rank
K = 12


def made(dtype: torch.dtype, *, bias: bool = True, num_adapters: int = 1) -> list[AdaptedLinear]:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    return [
        AdaptedLinear(
            weight_MK=random(features, K).to(dtype),
            bias_M=random(features).to(dtype) if bias else None,
            branches=tuple(
                LowRank(
                    a_RK=random(rank + i, K).float().requires_grad_(),
                    b_MR=random(features, rank + i).float().requires_grad_(),
                    scaling=0.5 + i,
                )
                for i in range(num_adapters)
            ),
        )
        for features, rank in SHAPES
    ]


def written_out(
    x: torch.Tensor, linears: list[AdaptedLinear], x_branch: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The formula in float64."""
    x64 = x.double()
    branch = x64 if x_branch is None else x_branch.double()
    outputs = []
    for one in linears:
        bias = None if one.bias_M is None else one.bias_M.double()
        y = F.linear(x64, one.weight_MK.double(), bias)
        for low in one.branches:
            y = y + low.scaling * (branch @ low.a_RK.double().t()) @ low.b_MR.double().t()
        outputs.append(y)
    return outputs


def factors(linears: list[AdaptedLinear]) -> list[torch.Tensor]:
    return [t for one in linears for low in one.branches for t in (low.a_RK, low.b_MR)]


@pytest.mark.parametrize("bias", [False, True])
def test_a_branch_is_rounded_before_the_larger_product_adds_to_it(bias: bool) -> None:
    """In bf16 an output errs by little more than its own rounding: W x was not rounded before."""
    torch.manual_seed(1)
    small = LowRank(a_RK=0.1 * torch.randn(4, 256), b_MR=0.1 * torch.randn(320, 4), scaling=1.5)
    weight_MK, bias_M = torch.randn(320, 256).bfloat16(), 0.1 * torch.randn(320)
    one = AdaptedLinear(
        weight_MK=weight_MK, bias_M=bias_M.bfloat16() if bias else None, branches=(small,)
    )
    x = torch.randn(1, 300, 256).bfloat16()
    (y,), (true,) = apply_linears(x, [one]), written_out(x, [one])
    rounding = (true.bfloat16().double() - true).norm()
    assert (y.double() - true).norm() <= 1.05 * rounding


@pytest.mark.parametrize("num_adapters", [1, 2])
@pytest.mark.parametrize("has_dropout", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_group_computes_the_formula_and_its_gradients(
    num_adapters: int, has_dropout: bool, bias: bool
) -> None:
    torch.manual_seed(1)
    linears = made(torch.float32, bias=bias, num_adapters=num_adapters)
    x = torch.randn(2, 7, K).requires_grad_()
    dropped = F.dropout(x, 0.4) if has_dropout else None
    ours = apply_linears(x, linears, x_branch=dropped)
    theirs = written_out(x, linears, dropped)
    cotangents = [torch.randn_like(y) for y in ours]
    for y, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(y, true.float(), rtol=1e-5, atol=1e-5)
    wanted = [x, *factors(linears)]
    found = torch.autograd.grad(ours, wanted, cotangents, retain_graph=has_dropout)
    truth = torch.autograd.grad(theirs, wanted, [g.double() for g in cotangents])
    for gradient, true in zip(found, truth, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, true.float(), rtol=1e-5, atol=1e-5)


def test_an_output_that_nothing_reads_has_no_part_in_the_gradients() -> None:
    torch.manual_seed(1)
    linears = made(torch.float32)
    x = torch.randn(7, K).requires_grad_()
    ours, theirs = apply_linears(x, linears)[1], written_out(x, linears)[1]
    cotangent = torch.randn_like(ours)
    found = torch.autograd.grad(ours, [x, *factors(linears)], cotangent, allow_unused=True)
    truth = torch.autograd.grad(
        theirs, [x, *factors(linears)], cotangent.double(), allow_unused=True
    )
    for gradient, true in zip(found, truth, strict=True):
        if true is None:
            assert gradient is None or not gradient.any()
        else:
            assert gradient is not None
            torch.testing.assert_close(gradient, true.float(), rtol=1e-5, atol=1e-5)


def test_outputs_may_be_changed_in_place() -> None:
    torch.manual_seed(1)
    linears = made(torch.float32)
    x = torch.randn(2, 7, K).requires_grad_()
    ours, *_ = apply_linears(x, linears)
    theirs, *_ = written_out(x, linears)
    found = torch.autograd.grad(ours.mul_(3).sin().sum(), [x, *factors(linears[:1])])
    truth = torch.autograd.grad((theirs * 3).sin().sum(), [x, *factors(linears[:1])])
    for gradient, true in zip(found, truth, strict=True):
        torch.testing.assert_close(gradient, true.float(), rtol=1e-4, atol=1e-4)


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    linears = made(torch.float32)
    for low in linears[0].branches:
        low.a_RK.requires_grad_(False)
    x = torch.randn(7, K)
    sum(y.sum() for y in apply_linears(x, linears)).backward()  # type: ignore[union-attr]
    assert linears[0].branches[0].a_RK.grad is None
    assert linears[0].branches[0].b_MR.grad is not None
    assert linears[1].branches[0].a_RK.grad is not None


def test_in_bf16_each_gradient_is_fp32_and_near_the_formula() -> None:
    torch.manual_seed(1)
    linears = made(torch.bfloat16)
    x = torch.randn(64, K).bfloat16().requires_grad_()
    ours, theirs = apply_linears(x, linears), written_out(x, linears)
    cotangents = [torch.randn_like(y) for y in ours]
    wanted = [x, *factors(linears)]
    found = torch.autograd.grad(ours, wanted, cotangents)
    truth = torch.autograd.grad(theirs, wanted, [g.double() for g in cotangents])
    for tensor, gradient, true in zip(wanted, found, truth, strict=True):
        assert gradient.dtype == tensor.dtype
        error = (gradient.double() - true.double()).norm() / true.double().norm()
        assert error < 2**-7


def test_a_visit_casts_factors_once_and_the_next_visit_casts_them_anew() -> None:
    linears = made(torch.bfloat16)
    x = torch.randn(3, K).bfloat16()
    try:
        VISIT_CACHE.enter("forward of a layer")
        with torch.no_grad():
            first = apply_linears(x, linears, key="group")
            for tensor in factors(linears):
                tensor.zero_()
            again = apply_linears(x, linears, key="group")
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            VISIT_CACHE.enter("another")
            later = apply_linears(x, linears, key="group")
    finally:
        VISIT_CACHE.enter(None)
    for y, one in zip(later, linears, strict=True):
        assert torch.equal(y, F.linear(x, one.weight_MK, one.bias_M))


def test_without_a_visit_nothing_is_kept() -> None:
    linears = made(torch.float32)
    x = torch.randn(3, K)
    with torch.no_grad():
        apply_linears(x, linears, key="group")
        for tensor in factors(linears):
            tensor.zero_()
        outputs = apply_linears(x, linears, key="group")
    for y, one in zip(outputs, linears, strict=True):
        assert torch.equal(y, F.linear(x, one.weight_MK, one.bias_M))


# --------------------------------------------------------------------------------------- top scores


V, TOP_SCORES_K = 23, 5


def drawn(num: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits, labels and given tokens; some labels are given, and some rows have fewer."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = 4 * torch.randn(num, V, generator=generator, dtype=torch.float64)
    ids_NK = torch.stack(
        [torch.randperm(V, generator=generator)[:TOP_SCORES_K] for _ in range(num)]
    )
    next_N = torch.randint(0, V, (num,), generator=generator)
    next_N[1] = ids_NK[1, 2]
    ids_NK[2, 3:] = -1
    return logits_NV.to(dtype), next_N, ids_NK


def plain(logits_NV: torch.Tensor, next_N: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """Compute the same in float64, by operators that autograd follows."""
    logps_NV = logits_NV.log_softmax(1)
    is_given_NV = torch.stack(
        [
            torch.tensor([token in ids_NK[n].tolist() for token in range(V)])
            for n in range(len(ids_NK))
        ]
    )
    others_N = logps_NV.masked_fill(is_given_NV, -torch.inf).logsumexp(1)
    top_NK = logps_NV.gather(1, ids_NK.clamp(min=0)).where(ids_NK >= 0, 0.0)
    return torch.cat((logps_NV.gather(1, next_N[:, None]), others_N[:, None], top_NK), dim=1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)]
)
def test_scores_and_gradient_are_those_of_autograd_in_float64(
    dtype: torch.dtype, tolerance: float
) -> None:
    logits_NV, next_N, ids_NK = drawn(7, dtype)
    exact_NV = logits_NV.double().requires_grad_()
    truth_NC = plain(exact_NV, next_N, ids_NK)
    gradient_NC = torch.randn(truth_NC.shape, dtype=torch.float64)
    gradient_NC[3] = 0
    gradient_NC[4, OTHERS] = 0
    truth_NC.backward(gradient_NC)
    before = logits_NV.clone()
    found_NC = top_scores(logits_NV, next_N, ids_NK)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gradient_NV = logits_gradient(logits_NV, next_N, ids_NK, gradient_NC.to(wide))
    assert found_NC.dtype == wide
    assert gradient_NV.dtype == dtype
    assert torch.equal(logits_NV, before)
    assert (found_NC - truth_NC).abs().max() <= max(1e-14, 5e-6 * (dtype != torch.float64))
    assert exact_NV.grad is not None
    assert (gradient_NV - exact_NV.grad).norm() <= tolerance * exact_NV.grad.norm()
    assert not gradient_NV[3].any()


def test_all_others_keep_their_digits_where_the_given_tokens_have_nearly_all_of_the_mass() -> None:
    logits_NV = torch.zeros(1, V)
    logits_NV[0, :TOP_SCORES_K] = 95.0  # the others have e^-95 of it: one minus the sum would be 0
    ids_NK, next_N = torch.arange(TOP_SCORES_K)[None], torch.tensor([0])
    exact_NV = logits_NV.double().requires_grad_()
    truth_NC = plain(exact_NV, next_N, ids_NK)
    found_NC = top_scores(logits_NV, next_N, ids_NK)
    assert found_NC[0, OTHERS].item() == pytest.approx(truth_NC[0, OTHERS].item(), rel=1e-6)
    truth_NC[0, OTHERS].backward()
    weights_NC = torch.zeros(1, TOP_SCORES_K + TOP)
    weights_NC[0, OTHERS] = 1
    assert exact_NV.grad is not None
    gradient_NV = logits_gradient(logits_NV, next_N, ids_NK, weights_NC)
    assert torch.allclose(gradient_NV.double(), exact_NV.grad, rtol=1e-5, atol=0)


def test_tokens_that_are_the_whole_vocabulary_leave_no_others() -> None:
    logits_NV, next_N, _ = drawn(3, torch.float64)
    ids_NK = torch.arange(V).expand(3, V)
    found_NC = top_scores(logits_NV, next_N, ids_NK)
    assert torch.isneginf(found_NC[:, OTHERS]).all()
    assert torch.allclose(found_NC[:, TOP:], logits_NV.log_softmax(1))
    weights_NC = torch.ones(3, V + TOP, dtype=torch.float64)
    weights_NC[:, OTHERS] = 0
    exact_NV = logits_NV.clone().requires_grad_()
    logps_NV = exact_NV.log_softmax(1)
    (logps_NV.sum() + logps_NV.gather(1, next_N[:, None]).sum()).backward()
    assert exact_NV.grad is not None
    gradient_NV = logits_gradient(logits_NV, next_N, ids_NK, weights_NC)
    assert torch.allclose(gradient_NV, exact_NV.grad, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_takes_no_more_than_three_copies_of_its_logits_in_fp32(dtype: torch.dtype) -> None:
    num, vocab = 64, 4096
    head_VD = torch.randn(vocab, 16).to(dtype)
    hidden_ND = torch.randn(num, 16).to(dtype).requires_grad_()
    ids_NK = torch.arange(TOP_SCORES_K).expand(num, TOP_SCORES_K).contiguous()
    next_N, gradient_NC = torch.arange(num), torch.randn(num, TOP_SCORES_K + TOP)
    memory = LiveBytes()
    peaks = []
    with Tracer(memory):
        with torch.no_grad():
            top_scores(hidden_ND @ head_VD.T, next_N, ids_NK)
        peaks.append(memory.peak_bytes)
        memory.reset_peak()
        before, logits_NV = memory.live_bytes, hidden_ND @ head_VD.T
        logits_NV.backward(logits_gradient(logits_NV, next_N, ids_NK, gradient_NC))
        peaks.append(memory.peak_bytes - before)
    # A log-sum-exp has a temporary as large as its input, which a trace of operators does not see.
    assert max(peaks) + 4 * num * vocab < 1.02 * 12 * num * vocab
