"""A run's steps: which rows, in which order, packed and cut into micro-batches."""

import json
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data import order as order_module
from finetune.data.compared import Comparison
from finetune.data.dataset import ExampleSet, Rows, load_rows
from finetune.data.order import BatchOrder, PackedOrder, RowCost, StepSizes, packed
from finetune.data.sources import open_source
from finetune.data.steps import StepBatch, StepLoader, Steps, StepShare, collate, collate_packed
from finetune.data.tokenize import IGNORE_INDEX, Example
from finetune.errors import DataError
from finetune.recipe.sections import DataSection, TrainSection
from finetune.report.screen import Work
from finetune.training.ranks import own_micro_batches
from offload.plan.facts.linears import SoftmaxAttention
from tests.conversations import count_rows, tokenised
from tests.doubles import tiny_tokenizer
from tests.tiers import mostly_slow

# --------------------------------------------------------------------------------------------------
# The order of the rows
# --------------------------------------------------------------------------------------------------

SIZES = {
    "lengths": st.lists(st.integers(1, 50), min_size=1, max_size=30),
    "micro_batch_size": st.integers(1, 4),
    "num_micro_batches": st.integers(1, 4),
    "seed": st.integers(0, 9),
}


def planned(
    lengths: list[int], micro_batch_size: int, num_micro_batches: int, seed: int
) -> BatchOrder:
    return BatchOrder(
        lengths=tuple(lengths),
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        num_steps=40,
        seed=seed,
    )


@settings(max_examples=60, deadline=None)
@given(**SIZES)
def test_each_epoch_visits_each_row_once(
    lengths: list[int], micro_batch_size: int, num_micro_batches: int, seed: int
) -> None:
    order = planned(lengths, micro_batch_size, num_micro_batches, seed)
    visits: Counter[int] = Counter()
    for step in range(order.num_steps):
        batches = order.step(step)
        assert [len(batch) for batch in batches] == [micro_batch_size] * num_micro_batches
        visits.update(row for batch in batches for row in batch)
        epochs, rest = divmod((step + 1) * order.rows_per_step, len(lengths))
        counts = [visits[row] for row in range(len(lengths))]
        assert min(counts) >= epochs
        assert max(counts) <= epochs + (rest > 0)


@settings(max_examples=60, deadline=None)
@given(**SIZES)
def test_no_step_is_larger_than_the_longest_step(
    lengths: list[int], micro_batch_size: int, num_micro_batches: int, seed: int
) -> None:
    order = planned(lengths, micro_batch_size, num_micro_batches, seed)

    def padded(batches: tuple[tuple[int, ...], ...]) -> list[int]:
        return [len(batch) * max(lengths[row] for row in batch) for batch in batches]

    largest = padded(order.longest_step())
    assert largest[0] == max(largest) == micro_batch_size * max(lengths)
    for step in range(order.num_steps):
        sizes = padded(order.step(step))
        assert max(sizes) <= largest[0]
        if len(lengths) >= order.rows_per_step and order.rows_per_step * (step + 1) <= len(lengths):
            assert sum(sizes) <= sum(largest)


def test_a_step_is_known_without_the_ones_before_it() -> None:
    first, second = (planned([3, 1, 4, 1, 5, 9, 2], 2, 3, 7) for _ in range(2))
    in_turn = [first.step(step) for step in range(40)]
    assert [second.step(step) for step in reversed(range(40))] == in_turn[::-1]
    assert in_turn != [planned([3, 1, 4, 1, 5, 9, 2], 2, 3, 8).step(step) for step in range(40)]


def test_the_order_is_fixed_for_ever() -> None:
    order = planned([1] * 6, 2, 2, 0)
    assert [order.step(step) for step in range(3)] == [
        ((5, 0), (3, 2)),
        ((1, 4), (1, 0)),
        ((3, 4), (5, 2)),
    ]


EPOCHS = (0.3, 1, 1.5, 2, 3)


