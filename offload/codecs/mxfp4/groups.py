"""Encoding and decoding groups of MXFP4 (see the package for the format)."""

from collections.abc import Iterator, Sequence

from offload.codecs._pieces import HOST_PIECE, has_triton
from offload.codecs.mxfp4 import GROUP, HALF
from offload.errors import CodecError
from offload.tensors import Tensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_POSITIVE, *(-number for number in _POSITIVE))
"""The 16 numbers of FP4 (OCP Microscaling Formats 1.0, 5.3.3)."""
_MAGNITUDE = 0x7FFF  # of the bits of a bf16 number
_STEP, _ONE = 64, 128  # half a binade, and a binade, in these bits
_MOST = 252  # exponents with which 6 is finite


def encode(values: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the weights (E, K, N) as codes and exponents.

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


def decode(parts: Sequence[Tensor], values: Tensor) -> None:
    """Look codes up, then scale, which is exact; on a GPU in one kernel."""
    import torch

    codes, exponents = shaped(parts, values)
    if values.is_cuda and has_triton():
        from offload.codecs.mxfp4.kernel import unpack

        with torch.cuda.device(values.device):
            unpack(codes, exponents, values.view(torch.int16))
        return
    numbers = torch.tensor(E2M1, dtype=values.dtype, device=values.device)
    tables = numbers.repeat(16), numbers.repeat_interleave(16)  # by the low, the high nibble
    out = values.view(-1, 2, HALF, values.shape[2])
    for some in _pieces(values):
        index = codes[some].reshape(-1).int()
        scale = (exponents[some].to(torch.int16) << 7).view(torch.bfloat16)[:, None]
        for half, table in enumerate(tables):
            found = table.index_select(0, index).view(codes[some].shape)
            torch.mul(found, scale, out=out[some, half])


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
