"""GPTQ in 4 bits: words along the features in, a scale and a zero point for a group of them.

A weight is (code - zero point) * scale, in the scale's type. The first format (`gptq`) holds each
zero point less 1, `gptq_v2` as it is. What the first holds of a zero point of 0 is read as 0 by
some programs and as 16 by others: a tensor that has one is refused. With `desc_act`, `g_idx` says
which group a feature is of.
Source: gptqmodel 7.7, nn_modules/qlinear/__init__.py, `dequantize_weight`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from finetune.model.form import FieldError, Form, Kept, Packing, Parts, require_fields
from finetune.model.forms._codes import decode, looked_up
from finetune.model.forms._names import has_int4_groups
from offload.tensors import Tensor, dtype

_CODES = range(16)
_OF_CALIBRATION = (
    *("group_size", "sym", "desc_act", "act_group_aware", "static_groups", "true_sequential"),
    *("damp_percent", "damp_auto_increment", "dataset", "tokenizer", "meta", "batch_size"),
    *("model_seqlen", "max_input_length", "pad_token_id", "cache_block_outputs", "mse"),
    *("model_name_or_path", "model_file_base_name", "block_name_to_quantize", "backend"),
    *("module_name_preceding_first_block", "modules_in_block_to_quantize", "lm_head"),
    *("use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16", "quant_method"),
)
_FORMATS = ("gptq", "gptq_v2")
_KNOWN = {
    **dict.fromkeys(_OF_CALIBRATION),
    "bits": (4,),
    "pack_dtype": (None, "int32"),
    "checkpoint_format": (None, *_FORMATS),
    "format": (None, *_FORMATS),
}


def _packings(fields: Mapping[str, Any]) -> Sequence[Packing]:
    require_fields({"bits": None, **fields}, _KNOWN)
    form = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    if fields.get("format") not in (None, form):
        raise FieldError("format", fields["format"])
    return (
        Packing(
            mark=re.compile(r"(?<=\.)qweight$"),
            name="weight",
            parts=("qzeros", "scales"),
            joint_parts=("g_idx",),
            dequantise=partial(_dequantise, less=int(form == "gptq")),
            decoded=_decoded,
        ),
    )


def _dequantise(parts: Parts, *, less: int) -> Tensor:
    import torch

    scales = parts["scales"]  # (G, N)
    zeros = looked_up(parts["qzeros"].view(torch.uint8), _CODES, scales.dtype)
    zeros = zeros[:, : scales.shape[1]]
    if less and (zeros == _CODES[-1]).any():
        raise ValueError("has a zero point of 0, which programs read differently")
    zeros += less
    words = parts["qweight"].t()  # (N, K / 8)
    codes = words.reshape(-1).view(torch.uint8).view(len(words), -1)
    return decode(
        codes,
        _CODES,
        scales.t(),
        zeros=zeros.t(),
        groups=parts.get("g_idx"),
        num_columns=2 * codes.shape[1],
        kind=scales.dtype,
    )


def _decoded(parts: Parts) -> tuple[Sequence[int], dtype | None]:
    num_words, num_out = parts["qweight"].shape
    return (num_out, 8 * num_words), None


def _kept(fields: Mapping[str, Any]) -> Kept | None:
    """Return that groups are kept, unless their features are in another order."""
    if not has_int4_groups(fields.get("group_size")) or fields.get("desc_act"):
        return None
    endings = [
        ending
        for block in fields.get("modules_in_block_to_quantize") or ()
        for ending in ([block] if isinstance(block, str) else block)
    ]
    return Kept(codec="int4", is_in=lambda name: not endings or name.endswith(tuple(endings)))


EXTENSION = Form(doc="gptq of 4 bits", packings=_packings, kept=_kept)
