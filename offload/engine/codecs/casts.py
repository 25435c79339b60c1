"""Weights rounded to another 16-bit type."""

import torch

from offload.engine.codecs.layout import check_dtype, is_finite, pieces
from offload.errors import CodecError
from offload.plan.facts.codec import CodecName


class Cast:
    """Each weight rounded to nearest, ties to even.

    Error: none if the weights already have that dtype. Otherwise the relative error is at most
    2**-8 in bf16 and 2**-11 in fp16: half a unit of 8 and 11 significant bits (IEEE 754-2019,
    4.3.1). Below fp16's normal numbers (2**-14) the absolute error is at most 2**-25; bf16 weights
    are exact in fp16 from 2**-17 on.

    Args:
        name: The codec's name.
        dtype: What is written.
    """

    def __init__(self, name: CodecName, dtype: torch.dtype) -> None:
        self.name: CodecName = name
        self._dtype = dtype

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return two bytes for each weight."""
        check_dtype(self.name, dtype)
        return shape.numel() * self._dtype.itemsize

    def workspace_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return 0: the copy itself converts."""
        return 0

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Round.

        Raises:
            CodecError: Finite weights are too large for the dtype.
        """
        assert encoded.numel() == self.num_bytes(values.shape, values.dtype)
        flat, rounded = values.detach().reshape(-1), encoded.view(self._dtype)
        rounded.copy_(flat)
        if values.dtype is self._dtype or is_finite(rounded):
            return
        num_lost = sum(
            int((rounded[piece].isinf() & flat[piece].isfinite()).sum())
            for piece in pieces(flat.numel(), flat.device)
        )
        if num_lost:
            raise CodecError(
                f"{num_lost} of {flat.numel()} weights are too large for {self.name}",
                limit=f"{self.name} ends at {torch.finfo(self._dtype).max:g}",
                hint='`codec="native"`',
            )

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Copy, converting."""
        values.copy_(encoded.view(self._dtype).view(values.shape), non_blocking=True)
