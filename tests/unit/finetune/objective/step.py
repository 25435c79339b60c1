"""A step of rows with random log-probabilities, and the same step cut over two ranks."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from finetune.objective.factory import objective_of
from finetune.objective.pairs import Exchange
from finetune.objective.step_rows import StepRows
from finetune.recipe.sections import ObjectiveSection
from offload.engine.objective import Objective, Scores

SEQ_LEN = 50
PAIRED = ([3, 0, 2, 0, 1, 3, 2, 1], [1, 0, 1, 1, 0, 0, 0, 1])
"""Groups and values of four pairs, out of order."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Rows and their scores; those of row i are `policy_N[rows_N == i]`."""

    rows: StepRows
    scores: Scores

    @property
    def num_rows(self) -> int:
        return self.scores.num_rows

    def of_row(self, values_N: torch.Tensor | None) -> list[torch.Tensor]:
        """The values of each row's tokens."""
        assert values_N is not None
        return [values_N[self.scores.rows_N == i] for i in range(self.num_rows)]

    def pairs(self) -> list[tuple[int, int]]:
        """Chosen and rejected row of each group of two, found by looking at all rows."""
        found = []
        for group in dict.fromkeys(self.rows.groups_R.tolist()):
            members = [i for i in range(self.num_rows) if self.rows.groups_R[i] == group]
            members.sort(key=lambda i: -float(self.rows.values_R[i]))
            found.append((members[0], members[1]))
        return found


def step(
    groups: Sequence[int] = PAIRED[0],
    values: Sequence[float] = PAIRED[1],
    *,
    num_trained: int | None = None,
    has_sampler: bool = False,
    seed: int = 0,
) -> Step:
    """Make rows of 1 to 9 tokens each, likelier or not than by the reference."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 10, (len(groups),), generator=rng)
    rows_N = torch.arange(len(groups)).repeat_interleave(sizes)

    def logps(near: torch.Tensor | None = None) -> torch.Tensor:
        drawn = torch.rand(len(rows_N), generator=rng, dtype=torch.float64)
        return -3 * drawn if near is None else near - 0.4 * (drawn - 0.5)

    policy_N = logps()
    scores = Scores(
        policy_N=policy_N.requires_grad_(),
        reference_N=logps(policy_N.detach()),
        rows_N=rows_N,
        num_rows=len(groups),
    )
    rows = StepRows(
        groups_R=torch.tensor(groups),
        values_R=torch.tensor(values, dtype=torch.float32),
        num_trained=len(groups) if num_trained is None else num_trained,
        sampler_N=logps(policy_N.detach()) if has_sampler else None,
    )
    return Step(rows=rows, scores=scores)


def objective(
    values: Mapping[str, Any], rows: StepRows, exchange: Exchange | None = None
) -> Objective:
    """Make the objective of a recipe with these settings."""
    section = ObjectiveSection.model_validate(values)
    return objective_of(section, rows, seq_len=SEQ_LEN, exchange=exchange)


def computed(
    values: Mapping[str, Any], of: Step, exchange: Exchange | None = None
) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, float]]:
    """Return the loss of a step, its gradient by each log-probability, and the metrics."""
    result = objective(values, of.rows, exchange).loss(of.scores)
    (gradient,) = torch.autograd.grad(result.value, of.scores.policy_N)
    metrics = {name: value.item() for name, value in result.metrics.items()}
    assert not any(value.requires_grad for value in result.metrics.values())
    return result.value.detach(), gradient, metrics


def assert_is(
    values: Mapping[str, Any], of: Step, by_hand: Callable[[Step], torch.Tensor]
) -> Mapping[str, float]:
    """Check loss and gradient against a loop written by hand; return the metrics."""
    loss, gradient, metrics = computed(values, of)
    expected = by_hand(of)
    (expected_gradient,) = torch.autograd.grad(expected, of.scores.policy_N)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-13)
    assert gradient.abs().sum() > 0
    return metrics


def cut(whole: Step, ranks_R: Sequence[int]) -> list[Step]:
    """Give each row of a step to one of two ranks."""
    parts = []
    for rank in range(2):
        mine = [i for i, theirs in enumerate(ranks_R) if theirs == rank]
        is_mine_N = torch.tensor([i in mine for i in whole.scores.rows_N.tolist()])
        numbers = [mine.index(i) for i in whole.scores.rows_N[is_mine_N].tolist()]
        reference_N, sampler_N = whole.scores.reference_N, whole.rows.sampler_N
        assert reference_N is not None
        scores = Scores(
            policy_N=whole.scores.policy_N.detach()[is_mine_N].requires_grad_(),
            reference_N=reference_N[is_mine_N],
            rows_N=torch.tensor(numbers, dtype=torch.int64),
            num_rows=len(mine),
        )
        rows = replace(
            whole.rows,
            groups_R=whole.rows.groups_R[mine],
            values_R=whole.rows.values_R[mine],
            num_trained=sum(i < whole.rows.num_trained for i in mine),
            sampler_N=None if sampler_N is None else sampler_N[is_mine_N],
        )
        parts.append(Step(rows=rows, scores=scores))
    return parts


def assert_two_ranks_are_one(
    values: Mapping[str, Any], whole: Step, ranks_R: Sequence[int]
) -> None:
    """Check that the ranks' losses add up to the step's, and that each has its own gradients."""
    loss, gradient, metrics = computed(values, whole)
    barrier = threading.Barrier(2)
    tables: list[torch.Tensor] = [torch.empty(0), torch.empty(0)]

    def of_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, float]]:
        def exchange(table: torch.Tensor) -> Sequence[torch.Tensor]:
            assert not table.requires_grad
            tables[rank] = table
            barrier.wait(timeout=30)
            theirs = tables[1 - rank]
            barrier.wait(timeout=30)
            return (theirs,)

        return computed(values, cut(whole, ranks_R)[rank], exchange)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(of_rank, range(2)))
    torch.testing.assert_close(sum(part for part, _, _ in results), loss, rtol=1e-12, atol=1e-13)
    for rank, (_, of_own, theirs) in enumerate(results):
        is_own_N = torch.tensor(ranks_R)[whole.scores.rows_N] == rank
        torch.testing.assert_close(of_own, gradient[is_own_N], rtol=1e-12, atol=1e-13)
        assert theirs.keys() == metrics.keys()
        for name, value in theirs.items():
            assert abs(value - metrics[name]) < 1e-12, name
