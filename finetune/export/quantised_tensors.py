"""Published tensors that are quantised, for a merge: what each decodes to, and its values.

They are decoded by `finetune.model.dequantize`, as for training. Their decoded dtypes and shapes
are known without decoding, because a file's header is written before its tensors.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.files.tensors import DTYPES, Spec, Unread, open_tensors
from finetune.model.dequantize import format_of, plain_tensors

_CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
_BNB_STATE = ".quant_state.bitsandbytes__"
_MXFP4_BLOCKS = "_blocks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A tensor that is quantised.

    Attributes:
        spec: What it decodes to.
        read: Returns its values.
    """

    spec: Spec
    read: Callable[[], torch.Tensor]


def find_packed(
    specs: Mapping[str, Spec], files: Sequence[Path], config: Mapping[str, Any], *, source: str
) -> tuple[dict[str, Packed], set[str]]:
    """Return the tensors of a checkpoint that are quantised, and the names of the others.

    Args:
        specs: The tensors in the files.
        files: Where each tensor is.
        config: The fields of config.json; it names the method.
        source: Name of the checkpoint in errors.

    Raises:
        ModelError: The method is not known, or a part of a tensor is missing.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return {}, set(specs)
    stored = open_tensors([str(file) for file in files])
    tensors = plain_tensors(stored, format_of(quantization, source), source)
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    states = {name.split(_BNB_STATE)[0]: name for name in specs if _BNB_STATE in name}
    packed = {}
    for name, tensor in tensors.items():
        if name in states:
            fields = json.loads(bytes(stored[states[name]].read().numpy()))
            spec = _spec(getattr(torch, fields["dtype"]), tuple(fields["shape"]))
        elif name + _MXFP4_BLOCKS in specs:
            num_experts, num_out, *blocks = specs[name + _MXFP4_BLOCKS].shape
            spec = _spec(torch.bfloat16, (num_experts, 2 * math.prod(blocks), num_out))
        elif specs[name].dtype.startswith("F8"):
            spec = _spec(dtype, specs[name].shape)
        else:
            continue
        packed[name] = Packed(spec=spec, read=_reader(tensor, DTYPES[spec.dtype]))
    return packed, tensors.keys() - packed.keys()


def _reader(tensor: Unread, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: tensor[...].to(dtype)


def _spec(dtype: torch.dtype, shape: tuple[int, ...]) -> Spec:
    return Spec(dtype=_CODES[dtype], shape=shape, num_bytes=math.prod(shape) * dtype.itemsize)
