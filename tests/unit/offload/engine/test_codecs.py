"""Codecs: values, bytes and packing."""

import importlib
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.codecs import fp8, int8, nf4
from offload.engine.codec import form_named
from offload.errors import CodecError
from offload.plan.facts.codec import CODECS
from tests.compiled import able_to_compile
from tests.encoded import decoded, encoded, interpreted, peak_bytes
from tests.tiers import mostly_slow

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOSSY: tuple[str, ...] = ("fp8", "int8", "nf4")
PAIRS = [
    (name, dtype)
    for name in CODECS
    for dtype in DTYPES
    if not CODECS[name].published and (name != "bf16_packed" or dtype is torch.bfloat16)
]
EXACT = [("native", dtype) for dtype in DTYPES] + [
    ("bf16", torch.bfloat16),
    ("bf16_packed", torch.bfloat16),
    ("fp16", torch.float16),
]
SHAPES = [(), (0,), (1,), (7,), (64,), (257,), (3, 100), (5, 0, 2), (4, 33, 65), (2**20 + 301,)]
BYTES_PER_WEIGHT: dict[str, float] = {  # of large tensors; native has that of the dtype
    "bf16": 2,
    "fp16": 2,
    "fp8": 1 + 1 / 256,
    "int8": 1 + 4 / 256,
    "nf4": 0.51587,
    "bf16_packed": 2 * 0.76367,
}
EXPERTS = torch.Size([128, 1536, 2048])  # gate_up_proj of a layer of Qwen3-30B-A3B
SPECIAL = {
    torch.bfloat16: [0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0001, 0x807F, 0x8000, 0x7F7F, 0x0080],
    torch.float16: [0x7E01, 0xFFFF, 0x7C00, 0xFC00, 0x0001, 0x83FF, 0x8000, 0x7BFF, 0x0400],
}


def normal(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 0.02) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16 if values.dtype.itemsize == 2 else torch.int32)


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_every_byte_is_written_and_equal_weights_give_equal_bytes(
    name: str, dtype: torch.dtype
) -> None:
    codec, weight_bytes = form_named(name), BYTES_PER_WEIGHT.get(name, dtype.itemsize)
    for shape in SHAPES:
        values = normal(shape, dtype)
        first = encoded(codec, values, garbage=0)
        assert torch.equal(first, encoded(codec, values, garbage=255)), shape
        assert first.numel() <= values.numel() * weight_bytes + 4096, shape


@pytest.mark.parametrize(("name", "dtype"), EXACT)
def test_exact_codecs_give_every_bit_back(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        values = normal(shape, dtype)
        if dtype in SPECIAL:
            special = torch.tensor(SPECIAL[dtype]).to(torch.int16)[: values.numel()]
            values.view(-1).view(torch.int16)[: len(special)] = special
        assert torch.equal(bits(decoded(form_named(name), values)), bits(values)), shape


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_weights_that_do_not_lie_in_order_are_encoded_in_order(
    name: str, dtype: torch.dtype
) -> None:
    codec, values = form_named(name), normal((130, 70), dtype).T
    assert torch.equal(encoded(codec, values), encoded(codec, values.contiguous()))


def half_unit(values: torch.Tensor) -> torch.Tensor:
    """Half the distance to the next number, at most, in the dtype of `values`."""
    info = torch.finfo(values.dtype)
    return values.double().abs() * (info.eps / 2) + info.smallest_normal * info.eps / 2


def largest(values: torch.Tensor, block: int) -> torch.Tensor:
    """The largest magnitude of each block, for each of its members; in float64."""
    flat = values.double().abs().view(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    return padded.amax(1).repeat_interleave(block)[: flat.numel()].view(values.shape)


def bound(name: str, values: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The error that a codec's docstring allows each weight."""
    truth, rounding = values.double().abs(), half_unit(found)
    if name == "bf16":
        return torch.zeros_like(truth) if values.dtype is torch.bfloat16 else truth * 2**-8 + 1e-40
    if name == "fp16":
        return torch.where(truth < 2**-14, 2.0**-25, truth * 2**-11)
    if name == "fp8":
        small = largest(values, fp8.BLOCK) * 2**-17 + 2.0**-136
        small += 2.0**-25 if values.dtype is torch.float16 else 0
        return torch.maximum(truth * 2**-4, small)
    if name == "int8":
        return largest(values, int8.BLOCK) / 250 + rounding
    scales = largest(values, nf4.BLOCK).view(-1)[:: nf4.BLOCK]
    apart = largest(scales - scales.mean(), nf4.NESTED_BLOCK) / 125
    of_scale = apart.repeat_interleave(nf4.BLOCK)[: values.numel()].view(values.shape)
    return largest(values, nf4.BLOCK) * 0.152 + of_scale + rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["bf16", "fp16", *LOSSY])
def test_errors_stay_within_the_stated_bounds(name: str, dtype: torch.dtype) -> None:
    ends = torch.finfo({"fp16": torch.float16}.get(name, dtype)).max
    for scale in (1e-36, 1e-6, 1e-4, 0.02, 1.0, 3e3, 1e30):
        if scale > ends / 10:
            continue
        values = normal((3, 111, 131), dtype, scale)
        values[1, 10:40] = 0  # whole blocks
        values[2, :, ::5] *= 1e-5
        found = decoded(form_named(name), values)
        error = (found.double() - values.double()).abs()
        allowed = bound(name, values, found)
        assert (error <= allowed).all(), (scale, (error - allowed).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*LOSSY, "bf16", "fp16"])
def test_zeros_stay_zeros(name: str, dtype: torch.dtype) -> None:
    zeros = torch.zeros(5000, dtype=dtype)
    assert torch.equal(decoded(form_named(name), zeros), zeros)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_does_not_round_the_largest_numbers_up_to_infinity(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -1.0, 0.5], dtype=dtype) * torch.finfo(dtype).max
    found = decoded(form_named("fp8"), values).double()
    assert ((found - values.double()).abs() <= values.double().abs() * 2**-4).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_rounds_once(dtype: torch.dtype) -> None:
    once = decoded(form_named("fp8"), normal((1000,), dtype))
    assert torch.equal(decoded(form_named("fp8"), once), once)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_weights_that_would_spoil_their_block_are_refused(name: str, dtype: torch.dtype) -> None:
    match = rf"2 of 2000 weights are not finite; {name} scales"
    for bad in (float("nan"), float("inf"), float("-inf")):
        values = normal((40, 50), dtype)
        values[3, 4] = values[39, 49] = bad
        with pytest.raises(CodecError, match=match):
            encoded(form_named(name), values)


