"""Launches the kernels: blocks, strides and output buffers. The host waits for nothing.

The letters are those of kernels.py.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from offload.engine.pointwise.reference import Curve

# The numbers of offload.engine.experts.kernels.
GATE_NUMBERS: dict[Curve, int] = {"silu": 0, "gelu_tanh": 2, "gelu": 3}
NORM_BLOCK, ROTARY_BLOCK, GATE_BLOCK = 4096, 2048, 2048  # elements of a program
WARP_ELEMENTS, MAX_WARPS = 1024, 16
NUM_WARPS = 4
VOCABULARY_BLOCK, VOCABULARY_WARPS = 4096, 8


def norm(
    x: torch.Tensor,
    weight_N: torch.Tensor,
    eps: float,
    offset: float,
    is_cast_first: bool,  # noqa: FBT001  # torch passes an operator's arguments by position
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normed rows, and the factor of each."""
    rows_MN = _rows(x)
    y = x.new_empty(x.shape)
    inverse_M = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel():
        grid, blocks = _norm_blocks(rows_MN)
        _kernels().norm[grid](
            x=rows_MN,
            weight=weight_N.contiguous(),
            y=y,
            inverse=inverse_M,
            num_rows=len(rows_MN),
            num_n=rows_MN.shape[1],
            stride_x=rows_MN.stride(0),
            eps=eps,
            offset=offset,
            IS_CAST_FIRST=is_cast_first,
            **blocks,
        )
    return y, inverse_M


def norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight_N: torch.Tensor,
    inverse_M: torch.Tensor,
    offset: float,
) -> torch.Tensor:
    """Return the gradient by a norm's input."""
    given_MN, rows_MN = _rows(gradient), _rows(x)
    out = x.new_empty(x.shape)
    if x.numel():
        grid, blocks = _norm_blocks(rows_MN)
        _kernels().norm_backward[grid](
            gradient=given_MN,
            x=rows_MN,
            weight=weight_N.contiguous(),
            inverse=inverse_M,
            out=out,
            num_rows=len(rows_MN),
            num_n=rows_MN.shape[1],
            stride_g=given_MN.stride(0),
            stride_x=rows_MN.stride(0),
            offset=offset,
            **blocks,
        )
    return out


