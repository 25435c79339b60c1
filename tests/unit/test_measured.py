"""docs/measured.md: shared rows are checked, and errors of the prediction are told by card."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.report.share import SETTINGS
from tests.tools import measured

RATES = ("h2d", "h2d_duplex", "d2h", "host_memory", "disk")
ROW: dict[str, Any] = {
    "form": 1,
    "versions": {"sluice": "0.1.0", "torch": "2.13.0"},
    "hardware": {
        **{"name": "a | card", "device": "cuda", "num_ranks": 1, "is_probed": True},
        **{"vram_bytes": 2**34, "ram_bytes": 2**36},
        **{f"{name}_bytes_per_s": 1e10 for name in RATES},
    },
    "model": {
        **{"id": None, "type": "qwen3", "num_layers": 4},
        **{"num_parameters": 8_000_000, "num_active_parameters": 8_000_000},
        "num_trained_parameters": 1_000,
    },
    "settings": {**dict.fromkeys(SETTINGS), "train.what": "adapter", "model.dtype": "float16"}
    | {"offload.codec": "auto"},
    "step": {
        **{"num_steps": 20, "num_tokens": 4096, "num_runs": 1},
        **{"first_predicted_s": 1.0, "first_grade": "probed", "grade": "timed"},
        **{"predicted_s": 0.9, "measured_s": 1.0, "p20_s": 1.0, "p50_s": 1.0, "p80_s": 1.0},
        "is_disturbed": True,
    },
    "peaks": [{"name": "device", "predicted_bytes": 110, "measured_bytes": 100}],
}


def written(folder: Path, row: dict[str, Any]) -> Path:
    file = folder / "row.json"
    file.write_text(json.dumps(row))
    return file


def test_each_shared_row_is_one_of_sluice_share() -> None:
    assert len(measured.read_shared()) == len(list(measured.SHARED.iterdir()))


def test_our_own_rows_are_those_that_cards_measured() -> None:
    found = measured.read_benchmarks()
    assert {row.card for row in found} == {"NVIDIA H200"}
    assert [round(row.error, 3) for row in found] == [-0.019, 0.799, -0.046]


def test_a_card_has_a_median_from_three_rows_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [measured.read_shared(written(tmp_path, ROW).parent)[0]] * 3
    for num, shown in ((2, "-"), (3, "10.0%")):
        monkeypatch.setattr(measured, "_all", lambda num=num: rows[:num])
        ((_, count, *errors),) = measured.cards()
        assert (count, errors) == (str(num), [shown, "-10.0%", shown, "+10.0%"])


def test_a_shared_row_says_how_far_the_prediction_was_off(tmp_path: Path) -> None:
    written(tmp_path, ROW)
    (row,) = measured.read_shared(tmp_path)
    assert (row.model, row.what) == ("qwen3, 8 million", "adapter, float16, auto, disturbed")
    assert row.error == pytest.approx(-0.1)
    assert row.memory_error == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"user": "me"}, "user\n  Extra inputs are not permitted"),
        ({"step": ROW["step"] | {"measured_s": -1}}, "measured_s"),
        ({"step": ROW["step"] | {"measured_s": None}}, "measured_s"),
        ({"hardware": {}}, "hardware.name\n  Field required"),
    ],
)
def test_another_row_is_refused_with_its_file(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    file = written(tmp_path, ROW | change)
    with pytest.raises(ValueError, match=rf"{file}: ") as caught:
        measured.read_shared(tmp_path)
    assert said in str(caught.value)
