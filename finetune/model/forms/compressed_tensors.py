"""What compressed-tensors (llm-compressor) publishes, with products in the library's order.

Codes in 8 bits have one scale for a tensor, a row or a block; integers of 4 or 8 bits that are
packed in int32 one for a group of a row, and perhaps a zero point; FP4 one for a group of 16
(NVFP4, also one for the tensor) or of 32 (MXFP4, powers of two). A weight is code times scale in
the type of the scale; of NVFP4, code times (scale / the tensor's) in fp32, then in bfloat16.
Source: compressed-tensors 0.20, compressors/*/base.py and `_dequantize` of
quantization/lifecycle/forward_helpers.py.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from finetune.model.form import FieldError, Form, Kept, Packing, Parts, require_fields
from finetune.model.forms._codes import (
    E4M3_MAX,
    decode,
    e2m1_of,
    in_pairs,
    looked_up,
    nvfp4_of,
)
from finetune.model.forms._names import has_int4_groups, is_named
from finetune.model.forms.fp8 import rescaled, scaled
from offload.codecs.mxfp4.groups import E2M1
from offload.tensors import Tensor, dtype

_CODES = ("float-quantized", "naive-quantized", "int-quantized")
_INTEGERS, _NVFP4, _MXFP4 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_MIXED = "mixed-precision"
_ALL = "Linear"  # a target that all linear layers are of, but for those that others name
_KNOWN = {
    "quant_method": None,
    "config_groups": None,
    "format": (*_CODES, _INTEGERS, _NVFP4, _MXFP4, _MIXED),
    "quantization_status": None,
    "global_compression_ratio": None,
    "ignore": None,
    "kv_cache_scheme": None,
    "version": None,
}
_GROUP = {
    "targets": None,
    "weights": None,
    "input_activations": None,
    "output_activations": None,
    "format": (None, *_CODES, _INTEGERS, _NVFP4, _MXFP4),
}
_WEIGHTS = {
    "num_bits": None,
    "type": None,
    "symmetric": None,
    "strategy": None,
    "dynamic": (None, False),
    "group_size": None,
    "block_structure": None,
    "actorder": (None, False, "weight", "static"),  # an order of calibration alone
    "observer": None,
    "observer_kwargs": None,
    "scale_dtype": None,
    "zp_dtype": None,
}
_DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True}
_IN_8_BITS: Mapping[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "symmetric": (True,),
    "strategy": (None, "tensor", "channel", "block"),
}
_FP4 = {"num_bits": (4,), "type": ("float",), "symmetric": (True,)}
# What the weights of a format may be.
_OF: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    **dict.fromkeys(_CODES, _IN_8_BITS),
    _INTEGERS: {
        "num_bits": (4, 8),
        "type": ("int",),
        "strategy": (None, "tensor", "channel", "group"),
    },
    _NVFP4: {**_FP4, "group_size": (16,)},
    _MXFP4: {**_FP4, "group_size": (32,)},
}


def _packings(fields: Mapping[str, Any]) -> Sequence[Packing]:
    require_fields(fields, _KNOWN)
    packings: dict[str, tuple[object, Packing]] = {}
    for name, group in fields.get("config_groups", {}).items():
        place = f"config_groups.{name}."
        if not isinstance(group, Mapping):  # the targets of a scheme that has this name
            raise FieldError(place[:-1], group)
        require_fields(group, _GROUP, place)
        if (stated := group.get("weights")) is None:
            continue
        form = str(group.get("format") or fields.get("format"))
        if form not in _OF:
            raise FieldError(f"{place}format", form)
        weights = _DEFAULTS | stated
        require_fields(weights, {**_WEIGHTS, **_OF[form]}, f"{place}weights.")
        key, packing = _packing(form, weights)
        known, _ = packings.setdefault(packing.mark.pattern, (key, packing))
        if known != key:  # no name says which of the two a tensor has
            raise FieldError(f"{place}weights", weights)
    if not packings:
        raise FieldError("config_groups", fields.get("config_groups"))
    # names of scales alone are looked for last, as packed tensors have them too
    return [packings[mark][1] for mark in sorted(packings)]


def _packing(form: str, weights: Mapping[str, Any]) -> tuple[object, Packing]:
    """Return what the decoding of a group's weights depends on, and their packing."""
    if form in _CODES:
        is_block = weights.get("strategy") == "block"
        size = tuple(weights["block_structure"]) if is_block else None
        packing = Packing(
            mark=re.compile(r"(?<=\.)weight_scale$"),
            name="weight",
            parts=("weight",),
            dequantise=partial(_scaled, size),
            decoded=_of_codes,
            quantise=partial(_to_codes, size),
        )
        return size, packing
    num_bits, is_symmetric = weights["num_bits"], weights["symmetric"]
    parts: tuple[str, ...] = ("weight_scale",)
    quantise = partial(_to_integers, num_bits) if form == _INTEGERS else _to_fp4
    if form == _INTEGERS:
        parts += ("weight_shape",) if is_symmetric else ("weight_shape", "weight_zero_point")
    elif form == _NVFP4:
        parts += ("weight_global_scale",)
    packing = Packing(
        mark=re.compile(r"(?<=\.)weight_packed$"),
        name="weight",
        parts=parts,
        dequantise=partial(_integers, num_bits) if form == _INTEGERS else _fp4,
        decoded=_stated if form == _INTEGERS else _of_pairs,
        quantise=quantise if is_symmetric else None,
    )
    return (form, num_bits, is_symmetric), packing


def _scaled(size: tuple[int, int] | None, parts: Parts) -> Tensor:
    return scaled(parts["weight"], parts["weight_scale"], size)


