"""The codec of experts that were published in MXFP4: every bit back, or a refusal."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offload.codecs.mxfp4.groups import shaped
from offload.engine.codec import form_named
from offload.errors import CodecError
from tests.compiled import able_to_compile
from tests.encoded import decoded, encoded, interpreted, peak_bytes
from tests.tiers import mostly_slow

MXFP4 = form_named("mxfp4")
KERNEL = "offload.codecs.mxfp4.kernel"


def published(
    num_experts: int, num_in: int, num_out: int, *, lowest: int = 100, highest: int = 130
) -> torch.Tensor:
    """Return what transformers makes of random blocks as gpt-oss publishes them: (E, K, N)."""
    random = torch.Generator().manual_seed(num_in + num_out)
    shape = (num_experts, num_out, num_in // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(lowest, highest + 1, shape, dtype=torch.uint8, generator=random)
    blocks[0, 0, 0], blocks[-1, -1, -1] = 0x00, 0x88  # zeros, and zeros below zero
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)


@pytest.mark.parametrize(
    "shape", [(1, 32, 1), (3, 64, 33), (2, 96, 128), (1, 2880, 40), (0, 64, 8), (2, 32, 5)]
)
def test_what_transformers_dequantises_comes_back_to_the_bit(shape: tuple[int, int, int]) -> None:
    values = published(*shape) if shape[0] else torch.empty(shape, dtype=torch.bfloat16)
    assert torch.equal(bits(decoded(MXFP4, values)), bits(values))
    first = encoded(MXFP4, values, garbage=0)
    assert torch.equal(first, encoded(MXFP4, values, garbage=255))
    assert first.numel() <= values.numel() * (1 / 2 + 1 / 32) + 512


def test_the_sign_of_a_zero_is_kept() -> None:
    values = published(2, 64, 16)
    found = decoded(MXFP4, values)
    assert (values == 0).sum() > 100
    assert torch.equal(found.signbit(), values.signbit())


@settings(deadline=None)
@given(
    exponent=st.integers(2, 252),
    codes=st.lists(st.integers(0, 15), min_size=32, max_size=32),
)
def test_any_group_of_any_exponent_comes_back(exponent: int, codes: list[int]) -> None:
    pairs = torch.tensor(codes, dtype=torch.uint8).view(16, 2)
    blocks = (pairs[:, 0] | (pairs[:, 1] << 4)).view(1, 1, 1, 16)
    scales = torch.tensor([[[exponent]]], dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    assert torch.equal(bits(decoded(MXFP4, values)), bits(values))


@pytest.mark.parametrize(
    "odd", [0.3, 5.0, 2.0**-6, -7.0, float("nan"), float("inf"), 2.0**-128], ids=str
)
def test_a_weight_that_would_not_come_back_is_refused(odd: float) -> None:
    values = torch.ones(1, 64, 4, dtype=torch.bfloat16)
    values[0, 40, 2] = odd
    with pytest.raises(CodecError, match=r"^(1|32) of 256 weights are no numbers of MXFP4"):
        encoded(MXFP4, values)


@pytest.mark.parametrize("shape", [(64, 64), (2, 40, 8), (128,), (2, 2, 32, 4)])
def test_weights_without_groups_of_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CodecError, match="are not in groups of 32 rows"):
        encoded(MXFP4, torch.zeros(shape, dtype=torch.bfloat16))


def test_decoding_on_the_host_takes_what_is_planned() -> None:
    from offload.plan.facts.codec import CODECS

    values = published(4, 320, 1024)
    buffer = encoded(MXFP4, values)
    peak = peak_bytes(lambda: MXFP4.decode(buffer, values))
    assert 0 < peak <= CODECS["mxfp4"].workspace_bytes


@pytest.fixture
def kernel() -> Iterator[ModuleType]:
    with interpreted(KERNEL) as found:
        yield found


@pytest.mark.parametrize("num_out", [1, 127, 128, 300])
def test_the_kernel_gives_every_bit_back(kernel: ModuleType, num_out: int) -> None:
    values = published(2, 64, num_out, lowest=2, highest=252)
    found = torch.full_like(values, 9).view(torch.int16)
    parts = MXFP4.parts(encoded(MXFP4, values), values.numel(), values.dtype)
    kernel.unpack(*shaped(parts, values), found)
    assert torch.equal(found, bits(values))


@pytest.mark.parametrize("capability", mostly_slow([75, 80, 86, 89, 90, 120], 75, 120))
def test_the_kernel_compiles_for_every_card(capability: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert able_to_compile(shared_bytes, capability) <= 8192


def shared_bytes(capability: int) -> int:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"HALF": 16, "COLUMNS": 128}
    signature = {"codes": "*u8", "exponents": "*u8", "out": "*i16", "num_columns": "i32"}
    source = ASTSource(
        fn=importlib.import_module(KERNEL).unpack_groups,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in range(4)},
    )
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return int(found.metadata.shared)
