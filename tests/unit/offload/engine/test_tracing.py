"""Operations, allocations and kernels, as they are traced."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from offload.engine.tracing.cuda_kernels import (
    CUDA_WORKSPACES,
    Attention,
    Capability,
    CudaKernels,
    attention_kernel,
)
from offload.engine.tracing.tracer import LiveBytes, Tracer, fake_copy


def counted(model: nn.Module, given: torch.Tensor) -> LiveBytes:
    memory = LiveBytes()
    with Tracer(memory):
        model(given).sum().backward()
    return memory


def test_fake_tensors_take_what_real_ones_take() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    real = counted(model, torch.randn(100, 8))
    mode = FakeTensorMode()
    fake_model = fake_copy(model, mode)
    with mode:
        fake = counted(fake_model, torch.empty(100, 8))
    assert real.peak_bytes == fake.peak_bytes > 2 * 4 * 100 * 32
    gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert real.live_bytes == fake.live_bytes == gradients


def test_a_storage_counts_once_and_until_its_last_view_is_gone() -> None:
    memory = LiveBytes()
    with Tracer(memory):
        whole = torch.ones(100)
        view = whole.view(10, 10)[2]
        del whole
        assert memory.live_bytes == 400
        del view
        assert memory.live_bytes == 0


def test_what_was_there_before_does_not_count_unless_it_is_held() -> None:
    before, held = torch.ones(10), torch.ones(20)
    memory = LiveBytes()
    tracer = Tracer(memory)
    tracer.hold([held])
    with tracer:
        before.add_(1)
        held.add_(1)
    assert memory.live_bytes == 80


def test_a_kernel_s_workspace_counts_beside_its_result() -> None:
    memory = LiveBytes()
    workspaces = {torch.ops.aten.relu.default: lambda args, _: 3 * args[0].nbytes}
    with Tracer(memory, workspaces):
        out = torch.relu(torch.ones(10))
    assert memory.peak_bytes == 40 + 40 + 120
    assert memory.live_bytes == out.nbytes


def test_a_copy_without_weights_shares_what_the_model_shares_and_leaves_it_alone() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    first.weight.requires_grad = False
    before = first.weight.clone()
    fake = fake_copy(nn.ModuleList([first, second]), FakeTensorMode())
    assert fake[0].weight is fake[1].weight
    assert not fake[0].weight.requires_grad
    assert fake[0].bias.requires_grad
    assert type(first.weight) is nn.Parameter
    assert torch.equal(first.weight, before)


# ---------------------------------------------------------------------------------------- allocator


def test_live_bytes_are_those_of_the_tensors_that_are_there() -> None:
    memory = LiveBytes()
    first = memory.allocate(1000)
    memory.allocate(10)
    memory.free(first)
    memory.allocate(500)
    assert (memory.live_bytes, memory.peak_bytes, memory.largest_bytes) == (510, 1010, 1000)
    memory.reset_peak()
    assert memory.peak_bytes == 510


# ------------------------------------------------------------------------------------- cuda kernels


B, H, S, K = 2, 8, 256, 64
HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype", "is_masked", "is_grouped", "head", "expected"),
    [
        ((8, 6), HALF, False, False, 64, Attention.FLASH),
        ((8, 6), HALF, False, True, 64, Attention.FLASH),
        ((8, 6), HALF, True, False, 64, Attention.EFFICIENT),
        ((8, 6), HALF, False, False, 512, Attention.EFFICIENT),
        ((8, 9), FULL, False, False, 64, Attention.EFFICIENT),
        ((8, 9), FULL, False, True, 64, Attention.MATH),  # in silence, and S x S large
        ((7, 5), torch.float16, False, False, 64, Attention.EFFICIENT),
        ((7, 5), torch.float16, False, True, 64, Attention.MATH),
        ((7, 5), HALF, False, False, 64, Attention.MATH),
        ((8, 6), HALF, True, False, 60, Attention.MATH),
    ],
)
def test_the_kernel_is_the_one_that_torch_takes(
    capability: Capability,
    dtype: torch.dtype,
    is_masked: bool,
    is_grouped: bool,
    head: int,
    expected: Attention,
) -> None:
    query = torch.empty(1, 4, 8, head, dtype=dtype, device="meta")
    found = attention_kernel(
        query, query, query, is_masked=is_masked, is_grouped=is_grouped, capability=capability
    )
    assert found is expected


def attended(
    *, dtype: torch.dtype = HALF, kv_heads: int = H, is_masked: bool = False
) -> tuple[int, int]:
    """Return the bytes that are kept for the backward, and those at its peak, per query."""
    memory = LiveBytes()
    with FakeTensorMode(), CudaKernels((8, 6)), Tracer(memory, CUDA_WORKSPACES):
        query = torch.empty(B, H, S, K, dtype=dtype, requires_grad=True)
        key = torch.empty(B, kv_heads, S, K, dtype=dtype, requires_grad=True)
        value = torch.empty(B, kv_heads, S, K, dtype=dtype, requires_grad=True)
        mask = torch.ones(B, 1, S, S, dtype=torch.bool) if is_masked else None
        before = memory.live_bytes
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=not is_masked, enable_gqa=kv_heads != H
        )
        kept = memory.live_bytes - before
        memory.reset_peak()
        before = memory.live_bytes
        torch.autograd.backward(out, torch.empty_like(out))
        assert query.grad is not None
        return kept, memory.peak_bytes - before


def test_flash_attention_keeps_its_result_and_a_number_per_row() -> None:
    kept, peak = attended()
    assert kept == B * H * S * (2 * K + 4)
    fp32_of_queries = 4 * B * H * S * K
    assert peak >= 4 * 2 * B * H * S * K + fp32_of_queries
    grouped_kept, grouped_peak = attended(kv_heads=2)
    assert grouped_kept == kept
    assert grouped_peak > peak  # gradients of each query's keys and values, before they are summed


def test_a_mask_is_added_to_the_scores_in_their_type() -> None:
    kept, _ = attended(is_masked=True)
    assert kept == B * H * S * (2 * K + 4) + B * S * S * 2


def test_grouped_keys_in_fp32_take_memory_that_grows_with_the_square() -> None:
    kept, _ = attended(dtype=FULL, kv_heads=2)
    assert kept > 4 * B * H * S * S
    assert attended(dtype=FULL)[0] < kept / 3


def test_softmax_in_fp32_of_half_scores_is_one_kernel() -> None:
    memory = LiveBytes()
    with FakeTensorMode(), CudaKernels((8, 6)), Tracer(memory, CUDA_WORKSPACES):
        scores = torch.empty(S, S, dtype=HALF, requires_grad=True)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32)
    assert weights.dtype == torch.float32
    assert memory.peak_bytes == 2 * S * S + 4 * S * S