@pytest.mark.parametrize(
    ("name", "dtype", "value", "limit"),
    [
        ("fp16", torch.bfloat16, 70000.0, "65504"),
        ("fp16", torch.float32, -65520.0, "65504"),
        ("bf16", torch.float32, 3.4e38, r"3\.38953e\+38"),
    ],
)
def test_weights_too_large_for_a_cast_are_refused(
    name: str, dtype: torch.dtype, value: float, limit: str
) -> None:
    values = torch.tensor([0.0, value, float("inf"), float("nan")], dtype=dtype)
    match = rf"1 of 4 weights are too large for {name}; {name} ends at {limit}"
    with pytest.raises(CodecError, match=match):
        encoded(form_named(name), values)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in CODECS if name != "native"),
        ("bf16_packed", torch.float16),
    ],
)
def test_other_dtypes_are_refused_before_any_weight_is_read(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(CodecError, match=rf"weights of {dtype} cannot .* as {name}; {name} takes"):
        form_named(name).num_bytes(torch.Size([8]), dtype)


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_a_weight_of_a_large_tensor_takes_what_is_published(name: str, dtype: torch.dtype) -> None:
    num_bytes = form_named(name).num_bytes(EXPERTS, dtype)
    assert num_bytes / EXPERTS.numel() == pytest.approx(
        BYTES_PER_WEIGHT.get(name, dtype.itemsize), rel=1e-5
    )


@pytest.mark.parametrize("num_weights", [100, 2**21 + 129])
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_decoding_allocates_what_is_planned_and_encoding_little(
    name: str, dtype: torch.dtype, num_weights: int
) -> None:
    codec, values = form_named(name), normal((num_weights,), dtype)
    buffer = encoded(codec, values)
    assert peak_bytes(lambda: codec.encode(values, buffer)) < 32 * 2**20
    assert peak_bytes(lambda: codec.decode(buffer, values)) <= CODECS[name].workspace_bytes


class DeviceOnly(TorchDispatchMode):
    """Counts what lives on a device that computes nothing, and lets no host tensor near it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        assert all(tensor.is_meta for tensor in given), func
        if func.name() == "bitsandbytes::dequantize_4bit.out":
            # of no device: bitsandbytes' check of `out` takes a list for another shape (0.50)
            packed, absmax, block, _, shape, dtype, out = args
            assert list(out.shape) == shape
            assert out.dtype is dtype
            assert absmax.shape == (-(-out.numel() // block),)
            assert packed.shape == (-(-out.numel() // 2),)
            return None
        result = func(*args, **(kwargs or {}))
        for tensor in [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]:
            storage = tensor.untyped_storage()
            if all(storage._cdata != other.untyped_storage()._cdata for other in given):
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._made.values()))
        return result


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_decoding_on_a_device_asks_nothing_of_the_host(name: str, dtype: torch.dtype) -> None:
    codec, shape = form_named(name), EXPERTS
    values = torch.empty(shape, dtype=dtype, device="meta")
    buffer = torch.empty(codec.num_bytes(shape, dtype), dtype=torch.uint8, device="meta")
    importlib.import_module("bitsandbytes")  # which makes tables
    with DeviceOnly() as counted:
        codec.decode(buffer, values)
    assert counted.peak_bytes <= CODECS[name].workspace_bytes


@pytest.mark.gpu
@pytest.mark.filterwarnings("default:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_a_card_decodes_as_the_host_does_and_encodes_within_the_bounds(
    name: str, dtype: torch.dtype
) -> None:
    codec, values = form_named(name), normal((33, 1000, 101), dtype)
    buffer = encoded(codec, values)
    found = torch.empty_like(values, device="cuda")
    codec.decode(buffer.cuda(), found)
    assert torch.equal(found.cpu(), decoded(codec, values))
    on_card = torch.empty_like(buffer, device="cuda")
    codec.encode(values.cuda(), on_card)
    codec.decode(on_card, found)
    error = (found.cpu().double() - values.double()).abs()
    allowed = 0 if (name, dtype) in EXACT else bound(name, values, found.cpu())
    assert (error <= allowed).all()


# ---------------------------------------------------------------------------------------------- nf4


NF4_SHAPES = [(2,), (64,), (130,), (3, 100), (4, 33, 66), (2**20 + 1000, 2)]  # the last: in pieces
NF4 = form_named("nf4")


def weights(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(7)
    columns = torch.linspace(0.001, 0.05, shape[-1])
    return (torch.randn(shape) * columns).to(dtype)


def by_bitsandbytes(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Encode by bitsandbytes, as it is called for a base of QLoRA."""
    return bnb.quantize_4bit(values, compress_statistics=True, quant_type="nf4", blocksize=64)


def written(values: torch.Tensor) -> torch.Tensor:
    """Return what bitsandbytes makes of a weight, part by part as the codec lays it out."""
    packed, state = by_bitsandbytes(values)
    encoded = torch.zeros(NF4.num_bytes(values.shape, values.dtype), dtype=torch.uint8)
    parts = (packed, state.absmax, state.state2.absmax, state.state2.code, state.offset)
    targets = NF4.parts(encoded, values.numel(), values.dtype)
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part.reshape(-1).view(torch.uint8))
    return encoded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", NF4_SHAPES, ids=str)
