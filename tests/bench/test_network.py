"""The benchmark of the network goes on where it was stopped, and prints its rows as a table."""

from pathlib import Path
from typing import Any

import pytest

from tests.bench.bench_network import Kept, table

pytestmark = pytest.mark.bench


def row(factor: float | None, **figures: float | None) -> dict[str, Any]:
    return {
        "factor": factor,
        "limit_mbit_per_s": 46.0 if factor else None,
        "probed_mbit_per_s": 37.6,
        "predicted_step_s": 8.0,
        "step_s": 9.0,
        "predicted_hidden_frac": 0.25,
        "hidden_frac": 0.5,
    } | figures


def test_rows_of_the_same_settings_are_found_again(tmp_path: Path) -> None:
    file, settings = tmp_path / "rows.jsonl", ("train.steps=10",)
    first = row(0.5)
    Kept(file, settings).add(first)
    found = Kept(file, settings).row(0.5)
    assert found is not None
    assert found.items() > first.items()
    assert Kept(file, settings).row(None) is None
    assert Kept(file, ("train.steps=3",)).row(0.5) is None


def test_each_rate_is_a_line() -> None:
    free = row(None, predicted_step_s=3.0, step_s=3.25)
    assert table([free, row(0.5)]).splitlines()[2:] == [
        "| none | 38 | 3.00, 3.25 | 25%, 50% |",
        "| 46 | 38 | 8.00, 9.00 | 25%, 50% |",
    ]
