"""AWQ in 4 bits (`gemm`): words along the features out, in an order of their own.

A weight is (code - zero point) * scale, in the scale's type, with both for a group of features in.
The first bits of a word are those of column 0, then of 2, 4, 6, 1, 3, 5 and 7.
Source: AutoAWQ 0.2.9, awq/utils/packing_utils.py, `dequantize_gemm`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.model.form import Form, Kept, Packing, Parts, require_fields
from finetune.model.forms._codes import decode, pieces
from finetune.model.forms._names import has_int4_groups
from offload.tensors import Tensor, dtype

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each column's bits in a word
_OF_INFERENCE = (
    *("group_size", "modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
    *("exllama_config", "backend", "quant_method"),
)
_KNOWN = {
    **dict.fromkeys(_OF_INFERENCE),
    "bits": (4,),
    "version": ("gemm", "GEMM"),
    "zero_point": (True,),
}


def _packings(fields: Mapping[str, Any]) -> Sequence[Packing]:
    require_fields({"bits": None, "version": None, "zero_point": None, **fields}, _KNOWN)
    return (
        Packing(
            mark=re.compile(r"(?<=\.)qweight$"),
            name="weight",
            parts=("qzeros", "scales"),
            dequantise=_dequantise,
            decoded=_decoded,
        ),
    )


def _dequantise(parts: Parts) -> Tensor:
    """Return (N, K), some words of all rows at a time."""
    import torch

    words, scales = parts["qweight"], parts["scales"]  # (K, N / 8), (G, N)
    num_in, num_words = words.shape
    weights = torch.empty(8 * num_words, num_in, dtype=scales.dtype)
    for some in pieces(num_words, 8 * num_in):
        columns = slice(8 * some.start, 8 * some.stop)
        weights[columns] = decode(
            _unpacked(words[:, some]).t(),
            range(256),
            scales[:, columns].t(),
            zeros=_unpacked(parts["qzeros"][:, some]).t(),
            num_columns=num_in,
            kind=scales.dtype,
        )
    return weights


def _unpacked(words: Tensor) -> Tensor:
    """Return the codes of (R, N / 8) words, uint8 (R, N)."""
    import torch

    packed = words.contiguous().view(torch.uint8)
    halves = torch.stack((packed & 15, packed >> 4), dim=-1)
    return halves.view(len(words), -1, len(_PLACES))[..., list(_PLACES)].flatten(1)


def _decoded(parts: Parts) -> tuple[Sequence[int], dtype | None]:
    num_in, num_words = parts["qweight"].shape
    return (8 * num_words, num_in), None


def _kept(fields: Mapping[str, Any]) -> Kept | None:
    if not has_int4_groups(fields.get("group_size")):
        return None
    left = fields.get("modules_to_not_convert") or ()
    return Kept(codec="int4", is_in=lambda name: not any(one in name for one in left))


EXTENSION = Form(doc="awq of 4 bits (`gemm`)", packings=_packings, kept=_kept)
