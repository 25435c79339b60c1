from collections import Counter
from itertools import chain
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data import order as order_module
from finetune.data.dataset import ExampleSet
from finetune.data.order import BatchOrder, PackedOrder, RowCost, packed
from finetune.data.steps import StepLoader, Steps, collate_packed
from finetune.training.ranks import own_micro_batches
from offload.plan.facts.linears import SoftmaxAttention
from tests.conversations import count_rows, tokenised

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)
HEADS = SoftmaxAttention(
    num_heads=8, num_kv_heads=8, qk_dim=64, v_dim=64, rotary_dim=64, num_rotated_heads=16
)
COST = RowCost(flops_per_token=40_000.0, mixing=((HEADS, 4),))


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(50, 120), min_bins=st.integers(1, 4))
def test_each_row_is_in_one_sequence_and_each_sequence_has_room(
    lengths: list[int], capacity: int, min_bins: int
) -> None:
    bins = packed(lengths, capacity=capacity, cost=COST, min_bins=min_bins)
    assert sorted(chain(*bins)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[row] for row in rows) <= capacity for rows in bins)
    assert len(bins) >= min(min_bins, len(lengths))
    costs = [sum(COST(lengths[row]) for row in rows) for rows in bins]
    assert costs == sorted(costs, reverse=True)


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(50, 120))
def test_no_two_sequences_would_fit_into_one(lengths: list[int], capacity: int) -> None:
    bins = packed(lengths, capacity=capacity, cost=COST)
    assert len(bins) <= 1 or sum(lengths) > capacity * len(bins) / 2


def test_rows_that_fill_sequences_exactly_fill_them() -> None:
    lengths = [6, 3, 1, 5, 5, 9, 1, 4, 4, 2]
    bins = packed(lengths, capacity=10, cost=float)
    assert [sum(lengths[row] for row in rows) for rows in bins] == [10] * 4


def test_sequences_of_a_step_cost_alike_where_there_is_room() -> None:
    lengths = [400, 400, 400, 400, *[25] * 64]
    bins = packed(lengths, capacity=1000, cost=COST, min_bins=4)
    costs = [sum(COST(lengths[row]) for row in rows) for rows in bins]
    assert len(bins) == 4
    assert max(costs) <= 1.01 * min(costs)
    assert {sum(lengths[row] == 400 for row in rows) for rows in bins} == {1}


def test_a_row_costs_its_products_and_the_square_of_its_tokens() -> None:
    assert COST(10) == 10 * 40_000 + 4 * 4.0 * 8 * 64 * 10 * 10 / 2


def order_of(
    lengths: list[int], *, tokens: int | None = None, rows: int | None = None, min_bins: int = 1
) -> PackedOrder:
    return PackedOrder(
        lengths=np.array(lengths),
        capacity=60,
        rows_per_step=rows,
        tokens_per_step=tokens,
        num_steps=30,
        seed=3,
        min_bins=min_bins,
        cost=COST,
    )


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, tokens=st.integers(60, 200))
def test_steps_given_in_tokens_visit_each_row_once_an_epoch(
    lengths: list[int], tokens: int
) -> None:
    order = order_of(lengths, tokens=tokens)
    visits: Counter[int] = Counter()
    seen = 0
    for step in range(order.num_steps):
        rows = list(chain(*order.step(step)))
        assert rows
        assert sorted(rows) == sorted(order.rows(step))
        visits.update(rows)
        seen += sum(lengths[row] for row in rows)
        assert abs(seen - (step + 1) * tokens) < max(lengths)
        counts = [visits[row] for row in range(len(lengths))]
        assert max(counts) - min(counts) <= 1


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, size=st.integers(1, 4), num=st.integers(1, 4))
def test_steps_given_in_rows_have_those_that_they_have_unpacked(
    lengths: list[int], size: int, num: int
) -> None:
    unpacked = BatchOrder(
        lengths=tuple(lengths), micro_batch_size=size, num_micro_batches=num, num_steps=30, seed=3
    )
    order = order_of(lengths, rows=size * num)
    for step in range(order.num_steps):
        assert sorted(chain(*order.step(step))) == sorted(chain(*unpacked.step(step)))


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(
    lengths=LENGTHS, tokens=st.integers(60, 200), is_in_rows=st.booleans(), is_long=st.booleans()
)
def test_no_packed_step_is_larger_than_the_longest(
    lengths: list[int], tokens: int, *, is_in_rows: bool, is_long: bool
) -> None:
    """Of a run of few rows some step is as large, and some sequence as wide."""
    num_rows = 1 + tokens % 7
    order = order_of(lengths, rows=num_rows) if is_in_rows else order_of(lengths, tokens=tokens)
    most = 0 if is_long else order_module.MOST_ROWS_LOOKED_AT
    with mock.patch.object(order_module, "MOST_ROWS_LOOKED_AT", most):
        longest = [sum(num for _, num in part) for part in order.longest_step()]
    steps = [
        [sum(lengths[row] for row in part) for part in order.step(step)]
        for step in range(order.num_steps)
    ]
    found = max(map(sum, steps)), max(map(max, steps))
    assert found[0] <= sum(longest)
    assert found[1] <= max(longest)
    if not is_long:
        assert found[0] == sum(longest)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> ExampleSet:
    return tokenised(count_rows(23), tmp_path_factory.mktemp("cache"))


