"""Answers to compare are in one step however it is cut; mismatched rows follow their order."""

from collections.abc import Callable
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch

from finetune.data.compared import Comparison
from finetune.data.dataset import ExampleSet, load_rows
from finetune.data.order import BatchOrder, PackedOrder, RowCost
from finetune.data.steps import StepLoader, Steps, StepShare
from finetune.data.tokenize import IGNORE_INDEX
from finetune.errors import DataError
from finetune.recipe.sections import DataSection, TrainSection
from finetune.training.ranks import own_micro_batches
from tests.doubles import tiny_tokenizer

COST = RowCost(flops_per_token=1.0)
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


def steps_of(
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
        PackedOrder.of(train, rows, min_parts=num_ranks, cost=COST, comparison=comparison)
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
        steps_of(rows, is_packed=is_packed, micro_batch_size=size, grad_accum_steps=6 // size)
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
    steps = steps_of(load(pairs(7), "preference"), is_packed=True)
    with StepLoader(steps, first_step=3, num_workers=0) as loader:
        found = [groups_of(batch.share) for batch in loader]
    assert found == [groups_of(steps.from_array(n, steps.as_array(n))) for n in (3, 4)]


@pytest.mark.parametrize("is_packed", [True, False])
def test_two_ranks_have_the_rows_of_a_step_between_them(
    load: Callable[..., ExampleSet], *, is_packed: bool
) -> None:
    rows = load(labelled(8), "labelled")
    alone = steps_of(rows, is_packed=is_packed, is_mismatched=True)
    ranks = [
        steps_of(rows, is_packed=is_packed, rank=rank, num_ranks=2, is_mismatched=True)
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
    steps = steps_of(rows, is_packed=is_packed, is_mismatched=True, micro_batch_size=2)
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
    steps = steps_of(load(*kind), is_packed=is_packed, is_mismatched=is_mismatched)
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
    steps = steps_of(load([row + known] * 4, "sampled"), is_packed=True, grad_accum_steps=2)
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
        steps_of(rows, is_packed=False, grad_accum_steps=3)
    with pytest.raises(DataError, match=r"a step has 1 sequences, and needs 2"):
        steps_of(rows, is_packed=True, grad_accum_steps=1)
    kto = load(labelled(4), "labelled")
    with pytest.raises(DataError, match=r"needs 2; KTO scores each prompt with the answer of"):
        steps_of(kto, is_packed=True, grad_accum_steps=1, is_mismatched=True)
    ranked = [
        '{"prompt": "q", "completions": ["a", "b"], "ranks": [1, 2]}',
        '{"prompt": "q", "completions": ["a", "b", "c"], "ranks": [1, 2, 3]}',
    ]
    rankings = load(ranked, "ranking")
    with pytest.raises(DataError, match=r"2 or 3 answers(.|\n)*`data\.packing: on`"):
        steps_of(rankings, is_packed=False)
    steps = steps_of(rankings, is_packed=True, grad_accum_steps=3)
    for step in range(5):
        sizes = map(len, groups_of(steps.from_array(step, steps.as_array(step))).values())
        assert sorted(sizes) in ([2], [3], [2, 3])
