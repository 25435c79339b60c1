"""Packed bf16: every bit back, by torch and by Triton, and what it has no room for."""

import importlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.engine.codecs.codec import codec_named
from offload.errors import CodecError
from tests.compiled import able_to_compile
from tests.tiers import mostly_slow

PACKED = codec_named("bf16_packed")
KERNEL = "offload.engine.codecs.packed_kernel"


def normal(num_weights: int) -> torch.Tensor:
    torch.manual_seed(num_weights)
    return (torch.randn(num_weights) * 0.02).bfloat16()


def encoded(values: torch.Tensor) -> torch.Tensor:
    buffer = torch.full((PACKED.num_bytes(values.shape, values.dtype),), 0xA5, dtype=torch.uint8)
    PACKED.encode(values, buffer)
    return buffer


def assert_exact(values: torch.Tensor) -> None:
    found = torch.full_like(values, 9)
    PACKED.decode(encoded(values), found)
    assert torch.equal(found.view(torch.int16), values.view(torch.int16))


def with_odd_ones(values: torch.Tensor, every: int) -> torch.Tensor:
    """Put any bits at all in one of so many places."""
    odd = torch.randint(-(2**15), 2**15, values[::every].shape).to(torch.int16)
    values.view(torch.int16)[::every] = odd
    return values


@settings(deadline=None)
@given(st.lists(st.integers(-(2**15), 2**15 - 1), max_size=64))
def test_any_bits_come_back(patterns: list[int]) -> None:
    assert_exact(torch.tensor(patterns, dtype=torch.int16).view(torch.bfloat16))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 254), st.integers(0, 17), st.integers(1, 600))
def test_any_range_of_exponents_comes_back(lowest: int, width: int, num_weights: int) -> None:
    exponents = torch.arange(num_weights) % (width + 1)
    exponents[exponents > 13] = 0  # few escapes at most
    patterns = (exponents + lowest).clamp(max=254) << 7 | torch.arange(num_weights) % 128
    assert_exact(patterns.to(torch.int16).view(torch.bfloat16))


@pytest.mark.parametrize("num_weights", [255, 256, 257, 70001, 2**20 + 255])
def test_weights_far_from_others_come_back(num_weights: int) -> None:
    assert_exact(with_odd_ones(normal(num_weights), every=300))


def test_zeros_cost_no_escape() -> None:
    values = normal(100 * 256).view(100, 256)
    values[::2] = 0  # whole blocks
    values[:, ::3] = -0.0
    values[:, 1::3] = 1e-40  # denormal
    assert_exact(values)


def test_one_large_weight_does_not_make_its_block_escape() -> None:
    values = normal(100 * 256)
    values[::256] = 3e38
    assert_exact(values)


def test_a_tensor_is_refused_when_its_room_is_one_too_small() -> None:
    values = torch.ones(20, 256, dtype=torch.bfloat16)
    values[:, ::64] = 1e-30  # 80
    values[:4, 1] = 1e-30
    assert_exact(values)
    values[4, 1] = 1e-30
    match = r"85 of 5120 weights are too small .*room for 84 .*\n\nhint: `codec=\"native\"`"
    with pytest.raises(CodecError, match=match):
        encoded(values)


def test_positions_are_wide_enough_for_very_large_tensors() -> None:
    sizes = [PACKED.num_bytes(torch.Size([n]), torch.bfloat16) for n in (2**31 - 256, 2**31)]
    assert sizes[0] / 2**31 == pytest.approx(1.5 + 7 / 256, rel=1e-5)
    assert sizes[1] / 2**31 == pytest.approx(1.5 + 11 / 256, rel=1e-5)


@pytest.fixture
def kernel() -> Iterator[ModuleType]:
    """The kernels, interpreted: Triton looks when they are defined."""
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, KERNEL, raising=False)
        yield importlib.import_module(KERNEL)
    sys.modules.pop(KERNEL, None)


@pytest.mark.thorough
@pytest.mark.parametrize("num_weights", [1, 255, 256, 2047, 2048, 2049, 70001])
def test_the_kernel_gives_every_bit_back(kernel: ModuleType, num_weights: int) -> None:
    from offload.engine.codecs.layout import layout_of
    from offload.engine.codecs.packed import typed

    values = with_odd_ones(normal(num_weights), every=300)
    found = torch.full((num_weights,), 9, dtype=torch.int16)
    parts = layout_of("bf16_packed", num_weights).split(encoded(values))
    kernel.unpack(*typed(parts, num_weights), found)
    assert torch.equal(found, values.view(torch.int16))


@pytest.mark.parametrize("capability", mostly_slow([75, 80, 86, 89, 90, 120], 75, 120))
def test_the_kernel_moves_wide_words_on_every_card(capability: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    words, shared_bytes = able_to_compile(moves_and_shared_bytes, capability)
    assert words == {"ld.global.b8", "ld.global.v2.b32", "st.global.v4.b32"}
    assert shared_bytes == 0


def moves_and_shared_bytes(capability: int) -> tuple[set[str], int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(("low", "codes", "tops"), "*u8")
    signature |= {"out": "*i16", "num_weights": "i32", "num_blocks": "i32"}
    constants = {"ROWS": 8, "HALF": 128}
    source = ASTSource(
        fn=importlib.import_module(KERNEL).unpack_blocks,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in range(5)},
    )
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return set(re.findall(r"(?:ld|st)\.global[\w.]*", found.asm["ptx"])), found.metadata.shared


@pytest.mark.gpu
@pytest.mark.parametrize("num_weights", [1, 2049, 2**21 + 77])
def test_a_card_gives_every_bit_back(num_weights: int) -> None:
    values = with_odd_ones(normal(num_weights), every=300)
    found = torch.empty_like(values, device="cuda")
    PACKED.decode(encoded(values).cuda(), found)
    assert torch.equal(found.cpu().view(torch.int16), values.view(torch.int16))
