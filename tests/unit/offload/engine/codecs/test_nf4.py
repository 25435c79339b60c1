"""nf4 against bitsandbytes itself: the same bytes and the same weights."""

from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch

from offload.engine.codecs.codec import NF4
from offload.engine.codecs.layout import layout_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(2,), (64,), (130,), (3, 100), (4, 33, 66), (2**20 + 1000, 2)]  # the last: in pieces


def weights(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(7)
    columns = torch.linspace(0.001, 0.05, shape[-1])
    return (torch.randn(shape) * columns).to(dtype)


def by_bitsandbytes(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Encode by bitsandbytes, as it is called for a base of QLoRA."""
    return bnb.quantize_4bit(values, compress_statistics=True, quant_type="nf4", blocksize=64)


def buffer(values: torch.Tensor) -> torch.Tensor:
    return torch.full((NF4.num_bytes(values.shape, values.dtype),), 0xA5, dtype=torch.uint8)


def written(values: torch.Tensor) -> torch.Tensor:
    """Return what bitsandbytes makes of a weight, part by part as the codec lays it out."""
    packed, state = by_bitsandbytes(values)
    encoded = buffer(values)
    parts = (packed, state.absmax, state.state2.absmax, state.state2.code, state.offset)
    targets = layout_of("nf4", values.numel()).split_to_write(encoded)
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part.reshape(-1).view(torch.uint8))
    return encoded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_and_weights_are_those_of_bitsandbytes(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = weights(shape, dtype)
    packed, state = by_bitsandbytes(values)
    ours, found = buffer(values), torch.empty_like(values)
    NF4.encode(values, ours)
    assert torch.equal(ours, written(values))
    NF4.decode(ours, found)
    assert torch.equal(found, bnb.dequantize_4bit(packed, state).view(shape))


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (scale, dtype)
        for scale in (1.0, 0.0, 1e-39, 0.02, 3.0, 7e4, 1e38)
        for dtype in DTYPES
        if scale < torch.finfo(dtype).max
    ],
)
def test_weights_between_two_values_go_where_bitsandbytes_puts_them(
    scale: float, dtype: torch.dtype
) -> None:
    values = bnb.get_4bit_type("nf4", device="cpu")
    between = (values[1:] + values[:-1]) / 2
    near = torch.cat([between, between.nextafter(values[0]), between.nextafter(values[-1]), values])
    block = torch.cat([near, -near, torch.zeros(-2 * len(near) % 62)])
    blocks = torch.stack([torch.cat([row, torch.tensor([1.0, -1.0])]) for row in block.split(62)])
    weights = (blocks * scale).to(dtype)
    ours = buffer(weights)
    NF4.encode(weights, ours)
    assert torch.equal(ours, written(weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_weights", [1, 65, 2**20 + 63])
def test_an_odd_number_of_weights_is_decoded_by_the_same_rule(
    num_weights: int, dtype: torch.dtype
) -> None:
    values = weights((num_weights,), dtype)
    packed, state = by_bitsandbytes(values)
    ours, found = buffer(values), torch.empty_like(values)
    NF4.encode(values, ours)
    NF4.decode(ours, found)
    absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    packed = packed.view(-1).long()
    codes = state.code[torch.stack((packed >> 4, packed & 15), 1).view(-1)[:num_weights]]
    assert torch.equal(found, (codes * absmax.repeat_interleave(64)[:num_weights]).to(dtype))
