"""How the memory use of CUDA kernels differs from that of CPU kernels, for tracing on a CPU.

Fake CUDA tensors cannot run backward on a machine without a GPU, so a trace runs on fake CPU
tensors. Most operations take the same memory on both. Known exceptions are corrected here: which
attention kernel torch selects and what it saves, softmax in fp32 of 16-bit scores, which is one
kernel on a GPU, and the workspaces of kernels.

Source: pytorch aten/src/ATen/native/transformers/cuda/{sdp_utils.cpp, attention_backward.cu,
flash_attn/flash_api.cpp}, native/cuda/SoftMax.cu.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, cast

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from offload.engine.tracing.tracer import Workspaces

Capability = tuple[int, int]
HALVES = (torch.float16, torch.bfloat16)
FLASH_SINCE = (8, 0)
MAX_FLASH_HEAD = 256
FLASH_ROWS, EFFICIENT_ROWS = 128, 32  # statistics are kept for whole blocks of rows
FP32_BYTES = 4


class Attention(Enum):
    """The kernels of `scaled_dot_product_attention`."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


def attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_masked: bool,
    is_grouped: bool,
    capability: Capability,
) -> Attention:
    """Return the kernel that torch takes; cuDNN's, the first choice on Hopper, counts as flash.

    With `is_grouped` keys and values have fewer heads than queries. Memory-efficient attention
    takes no such keys, nor bfloat16 before Ampere; math is what is left.
    """
    head_dims = {tensor.shape[-1] for tensor in (query, key, value)}
    is_half = query.dtype in HALVES
    if (
        capability >= FLASH_SINCE
        and is_half
        and not is_masked
        and len(head_dims) == 1
        and max(head_dims) <= MAX_FLASH_HEAD
    ):
        return Attention.FLASH
    is_known = query.dtype in (torch.float16, torch.float32) or (
        query.dtype == torch.bfloat16 and capability >= FLASH_SINCE
    )
    row = 8 if is_half else 4
    if is_known and not is_grouped and all(size % row == 0 for size in head_dims):
        return Attention.EFFICIENT
    return Attention.MATH


class CudaKernels(TorchFunctionMode):
    """Replaces functions whose kernels differ, while a trace runs."""

    def __init__(self, capability: Capability, attention: Attention | None = None) -> None:
        """Keep the GPU's compute capability.

        Args:
            capability: Such as (8, 6).
            attention: The kernel to take in place of torch's choice.
        """
        super().__init__()
        self._capability = capability
        self._attention = attention

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function as a GPU would."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func in _SOFTMAXES and kwargs.get("dtype") == torch.float32 and args[0].dtype in HALVES:
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            return torch.ops.aten._softmax(args[0], dim, True)  # noqa: FBT003 - half to float
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001 - as torch has it
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001 - as torch has it
    ) -> torch.Tensor:
        kernel = self._attention or attention_kernel(
            query,
            key,
            value,
            is_masked=attn_mask is not None,
            is_grouped=key.shape[1] != query.shape[1],
            capability=self._capability,
        )
        if kernel is Attention.MATH:
            math = torch.ops.aten._scaled_dot_product_attention_math
            return cast(
                "torch.Tensor",
                math(
                    query,
                    key,
                    value,
                    attn_mask,
                    dropout_p,
                    is_causal,
                    scale=scale,
                    enable_gqa=enable_gqa,
                )[0],
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # it is added to the scores
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        fused: Any = _Fused.apply
        return cast("torch.Tensor", fused(query, key, value, attn_mask, kernel))


_SOFTMAXES = (F.softmax, torch.softmax, torch.Tensor.softmax)


class _Fused(torch.autograd.Function):
    """The shapes of a fused attention kernel: what it keeps and what its backward takes inside."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kernel: Attention,
    ) -> torch.Tensor:
        batch, heads, rows, _ = query.shape
        out = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
        kept_rows = _filled(rows, EFFICIENT_ROWS) if kernel is Attention.EFFICIENT else rows
        statistics = query.new_empty(batch, heads, kept_rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, statistics)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, out, statistics = ctx.saved_tensors
        batch, heads, rows, head = query.shape
        gradient = gradients[0].transpose(1, 2).contiguous()
        of_query, of_key, of_value = (
            torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2)
            for tensor in (query, key, value)
        )
        inside = []
        if ctx.kernel is Attention.FLASH:
            filled = _filled(rows, FLASH_ROWS)
            wide = _filled(head, 32 if head <= FLASH_ROWS else 64)
            inside += [(batch, heads, filled), (batch, filled, heads, wide)]
        else:
            inside += [(batch, heads, rows)]
            if query.dtype in HALVES:  # gradients of queries are added up in fp32
                inside += [(batch, heads, rows, head)]
        held = [query.new_empty(shape, dtype=torch.float32) for shape in inside]
        if key.shape[1] != heads:  # of each query's head, before they are added up
            held += [query.new_empty(batch, key.shape[2], heads, head) for _ in range(2)]
        del held, gradient, out, statistics
        return of_query, of_key, of_value, None, None


def _filled(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


CUDA_WORKSPACES: Workspaces = {
    torch.ops.aten._softmax_backward_data.default: lambda args, _: cast("int", args[0].nbytes)
}  # grad * output
