"""Weights that were published in NVFP4, in 5 bits, without loss.

Such a weight is an e2m1 number c, +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}, times a scale x of 16 weights of
a row, in fp32, rounded to bf16. Published, x is a number in e4m3 times or over one of the tensor.
Experts are fused before they are encoded, so a tensor here has rows of several such tensors: it is
encoded from its values, and refused if any does not come back to the bit.

    codes   uint8 (N / 2,)    signs and 3 bits, of weights 2 j (low nibble) and 2 j + 1
    scales  16 bits (N / 16,) 6 of an exponent and 10 of a fraction

The scale that is kept need not be the published one: any with which all 16 weights come back is
exact. Codes are powers of two, or 1.5 times such, so at most two fractions of bf16 are in a group:
that of x and that of 1.5 x, each rounded. In bf16's units in the last place of x, the x that give
the first are an interval with ends at halves, and those of the second's are at thirds. Where both
overlap, they do by a sixth or more, and numbers with 11 significant bits are an eighth apart: one
is there. The product with such an x is exact in fp32, and bf16 rounds once.

So encoding is a lookup: the largest weight of a group is 4 or 6 (any other is one of these with a
smaller x), and its fraction with the distance to the other fraction says which, and x. Weights in
MXFP4 along rows are in this form too.

Rejected: the published bytes as they are, 4.5 bits. They would have to pass through transformers'
fusing of experts, and each tensor's own scale with them.
Source: nvidia-modelopt 0.47, torch/quantization/qtensor/nvfp4_tensor.py; compressed-tensors 0.20,
compressors/nvfp4/helpers.py.
"""

from offload.codecs._late import late
from offload.plan.facts.codec import WORKSPACE_BYTES, Codec

GROUP = 16  # weights that share a scale
FRACTION_BITS = 10  # of a scale, below which fp32 has 13 more
LOWEST = 79  # exponent of the smallest scale, 2**-48, as fp32 has it; the largest is 63 above


EXTENSION = Codec(
    doc="keeps weights that were published in NVFP4 in 5 bits, without loss",
    sizes=lambda num_weights, _: (-(-num_weights // 2), 2 * -(-num_weights // GROUP)),
    write=late("offload.codecs.nvfp4.groups", "encode"),
    read=late("offload.codecs.nvfp4.groups", "decode"),
    dtypes=("bfloat16",),
    published="nvfp4",
    fits=lambda shape: shape[-1] % GROUP == 0,
    is_exact=True,
    workspace_bytes=WORKSPACE_BYTES,
    is_automatic=True,
)
