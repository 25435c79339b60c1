"""Experts that were published in MXFP4, in as many bytes as there, without loss.

Such weights are e2m1 numbers, +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}, in groups of 32 along the features
in, each group times one power of two. gpt-oss decodes them into (E, K, N), K features in and N out,
so a group is 32 weights of a column. Their values determine codes and exponents, but for a factor
that both can hold: the exponent of a group is the one with which its largest weight is 4 or 6, or
the smallest. So a tensor is encoded from its values, whatever file they came from, and refused if
any does not come back to the bit.

    codes      uint8 (E * K / 32, 16, N)   signs and 3 bits, of rows j (low nibble) and j + 16
    exponents  uint8 (E * K / 32, N)       of two, plus 127

With s an exponent as stored and c a code above 1, the bits of the bf16 weight are the sign and
(s << 7) + (c << 6) - 128; of code 1, (s << 7) - 128. No exponent is below 1, so that none of these
is a denormal.

Rejected: the published bytes as they are (experts, N, K / 32, 16), which decode into a transposed
tensor: a column of the result would be written at a time.
Source: OCP Microscaling Formats 1.0, 5.3.3 and 6.3; transformers 5.24, integrations/mxfp4.py.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec

from offload.codecs._pieces import HOST_PIECE
from offload.errors import CodecError
from offload.plan.facts.codec import WORKSPACE_BYTES, Codec
from offload.tensors import Tensor

GROUP = 32  # weights that share an exponent
HALF = GROUP // 2
_MAGNITUDE = 0x7FFF  # of the bits of a bf16 number
_STEP, _ONE = 64, 128  # half a binade, and a binade, in these bits
_MOST = 252  # exponents with which 6 is finite


def _sizes(num_weights: int, _: int) -> tuple[int, ...]:
    return -(-num_weights // 2), -(-num_weights // GROUP)


def _write(values: Tensor, parts: Sequence[Tensor]) -> None:
    """Encode.

    Raises:
        CodecError: A weight would not come back to the bit, or groups are not of rows.
    """
    import torch

    if values.ndim != 3 or values.shape[1] % GROUP:
        raise _unfit(f"weights of {tuple(values.shape)} are not in groups of {GROUP} rows")
    bits = values.reshape(-1, GROUP, values.shape[2]).view(torch.int16)
    codes, exponents = shaped(parts, values)
    num_unfit = 0
    for some in _pieces(values):
        magnitude = bits[some] & _MAGNITUDE
        exponent = ((magnitude.amax(1) >> 7) - 2).clamp_(1, _MOST)
        exponents[some] = exponent.to(torch.uint8)
        above = magnitude - (exponent << 7)[:, None]  # in steps of half a binade, but for zeros
        is_zero, is_half = magnitude == 0, above == -_ONE
        is_code = ((above & (_STEP - 1)) == 0) & (above >= 0) & (above <= 5 * _STEP)
        num_unfit += int((~(is_zero | is_half | is_code)).sum())
        code = ((above + _ONE) >> 6).masked_fill_(is_half, 1).masked_fill_(is_zero, 0)
        code |= (bits[some] >> 12) & 8
        codes[some] = (code[:, :HALF] | (code[:, HALF:] << 4)).to(torch.uint8)
    if num_unfit:
        raise _unfit(f"{num_unfit} of {values.numel()} weights are no numbers of MXFP4")


def _unfit(what: str) -> CodecError:
    return CodecError(
        what,
        limit="mxfp4 keeps experts that were published in it, as those of gpt-oss, to the bit",
        hint='`codec="native"` keeps any weights as they are',
    )


def _read(parts: Sequence[Tensor], values: Tensor) -> None:
    """Look codes up, then scale, which is exact."""
    import torch

    codes, exponents = shaped(parts, values)
    if values.is_cuda and _has_triton():
        from offload.codecs.mxfp4.kernel import unpack

        with torch.cuda.device(values.device):
            unpack(codes, exponents, values.view(torch.int16))
        return
    numbers = torch.tensor(_NUMBERS, dtype=values.dtype, device=values.device)
    tables = numbers.repeat(16), numbers.repeat_interleave(16)  # by the low, the high nibble
    out = values.view(-1, 2, HALF, values.shape[2])
    for some in _pieces(values):
        index = codes[some].reshape(-1).int()
        scale = (exponents[some].to(torch.int16) << 7).view(torch.bfloat16)[:, None]
        for half, table in enumerate(tables):
            found = table.index_select(0, index).view(codes[some].shape)
            torch.mul(found, scale, out=out[some, half])


_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = (*_POSITIVE, *(-number for number in _POSITIVE))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def shaped(parts: Sequence[Tensor], values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of an encoded tensor, each in its shape."""
    codes, exponents = parts
    return codes.view(-1, HALF, values.shape[2]), exponents.view(-1, values.shape[2])


def _pieces(values: Tensor) -> Iterator[slice]:
    """Yield ranges of groups with temporaries of a few MB."""
    num_groups = values.shape[0] * values.shape[1] // GROUP
    size = max(1, HOST_PIECE // (GROUP * max(1, values.shape[2])))
    for start in range(0, num_groups, size):
        yield slice(start, min(start + size, num_groups))


EXTENSION = Codec(
    doc="keeps experts that were published in MXFP4 in its 4.25 bits, without loss",
    sizes=_sizes,
    write=_write,
    read=_read,
    dtypes=("bfloat16",),
    published="mxfp4",
    is_exact=True,
    workspace_bytes=WORKSPACE_BYTES,
    is_automatic=True,
)
