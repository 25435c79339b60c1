import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.dataset import ExampleSet
from finetune.data.order import BatchOrder, PackedOrder, RowCost, StepSizes
from finetune.data.steps import StepBatch, StepLoader, Steps, collate
from finetune.data.tokenize import Example
from finetune.errors import DataError
from finetune.recipe.sections import TrainSection
from tests.conversations import count_rows, tokenised
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