@pytest.mark.parametrize("epochs", EPOCHS)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("in_tokens", [None, 80, 160])
def test_the_last_step_ends_with_the_rows_of_the_last_epoch(
    examples: ExampleSet, epochs: float, num_ranks: int, in_tokens: int | None
) -> None:
    sizes: dict[str, Any] = {"grad_accum_steps": 4}
    if in_tokens is not None:
        sizes = {"tokens_per_step": in_tokens}
    train = TrainSection(seq_len=40, micro_batch_size=2, epochs=epochs, **sizes)
    order: BatchOrder | PackedOrder = BatchOrder.of(train, examples, min_parts=num_ranks)
    whole = math.ceil(epochs * len(examples))
    if in_tokens is not None:
        cost = RowCost(flops_per_token=1.0)
        order = PackedOrder.of(train, examples, min_parts=num_ranks, cost=cost)
    steps = [order.step(number) for number in range(order.num_steps)]
    visits = Counter(row for step in steps for part in step for row in part)
    most = math.ceil(epochs)
    assert set(visits.values()) <= {most - 1, most}
    if epochs == most:
        assert visits == Counter(dict.fromkeys(range(len(examples)), most))
    if in_tokens is None:
        assert visits.total() == whole
    for step in steps:  # a step of few rows is shared too
        assert all(part for part in step)
        assert len(step) >= min(num_ranks, sum(map(len, step)))
    assert order.num_epochs == pytest.approx(epochs, rel=0.05)


def test_a_run_of_fewer_rows_than_a_step_is_measured_and_rehearsed_with_them(
    examples: ExampleSet,
) -> None:
    train = TrainSection(seq_len=40, micro_batch_size=4, grad_accum_steps=20, epochs=1)
    order = BatchOrder.of(train, examples)
    sizes = StepSizes.of(order, examples)
    assert (order.num_steps, sizes.num_micro_batches, sizes.rows_per_step) == (1, 6, 23)
    assert sorted(row for part in order.longest_step() for row in part) == list(range(23))
    longer = BatchOrder.of(train.model_copy(update={"epochs": 5}), examples)
    assert [len(longer.rows(step)) for step in range(longer.num_steps)] == [80, 35]
    assert StepSizes.of(longer, examples).rows_per_step == 80  # the short step is not typical


def test_rows_of_like_length_share_a_micro_batch() -> None:
    order = planned([10, 1, 9, 2, 11, 3], 3, 2, 0)
    long, short = order.step(0)
    assert {order.lengths[row] for row in long} == {9, 10, 11}
    assert {order.lengths[row] for row in short} == {1, 2, 3}


# --------------------------------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------------------------------


def row_of(*ids: int) -> Example:
    tokens = np.array(ids, dtype=np.int32)
    return Example(input_ids=tokens, labels=tokens, source="x", is_truncated=False)


def test_rows_are_padded_at_the_right_to_a_multiple() -> None:
    batch = collate([row_of(5, 6, 7), row_of(8)], pad_token_id=9, pad_to_multiple_of=4)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert batch["labels"].tolist() == [[5, 6, 7, -100], [8, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_pad_token_within_a_row_is_attended_to() -> None:
    batch = collate([row_of(9, 9), row_of(1, 2)], pad_token_id=9, pad_to_multiple_of=2)
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 1]]
    assert batch["labels"].tolist() == [[9, 9], [1, 2]]


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> ExampleSet:
    return tokenised(count_rows(23), tmp_path_factory.mktemp("cache"))


def steps_of(
    examples: ExampleSet, *, micro_batch_ids: tuple[int, ...] = (0, 1, 2), num_steps: int = 6
) -> Steps:
    order = BatchOrder(
        lengths=examples.lengths,
        micro_batch_size=2,
        num_micro_batches=3,
        num_steps=num_steps,
        seed=1,
    )
    return Steps(
        rows=examples,
        order=order,
        sizes=StepSizes.of(order, examples),
        own=partial(ids_of_all_steps, micro_batch_ids),
        pad_token_id=0,
        is_masked=True,
    )


def ids_of_all_steps(ids: tuple[int, ...], _num_micro_batches: int) -> tuple[int, ...]:
    return ids


def loader(
    examples: ExampleSet,
    *,
    micro_batch_ids: tuple[int, ...] = (0, 1, 2),
    first_step: int = 0,
    num_workers: int = 0,
    num_steps: int = 6,
) -> StepLoader:
    steps = steps_of(examples, micro_batch_ids=micro_batch_ids, num_steps=num_steps)
    return StepLoader(steps, first_step=first_step, num_workers=num_workers)


def batches_of(examples: ExampleSet, *, first_step: int = 0, num_workers: int = 0) -> list[object]:
    with loader(examples, first_step=first_step, num_workers=num_workers) as steps:
        return list(map(as_lists, steps))


def as_lists(batch: StepBatch) -> tuple[int, list[dict[str, Any]]]:
    micro_batches = batch.share.micro_batches
    return batch.step, [{k: v.tolist() for k, v in b.items()} for b in micro_batches]


