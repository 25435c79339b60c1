"""Which cases of a test run by default, and which of the rest with the slow tests."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def mostly_slow(
    cases: Iterable[Any], *default: Any, rest: pytest.MarkDecorator = pytest.mark.slow
) -> list[ParameterSet]:
    """Return cases as parameters of a test: those that are named run by default.

    Args:
        cases: Of one parameter each, or tuples of several; a mapping names its cases.
        default: Cases, or names of a mapping's, that always run.
        rest: What the others are marked as.
    """
    named = cases.items() if isinstance(cases, Mapping) else [(case, case) for case in cases]
    unknown = [case for case in default if case not in [name for name, _ in named]]
    assert not unknown, unknown
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name if isinstance(cases, Mapping) else None,
            marks=() if name in default else rest,
        )
        for name, case in named
    ]


def tiered(
    cases: Mapping[str, Any] | Iterable[Any], *, default: Iterable[Any], slow: Iterable[Any]
) -> list[ParameterSet]:
    """Return cases as parameters of a test, of which most run by hand: those of a large grid.

    Args:
        cases: As of `mostly_slow`.
        default: Cases, or names of a mapping's, that always run.
        slow: Those that run with the slow tests; the others are exhaustive.
    """
    named = dict(cases) if isinstance(cases, Mapping) else list(cases)
    some = set(slow)
    unknown = some - set(named)
    assert not unknown, unknown
    found = mostly_slow(named, *default, rest=pytest.mark.exhaustive)
    names = list(named)
    return [
        pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
        if name in some and case.marks
        else case
        for name, case in zip(names, found, strict=True)
    ]


def each_value(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return as many combinations as have each value of each column once."""
    length = max(map(len, columns))
    return [tuple(column[i % len(column)] for column in columns) for i in range(length)]


def diagonal(
    *columns: Sequence[Any], rest: pytest.MarkDecorator = pytest.mark.slow
) -> list[ParameterSet]:
    """Return all combinations: by default run as many as have each value of each column once."""
    return mostly_slow(itertools.product(*columns), *each_value(*columns), rest=rest)
