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


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step of a run, counted from 0."""
    return _hashed(seed, step)


def visit_seed(seed: int, layer: int, micro_batch: int) -> int:
    """Return the generators' seed for a layer's visit by a micro-batch.

    Args:
        seed: Of the step.
        layer: Which, or `FRONT_LAYER` of `offload.engine.randomness`.
        micro_batch: Its number in the whole step.
    """
    return _hashed(seed, layer, micro_batch)


def _hashed(*numbers: int) -> int:
    """Hash numbers, each modulo 2**64."""
    data = b"".join((number & _WORD).to_bytes(8, "little") for number in numbers)
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MAX_SEED
