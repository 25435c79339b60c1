"""What NVIDIA's Model Optimizer publishes: NVFP4 and e4m3, also in one checkpoint.

NVFP4 is FP4 with a scale in e4m3 for 16 weights of a row and one in fp32 for the tensor. A weight
is code times (scale times the tensor's), in fp32, then in bfloat16; of e4m3, code times scale in
fp32. Scales of activations and of keys and values are of no use here.
Source: nvidia-modelopt 0.47, torch/quantization/qtensor/nvfp4_tensor.py, `dequantize`;
torch/export/convert_hf_config.py.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from finetune.model.form import Form, Kept, Packing, Parts, require_fields
from finetune.model.forms._codes import E4M3_MAX, decode, nvfp4_of
from finetune.model.forms._names import is_named
from finetune.model.forms.fp8 import rescaled, scaled
from offload.codecs.mxfp4.groups import E2M1
from offload.tensors import Tensor, dtype

_IN_NVFP4 = ("NVFP4", "W4A16_NVFP4")
_OF_LAYER = {
    "quant_algo": (*_IN_NVFP4, "FP8", "FP8_PER_CHANNEL_PER_TOKEN"),
    "group_size": (None, 16),
}
_KNOWN = {
    "quant_method": None,
    "quant_algo": (*_OF_LAYER["quant_algo"], "MIXED_PRECISION"),
    "group_size": _OF_LAYER["group_size"],
    "config_groups": None,
    "quantized_layers": None,
    "ignore": None,
    "kv_cache_scheme": None,
    "producer": None,
}
_GROUP = {"targets": None, "weights": None, "input_activations": None}


def _packings(fields: Mapping[str, Any]) -> Sequence[Packing]:
    require_fields(fields, _KNOWN)
    for name, group in fields.get("config_groups", {}).items():
        require_fields(group, _GROUP, f"config_groups.{name}.")
    for name, layer in fields.get("quantized_layers", {}).items():
        require_fields(layer, _OF_LAYER, f"quantized_layers.{name}.")
    return _NVFP4, _E4M3


def _nvfp4(parts: Parts) -> Tensor:
    import torch

    codes, scales = parts["weight"], parts["weight_scale"].float() * parts["weight_scale_2"].float()
    return decode(codes, E2M1, scales, num_columns=2 * codes.shape[1], kind=torch.bfloat16)


def _to_nvfp4(values: Tensor, parts: Parts) -> Parts:
    """Keep the tensor's scale, which others computed with it may share, if it is enough."""
    most = values.abs().amax() / (E2M1[7] * E4M3_MAX)
    unit = parts["weight_scale_2"].float().clamp(min=most)
    codes, scales = nvfp4_of(values, unit)
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": unit}


def _to_e4m3(values: Tensor, parts: Parts) -> Parts:
    codes, scales = rescaled(values, parts["weight"], parts["weight_scale"], None)
    return {"weight": codes, "weight_scale": scales}


def _of_pairs(parts: Parts) -> tuple[Sequence[int], dtype | None]:
    rows, num_bytes = parts["weight"].shape
    return (rows, 2 * num_bytes), None


def _of_codes(parts: Parts) -> tuple[Sequence[int], dtype | None]:
    return parts["weight"].shape, None


def _e4m3(parts: Parts) -> Tensor:
    return scaled(parts["weight"], parts["weight_scale"].float(), None)


_NVFP4 = Packing(
    mark=re.compile(r"(?<=\.)weight_scale_2$"),
    name="weight",
    parts=("weight", "weight_scale"),
    dequantise=_nvfp4,
    decoded=_of_pairs,
    quantise=_to_nvfp4,
)
_E4M3 = Packing(
    mark=re.compile(r"(?<=\.)weight_scale$"),
    name="weight",
    parts=("weight",),
    dequantise=_e4m3,
    decoded=_of_codes,
    quantise=_to_e4m3,
)


def _kept(fields: Mapping[str, Any]) -> Kept | None:
    if "quantized_layers" in fields:
        layers = fields["quantized_layers"].items()
        listed = [name for name, layer in layers if layer.get("quant_algo") in _IN_NVFP4]
        return Kept(codec="nvfp4", is_in=partial(is_named, listed=listed))
    if fields.get("quant_algo") not in _IN_NVFP4:
        return None
    left = fields.get("ignore") or ()
    return Kept(codec="nvfp4", is_in=lambda name: not is_named(name, left))


EXTENSION = Form(
    doc="modelopt's NVFP4 and FP8",
    packings=_packings,
    kept=_kept,
    ignored=re.compile(r"\.(input|k|v)_scale$"),
)
