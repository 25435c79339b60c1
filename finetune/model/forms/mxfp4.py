"""gpt-oss's experts: e2m1 in groups of 32 along the rows in, each scaled by a power of two.

They are published transposed, (experts, out, groups, 16 bytes), and dequantised by transformers.
"""

import re
from collections.abc import Sequence

from finetune.model.form import Form, Kept, Packing, Parts
from offload.tensors import Tensor, dtype


def _dequantise(parts: Parts) -> Tensor:
    """Return a layer's experts, one at a time: transformers' function takes 8 bytes per weight."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = parts["_blocks"], parts["_scales"]
    values = torch.empty(0, dtype=torch.bfloat16)
    for number in range(len(blocks)):
        one = slice(number, number + 1)
        expert = convert_moe_packed_tensors(blocks[one], scales[one], dtype=values.dtype)
        if number == 0:
            values = expert.new_empty(len(blocks), *expert.shape[1:])
        values[one] = expert
    return values


def _decoded(parts: Parts) -> tuple[Sequence[int], dtype | None]:
    import torch

    num_experts, num_out, num_groups, group_bytes = parts["_blocks"].shape
    return (num_experts, 2 * num_groups * group_bytes, num_out), torch.bfloat16


_EXPERTS = Packing(
    mark=re.compile(r"_blocks$"), parts=("_scales",), dequantise=_dequantise, decoded=_decoded
)
EXTENSION = Form(
    doc="mxfp4",
    packings=lambda _: (_EXPERTS,),
    kept=lambda _: Kept(codec="mxfp4", is_transposed=True),
)
