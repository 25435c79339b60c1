"""Seeds are promised: a run draws the same dropout masks for as long as it lasts (#17)."""

import struct
from hashlib import blake2b
from itertools import product

import pytest

from offload.engine.randomness import FRONT_LAYER
from offload.engine.seeding import NEWEST, Seeding

MAX_SEED = 2**63 - 1


@pytest.mark.parametrize(
    ("seeding", "numbers", "expected"),
    [
        (Seeding.BLAKE2, (0, 0), 1041621211125469266),
        (Seeding.BLAKE2, (0, 1), 8118103383084794603),
        (Seeding.BLAKE2, (1, 0), 2743968511113885123),
        (Seeding.BLAKE2, (2**32 - 1, 9_999), 6566966585929852217),
        (Seeding.TUPLE_HASH, (0, 0), -8458139203682520985),
        (Seeding.TUPLE_HASH, (0, 1), -1950498447580522560),
        (Seeding.TUPLE_HASH, (1, 0), -5164621852614943976),
        (Seeding.TUPLE_HASH, (2**32 - 1, 9_999), 7646977220959135838),
    ],
)
def test_a_step_has_the_seed_that_is_promised(seeding, numbers, expected) -> None:
    assert seeding.of_step(*numbers) == expected


@pytest.mark.parametrize(
    ("seeding", "numbers", "expected"),
    [
        (Seeding.BLAKE2, (0, 0, 0), 2891389769238885931),
        (Seeding.BLAKE2, (5, FRONT_LAYER, 1), 8572597718141032380),
        (Seeding.BLAKE2, (MAX_SEED, 47, 31), 4894146317200358153),
        (Seeding.BLAKE2, (-7, 3, 2), 560847751865936322),
        (Seeding.TUPLE_HASH, (0, 0, 0), 3010437511937009226),
        (Seeding.TUPLE_HASH, (5, FRONT_LAYER, 1), 7606214216926914295),
        (Seeding.TUPLE_HASH, (MAX_SEED, 47, 31), 968190319515647087),
        (Seeding.TUPLE_HASH, (-7, 3, 2), 7889723904107891375),
    ],
)
def test_a_visit_has_the_seed_that_is_promised(seeding, numbers, expected) -> None:
    assert seeding.of_visit(*numbers) == expected


def test_the_newest_seeds_are_blake2b_of_64_bit_words() -> None:
    numbers = 1_234_567_890_123, 11, 3
    digest = blake2b(struct.pack("<3q", *numbers), digest_size=8).digest()
    assert NEWEST.of_visit(*numbers) == struct.unpack("<Q", digest)[0] % 2**63


@pytest.mark.parametrize("seeding", Seeding)
def test_no_two_visits_share_a_seed_and_torch_takes_each(seeding: Seeding) -> None:
    steps = [seeding.of_step(seed, step) for seed, step in product(range(3), range(20))]
    visits = list(product(steps, range(-1, 8), range(8)))
    seeds = {seeding.of_visit(*visit) for visit in visits}
    assert len(seeds) == len(visits)
    assert min(seeds) >= 0
    assert max(seeds) <= MAX_SEED
