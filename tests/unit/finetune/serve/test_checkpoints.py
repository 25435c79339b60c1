"""Checkpoints of a server's clients: whole, indexed by their paths, and compared when read."""

import json
import multiprocessing
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.clients.requests import ClientState
from finetune.errors import CheckpointError, ConfigError
from finetune.serve.checkpoints import FILES, Checkpoints, Record, expiry

RUN = "0123456789ab:train:0"
A, B = (f"base_model.model.layers.0.q_proj.lora_{one}.weight" for one in "AB")


def state(value: float = 1.0, size: int = 4) -> ClientState:
    moments = {n: {"step": torch.tensor(3.0), "exp_avg": torch.full((2,), value)} for n in (0, 1)}
    values = {A: torch.full((2, size), value), B: torch.full((size, 2), -value)}
    return ClientState(values=values, moments={"state": moments})


def record(name: str = "first", **changes: Any) -> Record:
    given: dict[str, Any] = {
        "run": RUN,
        "kind": "weights",
        "name": name,
        "base": "tiny",
        "rank": 2,
        "alpha": 32.0,
        "targets": ["q_proj"],
        "seed": 1,
        "num_steps": 3,
        "time_s": 1e9,
        "num_bytes": 0,
    }
    return Record(**given | changes)


def is_same(one: ClientState, other: ClientState) -> bool:
    moments, others = one.moments["state"], other.moments["state"]
    return all(torch.equal(one.values[x], other.values[x]) for x in (A, B)) and all(
        torch.equal(moments[n][x], others[n][x]) for n in (0, 1) for x in ("step", "exp_avg")
    )


def test_what_is_saved_is_read_by_the_next_server(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(record(), state())
    found = Checkpoints(tmp_path)
    path = f"tinker://{RUN}/weights/first"
    assert [one.path for one in found] == [path]
    assert is_same(found.load(path, has_moments=True), state())
    assert found.find(path).num_bytes == sum(one.nbytes for one in state().values.values()) + 2 * (
        4 + 8
    )
    assert not found.load(path, has_moments=False).moments


def test_peft_reads_what_is_saved(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path)
    saved.save(record(), state())
    config = json.loads(saved.file(record().path, FILES[0]).read_text())
    assert config["target_modules"] == ["layers.0.q_proj"]
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 32.0, "LORA")
    with pytest.raises(CheckpointError, match=r"no file 'checkpoint\.json'"):
        saved.file(record().path, "checkpoint.json")
    with pytest.raises(CheckpointError, match="no file"):
        saved.file(record().path, "../key")


@pytest.mark.parametrize("file", [*FILES, "optimizer.safetensors", "manifest.json"])
def test_a_flipped_bit_is_found(tmp_path: Path, file: str) -> None:
    saved = Checkpoints(tmp_path)
    saved.save(record(), state())
    (folder,) = tmp_path.iterdir()
    content = bytearray((folder / file).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"(?s)is damaged: .*{folder.name}"):
        Checkpoints(tmp_path).load(record().path, has_moments=True)


def test_flipped_bits_of_a_record_are_found(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(record(), state())
    (folder,) = tmp_path.iterdir()
    file = folder / "checkpoint.json"
    whole = file.read_bytes()
    for place in range(len(whole) - 1):
        content = bytearray(whole)
        content[place] ^= 1
        file.write_bytes(content)
        found = Checkpoints(tmp_path)
        assert not list(found)
        assert f"{file} cannot be read" in found.problems[0]
    file.write_bytes(whole)
    assert Checkpoints(tmp_path).find(record().path) == record(num_bytes=88)


@pytest.mark.parametrize("file", [*FILES, "optimizer.safetensors", "manifest.json"])
def test_a_file_that_is_missing_or_short_is_found(tmp_path: Path, file: str) -> None:
    saved = Checkpoints(tmp_path)
    for name in ("first", "second"):
        saved.save(record(name), state())
        folder = saved.file(record(name).path, FILES[0]).parent
        if name == "first":
            (folder / file).unlink()
        else:
            (folder / file).write_bytes((folder / file).read_bytes()[:-9])
        with pytest.raises(CheckpointError, match="is damaged"):
            saved.load(record(name).path, has_moments=True)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"run": "../.."}', "\0", "{" * 5000])
def test_a_record_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    saved = Checkpoints(tmp_path)
    saved.save(record(), state())
    (folder,) = tmp_path.iterdir()
    saved.save(record("other"), state())
    (folder / "checkpoint.json").write_text(content)
    found = Checkpoints(tmp_path)
    assert [one.name for one in found] == ["other"]
    (problem,) = found.problems
    assert str(folder) in problem
    assert "remove its folder" in problem


def test_folders_of_other_names_are_left_alone(tmp_path: Path) -> None:
    for name in ("mine", ".git", "0123", "partial-0123456789abcdef-0123abcd"):
        (tmp_path / name).mkdir()
    assert not list(Checkpoints(tmp_path))
    left = {one.name for one in tmp_path.iterdir()}
    assert left == {"mine", ".git", "0123"}  # what a killed server has left is removed


