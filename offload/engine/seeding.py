"""Dropout seeds: of a step, and derived from it, of each visit of a layer by a micro-batch.

Problem. A recompute must draw the same as its forward, and a resumed run the same as an
uninterrupted one, on any machine. So masks depend on four numbers alone: the recipe's seed, the
step, the layer and the micro-batch. The function of these must not change while a run lasts.

Idea. The numbers are hashed by BLAKE2b, which has a specification. Each is 8 bytes, little-endian,
so different sequences of numbers are different bytes. This takes 1 us; numpy's SeedSequence, which
has a specification too, takes 40 us for each visit.

Version 1 was CPython's hash of a tuple, which is not specified and has changed before (in 3.8).
A run keeps the version it was started with: its checkpoints name it, and checkpoints without one
are version 1.

Source: RFC 7693.
"""

import hashlib
from enum import IntEnum

_WORD = 0xFFFF_FFFF_FFFF_FFFF
_MAX_SEED = 0x7FFF_FFFF_FFFF_FFFF  # torch's generators take 63 bits without a sign


class Seeding(IntEnum):
    """How numbers become seeds; checkpoints store the value."""

    TUPLE_HASH = 1
    BLAKE2 = 2

    def of_step(self, seed: int, step: int) -> int:
        """Return the seed of a step of a run, counted from 0."""
        if self is Seeding.TUPLE_HASH:
            return hash((seed, step))
        return _hashed(seed, step)

    def of_visit(self, seed: int, layer: int, micro_batch: int) -> int:
        """Return the generators' seed for a layer's visit by a micro-batch.

        Args:
            seed: Of the step.
            layer: Which, or `FRONT_LAYER` of `offload.engine.randomness`.
            micro_batch: Its number in the whole step.
        """
        if self is Seeding.TUPLE_HASH:
            return hash((seed, layer, micro_batch)) & _MAX_SEED
        return _hashed(seed, layer, micro_batch)


NEWEST = Seeding.BLAKE2


def _hashed(*numbers: int) -> int:
    """Hash numbers, each modulo 2**64."""
    data = b"".join((number & _WORD).to_bytes(8, "little") for number in numbers)
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MAX_SEED
