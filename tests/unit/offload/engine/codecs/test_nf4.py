"""nf4 against bitsandbytes itself: the same bytes, the same weights, and its checkpoints."""

from dataclasses import replace
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch

from offload.engine.codecs.codec import NF4
from offload.engine.codecs.nf4 import Published
from offload.errors import CodecError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(2,), (64,), (130,), (3, 100), (4, 33, 66), (2**20 + 1000, 2)]  # the last: in pieces


def weights(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(7)
    columns = torch.linspace(0.001, 0.05, shape[-1])
    return (torch.randn(shape) * columns).to(dtype)


def published(values: torch.Tensor) -> tuple[Published, Any]:
    """Encode by bitsandbytes, as it is called for a base of QLoRA."""
    packed, state = bnb.quantize_4bit(
        values, compress_statistics=True, quant_type="nf4", blocksize=64
    )
    parts = Published(
        packed=packed,
        absmax=state.absmax,
        quant_map=state.code,
        nested_absmax=state.state2.absmax,
        nested_quant_map=state.state2.code,
        nested_offset=state.offset.item(),
        blocksize=state.blocksize,
        nested_blocksize=state.state2.blocksize,
    )
    return parts, state


def buffer(values: torch.Tensor) -> torch.Tensor:
    return torch.full((NF4.num_bytes(values.shape, values.dtype),), 0xA5, dtype=torch.uint8)


def whole(parts: Published, values: torch.Tensor, assembled: torch.Tensor) -> None:
    NF4.assemble(parts, slice(0, values.numel()), values.shape, assembled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_and_weights_are_those_of_bitsandbytes(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = weights(shape, dtype)
    parts, state = published(values)
    ours, assembled, found = buffer(values), buffer(values), torch.empty_like(values)
    NF4.encode(values, ours)
    whole(parts, values, assembled)
    assert torch.equal(ours, assembled)
    NF4.decode(ours, found)
    assert torch.equal(found, bnb.dequantize_4bit(parts.packed, state).view(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-39, 0.02, 3.0, 7e4, 1e38])
def test_weights_between_two_values_go_where_bitsandbytes_puts_them(
    scale: float, dtype: torch.dtype
) -> None:
    values = bnb.get_4bit_type("nf4", device="cpu")
    between = (values[1:] + values[:-1]) / 2
    near = torch.cat([between, between.nextafter(values[0]), between.nextafter(values[-1]), values])
    block = torch.cat([near, -near, torch.zeros(-2 * len(near) % 62)])
    blocks = torch.stack([torch.cat([row, torch.tensor([1.0, -1.0])]) for row in block.split(62)])
    weights = (blocks * scale).to(dtype)
    if not weights.isfinite().all():
        pytest.skip("these weights are infinite in this dtype")
    ours, assembled = buffer(weights), buffer(weights)
    NF4.encode(weights, ours)
    whole(published(weights)[0], weights, assembled)
    assert torch.equal(ours, assembled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_weights", [1, 65, 2**20 + 63])
def test_an_odd_number_of_weights_is_decoded_by_the_same_rule(
    num_weights: int, dtype: torch.dtype
) -> None:
    values = weights((num_weights,), dtype)
    parts, state = published(values)
    ours, found = buffer(values), torch.empty_like(values)
    NF4.encode(values, ours)
    NF4.decode(ours, found)
    absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    packed = parts.packed.view(-1).long()
    codes = state.code[torch.stack((packed >> 4, packed & 15), 1).view(-1)[:num_weights]]
    assert torch.equal(found, (codes * absmax.repeat_interleave(64)[:num_weights]).to(dtype))


def test_a_weight_stored_as_another_dtype_is_assembled() -> None:
    values = weights((8, 64))
    parts, _ = published(values)
    ours, assembled = buffer(values), buffer(values)
    NF4.encode(values, ours)
    stored = parts.packed.view(-1).view(torch.bfloat16).view(-1, 1)  # as FSDP wants it
    whole(replace(parts, packed=stored), values, assembled)
    assert torch.equal(ours, assembled)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"blocksize": 128}, "blocks of 128 and 256; those of 64 and 256"),
        ({"nested_blocksize": 64}, "blocks of 64 and 64; those of 64 and 256"),
        ({"absmax": torch.ones(8)}, r"scales of torch.float32, .*; scales of torch.uint8"),
        ({"quant_map": torch.linspace(-1, 1, 16)}, r"values \[-1.0, -0.8666.*; nf4 has \[-1.0, -0"),
        ({"absmax": torch.ones(7, dtype=torch.uint8)}, r"512 .* \(256, 7, 4\) .* \(256, 8, 4\)"),
    ],
)
def test_other_forms_are_refused(change: dict[str, Any], match: str) -> None:
    values = weights((8, 64))
    parts, _ = published(values)
    with pytest.raises(CodecError, match=match):
        NF4.assemble(replace(parts, **change), slice(0, 512), values.shape, buffer(values))


def test_experts_that_were_quantised_apart_are_parts_of_one_tensor() -> None:
    experts = [weights((96, 512)) * scale for scale in (0.1, 1, 20)]  # 3 blocks of scales each
    experts.append(weights((1, 50)))  # the last may end anywhere
    tensor = torch.cat([expert.view(-1) for expert in experts])
    assembled, found = buffer(tensor), torch.empty_like(tensor)
    start = 0
    truth: list[torch.Tensor] = []
    for expert in experts:
        parts, state = published(expert)
        part = slice(start, start + expert.numel())
        NF4.assemble(parts, part, tensor.shape, assembled)
        start, truth = part.stop, [*truth, bnb.dequantize_4bit(parts.packed, state).view(-1)]
    NF4.decode(assembled, found)
    assert torch.equal(found, torch.cat(truth))


def test_parts_that_share_a_block_of_scales_are_refused() -> None:
    values = weights((2, 8192))
    parts, _ = published(values[0])
    shape = torch.Size([3, 8192])
    with pytest.raises(CodecError, match=r"weights 0 to 8192 of a tensor; .* block of 16384"):
        NF4.assemble(parts, slice(0, 8192), shape, buffer(torch.empty(shape, dtype=values.dtype)))
    with pytest.raises(CodecError, match=r"weights 8192 to 24576 of a tensor; .* block of 16384"):
        NF4.assemble(parts, slice(8192, 24576), shape, torch.empty(0))


def test_parts_whose_scales_have_other_values_are_refused() -> None:
    values = weights((4, 8192))
    parts, _ = published(values[:2])
    ours = buffer(values)
    NF4.assemble(parts, slice(0, 16384), values.shape, ours)
    other = replace(parts, nested_quant_map=parts.nested_quant_map * 2)
    with pytest.raises(CodecError, match="weights 16384 to 32768 have other values"):
        NF4.assemble(other, slice(16384, 32768), values.shape, ours)
