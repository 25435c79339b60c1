"""Masters in two halves: undone for every pattern of bits, and rounded to the nearest."""

import math

import pytest
import torch

from finetune.full.optimizer import joined, low_type, split_into

PIECE = 2**19  # what is made of it stays in a cache


def split(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    master = bits.view(torch.float32)
    high = torch.empty(master.shape, dtype=torch.bfloat16)
    low = torch.empty(master.shape, dtype=torch.int16)
    split_into(master, high, low)
    return high, low


def patterns(start: int, num: int) -> torch.Tensor:
    """Return 32-bit patterns, counted from the smallest signed number."""
    first = start - 2**31
    return torch.arange(first, first + num, dtype=torch.int32)


def assert_undone(bits: torch.Tensor) -> None:
    high, low = split(bits)
    assert torch.equal(joined(high, low).view(torch.int32), bits)


def assert_nearest(bits: torch.Tensor) -> None:
    """Of finite masters: the high half is what arithmetic in integers rounds to."""
    magnitude, high = bits & 0x7FFFFFFF, split(bits)[0].view(torch.int16)
    expected = ((magnitude + 0x8000) >> 16).to(torch.int16)
    is_same = ((high & 0x7FFF) == expected) & ((high < 0) == (bits < 0))
    assert bool((is_same | (magnitude >= 0x7F800000)).all())


@pytest.mark.parametrize(
    "start",
    [0, 2**31 - 2**16, 2**32 - 2**18, 2**31 + 0x7F7F0000, 2**31 + 0x3F800000, 0x3F800000],
)
def test_move_patterns_at_the_edges(start: int) -> None:
    bits = patterns(start, min(2**18, 2**32 - start))
    assert_undone(bits)
    assert_nearest(bits)


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(16, marks=pytest.mark.slow),  # of a magnitude's 16 pieces another one each
    ],
)
def test_move_all_patterns(every: int) -> None:
    for number, start in enumerate(range(0, 2**32, every * PIECE)):
        bits = patterns(start + number % every * PIECE, PIECE)
        assert_undone(bits)
        assert_nearest(bits)


def test_ties_go_away_from_zero() -> None:
    tie = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32)
    high, low = split(torch.cat([tie, tie + torch.tensor(-(2**31), dtype=torch.int32)]))
    above = [1 + 1 / 128, 1 + 2 / 128]
    assert high.tolist() == [*above, *(-x for x in above)]
    assert low.tolist() == [-(2**15)] * 4
    assert tie.view(torch.float32).bfloat16().tolist() == [1.0, 1 + 2 / 128]  # to even


def test_rounding_is_that_of_torch_but_for_ties() -> None:
    bits = torch.randint(-(2**31), 2**31, (2**20,), dtype=torch.int64).to(torch.int32)
    bits = bits[bits.view(torch.float32).isfinite() & ((bits & 0xFFFF) != 0x8000)]
    high, _ = split(bits)
    assert torch.equal(high, bits.view(torch.float32).bfloat16())


def test_what_is_not_finite() -> None:
    """Named in the module's docstring: masters come back, but their high halves may look fine."""
    largest, nan_low, nan_ones, nan = 0x7F7FFFFF, 0x7F800001, 0x7FFFFFFF, 0x7FC00000
    bits = torch.tensor([largest, nan_low, nan_ones, nan], dtype=torch.int32)
    high, low = split(bits)
    assert math.isinf(high[0])
    assert math.isinf(high[1])
    assert high[2].item() == 0.0
    assert math.isnan(high[3])
    assert torch.equal(joined(high, low).view(torch.int32), bits)


# ------------------------------------------------------------------------------------- float16


@pytest.mark.parametrize(
    "start", [0, 2**31 - 2**16, 2**31 + 0x387F0000, 2**31 + 0x477F0000, 0x3F800000, 2**31]
)
def test_move_a_float16_weight_and_its_rest_are_the_master(start: int) -> None:
    bits = patterns(start, min(2**18, 2**32 - start))
    master = bits.view(torch.float32)
    master = master[master.isfinite()]
    weight = torch.empty(master.shape, dtype=torch.float16)
    low = torch.empty(master.shape, dtype=torch.int32)
    split_into(master, weight, low)
    assert torch.equal(weight, master.half())
    assert torch.equal(joined(weight, low).view(torch.int32), master.view(torch.int32))


def test_a_float16_weight_that_was_not_updated_has_a_rest_of_zeros() -> None:
    weight = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    weight = weight[weight.isfinite()]
    rest = torch.zeros(weight.shape, dtype=low_type(torch.float16))
    assert torch.equal(joined(weight, rest), weight.float())
    again = torch.ones_like(rest)
    split_into(joined(weight, rest), weight.clone(), again)
    assert not bool(again.any())
