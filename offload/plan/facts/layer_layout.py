"""The size of a layer as one flat record, byte for byte.

Its tensors are stored one after another, each in the codec or in the compute dtype. Each part of a
tensor starts at a multiple of `ALIGN_BYTES`, and a record is padded to whole pages. In a tiny layer
this padding is a tenth of the record. Small parameters that the facts do not distinguish are
counted as one tensor.
"""

from collections.abc import Sequence

from offload.plan.facts.codec import CodecName, aligned, part_bytes
from offload.plan.facts.facts import LayerFacts

PAGE_BYTES = 4096


def to_pages(num_bytes: int) -> int:
    """Round a size up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def record_bytes(layer: LayerFacts, codec: CodecName, dtype_bytes: int) -> int:
    """Return the size of a layer in a codec: in memory, on the link and in a slot.

    Args:
        layer: Its tensors.
        codec: Of its matrices; `native` is the compute dtype.
        dtype_bytes: Bytes of a weight in the compute dtype.
    """

    def written(sizes: Sequence[int], form: CodecName) -> int:
        parts = (part for size in sizes for part in part_bytes(form, size, dtype_bytes))
        return sum(map(aligned, parts))

    return to_pages(written(layer.matrix_sizes, codec) + written(layer.other_sizes, "native"))
