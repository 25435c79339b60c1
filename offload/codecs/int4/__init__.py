"""Weights that were published as integers of 4 bits, in 4.75 bits, without loss.

Such a weight is (code - zero point) * scale, with a zero point and a scale for a group of a row, of
32 weights or a multiple. The product is rounded to the type of the scale: to bf16, or to fp16 and
then to bf16. GPTQ and AWQ have fp16 scales; compressed-tensors has either. As in `nvfp4`, a tensor
is encoded from its values, and refused if any does not come back to the bit.

    codes   uint8 (N / 2,)     of weights 2 j (low nibble) and 2 j + 1
    scales  16 bits (N / 32,)  bf16 or fp16
    notes   uint8 (N / 32,)    the zero point, plus 16 where the scale is fp16

The integers of a group follow from its smallest weight that is not zero, which is 1, 2, ... or 15
scales: each hypothesis gives the scale to 2**-7, so the other integers, and their mean the few
scales that can be meant, of which each is tried. A smallest weight of 1 scale is tried first; most
groups have one.

Source: compressed-tensors 0.20, quantization/lifecycle/forward_helpers.py, `_dequantize`;
gptqmodel 7.7, nn_modules/qlinear/__init__.py, `dequantize_weight`.
"""

from offload.codecs._late import late
from offload.plan.facts.codec import WORKSPACE_BYTES, Codec

GROUP = 32  # weights that share a scale and a zero point
IS_HALF = 16  # of a note: the scale is fp16


EXTENSION = Codec(
    doc="keeps weights that were published as integers of 4 bits in 4.75 bits, without loss",
    sizes=lambda n, _: (-(-n // 2), 2 * -(-n // GROUP), -(-n // GROUP)),
    write=late("offload.codecs.int4.groups", "encode"),
    read=late("offload.codecs.int4.groups", "decode"),
    dtypes=("bfloat16",),
    published="int4",
    fits=lambda shape: shape[-1] % GROUP == 0,
    is_exact=True,
    workspace_bytes=WORKSPACE_BYTES,
    is_automatic=True,
)
