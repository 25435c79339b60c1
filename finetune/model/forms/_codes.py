"""Weights in 4 or 8 bits with scales of groups: looked up, less a zero point, times a scale.

Rows are decoded a few at a time, as looking codes up takes ten bytes per weight.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from offload.codecs.mxfp4.groups import E2M1
from offload.tensors import Tensor, dtype

E4M3_MAX = 448.0
_PIECE = 2**20  # weights


def looked_up(codes: Tensor, numbers: Sequence[float], kind: dtype) -> Tensor:
    """Return the numbers of codes.

    Args:
        codes: Bytes (N, M), of 16 numbers two in a byte, the low four bits first.
        numbers: The value of each code: 16 of them, or 256.
        kind: The type of the result.

    Returns:
        (N, M) or (N, 2 * M).
    """
    import torch

    table = torch.tensor(numbers, dtype=kind)
    if len(numbers) == len(E2M1):
        table = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=1)
    found = table.view(256, -1)[codes.int()]
    return found.flatten(1)


def e2m1_of(values: Tensor) -> Tensor:
    """Return the codes of the nearest of 16 numbers, two in a byte: uint8 (N, M / 2) for (N, M)."""
    import torch

    ends = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1[: len(E2M1) // 2])])
    codes = torch.bucketize(values.abs(), ends, out_int32=True) + 8 * (values < 0)
    return in_pairs(codes)


def in_pairs(codes: Tensor) -> Tensor:
    """Return codes (N, M) of 4 bits as bytes, the low four bits first: uint8 (N, M / 2)."""
    import torch

    return (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)


def nvfp4_of(values: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (N, K / 2) of weights (N, K), and scales in e4m3 (N, K / 16) of a unit."""
    import torch

    groups = values.view(len(values), -1, 16)
    wanted = groups.abs().amax(-1) / (E2M1[7] * unit)
    scales = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    grid = (scales.float() * unit).masked_fill_(scales.float() == 0, torch.inf)
    return e2m1_of((groups / grid[..., None]).flatten(1)), scales


def decode(
    codes: Tensor,
    numbers: Sequence[float],
    scales: Tensor,
    *,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
    num_columns: int,
    kind: dtype,
) -> Tensor:
    """Return weights (N, num_columns): numbers less zero points, times scales, rounded once.

    Args:
        codes: Bytes in the form of `looked_up`; a row may end in some that are of no column.
        numbers: The value of each code.
        scales: (N, G) for G groups of columns, in the type of the product.
        zeros: Zero points (N, G), which are subtracted; None for none.
        groups: (num_columns,), the group of each column; None for as many in each, in order.
        num_columns: Weights of a row.
        kind: The type of the result.

    Raises:
        ValueError: There are not as many codes or scales as that.
    """
    import torch

    num_rows, num_groups = scales.shape
    num_codes = codes.shape[1] * (2 if len(numbers) == len(E2M1) else 1)
    size = 1 if groups is not None else num_columns // num_groups
    is_known = None if groups is None else (groups >= 0) & (groups < num_groups)
    num_known = num_groups * size if is_known is None else int(is_known.sum())
    if num_rows != len(codes) or num_codes < num_columns or num_known != num_columns:
        raise ValueError(
            f"has scales {tuple(scales.shape)} and {num_codes} codes a row for weights"
            f" {(len(codes), num_columns)}"
        )
    weights = torch.empty(num_rows, num_columns, dtype=kind)
    for some in pieces(num_rows, num_columns):
        found = looked_up(codes[some], numbers, scales.dtype)[:, :num_columns]
        found = found.reshape(len(found), -1, size)
        own = slice(None) if groups is None else groups.long()
        if zeros is not None:
            found -= zeros[some][:, own, None].to(found.dtype)
        weights[some] = found.mul_(scales[some][:, own, None]).flatten(1)
    return weights


def pieces(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Yield ranges of rows with about a million weights each."""
    size = max(1, _PIECE // max(1, num_columns))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))