def test_a_name_is_replaced_once_the_new_one_is_whole(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path)
    saved.save(record(), state(1.0))
    with pytest.raises(ConfigError, match="already"):
        saved.require_free(RUN, "weights", "first", may_replace=False)
    saved.require_free(RUN, "weights", "first", may_replace=True)
    saved.require_free("other", "weights", "first", may_replace=False)
    saved.require_free(RUN, "sampler_weights", "first", may_replace=False)
    saved.save(record(time_s=2e9), state(2.0))
    assert len(list(tmp_path.iterdir())) == 1
    assert is_same(Checkpoints(tmp_path).load(record().path, has_moments=True), state(2.0))


def test_of_two_of_a_path_the_newest_counts(tmp_path: Path) -> None:
    """The server was killed after it had written the new one, and before it removed the old."""
    one, other = (Checkpoints(tmp_path) for _ in range(2))
    one.save(record(time_s=2e9), state(2.0))
    other.save(record(time_s=1e9), state(1.0))
    found = Checkpoints(tmp_path)
    assert is_same(found.load(record().path, has_moments=True), state(2.0))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "a\0", "\0", 65 * "n", "", "a b", "\u00e9", "x\n", "\n", "a\\b"]
)
def test_names_that_are_no_names_are_refused(tmp_path: Path, name: str) -> None:
    saved = Checkpoints(tmp_path)
    with pytest.raises(ConfigError, match="1 to 64 of letters"):
        saved.require_free(RUN, "weights", name, may_replace=True)
    with pytest.raises(ValueError, match="name"):
        record(name)


@pytest.mark.parametrize("path", ["", "tinker://", "../../etc/passwd", "tinker://a/b/c", "\0"])
def test_paths_of_nothing_are_refused(tmp_path: Path, path: str) -> None:
    saved = Checkpoints(tmp_path)
    for ask in (saved.find, saved.remove, lambda x: saved.load(x, has_moments=False)):
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            ask(path)
    with pytest.raises(CheckpointError):
        saved.expire(path, None)


def test_samplers_have_nothing_to_train_on(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path)
    saved.save(record(kind="sampler_weights"), state())
    path = f"tinker://{RUN}/sampler_weights/first"
    with pytest.raises(CheckpointError, match="no states of the optimizer"):
        saved.load(path, has_moments=True)
    assert saved.load(path, has_moments=False).values


def test_checkpoints_are_removed_when_they_expire(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path)
    now_s = time.time()  # noqa: TID251 - a date
    saved.save(record("old", expires_s=now_s - 1), state())
    saved.save(record("new"), state())
    assert [one.name for one in saved] == ["new"]
    assert len(list(tmp_path.iterdir())) == 1
    saved.expire(record("new").path, now_s + 1000)
    assert Checkpoints(tmp_path).find(record("new").path).expires_s == now_s + 1000
    assert Checkpoints(tmp_path).load(record("new").path, has_moments=True)
    saved.expire(record("new").path, now_s - 1)
    assert not list(Checkpoints(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ttl_s", [0, -1, 10**10, 10**400, -(10**400)])
def test_times_that_a_date_cannot_hold_are_refused(ttl_s: int) -> None:
    with pytest.raises(ConfigError, match="ttl_seconds is"):
        expiry(1e9, ttl_s)
    assert expiry(1e9, None) is None
    assert expiry(1e9, 3600) == 1e9 + 3600


def _full(folder: Path) -> None:
    """Save on a disk that is full after a few bytes."""
    saved = Checkpoints(folder)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        saved.save(record("second"), state(2.0, size=1000))
    except CheckpointError as error:
        is_right = "cannot be written" in str(error)
        os._exit(0 if is_right and saved.load(record().path, has_moments=True) else 1)
    os._exit(2)


def test_a_full_disk_leaves_nothing_and_what_was_there(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(record(), state())
    process = multiprocessing.get_context("fork").Process(target=_full, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert len(list(tmp_path.iterdir())) == 1
    assert is_same(Checkpoints(tmp_path).load(record().path, has_moments=True), state())


def test_one_that_is_removed_while_it_is_read_is_missing_and_no_more(tmp_path: Path) -> None:
    saved, odd = Checkpoints(tmp_path), list[BaseException]()
    is_ended = threading.Event()

    def read() -> None:
        while not is_ended.is_set():
            try:
                saved.load(record().path, has_moments=True)
            except CheckpointError:
                continue
            except Exception as error:  # noqa: BLE001 - it is looked at below
                odd.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(40):
        saved.save(record(time_s=1e9 + turn), state(float(turn)))
        if turn % 2:
            saved.remove(record().path)
    is_ended.set()
    reader.join()
    assert not odd
