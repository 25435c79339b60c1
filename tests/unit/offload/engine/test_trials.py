"""Sizes of trials, and the subsets of tokens that are made NaN."""

import math

import pytest
import torch

from offload.engine.trials import TrialSize, subsets_apart


@pytest.mark.parametrize("num", [1, 2, 3, 6, 7, 20, 21, 70])
def test_of_any_two_things_a_subset_has_the_first_and_not_the_second(num: int) -> None:
    subsets = subsets_apart(num)
    assert subsets.shape[1] == num
    for one in range(num):
        for other in range(num):
            assert one == other or (subsets[:, one] & ~subsets[:, other]).any()


def test_a_few_subsets_are_enough_for_many_things() -> None:
    assert len(subsets_apart(4096)) == 15
    assert len(subsets_apart(65_536)) == 19


def batch(num_rows: int, num_tokens: int, *lens: int) -> dict[str, torch.Tensor]:
    found = {"input_ids": torch.zeros(num_rows, num_tokens, dtype=torch.long)}
    return {**found, "row_lens": torch.tensor(lens)} if lens else found


def size(*batches: dict[str, torch.Tensor], max_row_tokens: int = 10_000) -> TrialSize:
    return TrialSize.of(batches, max_row_tokens=max_row_tokens)


def test_a_trial_is_at_least_as_large_as_the_micro_batches_and_at_most_a_third_larger() -> None:
    for num in range(1, 300):
        found = size(batch(2, num))
        assert 2 * num <= found.num_tokens <= max(2 * num + 1, 2 * num * 4 / 3)
        assert num <= found.row_tokens <= max(num + 1, num * 4 / 3)
        assert found.num_rows * found.row_tokens >= found.num_tokens


def test_micro_batches_that_grow_need_few_trials() -> None:
    assert len({size(batch(1, num)) for num in range(1024, 8193)}) <= 3 * 4 + 1


def test_rows_are_no_longer_than_a_model_has_positions() -> None:
    found = size(batch(1, 72, 30, 42), max_row_tokens=43)
    assert (found.num_tokens, found.row_tokens) == (80, 43)
    assert size(batch(1, 50), max_row_tokens=41).row_tokens == 50


def test_a_size_covers_smaller_ones_only() -> None:
    large, long = size(batch(8, 64)), size(batch(1, 256))
    assert not large.covers(long)
    assert not long.covers(large)
    assert large.join(long).covers(large)
    assert large.join(long).covers(long)


@pytest.mark.parametrize("lens", [(128, 128), (256, 128, 128), (1, 1), (2,), (1,), (1000, 300)])
def test_packed_rows_of_a_trial_end_where_no_block_does(lens: tuple[int, ...]) -> None:
    found = size(batch(1, sum(lens), *lens))
    rows = found.row_lens
    assert sum(rows) >= max(2, found.num_tokens)
    assert len(rows) >= 2
    assert max(rows) >= min(max(lens), sum(lens) - 1)
    ends = [sum(rows[: n + 1]) for n in range(len(rows) - 1)]
    assert math.gcd(*ends) == 1
