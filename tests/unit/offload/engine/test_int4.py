"""The codec of weights that were published as integers of 4 bits: every bit back, or a refusal."""

import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType

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

INT4 = form_named("int4")
KERNEL = "offload.codecs.int4.kernel"
KINDS = (torch.bfloat16, torch.float16)


def product(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return (codes (..., G) less zeros (...)) times scales (...), rounded to their type, bf16."""
    exact = (codes - zeros[..., None]).double() * scales.double()[..., None]
    return exact.to(scales.dtype).bfloat16()


def published(
    rows: int, columns: int, kind: torch.dtype, *, group: int = 32, has_zeros: bool = True
) -> torch.Tensor:
    """Return random integers less zero points, times scales of groups."""
    random = torch.Generator().manual_seed(rows + columns)
    grouped = (rows, columns // group)
    codes = torch.randint(0, 16, (*grouped, group), generator=random)
    zeros = torch.randint(0, 16, grouped, generator=random) if has_zeros else torch.full(grouped, 8)
    scales = torch.exp2(torch.rand(grouped, generator=random) * 14 - 16).to(kind)
    return product(codes, zeros, scales).view(rows, columns)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("group", [32, 64, 128, 1024])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_what_is_published_comes_back_to_the_bit(
    kind: torch.dtype, group: int, has_zeros: bool
) -> None:
    values = published(96, 1024, kind, group=group, has_zeros=has_zeros)
    assert torch.equal(bits(decoded(INT4, values)), bits(values))
    first = encoded(INT4, values, garbage=0)
    assert torch.equal(first, encoded(INT4, values, garbage=255))
    assert first.numel() <= values.numel() * 4.75 / 8 + 768


@pytest.mark.parametrize("shape", [(32,), (2, 3, 64), (0, 32), (1030, 1024)])
def test_a_tensor_of_any_shape_comes_back(shape: tuple[int, ...]) -> None:
    values = published(int(np.prod(shape)) // 32, 32, torch.float16).view(shape)
    assert torch.equal(bits(decoded(INT4, values)), bits(values))


def test_one_tensor_may_have_scales_of_both_kinds() -> None:
    """As experts that are fused might; and more than one piece of it."""
    values = torch.cat([published(600, 1024, kind) for kind in (*KINDS, *KINDS)])
    values[7] = 0
    assert torch.equal(bits(decoded(INT4, values)), bits(values))


@settings(deadline=None, max_examples=200)
@given(
    integers=st.lists(st.integers(0, 15), min_size=1, max_size=6),
    zero=st.integers(0, 15),
    scale=st.integers(1, 0x7BFF),
    kind=st.sampled_from(KINDS),
    data=st.data(),
)
def test_any_group_of_any_scale_comes_back(
    integers: Sequence[int], zero: int, scale: int, kind: torch.dtype, data: st.DataObject
) -> None:
    """Also of few integers, none of which is 1, and of scales below the normal ones of fp16."""
    drawn = st.lists(st.sampled_from(list(integers)), min_size=32, max_size=32)
    codes = torch.tensor([data.draw(drawn)])
    scales = torch.tensor([scale], dtype=torch.int16).view(kind)
    if kind is torch.bfloat16:
        scales = scales.clamp(2.0**-100, 2.0**100)
    values = product(codes, torch.tensor([zero]), scales)
    if values.isfinite().all() and values.abs().max() < 65504:
        assert torch.equal(bits(decoded(INT4, values)), bits(values))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("part", mostly_slow(list(range(16)), 3))
def test_every_scale_is_kept_with_each_pair_of_integers(kind: torch.dtype, part: int) -> None:
    """Every fraction of a scale, with groups that hold two integers, of every pair there is."""
    fractions = 2 ** (10 if kind is torch.float16 else 7)
    own = np.arange(part * fractions // 16, (part + 1) * fractions // 16)
    scales = torch.from_numpy((1 + own / fractions) / 256).to(kind)
    pairs = torch.combinations(torch.arange(16), with_replacement=True)
    codes = pairs.repeat(1, 16).repeat(len(scales), 1)
    zeros = torch.from_numpy(np.random.default_rng(part).integers(0, 16, len(codes)))
    values = product(codes, zeros, scales.repeat_interleave(len(pairs)))
    assert torch.equal(bits(decoded(INT4, values)), bits(values))


@pytest.mark.parametrize("odd", [0.3, 16.0, -9.0, float("nan"), float("inf"), -0.0], ids=str)
def test_a_weight_that_would_not_come_back_is_refused(odd: float) -> None:
    values = torch.ones(4, 64, dtype=torch.bfloat16)
    values[2, 32:48] = 7
    values[2, 40] = odd
    with pytest.raises(CodecError, match=r"^\d+ of 256 weights are no integers of 4 bits"):
        encoded(INT4, values)


def test_encoding_takes_memory_for_pieces_alone() -> None:
    values = published(8192, 1024, torch.float16)
    buffer = encoded(INT4, values)
    assert peak_bytes(lambda: INT4.encode(values, buffer)) < 32 * 2**20


def test_decoding_on_the_host_takes_what_is_planned() -> None:
    values = published(1280, 1024, torch.float16)
    buffer = encoded(INT4, values)
    peak = peak_bytes(lambda: INT4.decode(buffer, values))
    assert 0 < peak <= CODECS["int4"].workspace_bytes


@pytest.fixture
def kernel() -> Iterator[ModuleType]:
    with interpreted(KERNEL) as found:
        yield found


@pytest.mark.parametrize("columns", [32, 2048, 2080, 5024])
def test_the_kernel_gives_every_bit_back(kernel: ModuleType, columns: int) -> None:
    values = torch.cat([published(3, columns, kind) for kind in KINDS])
    found = torch.full_like(values, 9).view(torch.int32)
    codes, scales, notes = INT4.parts(encoded(INT4, values), values.numel(), values.dtype)
    kernel.unpack(codes, scales.view(torch.int16), notes, found)
    assert torch.equal(found, values.view(torch.int32))


@pytest.mark.parametrize("capability", mostly_slow([75, 80, 86, 89, 90, 120], 75, 120))
def test_the_kernel_compiles_for_every_card(capability: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert able_to_compile(shared_bytes, capability) <= 8192


def shared_bytes(capability: int) -> int:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"BYTES": 1024, "GROUP_BYTES": 16, "IS_HALF": 16}
    signature = {
        **{"codes": "*u8", "scales": "*i16", "notes": "*u8", "out": "*i32"},
        "num_bytes": "i32",
    }
    source = ASTSource(
        fn=importlib.import_module(KERNEL).unpack_pairs,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in range(5)},
    )
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return int(found.metadata.shared)
