"""How rows of all ranks are cut into rounds, and the memory of those that are on their way."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune.training.world.row_rounds import RowRounds, rounds_of, rows_per_round
from offload.plan.facts.embedding import ROW_ROUNDS_BYTES


@given(st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=4), st.integers(1, 9))
def test_rounds_have_each_row_once_and_all_of_a_token_and_no_more_than_they_may(
    sets: list[set[int]], num_rows: int
) -> None:
    every = [np.array(sorted(one), dtype=np.int64) for one in sets]
    place: dict[int, int] = {}
    found: list[list[int]] = [[] for _ in every]
    for number, one in enumerate(rounds_of(every, num_rows=num_rows)):
        tokens = [own[part].tolist() for own, part in zip(every, one, strict=True)]
        assert 0 < sum(map(len, tokens)) <= num_rows + len(every) - 1
        for rank, some in enumerate(tokens):
            found[rank] += some
            assert all(place.setdefault(token, number) == number for token in some)
    assert found == [own.tolist() for own in every]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num", "to"), [(2, {0}), (2, {0, 1}), (8, {3}), (8, {0, 4})])
def test_rounds_on_their_way_fit_the_memory_that_is_planned(
    num: int, to: set[int], dtype: torch.dtype
) -> None:
    for width in (64, 4096, 16384):
        rounds = RowRounds(torch.empty(0, width), index=0, num=num, to=to, dtype=dtype)
        num_bytes = rounds._received_NRD.nbytes + rounds._sent_NRD.nbytes
        assert 0.8 * ROW_ROUNDS_BYTES < num_bytes <= ROW_ROUNDS_BYTES


def test_a_row_that_is_larger_than_a_round_may_be_is_sent_by_itself() -> None:
    assert rows_per_round(ROW_ROUNDS_BYTES, num_ranks=2, num_targets=1) == 1
