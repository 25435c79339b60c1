"""4 bits as bitsandbytes saves them, nf4 or fp4, dequantised by it; each tensor says how."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.errors import ModelError
from finetune.model.form import FieldError, Form, Packing, Parts
from offload.tensors import Tensor, dtype


def _packings(fields: Mapping[str, Any]) -> Sequence[Packing]:
    if not fields.get("load_in_4bit"):
        raise FieldError("load_in_8bit", fields.get("load_in_8bit"))
    return (
        Packing(
            mark=re.compile(r"\.quant_state\.bitsandbytes__(nf4|fp4)$"),
            parts=("", ".absmax", ".quant_map"),
            joint_parts=(".nested_absmax", ".nested_quant_map"),
            dequantise=_dequantise,
            decoded=_decoded,
        ),
    )


def _dequantise(parts: Parts) -> Tensor:
    """Return a tensor in the dtype that it was quantised from.

    It is dequantised flat, as it was packed. The CPU kernel of bitsandbytes 0.50 uses the scale of
    the wrong block if a row is not a whole number of blocks (of 48 or 96 weights, not of 40).
    """
    import torch

    try:
        from bitsandbytes.functional import QuantState, dequantize_4bit
    except ImportError as error:
        raise ModelError(
            f"bitsandbytes cannot be imported: {error}",
            limit="weights in its format are dequantised by it",
            hint="`pip install bitsandbytes`",
        ) from error

    state = QuantState.from_dict(
        {ending.lstrip("."): part for ending, part in parts.items() if ending},
        device=torch.device("cpu"),
    )
    shape, state.shape = state.shape, torch.Size([state.shape.numel()])
    values: Tensor = dequantize_4bit(parts[""].view(torch.uint8), state)
    return values.view(shape)


def _decoded(parts: Parts) -> tuple[Sequence[int], dtype | None]:
    import torch

    state = next(part for ending, part in parts.items() if ending.startswith(".quant_state"))
    fields = json.loads(bytes(state.numpy()))
    return fields["shape"], getattr(torch, fields["dtype"])


EXTENSION = Form(doc="bitsandbytes with `load_in_4bit`", packings=_packings)
