"""Seeds are promised: a run draws the same dropout masks for as long as it lasts (#17)."""

import struct
from hashlib import blake2b
from itertools import product

import pytest

from offload.engine.randomness import FRONT_LAYER
from offload.engine.seeding import seed_of

MAX_SEED = 2**63 - 1


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0, 0), 1041621211125469266),
        ((0, 1), 8118103383084794603),
        ((1, 0), 2743968511113885123),
        ((2**32 - 1, 9_999), 6566966585929852217),
    ],
)
def test_a_step_has_the_seed_that_is_promised(numbers, expected) -> None:
    assert seed_of(*numbers) == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0, 0, 0), 2891389769238885931),
        ((5, FRONT_LAYER, 1), 8572597718141032380),
        ((MAX_SEED, 47, 31), 4894146317200358153),
        ((-7, 3, 2), 560847751865936322),
    ],
)
def test_a_visit_has_the_seed_that_is_promised(numbers, expected) -> None:
    assert seed_of(*numbers) == expected


def test_seeds_are_blake2b_of_64_bit_words() -> None:
    numbers = 1_234_567_890_123, 11, 3
    digest = blake2b(struct.pack("<3q", *numbers), digest_size=8).digest()
    assert seed_of(*numbers) == struct.unpack("<Q", digest)[0] % 2**63


def test_no_two_visits_share_a_seed_and_torch_takes_each() -> None:
    steps = [seed_of(seed, step) for seed, step in product(range(3), range(20))]
    visits = list(product(steps, range(-1, 8), range(8)))
    seeds = {seed_of(*visit) for visit in visits}
    assert len(seeds) == len(visits)
    assert min(seeds) >= 0
    assert max(seeds) <= MAX_SEED
