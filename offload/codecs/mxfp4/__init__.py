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

from offload.codecs._late import late
from offload.plan.facts.codec import WORKSPACE_BYTES, Codec

GROUP = 32  # weights that share an exponent
HALF = GROUP // 2  # pairs of them, of which a byte has both
_NUM_DIMS = 3  # of experts


EXTENSION = Codec(
    doc="keeps experts that were published in MXFP4 in its 4.25 bits, without loss",
    sizes=lambda num_weights, _: (-(-num_weights // 2), -(-num_weights // GROUP)),
    write=late("offload.codecs.mxfp4.groups", "encode"),
    read=late("offload.codecs.mxfp4.groups", "decode"),
    dtypes=("bfloat16",),
    published="mxfp4",
    fits=lambda shape: len(shape) == _NUM_DIMS and shape[1] % GROUP == 0,
    is_exact=True,
    workspace_bytes=WORKSPACE_BYTES,
    is_automatic=True,
)
