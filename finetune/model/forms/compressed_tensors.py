"""What compressed-tensors (llm-compressor) publishes: float8 with scales in the type that it has.

A weight is its code times its scale, computed in the scale's type as the library does.
Source: compressed-tensors 0.20, quantization/lifecycle/forward_helpers.py, `_dequantize`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from finetune.model.form import FieldError, Form, Packing, Parts, require_fields
from finetune.model.forms.fp8 import decoded, scaled
from offload.tensors import Tensor

_FORMATS = ("float-quantized", "naive-quantized")
_KNOWN = {
    "quant_method": None,
    "config_groups": None,
    "format": _FORMATS,
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
    "format": (None, *_FORMATS),
}
_WEIGHTS = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    "dynamic": (False,),
    "strategy": ("tensor", "channel", "block"),
    "group_size": None,
    "block_structure": None,
    "observer": None,
    "observer_kwargs": None,
    "scale_dtype": None,
    "zp_dtype": None,
}


def _packings(fields: Mapping[str, Any]) -> Sequence[Packing]:
    require_fields(fields, _KNOWN)
    packings: dict[tuple[int, int] | None, Packing] = {}
    for name, group in fields.get("config_groups", {}).items():
        place = f"config_groups.{name}."
        require_fields(group, _GROUP, place)
        if (weights := group.get("weights")) is None:
            continue
        require_fields(weights, _WEIGHTS, f"{place}weights.")
        size = tuple(weights["block_structure"]) if weights["strategy"] == "block" else None
        packings[size] = Packing(
            mark=re.compile(r"(?<=\.weight)_scale$"),
            parts=("",),
            dequantise=partial(_dequantise, size),
            decoded=decoded,
        )
    if len(packings) != 1:
        raise FieldError("config_groups", fields.get("config_groups"))
    return tuple(packings.values())


def _dequantise(size: tuple[int, int] | None, parts: Parts) -> Tensor:
    return scaled(parts[""], parts["_scale"], size)


EXTENSION = Form(
    doc="compressed-tensors with weights in float8",
    packings=_packings,
    ignored=re.compile(r"\.(input|output|q|k|v)_(scale|zero_point)$"),
)
