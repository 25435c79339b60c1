"""Weights that come from a hub, which is a server on this machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.files.shards import INDEX, SINGLE
from tests.hub import hub

MIB = 2**20
FETCH = """
import sys, time
from finetune.env import quiet_libraries
quiet_libraries()
from rich.console import Console
from finetune.errors import ModelError
from finetune.model.download import download_weights
from finetune.report import screen
from finetune.report.screen import Screen
screen.LINE_EVERY_S = screen.RATE_AFTER_S = 0.0
console = Console(force_terminal=sys.argv[2] == "terminal", width=400)
screen = Screen(console, is_verbose=False)
try:
    download_weights(sys.argv[1], working=screen.working, note=screen.note)
except ModelError as error:
    print(error)
"""


def fetched(repo: str, variables: dict[str, str], *, terminal: bool = False) -> str:
    """Fetch weights in a process of its own, whose hub this is; return what it shows."""
    own = [f"{name}={value}" for name, value in variables.items()]
    no_proxy = [word for name in ("http_proxy", "HTTP_PROXY") for word in ("-u", name)]
    done = subprocess.run(
        [
            *("env", *no_proxy, *own, sys.executable, "-c", FETCH, repo),
            "terminal" if terminal else "file",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def cached(variables: dict[str, str]) -> dict[str, int]:
    """Return the sizes of the files in the cache, by name."""
    folder = Path(variables["HF_HOME"])
    return {file.name: file.stat().st_size for file in folder.glob("hub/models*/snapshots/*/*")}


def write_shards(folder: Path, *num_bytes: int) -> None:
    folder.mkdir(parents=True)
    names = [f"model-{n}.safetensors" for n in range(len(num_bytes))]
    for name, size in zip(names, num_bytes, strict=True):
        (folder / name).write_bytes(os.urandom(size))
    weight_map = {f"weight {n}": name for n, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "consolidated.safetensors").write_bytes(bytes(MIB))  # the same weights once more
    (folder / "config.json").write_text("{}")


def test_weights_are_fetched_with_size_rate_and_end_in_lines(tmp_path: Path) -> None:
    write_shards(tmp_path / "hub" / "own" / "model", 30 * MIB, 25 * MIB, MIB)
    with hub(tmp_path / "hub") as (variables, asked):
        shown = fetched("own/model", variables)
        first, *lines = shown.splitlines()
        assert first.startswith("Downloading own/model: 0.06 GB, 3 files, to ")
        assert 2 <= len(lines) <= 10, shown
        for line in lines:
            assert re.fullmatch(
                r"[\d:]+ Downloading own/model: 0\.\d\d of 0\.05 GiB, [\d,]+ MB/s, ETA \d+ s", line
            )
        assert "0.05 of 0.05 GiB" in lines[-1]
        assert cached(variables) == {
            **{"model-0.safetensors": 30 * MIB, "model-1.safetensors": 25 * MIB},
            **{
                "model-2.safetensors": MIB,
                INDEX: (tmp_path / "hub/own/model" / INDEX).stat().st_size,
            },
        }
        num_asked = len(asked)
        assert fetched("own/model", variables) == "", "all of it is there"
        assert len(asked) == num_asked


def test_a_terminal_has_a_bar(tmp_path: Path) -> None:
    write_shards(tmp_path / "hub" / "own" / "model", 12 * MIB, MIB)
    with hub(tmp_path / "hub") as (variables, _):
        shown = fetched("own/model", variables, terminal=True)
    assert "Downloading own/model: 0.01 GB, 2 files, to " in shown
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in shown
    assert "0.01 of 0.01 GiB" in shown


def test_a_single_file_is_fetched_and_no_shards(tmp_path: Path) -> None:
    write_shards(tmp_path / "hub" / "own" / "model", MIB)
    (tmp_path / "hub" / "own" / "model" / SINGLE).write_bytes(bytes(3 * MIB))
    with hub(tmp_path / "hub") as (variables, _):
        assert "own/model: 0.00 GB, 1 file, to " in fetched("own/model", variables)
        assert cached(variables) == {SINGLE: 3 * MIB}


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    write_shards(tmp_path / "hub" / "own" / "model", 30 * MIB, 20 * MIB)
    with hub(tmp_path / "hub") as (variables, asked):
        fetched("own/model", variables)
        (shard,) = Path(variables["HF_HOME"]).glob("hub/models*/snapshots/*/model-1.safetensors")
        shard.resolve().unlink()  # a link to nothing is left
        asked.clear()
        shown = fetched("own/model", variables)
        assert shown.startswith("Downloading own/model: 0.02 GB, 1 file, to ")
        assert asked == ["model-1.safetensors"]
        assert cached(variables)["model-1.safetensors"] == 20 * MIB


@pytest.mark.parametrize(
    ("repo", "why"),
    [
        ("own/model", "RepositoryNotFoundError: 404"),
        ("no such id!", "HFValidationError: Repo id must use alphanumeric"),
        ("own/empty", "EntryNotFoundError: 404"),
    ],
)
def test_what_the_hub_does_not_have_is_named(tmp_path: Path, repo: str, why: str) -> None:
    (tmp_path / "hub" / "own" / "empty").mkdir(parents=True)
    with hub(tmp_path / "hub") as (variables, _):
        shown = fetched(repo, variables)
    assert f"model.path: {repo} cannot be downloaded" in shown
    assert why in shown


def test_a_shard_that_the_hub_lacks_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path / "hub" / "own" / "model", MIB, MIB)
    (tmp_path / "hub" / "own" / "model" / "model-1.safetensors").unlink()
    with hub(tmp_path / "hub") as (variables, _):
        shown = fetched("own/model", variables)
    assert "model.path: own/model cannot be downloaded (" in shown
    assert "EntryNotFoundError: 404" in shown
    assert "hint: start again" in shown


def test_without_a_hub_nothing_is_done(tmp_path: Path) -> None:
    write_shards(tmp_path / "hub" / "own" / "model", MIB)
    with hub(tmp_path / "hub") as (variables, asked):
        assert fetched("own/model", {**variables, "HF_HUB_OFFLINE": "1"}) == ""
        assert fetched(str(tmp_path / "hub" / "own" / "model"), variables) == ""
        assert asked == []
    assert fetched("own/model", variables) == "", "it does not answer"