def rotate(
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    cos_BTD: torch.Tensor,
    sin_BTD: torch.Tensor,
    is_back: bool,  # noqa: FBT001  # torch passes an operator's arguments by position
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys rotated by their tokens' angles, or by the opposite ones."""
    heads = {"q": q_BHTD, "k": k_BHTD}
    nothing = dict.fromkeys(("q_weight", "k_weight", "q_inverse", "k_inverse"))
    form = {"eps": 0.0, "offset": 0.0, "HAS_NORM": False, "IS_CAST_FIRST": False}
    return _turned("rotate", heads, cos_BTD, sin_BTD, IS_BACK=is_back, **nothing, **form)


def norm_rotate(  # noqa: PLR0913  # as torch's operators take them
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    cos_BTD: torch.Tensor,
    sin_BTD: torch.Tensor,
    eps: float,
    offset: float,
    is_cast_first: bool,  # noqa: FBT001  # torch passes an operator's arguments by position
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys normed and rotated, and the factor of each head."""
    q_inverse_BTH, k_inverse_BTH = (
        x.new_empty(x.shape[0], x.shape[2], x.shape[1], dtype=torch.float32)
        for x in (q_BHTD, k_BHTD)
    )
    q_out_BHTD, k_out_BHTD = _turned(
        "rotate",
        {"q": q_BHTD, "k": k_BHTD},
        cos_BTD,
        sin_BTD,
        q_weight=q_weight_D.contiguous(),
        k_weight=k_weight_D.contiguous(),
        q_inverse=q_inverse_BTH,
        k_inverse=k_inverse_BTH,
        eps=eps,
        offset=offset,
        IS_BACK=False,
        HAS_NORM=True,
        IS_CAST_FIRST=is_cast_first,
    )
    return q_out_BHTD, k_out_BHTD, q_inverse_BTH, k_inverse_BTH


def norm_rotate_backward(  # noqa: PLR0913  # as torch's operators take them
    of_q_BHTD: torch.Tensor,
    of_k_BHTD: torch.Tensor,
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    cos_BTD: torch.Tensor,
    sin_BTD: torch.Tensor,
    q_inverse_BTH: torch.Tensor,
    k_inverse_BTH: torch.Tensor,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients by queries and keys before they were normed."""
    return _turned(
        "norm_rotate_backward",
        {"of_q": of_q_BHTD, "of_k": of_k_BHTD, "q": q_BHTD, "k": k_BHTD},
        cos_BTD,
        sin_BTD,
        q_weight=q_weight_D.contiguous(),
        k_weight=k_weight_D.contiguous(),
        q_inverse=q_inverse_BTH,
        k_inverse=k_inverse_BTH,
        offset=offset,
    )


def _turned(
    kernel: str,
    given: Mapping[str, torch.Tensor],
    cos_BTD: torch.Tensor,
    sin_BTD: torch.Tensor,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a rotation's kernel, and return what it writes for queries and keys.

    Args:
        kernel: Its name.
        given: Tensors (B, H, T, D) by the names of the kernel's arguments, `q` and `k` among them.
        cos_BTD: Cosines (B or 1, T, ...).
        sin_BTD: Sines.
        more: Further arguments of the kernel.
    """
    q_out_BHTD, k_out_BHTD = _like_dense_rows(given["q"]), _like_dense_rows(given["k"])
    if q_out_BHTD.numel() + k_out_BHTD.numel():
        heads = {**given, "q_out": q_out_BHTD, "k_out": k_out_BHTD}
        grid, arguments = _rotary(heads, cos_BTD, sin_BTD)
        getattr(_kernels(), kernel)[grid](**more, **arguments)
    return q_out_BHTD, k_out_BHTD


def _rotary(
    heads: Mapping[str, torch.Tensor], cos_BTD: torch.Tensor, sin_BTD: torch.Tensor
) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid of tokens, and the tensors, sizes and strides of a rotation's kernel."""
    dense = {name: _with_dense_rows(x) for name, x in heads.items()}
    arguments: dict[str, Any] = dict(dense)
    for name, x in dense.items():
        arguments |= {f"{name}_{axis}": x.stride(i) for i, axis in enumerate("bht")}
    for name, table in (("cos", cos_BTD), ("sin", sin_BTD)):
        x = _with_dense_rows(table)
        strides = {f"{name}_b": x.stride(0) if len(x) > 1 else 0, f"{name}_t": x.stride(1)}
        arguments |= {name: x, **strides}
    num_b, num_q, num_t, width = heads["q"].shape
    num_k, block_d = heads["k"].shape[1], _power_of_2(width)
    return (num_b * num_t,), arguments | {
        "num_q": num_q,
        "num_k": num_k,
        "num_t": num_t,
        "width": width,
        "rotated_width": cos_BTD.shape[-1],
        "BLOCK_H": min(_power_of_2(max(num_q, num_k)), max(1, ROTARY_BLOCK // block_d)),
        "BLOCK_D": block_d,
        "num_warps": NUM_WARPS,
    }


def gated(gate: torch.Tensor, up: torch.Tensor, curve: Curve) -> torch.Tensor:
    """Return the activation of a gate, times up."""
    gate_MN, up_MN, out = _rows(gate), _rows(up), gate.new_empty(gate.shape)
    if gate.numel():
        grid, blocks = _gate_blocks(gate_MN)
        _kernels().gate_up[grid](
            gate=gate_MN,
            up=up_MN,
            out=out,
            num_n=gate_MN.shape[1],
            stride_gate=gate_MN.stride(0),
            stride_up=up_MN.stride(0),
            GATE=GATE_NUMBERS[curve],
            **blocks,
        )
    return out


def gated_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, curve: Curve
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients by gate and up."""
    given_MN, gate_MN, up_MN = _rows(gradient), _rows(gate), _rows(up)
    of_gate, of_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if gate.numel():
        grid, blocks = _gate_blocks(gate_MN)
        _kernels().gate_up_backward[grid](
            gradient=given_MN,
            gate=gate_MN,
            up=up_MN,
            of_gate=of_gate,
            of_up=of_up,
            num_n=gate_MN.shape[1],
            stride_g=given_MN.stride(0),
            stride_gate=gate_MN.stride(0),
            stride_up=up_MN.stride(0),
            GATE=GATE_NUMBERS[curve],
            **blocks,
        )
    return of_gate, of_up


def cross_entropy(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    num_items: torch.Tensor,
    has_gradient: bool,  # noqa: FBT001  # torch passes an operator's arguments by position
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's cross-entropy, and the gradient by the logits."""
    rows_NV = _with_dense_rows(logits_NV)
    losses_N = rows_NV.new_empty(len(rows_NV), dtype=torch.float32)
    gradient = rows_NV.new_empty(rows_NV.shape if has_gradient else (0,))
    if rows_NV.numel():
        _kernels().cross_entropy[(len(rows_NV),)](
            logits=rows_NV,
            labels=labels_N.contiguous(),
            num_items=num_items.contiguous(),
            losses=losses_N,
            gradient=gradient,
            num_v=rows_NV.shape[1],
            stride_x=rows_NV.stride(0),
            stride_items=num_items.dim(),
            HAS_GRADIENT=has_gradient,
            BLOCK_V=min(VOCABULARY_BLOCK, _power_of_2(rows_NV.shape[1])),
            num_warps=VOCABULARY_WARPS,
        )
    return losses_N, gradient


def _kernels() -> Any:
    """Return the programs; not every machine has Triton."""
    from offload.engine.pointwise import kernels

    return kernels


def _norm_blocks(rows_MN: torch.Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid of whole rows, and what each program holds."""
    num_rows, num_n = rows_MN.shape
    block_n = _power_of_2(num_n)
    block_m = min(_power_of_2(num_rows), max(1, NORM_BLOCK // block_n))
    num_warps = min(MAX_WARPS, max(NUM_WARPS, block_m * block_n // WARP_ELEMENTS))
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps}
    return (math.ceil(num_rows / block_m),), blocks


def _gate_blocks(rows_MN: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    num_rows, num_n = rows_MN.shape
    block_n = min(GATE_BLOCK, _power_of_2(num_n))
    return (num_rows, math.ceil(num_n / block_n)), {"BLOCK_N": block_n, "num_warps": NUM_WARPS}


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor (M, N), copied only if no one stride leads from row to row."""
    x = _with_dense_rows(x)
    try:
        return x.view(-1, x.shape[-1]) if x.numel() else x.reshape(0, x.shape[-1])
    except RuntimeError:
        return x.reshape(-1, x.shape[-1])


def _like_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return empty memory in the order of a tensor's, whose rows are dense."""
    return torch.empty_like(x if x.stride(-1) == 1 else x.contiguous())


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
