"""Dropout seeds: of a step, and derived from it, of each visit of a layer by a micro-batch.

Problem. A recompute must draw the same as its forward, and a resumed run the same as an
uninterrupted one, on any machine. So masks depend on four numbers alone: the recipe's seed, the
step, the layer and the micro-batch. The function of these must not change while a run lasts.

Idea. The numbers are hashed by BLAKE2b, which has a specification. Each is 8 bytes, little-endian,
so different sequences of numbers are different bytes. This takes 1 us; numpy's SeedSequence, which
has a specification too, takes 40 us for each visit.

Source: RFC 7693.
"""

import hashlib

_WORD = 0xFFFF_FFFF_FFFF_FFFF
_MAX_SEED = 0x7FFF_FFFF_FFFF_FFFF  # torch's generators take 63 bits without a sign


def seed_of(*numbers: int) -> int:
    """Return the seed that follows from some numbers, each taken modulo 2**64.

    The seed of a step is that of the recipe's seed and the step, counted from 0. The generators'
    seed for a visit is that of the step's seed, the layer (`FRONT_LAYER` of
    `offload.engine.randomness` before the layers) and the micro-batch's number in the whole step.
    """
    data = b"".join((number & _WORD).to_bytes(8, "little") for number in numbers)
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MAX_SEED