def test_the_loader_gives_the_collated_rows_of_each_step(examples: ExampleSet) -> None:
    order = steps_of(examples).order
    with loader(examples) as steps:
        for batch in steps:
            rows = order.step(batch.step)
            for ours, indices in zip(batch.share.micro_batches, rows, strict=True):
                theirs = collate([examples[row] for row in indices], pad_token_id=0)
                assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
            assert batch.wait_s >= 0
    assert batch.step == 5


@pytest.mark.parametrize("is_masked", [True, False])
def test_a_model_gets_a_padding_mask_only_where_its_loss_counts_tokens(
    is_masked: bool, examples: ExampleSet
) -> None:
    steps = replace(steps_of(examples), is_masked=is_masked)
    names = {"input_ids", "labels", *(["attention_mask"] if is_masked else [])}
    assert set(steps.padded_batch([examples[0], examples[1]])) == names
    with StepLoader(steps, first_step=0, num_workers=0) as loaded:
        assert all(set(one) == names for batch in loaded for one in batch.share.micro_batches)


def test_the_loaders_of_two_ranks_have_the_step_between_them(examples: ExampleSet) -> None:
    with (
        loader(examples) as whole,
        loader(examples, micro_batch_ids=(1, 2)) as first,
        loader(examples, micro_batch_ids=(0,)) as second,
    ):
        for step, one, two in zip(whole, first, second, strict=True):
            parts = {
                i: batch
                for share in (one.share, two.share)
                for i, batch in zip(share.micro_batch_ids, share.micro_batches, strict=True)
            }
            for i, expected in zip(
                step.share.micro_batch_ids, step.share.micro_batches, strict=True
            ):
                assert all(torch.equal(parts[i][name], expected[name]) for name in expected)
            batches = step.share.micro_batches
            for share in (step.share, one.share, two.share):  # all know of the whole step
                assert share.num_tokens == sum(int(b["attention_mask"].sum()) for b in batches)
                assert share.num_label_tokens == sum(
                    int((b["labels"][:, 1:] != -100).sum()) for b in batches
                )


def test_a_resumed_loader_goes_on_with_the_same_batches(examples: ExampleSet) -> None:
    assert batches_of(examples, first_step=4) == batches_of(examples)[4:]


