"""Servers and rewards of recipes in the runs room, from files of any content."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from finetune.recipe.load import RUN_RECIPE
from finetune.serve.status import STATUS_FILE
from finetune.studio.runs import Runs
from finetune.studio.servers import (
    CLIENT_COLUMNS,
    DEAD_S,
    METRICS_FILE,
    MOST_BYTES,
    NUM_SPARK,
    REWARD_COLUMNS,
    Servers,
)
from tests.studios import client_status, write_status


def write_rewards(folder: Path, *rewards: float, key: str = "reward/total", at: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": at + n, "optim/lr": 1e-4, key: value} for n, value in enumerate(rewards)]
    with (folder / METRICS_FILE).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder / METRICS_FILE


def test_a_server_is_shown_with_its_clients_and_what_its_passes_load(tmp_path: Path) -> None:
    clients = [client_status("a:train:0"), client_status("b:train:0", last_loss=None, rank=8)]
    write_status(tmp_path / "serve", *clients, num_waiting=3)
    found = Runs(tmp_path).all()
    assert found["runs"] == []
    (server,) = found["servers"]
    assert (server["name"], server["base"], server["problem"]) == ("serve", "Qwen/Qwen3-8B", None)
    assert server["facts"] == [
        "Clients that train: 2",
        "clients that wait for a slot: 3",
        "passes to train: 8 (36.0 layers loaded in each)",
        "passes to decode: 400 (33.5 layers loaded in each)",
    ]
    shown = [dict(zip(CLIENT_COLUMNS, one, strict=True)) for one in server["clients"]]
    assert shown[0] == {
        "server": "serve",
        "client": "a:train:0",
        "rank": "32",
        "steps": "1,200",
        "tokens trained": "98,304",
        "loss of the newest request": "2.5000",
        "tokens sampled": "5,000",
        "requests that wait": "2",
        "last heard": "4 s ago",
    }
    assert (shown[1]["rank"], shown[1]["loss of the newest request"]) == ("8", "-")


def test_a_loss_that_is_no_number_is_shown_as_that(tmp_path: Path) -> None:
    write_status(tmp_path, client_status("a", last_loss=float("nan")))
    (server,) = Servers(tmp_path).all()["servers"]
    assert (server["name"], server["clients"][0][5]) == (".", "nan")


def test_a_server_that_was_killed_is_called_so(tmp_path: Path) -> None:
    file = write_status(tmp_path / "serve")
    written_s = file.stat().st_mtime - DEAD_S - 5
    os.utime(file, (written_s, written_s))
    (server,) = Servers(tmp_path).all()["servers"]
    assert "it was killed" in server["problem"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        json.dumps({"base": "b"}),
        json.dumps({"base": 1, "clients": [], "num_waiting": 0, "num_passes": {}, "num_loads": {}}),
        '{"base": "' + "b" * MOST_BYTES + '"}',
    ],
    ids=["empty", "torn", "another", "deep", "missing", "type", "huge"],
)
def test_a_damaged_file_of_a_server_hides_no_other(text: str, tmp_path: Path) -> None:
    write_status(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / STATUS_FILE).write_text(text)
    assert [one["name"] for one in Servers(tmp_path).all()["servers"]] == ["good"]


def test_fields_are_checked_before_they_are_shown(tmp_path: Path) -> None:
    for field, value in (("num_steps", -1), ("num_tokens", 10**30), ("id", "x" * 2000)):
        write_status(tmp_path / field, client_status("a", **{field: value}))
    assert Servers(tmp_path).all()["servers"] == []


def test_text_that_is_not_unicode_keeps_nothing_from_being_shown(tmp_path: Path) -> None:
    write_status(tmp_path / "bad", client_status("\ud800"))
    write_status(tmp_path / "good")
    write_rewards(tmp_path / os.fsdecode(b"odd-\xff"), 0.5)
    found = Servers(tmp_path).all()
    assert [one["name"] for one in found["servers"]] == ["good"]
    assert [one["name"] for one in found["rewards"]] == ["odd-\ufffd"]


def test_no_link_and_no_pipe_is_read(tmp_path: Path) -> None:
    folder, outside = tmp_path / "runs", tmp_path / "outside"
    write_status(outside)
    write_rewards(outside, 0.5)
    for name in ("linked", "pipe"):
        (folder / name).mkdir(parents=True)
    (folder / "linked" / STATUS_FILE).symlink_to(outside / STATUS_FILE)
    (folder / "linked" / METRICS_FILE).symlink_to(outside / METRICS_FILE)
    (folder / "whole").symlink_to(outside)
    os.mkfifo(folder / "pipe" / STATUS_FILE)
    assert Servers(folder).all() == {"servers": [], "rewards": []}
    assert Servers(tmp_path / "none").all() == {"servers": [], "rewards": []}


@pytest.mark.parametrize("key", ["reward/total", "env/all/reward/total"])
def test_the_rewards_of_a_recipe_are_shown_with_their_course(key: str, tmp_path: Path) -> None:
    write_rewards(tmp_path / "math_rl" / "one", 0.1, 0.7, 0.4, key=key)
    (found,) = Servers(tmp_path).all()["rewards"]
    assert found == {
        "name": "math_rl/one",
        "figures": ["3", "0.1000", "0.4000", "0.7000"],
        "spark": [0.1, 0.7, 0.4],
    }
    assert len(found["figures"]) == len(REWARD_COLUMNS) - 2


def test_a_long_course_is_shown_by_the_means_of_its_parts(tmp_path: Path) -> None:
    write_rewards(tmp_path, *range(10 * NUM_SPARK))
    spark = Servers(tmp_path).all()["rewards"][0]["spark"]
    assert spark == [10 * part + 4.5 for part in range(NUM_SPARK)]


def test_steps_that_were_done_again_count_once_and_new_ones_are_seen(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    write_rewards(tmp_path, 0.1, 0.2, 0.3)
    assert servers.all()["rewards"][0]["spark"] == [0.1, 0.2, 0.3]
    file = write_rewards(tmp_path, 0.9, 1.0, at=2)
    assert servers.all()["rewards"][0]["spark"] == [0.1, 0.2, 0.9, 1.0]
    file.unlink()
    assert servers.all()["rewards"] == []


def test_lines_without_a_reward_are_passed_over_and_runs_of_sluice_are_no_recipes(
    tmp_path: Path,
) -> None:
    file = write_rewards(tmp_path / "rl", 0.1, float("nan"), 0.3)
    lines: list[Any] = [{"step": 3}, {"reward/total": 1.0}, [1], "x", {"step": -1}]
    with file.open("a") as opened:
        opened.writelines(json.dumps(one) + "\n" for one in lines)
        opened.write('{"step": 9, "reward/tot')
    write_rewards(tmp_path / "own", 0.5)
    (tmp_path / "own" / RUN_RECIPE).touch()
    write_rewards(tmp_path / "serve" / "checkpoints", 0.5)
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / METRICS_FILE).write_text('{"step": 1, "train_mean_nll": 2.0}\n')
    (found,) = Servers(tmp_path).all()["rewards"]
    assert (found["name"], found["spark"]) == ("rl", [0.1, 0.3])