def _integers(num_bits: int, parts: Parts) -> Tensor:
    """Return integers less their zero points, times their scales."""
    import torch

    rows, columns = parts["weight_shape"].tolist()
    numbers = range(-(2 ** (num_bits - 1)), 2 ** (num_bits - 1))
    scales = parts["weight_scale"]
    scales = scales.expand(rows, 1) if scales.numel() == 1 else scales
    zeros = None
    if "weight_zero_point" in parts:  # packed along the rows
        words = parts["weight_zero_point"].t()
        packed = words.reshape(-1).view(torch.uint8).view(len(words), -1)
        zeros = looked_up(packed, numbers, scales.dtype)[:, :rows].t()
    return decode(
        parts["weight_packed"].view(torch.uint8),
        numbers,
        scales,
        zeros=zeros,
        num_columns=columns,
        kind=scales.dtype,
    )


def _fp4(parts: Parts) -> Tensor:
    import torch

    codes, scales = parts["weight_packed"], parts["weight_scale"]
    if "weight_global_scale" in parts:  # of NVFP4
        scales = scales.float() / parts["weight_global_scale"].float()
    else:  # exponents
        scales = scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    return decode(codes, E2M1, scales, num_columns=2 * codes.shape[1], kind=torch.bfloat16)


def _to_codes(size: tuple[int, int] | None, values: Tensor, parts: Parts) -> Parts:
    codes, scales = rescaled(values, parts["weight"], parts["weight_scale"], size)
    return {"weight": codes, "weight_scale": scales}


def _to_integers(num_bits: int, values: Tensor, parts: Parts) -> Parts:
    """Scale the largest weight of a group to half of all codes, as the library's observer does."""
    import torch

    scales, middle = parts["weight_scale"], 2 ** (num_bits - 1)
    groups = values.view(len(values), scales.shape[-1], -1)
    largest = groups.abs().amax(-1)
    found = largest.masked_fill(largest == 0, 1).div(middle - 0.5).to(scales.dtype)
    if found.shape != scales.shape:
        raise ValueError("has one scale for all rows")
    codes = (groups / found.float()[..., None]).round_().clamp_(-middle, middle - 1) + middle
    num_columns = parts["weight_packed"].shape[1] * 32 // num_bits
    codes = torch.nn.functional.pad(codes.flatten(1), (0, num_columns - values.shape[1])).int()
    packed = in_pairs(codes) if num_bits != _DEFAULTS["num_bits"] else codes.to(torch.uint8)
    return {"weight_packed": packed.view(torch.int32), "weight_scale": found}


def _to_fp4(values: Tensor, parts: Parts) -> Parts:
    """Keep the tensor's scale, which others computed with it may share, if it is enough."""
    import torch

    if "weight_global_scale" in parts:
        most = E2M1[7] * E4M3_MAX / values.abs().amax()
        by = parts["weight_global_scale"].float().clamp(max=most)
        codes, scales = nvfp4_of(values, 1 / by)
        return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": by}
    groups = values.view(*parts["weight_scale"].shape, -1)
    _, exponents = torch.frexp(groups.abs().amax(-1))  # of twice the power of two below
    exponents = (exponents - 3 + 127).clamp_(1, 254)
    codes = e2m1_of(torch.ldexp(groups, 127 - exponents[..., None]).flatten(1))
    return {"weight_packed": codes, "weight_scale": exponents.to(torch.uint8)}


def _of_codes(parts: Parts) -> tuple[Sequence[int], dtype | None]:
    return parts["weight"].shape, None


def _stated(parts: Parts) -> tuple[Sequence[int], dtype | None]:
    return parts["weight_shape"].tolist(), None


def _of_pairs(parts: Parts) -> tuple[Sequence[int], dtype | None]:
    rows, num_bytes = parts["weight_packed"].shape
    return (rows, 2 * num_bytes), None


def _kept(fields: Mapping[str, Any]) -> Kept | None:
    """Return what one codec keeps of all groups; of several, each has to list its layers."""
    groups = [group for group in fields["config_groups"].values() if group.get("weights")]
    if len(groups) > 1 and not all(group.get("targets") for group in groups):
        return None
    kept = [_codec(str(group.get("format") or fields.get("format")), group) for group in groups]
    targets = [group.get("targets") or [_ALL] for group in groups]
    codecs = {codec for codec in kept if codec}
    if len(codecs) != 1:
        return None

    def is_in(name: str) -> bool:
        named = [codec for codec, own in zip(kept, targets, strict=True) if is_named(name, own)]
        others = [codec for codec, own in zip(kept, targets, strict=True) if _ALL in own]
        first = next(iter((*named, *others)), None)
        return first is not None and not is_named(name, fields.get("ignore") or ())

    return Kept(codec=codecs.pop(), is_in=is_in)


def _codec(form: str, group: Mapping[str, Any]) -> str | None:
    """Return the codec that keeps the weights of a group; MXFP4 along rows is in NVFP4's form."""
    weights = _DEFAULTS | group["weights"]
    if form in (_NVFP4, _MXFP4):
        return "nvfp4"
    is_int4 = form == _INTEGERS and weights["num_bits"] != _DEFAULTS["num_bits"]
    is_kept = is_int4 and has_int4_groups(weights.get("group_size"))
    return "int4" if is_kept and "32" not in str(weights.get("scale_dtype")) else None


EXTENSION = Form(
    doc="compressed-tensors of 8 or 4 bits",
    packings=_packings,
    kept=_kept,
    ignored=re.compile(r"\.(input|output|q|k|v)_(global_scale|scale|zero_point)$"),
)
