"""Encoding and decoding groups of integers of 4 bits (see the package for the format)."""

from collections.abc import Sequence

from offload.codecs._pieces import HOST_PIECE, blocks_of, has_triton, pieces
from offload.codecs.int4 import GROUP, IS_HALF
from offload.errors import CodecError
from offload.tensors import Tensor

_MOST = 15  # the largest code
# Candidates for a scale after the first, to either side in turn. The first is the mean over a group
# where roundings cancel: it is off by at most 2**-8 and, of fp16, 2**-11 of itself, which are a
# place of bf16 or 10 of fp16.
_NUM_STEPS = {False: 2, True: 20}


def encode(values: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the weights (..., K) as codes, scales and notes of rows.

    Raises:
        CodecError: A weight would not come back to the bit, or rows are not of whole groups.
    """
    import torch

    if not values.ndim or values.shape[-1] % GROUP:
        raise _unfit(f"weights of {tuple(values.shape)} are not in groups of {GROUP} of a row")
    flat, codes, scales, notes = values.reshape(-1), parts[0], parts[1].view(torch.int16), parts[2]
    kinds = [False, True]  # whether a scale is fp16: what most groups of the last piece had first
    for piece in pieces(flat.numel(), flat.device, most=HOST_PIECE):
        groups = blocks_of(piece, GROUP)
        own = codes[blocks_of(piece, 2)], scales[groups], notes[groups]
        weights = flat[piece].view(-1, GROUP)
        _encode_groups(weights, *own, kinds)
        num_unfit = int((_decoded(*own).view(torch.int16) != weights.view(torch.int16)).sum())
        if num_unfit:  # of others, each hypothesis would be tried too
            raise _unfit(f"{num_unfit} of {flat[piece].numel()} weights are no integers of 4 bits")
        kinds.sort(reverse=2 * int((own[2] >= IS_HALF).sum()) > len(own[2]))


def _unfit(what: str) -> CodecError:
    return CodecError(
        what,
        limit="int4 keeps weights that were published in groups of such integers, to the bit",
        hint='`codec="native"` keeps any weights as they are',
    )


def _encode_groups(
    weights: Tensor, codes: Tensor, scales: Tensor, notes: Tensor, kinds: Sequence[bool]
) -> None:
    """Write codes, scales and notes of groups (G, 32), which are right if there are any."""
    import torch

    packed = codes.view(-1, GROUP // 2)
    left = torch.arange(len(weights), device=weights.device)
    for least in range(1, _MOST + 1):
        for is_half in kinds:
            found, integers, scale = _tried(_at(weights, left), least, is_half=is_half)
            zero = -integers.amin(1, keepdim=True).clamp_(max=0)
            code = integers.add_(zero).to(torch.uint8)
            packed[left] = code[:, ::2] | (code[:, 1::2] << 4)
            scales[left] = scale
            notes[left] = (zero.view(-1) + IS_HALF * is_half).to(torch.uint8)
            left = left[~found]
            if not len(left):
                return


def _tried(weights: Tensor, least: int, *, is_half: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return what groups are if the smallest weight that is not zero is so many scales.

    Args:
        weights: bf16 (G, 32).
        least: How many.
        is_half: Whether a scale is fp16.

    Returns:
        Whether each group comes back so (G,), its integers in fp32 (G, 32), its scale as int16.
    """
    import torch

    kind = torch.float16 if is_half else torch.bfloat16
    magnitude = weights.view(torch.int16) & 0x7FFF
    smallest = ((magnitude - 1) & 0x7FFF).amin(1, keepdim=True) + 1  # zeros come last
    wide = weights.float()
    integers = wide.mul(least / smallest.view(torch.bfloat16).float()).round_()
    integers.nan_to_num_(0, 0, 0)  # where all are zero
    mean = wide.abs().sum(1) / integers.abs().sum(1).clamp_(min=1)
    scales = mean.to(kind).view(torch.int16)
    found = torch.zeros_like(mean, dtype=torch.bool)
    span = integers.amax(1).clamp_(min=0) - integers.amin(1).clamp_(max=0)
    left = (span <= _MOST).nonzero().view(-1)
    for step in range(_NUM_STEPS[is_half] + 1):
        if not len(left):
            break
        scale = scales[left] + (step if step % 2 else -step)
        product = _at(integers, left) * scale.view(kind).float()[:, None]
        rounded = (product.half().float() if is_half else product).bfloat16()
        is_other = rounded.view(torch.int16) != _at(weights, left).view(torch.int16)
        is_equal = is_other.view(torch.int64).amax(1) == 0
        scales[left], found[left] = scale, is_equal
        left = left[~is_equal]
    return found, integers, scales


def _at(groups: Tensor, places: Tensor) -> Tensor:
    """Return some groups, in order; all of them are not copied."""
    return groups if len(places) == len(groups) else groups[places]


def decode(parts: Sequence[Tensor], values: Tensor) -> None:
    """Subtract zero points, scale and round; on a GPU in one kernel."""
    import torch

    codes, scales, notes = parts[0], parts[1].view(torch.int16), parts[2]
    if values.is_cuda and has_triton():
        from offload.codecs.int4.kernel import unpack

        with torch.cuda.device(values.device):
            unpack(codes, scales, notes, values.view(torch.int32))
        return
    flat = values.view(-1)
    for piece in pieces(flat.numel(), flat.device, most=HOST_PIECE):
        groups = blocks_of(piece, GROUP)
        own = codes[blocks_of(piece, 2)], scales[groups], notes[groups]
        flat[piece].view(-1, GROUP).copy_(_decoded(*own))


def _decoded(codes: Tensor, scales: Tensor, notes: Tensor) -> Tensor:
    """Return the weights of groups, bf16 (G, 32)."""
    import torch

    numbers = torch.arange(16, dtype=torch.float32, device=codes.device)
    pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)
    found = pairs.index_select(0, codes.int()).view(-1, GROUP)
    is_half = notes >= IS_HALF
    scale = torch.where(is_half, scales.view(torch.float16).float(), scales.view(torch.bfloat16))
    found.sub_((notes & _MOST)[:, None]).mul_(scale[:, None])
    return torch.where(is_half[:, None], found.half().bfloat16(), found.bfloat16())