def test_bytes_and_weights_are_those_of_bitsandbytes(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = weights(shape, dtype)
    packed, state = by_bitsandbytes(values)
    ours, found = encoded(NF4, values), torch.empty_like(values)
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
    assert torch.equal(encoded(NF4, weights), written(weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_weights", [1, 65, 2**20 + 63])
def test_an_odd_number_of_weights_is_decoded_by_the_same_rule(
    num_weights: int, dtype: torch.dtype
) -> None:
    values = weights((num_weights,), dtype)
    packed, state = by_bitsandbytes(values)
    ours, found = encoded(NF4, values), torch.empty_like(values)
    NF4.decode(ours, found)
    absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    packed = packed.view(-1).long()
    codes = state.code[torch.stack((packed >> 4, packed & 15), 1).view(-1)[:num_weights]]
    assert torch.equal(found, (codes * absmax.repeat_interleave(64)[:num_weights]).to(dtype))


# ------------------------------------------------------------------------------------------- packed


PACKED = form_named("bf16_packed")
KERNEL = "offload.codecs.bf16_packed.kernel"


def normal_packed(num_weights: int) -> torch.Tensor:
    torch.manual_seed(num_weights)
    return (torch.randn(num_weights) * 0.02).bfloat16()


def assert_exact(values: torch.Tensor) -> None:
    assert torch.equal(bits(decoded(PACKED, values)), bits(values))


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
    assert_exact(with_odd_ones(normal_packed(num_weights), every=300))


def test_zeros_cost_no_escape() -> None:
    values = normal_packed(100 * 256).view(100, 256)
    values[::2] = 0  # whole blocks
    values[:, ::3] = -0.0
    values[:, 1::3] = 1e-40  # denormal
    assert_exact(values)


def test_one_large_weight_does_not_make_its_block_escape() -> None:
    values = normal_packed(100 * 256)
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
        encoded(PACKED, values)


def test_positions_are_wide_enough_for_very_large_tensors() -> None:
    sizes = [PACKED.num_bytes(torch.Size([n]), torch.bfloat16) for n in (2**31 - 256, 2**31)]
    assert sizes[0] / 2**31 == pytest.approx(1.5 + 7 / 256, rel=1e-5)
    assert sizes[1] / 2**31 == pytest.approx(1.5 + 11 / 256, rel=1e-5)


@pytest.fixture
def kernel() -> Iterator[ModuleType]:
    with interpreted(KERNEL) as found:
        yield found


@pytest.mark.thorough
@pytest.mark.parametrize("num_weights", [1, 255, 256, 2047, 2048, 2049, 70001])
def test_the_kernel_gives_every_bit_back(kernel: ModuleType, num_weights: int) -> None:
    from offload.codecs.bf16_packed import typed

    values = with_odd_ones(normal_packed(num_weights), every=300)
    found = torch.full((num_weights,), 9, dtype=torch.int16)
    parts = PACKED.parts(encoded(PACKED, values), num_weights, values.dtype)
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
    values = with_odd_ones(normal_packed(num_weights), every=300)
    found = torch.empty_like(values, device="cuda")
    PACKED.decode(encoded(PACKED, values).cuda(), found)
    assert torch.equal(found.cpu().view(torch.int16), values.view(torch.int16))
