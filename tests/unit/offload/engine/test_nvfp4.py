"""The codec of weights that were published in NVFP4: every bit back, or a refusal."""

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.engine.codec import form_named
from offload.errors import CodecError
from offload.plan.facts.codec import CODECS
from tests.compiled import able_to_compile
from tests.encoded import decoded, encoded, interpreted, peak_bytes
from tests.tiers import mostly_slow

NVFP4 = form_named("nvfp4")
KERNEL = "offload.codecs.nvfp4.kernel"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
NUMBERS = np.concatenate((E2M1, -E2M1))


def product(codes: Any, scales: Any) -> torch.Tensor:
    """Return codes (..., 16) times scales (...) in fp32, then in bf16."""
    return torch.from_numpy(
        NUMBERS[codes] * np.asarray(scales, dtype=np.float32)[..., None]
    ).bfloat16()


def published(
    *shape: int, lowest: float = 2.0**-9, highest: float = 448, tensor: float = 1.7e-5
) -> torch.Tensor:
    """Return random codes times scales in e4m3, times one of the tensor."""
    random = np.random.default_rng(sum(shape))
    grouped = (*shape[:-1], shape[-1] // 16)
    drawn = np.exp2(random.uniform(np.log2(lowest), np.log2(highest), grouped))
    scales = torch.from_numpy(drawn).to(torch.float8_e4m3fn).float().numpy() * np.float32(tensor)
    return product(random.integers(0, 16, (*grouped, 16)), scales).view(shape)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)


@pytest.mark.parametrize("shape", [(16,), (1, 16), (3, 5, 48), (40, 4096), (0, 32), (1030, 1024)])
def test_what_is_published_comes_back_to_the_bit(shape: tuple[int, ...]) -> None:
    values = published(*shape)
    assert torch.equal(bits(decoded(NVFP4, values)), bits(values))
    first = encoded(NVFP4, values, garbage=0)
    assert torch.equal(first, encoded(NVFP4, values, garbage=255))
    assert first.numel() <= values.numel() * 5 / 8 + 512


def test_a_scale_that_divides_comes_back_to_the_bit() -> None:
    random = np.random.default_rng(0)
    scales = torch.from_numpy(random.uniform(0, 448, 4096)).to(torch.float8_e4m3fn).float().numpy()
    scales[:9] = 0
    values = product(random.integers(0, 16, (4096, 16)), scales / np.float32(61234.5))
    found = decoded(NVFP4, values)
    assert torch.equal(bits(found), bits(values))
    assert (values == 0).sum() > 4096
    assert torch.equal(found.signbit(), values.signbit())


@pytest.mark.parametrize("part", mostly_slow(list(range(8)), 0))
def test_every_fraction_that_a_scale_in_fp32_can_have_is_kept(part: int) -> None:
    """With each of both fractions that a code makes of it: 2**23 groups of all codes."""
    codes = np.arange(16)
    for start in range(part * 2**20, (part + 1) * 2**20, 2**17):
        scales = (np.arange(start, start + 2**17, dtype=np.int32) + (120 << 23)).view(np.float32)
        values = product(codes, scales)
        assert torch.equal(bits(decoded(NVFP4, values)), bits(values))


@settings(deadline=None)
@given(
    codes=st.lists(st.integers(0, 15), min_size=16, max_size=16),
    fraction=st.integers(0, 2**23 - 1),
    exponent=st.integers(-44, 14),
)
def test_any_group_of_any_scale_comes_back(codes: list[int], fraction: int, exponent: int) -> None:
    scale = np.array([(exponent + 127 << 23) + fraction], dtype=np.int32).view(np.float32)
    values = product(np.array([codes]), scale)
    assert torch.equal(bits(decoded(NVFP4, values)), bits(values))


def test_powers_of_two_are_scales_too() -> None:
    """MXFP4, whose groups are of 32."""
    random = np.random.default_rng(1)
    scales = np.exp2(random.integers(-12, 3, 64)).astype(np.float32).repeat(2)
    values = product(random.integers(0, 16, (128, 16)), scales).view(4, 512)
    assert torch.equal(bits(decoded(NVFP4, values)), bits(values))


@pytest.mark.parametrize(
    "odd", [0.3, 5.0, 2.0**-6, -7.0, float("nan"), float("inf"), 2.0**-128, 2.0**20], ids=str
)
def test_a_weight_that_would_not_come_back_is_refused(odd: float) -> None:
    values = torch.ones(4, 64, dtype=torch.bfloat16)
    values[2, 3] = 1.5
    values[2, 40] = odd
    with pytest.raises(CodecError, match=r"^(1|15|16) of 256 weights are no numbers of NVFP4"):
        encoded(NVFP4, values)


def test_encoding_takes_memory_for_pieces_alone() -> None:
    values = published(8192, 1024)
    buffer = encoded(NVFP4, values)
    assert peak_bytes(lambda: NVFP4.encode(values, buffer)) < 32 * 2**20


def test_decoding_on_the_host_takes_what_is_planned() -> None:
    values = published(1280, 1024)
    buffer = encoded(NVFP4, values)
    peak = peak_bytes(lambda: NVFP4.decode(buffer, values))
    assert 0 < peak <= CODECS["nvfp4"].workspace_bytes


@pytest.fixture
def kernel() -> Iterator[ModuleType]:
    with interpreted(KERNEL) as found:
        yield found


@pytest.mark.parametrize("columns", [16, 2048, 2064, 5008])
def test_the_kernel_gives_every_bit_back(kernel: ModuleType, columns: int) -> None:
    values = published(3, columns)
    found = torch.full_like(values, 9).view(torch.int32)
    codes, scales = NVFP4.parts(encoded(NVFP4, values), values.numel(), values.dtype)
    kernel.unpack(codes, scales.view(torch.int16), found)
    assert torch.equal(found, values.view(torch.int32))


@pytest.mark.parametrize("capability", mostly_slow([75, 80, 86, 89, 90, 120], 75, 120))
def test_the_kernel_compiles_for_every_card(capability: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert able_to_compile(shared_bytes, capability) <= 8192


def shared_bytes(capability: int) -> int:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"BYTES": 1024, "GROUP_BYTES": 8, "FRACTION_BITS": 10, "LOWEST": 79}
    signature = {"codes": "*u8", "scales": "*i16", "out": "*i32", "num_bytes": "i32"}
    source = ASTSource(
        fn=importlib.import_module(KERNEL).unpack_pairs,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in range(4)},
    )
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return int(found.metadata.shared)
