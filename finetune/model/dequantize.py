"""Published weights that are already quantised, read as the plain tensors that they represent.

Problem. transformers would build another model around such a checkpoint: other modules, packed
parameters, kernels that do not work on a CPU or a frozen slab. The engine needs the plain model,
and never all of it in memory at once.

Idea. Leave the model as it is and give transformers other tensors: objects that are dequantised
when they are read. It reads them one at a time (see `env.loading_one_by_one`), so only one is in
memory; transformers still handles names, fused experts, ties and dtypes. Packed tensors are
recognised by their names, so parts that were left unquantised pass unchanged.

How each is dequantised: bitsandbytes by its own `dequantize_4bit`, mxfp4 by transformers' own
function, fp8 as it was published (a scale for each block of rows and columns; products in fp32).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from finetune.errors import ModelError
from finetune.files.tensors import Unread

Parts = Mapping[str, torch.Tensor]
"""The parts of a packed tensor, by the suffix that their names add to its own."""

_PACKED = (
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)
"""Dtypes whose values are no weights by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How a kind of checkpoint stores a tensor: as parts whose names begin with the tensor's name.

    Attributes:
        mark: The suffix of a part that no plain tensor has.
        parts: The suffixes of the other parts; an empty one is the tensor's own name.
        joint_parts: Suffixes that a tensor has all of, or none.
        ignored: The suffixes of names that carry no values.
        dequantise: Returns the values.
    """

    mark: re.Pattern[str]
    parts: tuple[str, ...]
    joint_parts: tuple[str, ...] = ()
    ignored: re.Pattern[str] = re.compile(r"(?!)")  # matches nothing
    dequantise: Callable[[Parts], torch.Tensor]


def format_of(quantization: Mapping[str, Any], path: str) -> Format:
    """Return how a checkpoint is quantised, by the `quantization_config` of its config.json.

    Raises:
        ModelError: The method is not supported.
    """
    method = quantization.get("quant_method", "bitsandbytes")
    if method == "bitsandbytes" and quantization.get("load_in_4bit"):
        return _BNB_4BIT
    if method == "mxfp4":
        return _MXFP4
    if method == "fp8" and quantization.get("weight_block_size"):
        return _fp8(*quantization["weight_block_size"])
    kind = "bitsandbytes with 8 bits" if method == "bitsandbytes" else method
    raise ModelError(
        f"model.path: {path} is quantised, its quant_method is {kind}",
        limit="of quantised weights, bitsandbytes with 4 bits, mxfp4 and fp8 in blocks can be read",
        hint="`model.path` of the model that it was made from; `offload.codec: nf4` packs it here",
    )


def plain_tensors(published: Mapping[str, Unread], form: Format, path: str) -> dict[str, Unread]:
    """Return the plain tensors of a quantised checkpoint, unread.

    Args:
        published: All tensors of the checkpoint.
        form: How it is quantised.
        path: Its name in errors.

    Raises:
        ModelError: A part of a packed tensor is missing.
    """
    tensors: dict[str, Unread] = {}
    inside: set[str] = set()
    for name in published:
        if mark := form.mark.search(name):
            base = name[: mark.start()]
            endings = (mark[0], *_endings(base, published, form, path))
            parts = {ending: published[base + ending] for ending in endings}
            tensors[base] = Unread(read=partial(_read_packed, form, parts))
            inside.update(base + ending for ending in endings)
        elif form.ignored.search(name):
            inside.add(name)
    for name in published.keys() - inside:
        dtype = published[name].read().dtype
        if dtype in _PACKED:  # a cast to a weight's dtype would give a wrong weight
            raise _torn(path, f"{name} ({dtype}) lacks the scales that belong to it")
        tensors[name] = published[name]
    return tensors


def _endings(
    base: str, published: Mapping[str, Unread], form: Format, path: str
) -> tuple[str, ...]:
    """Return the endings of the parts that a packed tensor must have."""
    has_joint = any(base + ending in published for ending in form.joint_parts)
    endings = form.parts + (form.joint_parts if has_joint else ())
    for ending in endings:
        if base + ending not in published:
            raise _torn(path, f"{base} lacks {base + ending}")
    return endings


def _read_packed(form: Format, parts: Mapping[str, Unread]) -> torch.Tensor:
    return form.dequantise({ending: part.read() for ending, part in parts.items()})


def _torn(path: str, what: str) -> ModelError:
    return ModelError(
        f"model.path: {path} is quantised, and {what}",
        limit="a quantised tensor is read from all of its parts",
        hint="download the model again",
    )


# ----------------------------------------------------------------------------------------- formats


def _dequantise_bnb(parts: Parts) -> torch.Tensor:
    """Return a tensor in the dtype that it was quantised from.

    It is dequantised flat, as it was packed. The CPU kernel of bitsandbytes 0.50 uses the scale of
    the wrong block if a row is not a whole number of blocks (of 48 or 96 weights, not of 40).
    """
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
    values: torch.Tensor = dequantize_4bit(parts[""].view(torch.uint8), state)
    return values.view(shape)


def _dequantise_mxfp4(parts: Parts) -> torch.Tensor:
    """Return a layer's experts, one at a time: transformers' function takes 8 bytes per weight."""
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


def _fp8(rows: int, columns: int) -> Format:
    def dequantise(parts: Parts) -> torch.Tensor:
        packed, scales = parts[""], parts["_scale_inv"]
        if scales.dtype == torch.uint8:  # exponents
            scales = scales.view(torch.float8_e8m0fnu)
        grid = scales.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        return packed.float().mul_(grid[..., : packed.shape[-2], : packed.shape[-1]])

    return Format(
        mark=re.compile(r"(?<=\.weight)_scale_inv$"),
        parts=("",),
        ignored=re.compile(r"\.(activation|input)_scale$"),
        dequantise=dequantise,
    )


_BNB_4BIT = Format(
    mark=re.compile(r"\.quant_state\.bitsandbytes__(nf4|fp4)$"),
    parts=("", ".absmax", ".quant_map"),
    joint_parts=(".nested_absmax", ".nested_quant_map"),
    dequantise=_dequantise_bnb,
)
_MXFP4 = Format(
    mark=re.compile(r"_blocks$"),
    parts=("_scales",),
    dequantise=_dequantise_mxfp4,
)
