import math
from collections.abc import Sequence
from functools import partial
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from offload.plan.shares import apportioned, fastest_shares


@given(num=st.integers(0, 60), shares=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_what_is_apportioned_adds_up_and_is_within_one_of_its_proportion(
    num: int, shares: list[int]
) -> None:
    counts = apportioned(num, shares)
    assert sum(counts) == num
    if num >= len(shares):
        assert min(counts) >= 1
    exact = [num * share / sum(shares) for share in shares]
    if min(exact) >= 1:
        assert all(abs(one - count) < 1 for one, count in zip(exact, counts, strict=True))


def test_equal_shares_give_the_first_ones_more() -> None:
    assert apportioned(5, (1, 1, 1)) == (2, 2, 1)
    assert apportioned(6, (3, 1)) == (5, 1)
    assert apportioned(2, (9, 1)) == (1, 1)


# Of a rank: the time of its loads, that of a micro-batch, and how many micro-batches fit.
CARDS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=3
)


@given(cards=CARDS, num=st.integers(2, 12))
def test_no_other_shares_have_a_faster_slowest_rank(
    cards: list[tuple[int, int, int]], num: int
) -> None:
    def fits(card: tuple[int, int, int], count: int) -> bool:
        return count <= card[2]

    def step_s(card: tuple[int, int, int], count: int) -> float:
        assert fits(card, count)
        return max(card[0], card[1] * count)

    def slowest_s(counts: Sequence[int]) -> float:
        taken = list(zip(cards, counts, strict=True))
        return max(step_s(*one) for one in taken) if all(fits(*one) for one in taken) else math.inf

    found = fastest_shares(
        [partial(step_s, card) for card in cards], [partial(fits, card) for card in cards], num=num
    )
    every = [
        counts for counts in product(range(1, num + 1), repeat=len(cards)) if sum(counts) == num
    ]
    best_s = min(map(slowest_s, every), default=math.inf)
    assert (found is None) == math.isinf(best_s)
    if found is not None:
        assert sum(found) == num
        assert slowest_s(found) == best_s


def test_a_step_that_is_shorter_with_more_ends_the_search() -> None:
    odd = {1: 5.0, 2: 4.0, 3: 9.0}
    steps_s = [odd.__getitem__, lambda count: 2.0 * count]
    found = fastest_shares(steps_s, [lambda count: True] * 2, num=4)
    assert found == (2, 2)
