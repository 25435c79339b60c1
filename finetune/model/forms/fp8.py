"""e4m3 with a scale for each block of rows and columns, for each row, or for the whole tensor.

DeepSeek and Qwen publish blocks; Mistral one number (`weight_block_size: null`). A weight is its
code times its scale, in fp32, whatever the name `scale_inv` says; scales of activations are of no
use to a model that computes in bfloat16.
Source: transformers 5.24, integrations/finegrained_fp8.py, `Fp8Dequantize`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from finetune.model.form import FieldError, Form, Packing, Parts, require_fields
from offload.tensors import Tensor, dtype

_KNOWN = {
    "quant_method": None,
    "fmt": (None, "e4m3"),
    "scale_fmt": (None, "float", "ue8m0"),
    "expert_dtype": (None, "fp8"),
    "activation_scheme": None,
    "weight_block_size": None,
    "modules_to_not_convert": None,
    "modules_to_convert": None,
    "ignored_layers": None,
    "dequantize": None,
}


def _packings(fields: Mapping[str, Any]) -> Sequence[Packing]:
    require_fields(fields, _KNOWN)
    if "weight_block_size" not in fields:
        raise FieldError("weight_block_size", None)
    size = fields["weight_block_size"]
    return (
        Packing(
            mark=re.compile(r"_scale_inv$"),
            parts=("",),
            dequantise=partial(_dequantise, None if size is None else tuple(size)),
            decoded=_decoded,
            quantise=partial(_quantise, None if size is None else tuple(size)),
        ),
    )


def _dequantise(size: tuple[int, int] | None, parts: Parts) -> Tensor:
    import torch

    scales = parts["_scale_inv"]
    if scales.dtype == torch.uint8:  # exponents
        scales = scales.view(torch.float8_e8m0fnu)
    return scaled(parts[""], scales.float(), size)


def _quantise(size: tuple[int, int] | None, values: Tensor, parts: Parts) -> Parts:
    codes, scales = rescaled(values, parts[""], parts["_scale_inv"], size)
    return {"": codes, "_scale_inv": scales}


def scaled(codes: Tensor, scales: Tensor, size: tuple[int, int] | None) -> Tensor:
    """Return codes times scales, in the type of the scales.

    Args:
        codes: float8 or int8 (..., rows, columns).
        scales: One for each block of `size`, of which the last in a row or column may be smaller;
            without a size, one in all, one for each row (..., rows, 1), or one for each matrix.
        size: Rows and columns of a block.

    Raises:
        ValueError: These are no codes, or there are not as many scales as that.
    """
    if not str(codes.dtype).startswith(("torch.float8", "torch.int8")):
        raise ValueError(f"is {codes.dtype} and has scales of codes in 8 bits")
    return codes.to(scales.dtype).mul_(_grid(scales, codes.shape, size))


def rescaled(
    values: Tensor, codes: Tensor, scales: Tensor, size: tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of values, in the types and shapes of those given: see `scaled`.

    Raises:
        ValueError: The scales are exponents.
    """
    import torch

    if scales.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError("has exponents for scales")
    is_float = codes.dtype.is_floating_point
    most = torch.finfo(codes.dtype).max if is_float else torch.iinfo(codes.dtype).max
    shape = values.shape
    if size is None:
        like = _grid(scales, shape, size)
        dims = [dim for dim in range(values.ndim) if like.ndim == 0 or like.shape[dim] == 1]
        largest = values.abs().amax(dims)
    else:
        rows, columns = size
        padded = torch.nn.functional.pad(values, (0, -shape[-1] % columns, 0, -shape[-2] % rows))
        blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
        largest = blocks.abs().amax((-3, -1))
    found = (largest.masked_fill(largest == 0, most) / most).view(scales.shape).to(scales.dtype)
    wanted = (values / _grid(found.float(), shape, size)).clamp_(-most, most)
    return (wanted if is_float else wanted.round_()).to(codes.dtype), found


def _grid(scales: Tensor, shape: Sequence[int], size: tuple[int, int] | None) -> Tensor:
    """Return scales as they are multiplied with codes of a shape: see `scaled`."""
    if size is None:
        if scales.ndim == 1 and len(scales) == shape[0]:
            scales = scales.view(-1, *[1] * (len(shape) - 1))
        is_one_each = all(n in (1, m) for n, m in zip(scales.shape, shape, strict=False))
        if scales.numel() > 1 and not (
            scales.ndim == len(shape) and is_one_each and scales.shape[-1] == 1
        ):
            raise _unfit(scales, shape)
        return scales if scales.numel() > 1 else scales.view(())
    rows, columns = size
    num_blocks = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    if scales.shape != num_blocks:
        raise _unfit(scales, shape)
    grid = scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return grid[..., : shape[-2], : shape[-1]]


def _unfit(scales: Tensor, shape: Sequence[int]) -> ValueError:
    return ValueError(f"has scales {tuple(scales.shape)} for weights {tuple(shape)}")


def _decoded(parts: Parts) -> tuple[Sequence[int], dtype | None]:
    return parts[""].shape, None


EXTENSION = Form(
    doc="fp8 with a `weight_block_size`, also of `null`",
    packings=_packings,
    ignored=re.compile(r"[._](activation|input)_scale$"),
)
