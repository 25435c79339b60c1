"""Plans of recipes on cards are the settled ones: tests/golden/plans.py writes them anew."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.golden.plans import figures, pairs, written

WRITTEN = written()


def flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested figures by dotted names."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        inner = flat(value) if isinstance(value, Mapping) else {"": value}
        found |= {f"{name}.{key}".rstrip("."): x for key, x in inner.items()}
    return found


def test_each_pair_is_written_and_most_fit() -> None:
    assert list(WRITTEN) == list(pairs())
    assert sum(x is not None for x in WRITTEN.values()) >= 30


@pytest.mark.parametrize("pair", list(pairs()))
def test_a_plan_is_the_settled_one(pair: str) -> None:
    found, settled = figures(pair), WRITTEN[pair]
    assert (found is None) == (settled is None)
    if found is None or settled is None:
        return
    found, settled = flat(found), flat(settled)
    assert found.keys() == settled.keys()
    differing = {
        name: (found[name], value)
        for name, value in settled.items()
        if found[name] != (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)
    }
    assert not differing
