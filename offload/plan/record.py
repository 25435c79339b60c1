"""What a layer takes as one flat record, byte for byte.

Its tensors lie side by side, each written by the codec or as it computes, and each part of each
begins at a multiple of `ALIGN_BYTES`; a record ends with a page. In a tiny layer that is a tenth of
it. Small parameters that the facts do not tell apart are counted as one tensor.
"""

from collections.abc import Sequence

from offload.plan.codec import CodecName, aligned, part_bytes
from offload.plan.facts import LayerFacts

PAGE_BYTES = 4096


def to_pages(num_bytes: int) -> int:
    """Round a size up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def record_bytes(layer: LayerFacts, codec: CodecName, dtype_bytes: int) -> int:
    """Return what a layer takes as it is written by a codec: in memory, on the link, in a slot.

    Args:
        layer: Its tensors.
        codec: Of its matrices; `native` is what they compute as.
        dtype_bytes: Bytes of a weight as it computes.
    """

    def written(sizes: Sequence[int], form: CodecName) -> int:
        parts = (part for size in sizes for part in part_bytes(form, size, dtype_bytes))
        return sum(map(aligned, parts))

    return to_pages(written(layer.matrix_sizes, codec) + written(layer.other_sizes, "native"))
