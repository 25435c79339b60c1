"""Weights in another dtype.

Each is rounded to nearest, ties to even. Error: none if the weights already have that dtype.
Otherwise the relative error is at most 2**-8 in bf16 and 2**-11 in fp16: half a unit of 8 and 11
significant bits (IEEE 754-2019, 4.3.1). Below fp16's normal numbers (2**-14) the absolute error is
at most 2**-25; bf16 weights are exact in fp16 from 2**-17 on.
"""

from collections.abc import Sequence

from offload.codecs._pieces import is_finite, pieces
from offload.errors import CodecError
from offload.plan.facts.codec import Codec
from offload.tensors import Tensor


def cast(name: str, dtype: str, *, is_exact: bool) -> Codec:
    """Return the codec of weights in a dtype of two bytes."""

    def write(values: Tensor, parts: Sequence[Tensor]) -> None:
        import torch

        flat, rounded = values.reshape(-1), parts[0].view(getattr(torch, dtype))
        rounded.copy_(flat)
        if flat.dtype is rounded.dtype or is_finite(rounded):
            return
        num_lost = sum(
            int((rounded[piece].isinf() & flat[piece].isfinite()).sum())
            for piece in pieces(flat.numel(), flat.device)
        )
        if num_lost:
            raise CodecError(
                f"{num_lost} of {flat.numel()} weights are too large for {name}",
                limit=f"{name} ends at {torch.finfo(rounded.dtype).max:g}",
                hint='`codec="native"`',
            )

    def read(parts: Sequence[Tensor], values: Tensor) -> None:
        import torch

        values.view(-1).copy_(parts[0].view(getattr(torch, dtype)), non_blocking=True)

    return Codec(
        doc=f"is {dtype}",
        sizes=lambda num_weights, _: (2 * num_weights,),
        write=write,
        read=read,
        same_as=dtype,
        is_exact=is_exact,
    )