@pytest.mark.thorough
def test_workers_give_the_same_batches_without_sockets_and_are_gone_afterwards(
    examples: ExampleSet,
    worker_pids: Callable[[], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Unix socket's path has at most 107 bytes; where it is longer, a run waited forever."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    batches = batches_of(examples)
    with loader(examples, num_workers=2) as steps:
        for batch, expected in zip(map(as_lists, steps), batches, strict=True):
            assert batch == expected
            assert not list(tmp_path.iterdir())
    assert not worker_pids()


@pytest.mark.slow
def test_leaving_a_loader_early_stops_its_workers(
    examples: ExampleSet, worker_pids: Callable[[], list[int]]
) -> None:
    with loader(examples, num_workers=2, num_steps=1_000) as steps:
        next(iter(steps))
        assert len(worker_pids()) == 2
    assert not worker_pids()


@pytest.mark.slow
def test_the_loader_leaves_the_random_state_alone(examples: ExampleSet) -> None:
    before = torch.get_rng_state()
    batches_of(examples)
    batches_of(examples, num_workers=1)
    assert torch.equal(torch.get_rng_state(), before)


# torch tells of the death by a signal, which may come while it opens files or lets workers go.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("sent", mostly_slow([signal.SIGKILL, signal.SIGSEGV], signal.SIGKILL))
def test_a_killed_worker_is_an_error_and_not_a_hang(
    examples: ExampleSet, worker_pids: Callable[[], list[int]], sent: signal.Signals
) -> None:
    with loader(examples, num_workers=1, num_steps=100_000) as steps:
        stream = iter(steps)
        next(stream)
        (pid,) = worker_pids()
        os.kill(pid, sent)
        start_s = time.perf_counter()
        with pytest.raises(DataError, match=r"worker died while preparing(.|\n)*num_workers: 0"):
            exhaust(stream)
        assert time.perf_counter() - start_s < 20


@pytest.mark.slow
def test_an_interrupt_does_not_stop_a_worker(
    examples: ExampleSet, worker_pids: Callable[[], list[int]]
) -> None:
    with loader(examples, num_workers=1, num_steps=50) as steps:
        stream = iter(steps)
        next(stream)
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGINT)
        assert exhaust(stream) == 49


def exhaust(stream: Iterator[object]) -> int:
    return sum(1 for _ in stream)


@pytest.fixture
def worker_pids() -> Callable[[], list[int]]:
    """Return what finds the processes that prepare batches: those that the test has started."""
    before = spawned()
    return lambda: [pid for pid in spawned() if pid not in before]


def spawned() -> list[int]:
    """Return our child processes that run Python, but for its own tracker."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text()
        except OSError:  # it ended while we looked
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z" and "spawn_main" in command:
            pids.append(int(stat.parent.name))
    return pids


# ------------------------------------------------------------------------------------------ packing


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


def steps_of_packing(examples: ExampleSet, *, index: int = 0, num: int = 1) -> Steps:
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
    steps = steps_of_packing(examples)
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
    shares = [steps_of_packing(examples, index=i, num=3).typical()[0] for i in range(3)]
    whole = steps_of_packing(examples, num=1)
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
    steps = steps_of_packing(examples)
    widths = [batch["input_ids"].shape[1] for batch in steps.longest().micro_batches]
    assert max(widths) == steps.sizes.largest_width == steps.largest_tokens
    assert sum(widths) == steps.order.largest[0]  # type: ignore[union-attr]
    assert steps.longest().num_label_tokens > 0


def test_packing_is_measured_over_the_first_steps(examples: ExampleSet) -> None:
    steps, lengths = steps_of_packing(examples), np.array(examples.lengths)
    found = steps.sizes.packing
    assert found is not None
    rows = [steps.order.step(step) for step in range(6)]
    tokens = sum(int(lengths[list(chain(*bins))].sum()) for bins in rows)
    room = sum(len(bins) for bins in rows) * 2 * max(examples.lengths)
    assert found.fill == tokens / room
    typical = lengths[list(chain(*rows[steps.sizes.typical_steps[0]]))]
    assert found.rows_per_step == len(typical)
    assert found.row_tokens == round((typical**2).sum() / typical.sum())


# -------------------------------------------------------------------------------------- step layout


STEP_LAYOUT_COST = RowCost(flops_per_token=1.0)
SEQ_LEN = 96


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ExampleSet]:
    folder = tmp_path_factory.mktemp("rows")

    def loaded(lines: list[str], data_format: str) -> ExampleSet:
        file = folder / f"{abs(hash(tuple(lines)))}.jsonl"
        file.write_text("\n".join(lines))
        return load_rows(
            DataSection(path=str(file)),
            tiny_tokenizer(),
            seq_len=SEQ_LEN,
            seed=0,
            cache_dir=folder,
            formats=(data_format,),
        ).train

    return loaded


def pairs(num: int) -> list[str]:
    return [
        f'{{"prompt": "q{n}", "chosen": "{"a" * (1 + n % 5)}", "rejected": "b{"c" * (n % 3)}"}}'
        for n in range(num)
    ]


def labelled(num: int) -> list[str]:
    label = ("true", "false")
    return [
        f'{{"prompt": "{"q" * n}", "completion": "{"a" * (num - n)}{n}", "label": {label[n % 2]}}}'
        for n in range(1, num + 1)
    ]


def steps_of_step_layout(
    rows: ExampleSet,
    *,
    is_packed: bool,
    micro_batch_size: int = 1,
    grad_accum_steps: int = 6,
    rank: int = 0,
    num_ranks: int = 1,
    is_mismatched: bool = False,
) -> Steps:
    train = TrainSection(
        seq_len=SEQ_LEN,
        steps=5,
        micro_batch_size=micro_batch_size,
        grad_accum_steps=grad_accum_steps,
    )
    comparison = Comparison.of(rows, is_mismatched=is_mismatched, seq_len=SEQ_LEN)
    order = (
        PackedOrder.of(
            train, rows, min_parts=num_ranks, cost=STEP_LAYOUT_COST, comparison=comparison
        )
        if is_packed
        else BatchOrder.of(train, rows, min_parts=num_ranks, comparison=comparison)
    )
    return Steps.of(
        order,
        rows,
        own=partial(own_micro_batches, index=rank, num=num_ranks),
        pad_token_id=0,
        comparison=comparison,
    )


def rows_in(batches: tuple[dict[str, torch.Tensor], ...]) -> list[tuple[int, ...]]:
    """Return the label tokens of each row, in the order of the micro-batches."""
    found = []
    for batch in batches:
        if "row_lens" in batch:
            parts = batch["labels"][0].split(batch["row_lens"].tolist())
        else:
            parts = batch["labels"].unbind()
        found += [tuple(row[row != IGNORE_INDEX].tolist()) for row in parts]
    return found


def groups_of(share: StepShare) -> dict[int, dict[tuple[int, ...], float]]:
    """Return the answers of each group, as tokens, with their values."""
    assert share.rows is not None
    found: dict[int, dict[tuple[int, ...], float]] = {}
    trained = rows_in(share.micro_batches)
    assert len(trained) == share.rows.num_trained
    known = zip(share.rows.groups_R.tolist(), share.rows.values_R.tolist(), strict=True)
    for (group, value), row in zip(known, trained, strict=False):
        found.setdefault(group, {})[row] = value
    return found


@pytest.mark.parametrize("is_packed", [True, False])
def test_both_sides_of_a_pair_are_in_one_step_however_it_is_cut(
    load: Callable[..., ExampleSet], *, is_packed: bool
) -> None:
    rows = load(pairs(7), "preference")
    answers = [
        (tuple(one.labels[one.labels != IGNORE_INDEX].tolist()), one.value or 0.0) for one in rows
    ]
    expected = [dict(answers[at : at + 2]) for at in range(0, len(rows), 2)]
    cuts = [
        steps_of_step_layout(
            rows, is_packed=is_packed, micro_batch_size=size, grad_accum_steps=6 // size
        )
        for size in (1, 3)
    ]
    seen: list[dict[tuple[int, ...], float]] = []
    for step in range(5):
        shares = [one.from_array(step, one.as_array(step)) for one in cuts]
        found = [groups_of(share) for share in shares]
        assert found[0] == found[1]
        assert list(range(3)) == sorted(found[0])
        seen += [found[0][group] for group in range(3)]
    assert all(group in expected for group in seen)
    for epoch in (seen[:7], seen[7:14]):
        assert sorted(expected.index(group) for group in epoch) == list(range(7))


def test_workers_give_the_same_groups(load: Callable[..., ExampleSet]) -> None:
    steps = steps_of_step_layout(load(pairs(7), "preference"), is_packed=True)
    with StepLoader(steps, first_step=3, num_workers=0) as loader:
        found = [groups_of(batch.share) for batch in loader]
    assert found == [groups_of(steps.from_array(n, steps.as_array(n))) for n in (3, 4)]


@pytest.mark.parametrize("is_packed", [True, False])
def test_two_ranks_have_the_rows_of_a_step_between_them(
    load: Callable[..., ExampleSet], *, is_packed: bool
) -> None:
    rows = load(labelled(8), "labelled")
    alone = steps_of_step_layout(rows, is_packed=is_packed, is_mismatched=True)
    ranks = [
        steps_of_step_layout(rows, is_packed=is_packed, rank=rank, num_ranks=2, is_mismatched=True)
        for rank in range(2)
    ]
    for step in range(3):
        whole, *shares = (one.from_array(step, one.as_array(step)) for one in (alone, *ranks))
        assert whole.rows is not None
        found: list[tuple[int, float]] = []
        for share in shares:
            assert share.rows is not None
            assert share.micro_batches
            assert share.scored
            found += zip(share.rows.groups_R.tolist(), share.rows.values_R.tolist(), strict=True)
        every = zip(whole.rows.groups_R.tolist(), whole.rows.values_R.tolist(), strict=True)
        assert sorted(found) == sorted(every)
        assert sorted(chain(*(rows_in(share.scored) for share in shares))) == sorted(
            rows_in(whole.scored)
        )


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_mismatched_row_has_the_answer_of_the_row_before_as_in_trl(
    load: Callable[..., ExampleSet], *, is_packed: bool
) -> None:
    rows = load(labelled(8), "labelled")
    steps = steps_of_step_layout(rows, is_packed=is_packed, is_mismatched=True, micro_batch_size=2)
    for step in range(3):
        order = steps.order.rows(step)
        answers = [tuple(rows[n].labels[rows[n].labels != IGNORE_INDEX].tolist()) for n in order]
        cycled = [answers[-1], *answers[:-1]]
        share = steps.from_array(step, steps.as_array(step))
        assert share.rows is not None
        num = share.rows.num_trained
        assert num == len(order)
        made_for = share.rows.groups_R[num:].tolist()
        assert sorted(made_for) == list(range(num))
        for place, labels in zip(made_for, rows_in(share.scored), strict=True):
            assert labels == cycled[place][: len(labels)]
            prompt = int(np.flatnonzero(rows[order[place]].labels != IGNORE_INDEX)[0])
            assert len(labels) == min(len(cycled[place]), SEQ_LEN - prompt)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("is_mismatched", [True, False])
def test_a_rehearsed_step_has_whole_groups_and_a_label_in_each_row(
    load: Callable[..., ExampleSet], *, is_packed: bool, is_mismatched: bool
) -> None:
    kind = (labelled(9), "labelled") if is_mismatched else (pairs(9), "preference")
    steps = steps_of_step_layout(load(*kind), is_packed=is_packed, is_mismatched=is_mismatched)
    share = steps.longest()
    assert share.rows is not None
    rows = rows_in(share.micro_batches)
    assert share.rows.num_trained == len(rows)
    assert all(rows)
    assert len(share.rows.groups_R) == len(rows) + len(rows_in(share.scored))
    in_group = torch.bincount(share.rows.groups_R[: len(rows)])
    assert set(in_group.tolist()) == {1 if is_mismatched else 2}
    assert {0.0, 1.0} == set(share.rows.values_R.tolist())
    shares = [share, *(steps.from_array(n, steps.as_array(n)) for n in range(5))]
    sizes = [sum(batch["labels"].numel() for batch in one.micro_batches) for one in shares]
    assert sizes[0] == max(sizes)


def test_rows_with_known_logps_are_rehearsed_with_some(
    load: Callable[..., ExampleSet],
) -> None:
    row = '{"prompt": "q", "completions": ["a", "bc"], "rewards": [16777217, 0]'
    known = ', "ref_logps": [-1, -5000.0001], "logprobs": [[-1, -2], [-3, -4, -5]]}'
    steps = steps_of_step_layout(
        load([row + known] * 4, "sampled"), is_packed=True, grad_accum_steps=2
    )
    share = steps.longest()
    assert share.rows is not None
    assert share.rows.reference_R is not None
    assert len(share.rows.reference_R) == share.rows.num_trained
    assert share.rows.sampler_N is not None
    assert len(share.rows.sampler_N) == sum(map(len, rows_in(share.micro_batches)))
    step = steps.from_array(0, steps.as_array(0)).rows
    assert step is not None
    assert step.reference_R is not None
    assert step.reference_R.tolist() == [
        (-5000.0001, -1.0)[v == 16777217] for v in step.values_R.tolist()
    ]
    assert step.sampler_N is not None
    assert sorted(step.sampler_N.tolist()) == [-5, -4, -3, -2, -1]


def test_steps_that_groups_do_not_fill_are_refused(load: Callable[..., ExampleSet]) -> None:
    rows = load(pairs(3), "preference")
    with pytest.raises(DataError, match=r"2 answers, and a step 3 sequences(.|\n)*multiple of 2"):
        steps_of_step_layout(rows, is_packed=False, grad_accum_steps=3)
    with pytest.raises(DataError, match=r"a step has 1 sequences, and needs 2"):
        steps_of_step_layout(rows, is_packed=True, grad_accum_steps=1)
    kto = load(labelled(4), "labelled")
    with pytest.raises(DataError, match=r"needs 2; each prompt is scored with the"):
        steps_of_step_layout(kto, is_packed=True, grad_accum_steps=1, is_mismatched=True)
    ranked = [
        '{"prompt": "q", "completions": ["a", "b"], "ranks": [1, 2]}',
        '{"prompt": "q", "completions": ["a", "b", "c"], "ranks": [1, 2, 3]}',
    ]
    rankings = load(ranked, "ranking")
    with pytest.raises(DataError, match=r"2 or 3 answers(.|\n)*`data\.packing: on`"):
        steps_of_step_layout(rankings, is_packed=False)
    steps = steps_of_step_layout(rankings, is_packed=True, grad_accum_steps=3)
    for step in range(5):
        sizes = map(len, groups_of(steps.from_array(step, steps.as_array(step))).values())
        assert sorted(sizes) in ([2], [3], [2, 3])


# ------------------------------------------------------------------------------------ encode source


HEAD = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PROMPT_TOKENS = len(HEAD) - len("<|im_start|><|im_end|><|im_start|>") + 3


def write(tmp_path: Path, *rows: object) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def qa(answer: str) -> dict[str, str]:
    return {"instruction": "q", "output": answer}


def load_encode_source(
    tmp_path: Path, *, seq_len: int = 100, tokenizer: Any = None, **settings: Any
) -> Rows:
    return load_rows(
        DataSection(path=str(tmp_path / "rows.jsonl"), **settings),
        tokenizer or tiny_tokenizer(),
        seq_len=seq_len,
        seed=0,
        cache_dir=tmp_path / "cache",
    )


LONG = "abcdefghij" * 20
# The last question is written otherwise than earlier ones, so each answer has a text of its own.
REWRITES = (
    "{% for m in messages %}{% set is_last = loop.index0 + 2 >= messages|length %}"
    "{{ '<|im_start|>' + m.role + (' now' if is_last and m.role == 'user' else '') }}\n"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_long_rows_are_cut_dropped_split_or_refused_and_counted(tmp_path: Path) -> None:
    file = write(tmp_path, qa("a"), qa(LONG))
    whole = load_encode_source(tmp_path, seq_len=1000).train[1]
    cut = load_encode_source(tmp_path)
    assert cut.train[1].labels.tolist() == whole.labels[:100].tolist()
    assert cut.notes == ("1 of 2 rows were cut to 100 tokens",)
    dropped = load_encode_source(tmp_path, too_long="drop")
    assert dropped.train.sources == (f"{file}:1",)
    assert dropped.notes == (
        f"1 of 2 rows were dropped: they have more than 100 tokens ({file}:2)",
    )
    split = load_encode_source(tmp_path, too_long="split")
    assert split.train.lengths == (PROMPT_TOKENS + 2, 100, 100, PROMPT_TOKENS + 3)
    first, *others = list(split.train)[1:]
    for name in ("input_ids", "labels"):  # a part begins with the last token of the one before
        parts = [getattr(first, name), *(getattr(part, name)[1:] for part in others)]
        assert [t for part in parts for t in part.tolist()] == getattr(whole, name).tolist()
    assert sum(part.num_loss_tokens for part in (first, *others)) == whole.num_loss_tokens
    assert [end for part in (first, *others) for end in part.end_ids] == [*whole.end_ids]
    assert split.train.sources[1:] == (f"{file}:2",) * 3
    assert split.notes == (f"1 of 2 rows were split into parts of at most 100 tokens ({file}:2)",)
    for _ in range(2):  # also from the cache
        with pytest.raises(DataError, match=rf"1 of 2 rows have more than 100 tokens: {file}:2;"):
            load_encode_source(tmp_path, too_long="error")


def test_parts_of_a_prompt_are_no_examples(tmp_path: Path) -> None:
    write(tmp_path, {"instruction": "q" * 250, "output": "a"})
    assert load_encode_source(tmp_path, too_long="split").train.lengths == (
        PROMPT_TOKENS + 251 - 198,
    )
    with pytest.raises(DataError, match=r"none of the 1 rows has an answer within 100 tokens"):
        load_encode_source(tmp_path)


def test_as_many_bad_rows_are_skipped_as_the_recipe_allows_each_named(tmp_path: Path) -> None:
    file = write(tmp_path, qa("a"), qa(" "), {"instruction": "q"}, qa("b"))
    with pytest.raises(DataError, match=r"2 of 4 rows(.|\n)*:2: empty answer\n(.|\n)*:3: no key"):
        load_encode_source(tmp_path)
    rows = load_encode_source(tmp_path, skip_bad=2)
    assert rows.train.sources == (f"{file}:1", f"{file}:4")
    assert rows.notes == (
        f"2 bad rows of {file} were skipped:\n  {file}:2: empty answer\n"
        f"  {file}:3: no key 'output'; it has 'instruction'",
    )
    assert load_encode_source(tmp_path, skip_bad=3).notes == rows.notes
    with pytest.raises(DataError, match=r"2 of 4 rows(.|\n)*and `data\.skip_bad` allows 1"):
        load_encode_source(tmp_path, skip_bad=1)  # the tokens are cached


def test_a_row_that_the_template_refuses_may_be_skipped_too(tmp_path: Path) -> None:
    refused = {"messages": [{"role": "user", "content": "q"}] * 2}
    refused["messages"] = [*refused["messages"], {"role": "assistant", "content": "a"}]
    raising = tiny_tokenizer()
    raising.chat_template = (
        "{% for m in messages %}{% if m.content == 'x' %}{{ raise_exception('no x') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    file = write(tmp_path, qa("a"), {"instruction": "x", "output": "b"})

    def loaded(skip_bad: int) -> Rows:
        return load_rows(
            DataSection(path=str(file), skip_bad=skip_bad),
            raising,
            seq_len=100,
            seed=0,
            cache_dir=tmp_path / "cache",
        )

    with pytest.raises(DataError, match=r"cannot render the row: no x \(.*rows\.jsonl:2\)"):
        loaded(0)
    assert loaded(1).train.sources == (f"{file}:1",)
    assert f"1 bad rows of {file} were skipped" in loaded(1).notes[0]


def test_rows_that_say_the_same_are_dropped_on_request_and_counted(tmp_path: Path) -> None:
    same = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    file = write(tmp_path, qa("a"), qa("b"), qa("a") | {"id": 1}, qa("a") | {"input": "r"}, qa("b"))
    assert len(load_encode_source(tmp_path).train) == 5
    rows = load_encode_source(tmp_path, drop_duplicates=True)
    assert rows.train.sources == (f"{file}:1", f"{file}:2", f"{file}:4")
    assert f"2 rows of {file} were dropped as duplicates" in rows.notes
    write(tmp_path, {"messages": same}, {"messages": [*same[:1], same[1] | {"train": True}]})
    assert len(load_encode_source(tmp_path, drop_duplicates=True).train) == 1


def test_documents_that_say_the_same_are_dropped_before_they_are_joined(tmp_path: Path) -> None:
    write(tmp_path, {"text": "abc"}, {"text": "abc"}, {"text": "d"})
    rows = load_encode_source(tmp_path, drop_duplicates=True)
    ends = "<|endoftext|>"
    assert tiny_tokenizer().decode(rows.train.input_ids) == f"abc{ends}d{ends}"


def progress_of(file: Path, **settings: Any) -> tuple[list[str], list[tuple[int, int | None]]]:
    """Return the works that tokenising a file shows, and their numbers."""
    works, numbers = [], []

    @contextmanager
    def working(what: str, unit: str) -> Iterator[Work]:
        assert unit == "rows"
        works.append(what)
        yield lambda done, total: numbers.append((done, total))

    load_rows(
        DataSection(path=str(file), **settings),
        tiny_tokenizer(),
        seq_len=100,
        seed=0,
        cache_dir=file.parent / "cache",
        working=working,
    )
    return works, numbers


@pytest.mark.thorough
def test_tokenising_counts_rows_of_a_known_number_once(tmp_path: Path) -> None:
    file = write(tmp_path, *[qa(str(n)) for n in range(600)])
    with file.open("a") as out:
        out.write("\n \n")  # blank lines are no rows
    works, numbers = progress_of(file)
    assert works == ["Tokenising rows.jsonl"]
    assert numbers == [(0, 600), (250, 600), (500, 600), (600, 600)]
    assert progress_of(file) == ([], [])  # it is in the cache
    assert progress_of(file, max_rows=300)[1] == [(0, 300), (250, 300), (300, 300)]


def test_tokenising_rows_that_have_to_be_decoded_counts_without_an_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([qa(str(n)) for n in range(300)]))
    assert progress_of(file)[1] == [(0, None), (250, None), (300, None)]


def test_data_sets_and_parquet_files_know_how_many_rows_they_have(tmp_path: Path) -> None:
    rows = Dataset.from_list([qa(str(n)) for n in range(300)])
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "saved")
    (tmp_path / "text.txt").write_text("a\nb\n")
    sources = [open_source(str(tmp_path / n)) for n in ("rows.parquet", "saved", "text.txt")]
    assert [source.num_rows() for source in sources] == [300, 300, 1]
    assert [len(list(source.rows())) for source in sources] == [300, 300, 1]


def test_rows_that_differ_in_what_is_trained_are_no_duplicates(tmp_path: Path) -> None:
    def chat(*, trained: bool) -> dict[str, Any]:
        answer = {"role": "assistant", "content": "a", "train": trained}
        last = {"role": "assistant", "content": "b"}
        user = {"role": "user", "content": "q"}
        return {"messages": [user, answer, user, last]}

    file = write(tmp_path, chat(trained=True), chat(trained=False), chat(trained=True))
    rows = load_encode_source(tmp_path, drop_duplicates=True)
    assert rows.train.sources == (f"{file}:1", f"{file}:2")
    assert rows.notes == (f"1 rows of {file} were dropped as duplicates",)


def test_a_row_of_several_texts_of_which_one_is_cut_away_is_counted(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = REWRITES
    turns = [("user", "q"), ("assistant", "a"), ("user", LONG), ("assistant", "b")]
    write(tmp_path, {"messages": [{"role": role, "content": text} for role, text in turns]})
    rows = load_encode_source(tmp_path, seq_len=100, tokenizer=tokenizer)
    assert len(rows.train) == 1
    assert rows.notes == ("1 of 1 rows were cut to 100 tokens",)
