"""Runs next to each other: figures, settings that differ, a page, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune.app import main
from finetune.errors import CheckpointError, ConfigError
from finetune.report.compare_pages import compare_page
from finetune.report.compared_runs import COLUMNS, figures_of, read_runs, recipe_changes, runs_table
from tests.unit.finetune.report.made_up import write_run
from tests.unit.finetune.report.seen import Seen, begun, specs

PRICE = {"report__price_per_kwh": 0.5, "report__currency": "EUR"}


def a_run(folder: Path, *, slow_s: list[float], more: dict[str, Any], **changes: Any) -> Path:
    folder.mkdir(parents=True)
    write_run(begun(folder, output__name=folder.name, **changes), slow_s=slow_s)
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("".join(f"{json.dumps(json.loads(line) | more)}\n" for line in lines))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    energy = {"energy_j": {"GPU": 1.8e6}, "energy_window_s": 9.0, "energy_per_token_j": 1.8e4}
    fast = a_run(tmp_path / "fast", slow_s=[0.0] * 2, more={"eval_loss": 2.5})
    slow = a_run(
        tmp_path / "slow", slow_s=[1.0] * 4, more={"loss": 0.5, **energy}, train__lr=0.5, **PRICE
    )
    return [fast, slow]


def shown(folders: list[Path]) -> str:
    console = Console(width=200, record=True)
    with console.capture() as found:
        console.print(runs_table(read_runs(folders)))
    return found.get()


def test_figures_are_those_of_each_runs_own_files(folders: list[Path]) -> None:
    fast, slow = (dict(zip(COLUMNS, figures_of(run), strict=True)) for run in read_runs(folders))
    assert (fast["run"], fast["steps"], fast["loss"], fast["held-out"]) == (
        *("fast", "2", "1.0000", "2.5000"),
    )
    assert (fast["energy"], fast["cost"]) == ("-", "-")
    assert (slow["steps"], slow["loss"], slow["held-out"]) == ("4", "0.5000", "-")
    assert (slow["J/token"], slow["energy"], slow["cost"]) == ("1.8e+04", "2 kWh", "1 EUR")
    assert slow["predicted"] == fast["predicted"]
    seconds = [float(run["measured"].split()[0]) for run in (fast, slow)]
    assert seconds[1] - seconds[0] == pytest.approx(1.0, abs=0.02)
    lines = (folders[0] / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["phases_s"] for line in lines]
    rate = 200 / sum(one["step"] + one["data wait"] for one in times)
    assert float(fast["tokens/s"]) == pytest.approx(rate, abs=0.5)


def test_settings_that_differ_are_named_but_not_the_names(folders: list[Path]) -> None:
    changes = recipe_changes(read_runs(folders))
    assert [line.split(":")[0] for line in changes["slow"]] == [
        *("train.lr", "report.price_per_kwh", "report.currency")
    ]
    text = shown(folders)
    assert "Settings that differ from those of fast:" in text
    assert "-> 0.5, report.price_per_kwh: null -> 0.5" in text


def test_columns_of_energy_are_shown_only_if_a_run_has_it(
    folders: list[Path], tmp_path: Path
) -> None:
    other = a_run(tmp_path / "other", slow_s=[0.0], more={})
    assert "J/token" in shown(folders)
    assert "J/token" not in shown([folders[0], other])
    assert "  other: none" in shown([folders[0], other])


def test_a_run_without_a_step_is_a_row_of_dashes(folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    runs = read_runs([folders[0], begun(tmp_path / "new")])
    assert figures_of(runs[1]) == ("new", "0", *["-"] * (len(COLUMNS) - 2))
    text = compare_page(runs)
    assert "new has done no step yet." in Seen(text).text
    assert {point["run"] for point in specs(text)["loss"]["data"]["values"]} == {"fast"}


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    paths = [a_run(tmp_path / top / "same", slow_s=[0.0], more={}) for top in ("a", "b")]
    assert [run.name for run in read_runs(paths)] == [str(path) for path in paths]


def test_the_page_has_the_curves_of_every_run(folders: list[Path]) -> None:
    drawn = specs(compare_page(read_runs(folders)))
    assert set(drawn) == {"eval", "loss", "rate", "lr", "energy"}
    steps = [(p["run"], p["step"]) for p in drawn["loss"]["data"]["values"]]
    assert steps == [*(("fast", i) for i in (1, 2)), *(("slow", i) for i in (1, 2, 3, 4))]
    assert {p["run"] for p in drawn["energy"]["data"]["values"]} == {"slow"}
    for chart in drawn.values():  # a run has the same colour in all of them
        assert chart["encoding"]["color"]["scale"]["domain"] == ["fast", "slow"]


def test_what_cannot_be_compared_is_refused(folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one run"):
        read_runs(folders[:1])
    with pytest.raises(ConfigError, match="again"):
        read_runs([folders[0], folders[0].parent / "x" / ".." / "fast"])
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="holds no run"):
            read_runs([folders[0], folder])


def test_the_command_shows_a_table_and_writes_a_page(
    folders: list[Path], tmp_path: Path, capsys
) -> None:
    page = tmp_path / "compare.html"
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, folders), "--out", str(page)])
    assert ended.value.code in (0, None)
    assert not Seen(page.read_text("utf-8")).loaded
    assert "Settings that differ" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, folders), "--out", str(folders[0] / "metrics.jsonl")])
    assert ended.value.code == 1
    assert "NAME.html" in capsys.readouterr().err
