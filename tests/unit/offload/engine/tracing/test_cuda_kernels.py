import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from offload.engine.tracing.cuda_kernels import (
    CUDA_WORKSPACES,
    Attention,
    Capability,
    CudaKernels,
    attention_kernel,
)
from offload.engine.tracing.tracer import LiveBytes, Tracer

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