def steps_of(examples: ExampleSet, *, index: int = 0, num: int = 1) -> Steps:
    order = PackedOrder(
        lengths=np.array(examples.lengths),
        capacity=2 * max(examples.lengths),
        rows_per_step=None,
        tokens_per_step=5 * max(examples.lengths),
        num_steps=6,
        seed=1,
        min_bins=num,
        cost=COST,
    )
    own = _Own(index=index, num=num)
    return Steps.of(order, examples, own=own, pad_token_id=0)


class _Own:
    def __init__(self, *, index: int, num: int) -> None:
        self._index, self._num = index, num

    def __call__(self, num_micro_batches: int) -> tuple[int, ...]:
        return own_micro_batches(num_micro_batches, index=self._index, num=self._num)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_loader_gives_packed_rows_from_any_step_on(
    examples: ExampleSet, num_workers: int
) -> None:
    steps = steps_of(examples)
    with StepLoader(steps, first_step=2, num_workers=num_workers) as loader:
        for batch in loader:
            bins = steps.order.step(batch.step)
            for ours, rows in zip(batch.share.micro_batches, bins, strict=True):
                theirs = collate_packed([examples[row] for row in rows])
                assert ours.keys() == theirs.keys()
                assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
            seen = [examples[row] for row in chain(*bins)]
            assert batch.share.num_tokens == sum(len(row.input_ids) for row in seen)
            assert batch.share.num_label_tokens == sum(row.num_loss_tokens for row in seen)
    assert batch.step == 5


def test_ranks_have_a_packed_step_between_them(examples: ExampleSet) -> None:
    shares = [steps_of(examples, index=i, num=3).typical()[0] for i in range(3)]
    whole = steps_of(examples, num=1)
    ids = sorted(chain(*(share.micro_batch_ids for share in shares)))
    assert ids == list(range(len(ids)))
    assert all(share.micro_batches for share in shares)
    tokens = sum(int(b["row_lens"].sum()) for share in shares for b in share.micro_batches)
    assert tokens == shares[0].num_tokens
    assert whole.sizes.packing is not None


def test_the_labels_of_packed_rows_are_those_of_rows_alone(examples: ExampleSet) -> None:
    batch = collate_packed([examples[0], examples[1]])
    first, second = examples[0].labels.copy(), examples[1].labels.copy()
    first[0] = second[0] = -100
    assert batch["labels"].tolist() == [[*first, *second]]
    assert batch["row_lens"].tolist() == [len(first), len(second)]


def test_the_longest_share_has_the_width_that_the_plan_counts(examples: ExampleSet) -> None:
    steps = steps_of(examples)
    widths = [batch["input_ids"].shape[1] for batch in steps.longest().micro_batches]
    assert max(widths) == steps.sizes.largest_width == steps.largest_tokens
    assert sum(widths) == steps.order.largest[0]  # type: ignore[union-attr]
    assert steps.longest().num_label_tokens > 0


def test_packing_is_measured_over_the_first_steps(examples: ExampleSet) -> None:
    steps, lengths = steps_of(examples), np.array(examples.lengths)
    found = steps.sizes.packing
    assert found is not None
    rows = [steps.order.step(step) for step in range(6)]
    tokens = sum(int(lengths[list(chain(*bins))].sum()) for bins in rows)
    room = sum(len(bins) for bins in rows) * 2 * max(examples.lengths)
    assert found.fill == tokens / room
    typical = lengths[list(chain(*rows[steps.sizes.typical_steps[0]]))]
    assert found.rows_per_step == len(typical)
    assert found.row_tokens == round((typical**2).sum() / typical.sum())
