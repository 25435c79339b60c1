"""Weights that are fetched from a hub: with a size, a rate and an end, resumed, and refused."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from finetune.errors import ModelError
from finetune.files.shards import INDEX, SINGLE
from finetune.hub import download
from finetune.hub.download import download_weights
from finetune.hub.repository import Repository, look_up
from finetune.report import screen
from finetune.report.screen import Screen
from tests.hub import Hub, ask, commit_of, hub

MIB = 2**20


def model(repo: str, revision: str | None = None) -> Repository:
    return Repository(
        id=repo,
        revision=revision,
        kind="model",
        setting="model.path",
        revision_setting="model.revision",
    )


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(screen, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(screen, "RATE_AFTER_S", 0.0)
    with hub(tmp_path / "hub") as one:
        ask(one, monkeypatch)
        yield one


def fetched(repo: str, revision: str | None = None, *, is_terminal: bool = False) -> str:
    """Fetch weights; return what is shown."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=400)
    on_it = Screen(console, is_verbose=False)
    look_up.cache_clear()
    download_weights(model(repo, revision), working=on_it.working, note=on_it.note)
    return text.getvalue()


def cached(served: Hub) -> dict[str, int]:
    """Return the sizes of the files in the cache, by name."""
    found = Path(served.variables["HF_HOME"]).glob("hub/models*/snapshots/*/*")
    return {file.name: file.stat().st_size for file in found}


def write_shards(folder: Path, *num_bytes: int) -> None:
    folder.mkdir(parents=True)
    names = [f"model-{n}.safetensors" for n in range(len(num_bytes))]
    for name, size in zip(names, num_bytes, strict=True):
        (folder / name).write_bytes(os.urandom(size))
    weight_map = {f"weight {n}": name for n, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "consolidated.safetensors").write_bytes(bytes(MIB))  # the same weights once more
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")


def test_weights_are_fetched_with_size_room_rate_and_end_in_lines(served: Hub) -> None:
    folder = served.folder / "own" / "model"
    write_shards(folder, 30 * MIB, 25 * MIB, MIB)
    first, room, promise, *lines = fetched("own/model").splitlines()
    assert first == f"Downloading own/model: 56.0 MiB, 3 files, at commit {commit_of(folder)}"
    where = re.escape(served.variables["HF_HOME"])
    assert re.fullmatch(
        rf"  to {where}/hub, which takes 56\.0 MiB more and has [\d.]+ GiB free", room
    )
    assert promise == "  If it is cut, the same command goes on from there."
    assert 2 <= len(lines) <= 10, lines
    for line in lines:
        assert re.fullmatch(
            r"[\d:]+ Downloading own/model: 0\.\d\d of 0\.05 GiB, [\d,]+ MB/s, ETA \d+ s", line
        )
    assert "0.05 of 0.05 GiB" in lines[-1]
    described = {"config.json": 2, "tokenizer.json": 2, INDEX: (folder / INDEX).stat().st_size}
    shards = {f"model-{n}.safetensors": size * MIB for n, size in enumerate((30, 25, 1))}
    assert cached(served) == shards | described
    num_asked = len(served.asked)
    assert fetched("own/model") == "", "all of it is there"
    assert len(served.asked) == num_asked


def test_a_terminal_has_a_bar(served: Hub) -> None:
    write_shards(served.folder / "own" / "model", 12 * MIB, MIB)
    shown = fetched("own/model", is_terminal=True)
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in shown
    assert "0.01 of 0.01 GiB" in shown


def test_a_single_file_is_fetched_and_no_shards(served: Hub) -> None:
    write_shards(served.folder / "own" / "model", MIB)
    (served.folder / "own" / "model" / SINGLE).write_bytes(bytes(3 * MIB))
    assert "own/model: 3.0 MiB, 1 file, at " in fetched("own/model")
    assert {name for name in cached(served) if name.endswith("tensors")} == {SINGLE}


def test_what_is_there_is_not_fetched_again(served: Hub) -> None:
    write_shards(served.folder / "own" / "model", 30 * MIB, 20 * MIB)
    fetched("own/model")
    cache = Path(served.variables["HF_HOME"])
    (shard,) = cache.glob("hub/models*/snapshots/*/model-1.safetensors")
    shard.resolve().unlink()  # a link to nothing is left
    served.asked.clear()
    assert "own/model: 20.0 MiB, 1 file, at " in fetched("own/model")
    assert served.asked == ["model-1.safetensors"]
    assert cached(served)["model-1.safetensors"] == 20 * MIB


def test_another_revision_is_fetched_next_to_the_first(served: Hub) -> None:
    write_shards(served.folder / "own" / "model", MIB)
    write_shards(served.folder / "own" / "model@v1", 2 * MIB)
    fetched("own/model")
    commit = commit_of(served.folder / "own" / "model@v1")
    assert f"2.0 MiB, 1 file, at commit {commit}" in fetched("own/model", "v1")
    assert fetched("own/model", commit) == "", "the tag and its commit are one"


FETCH = """
import sys
from finetune.env import quiet_libraries
quiet_libraries()
from rich.console import Console
from finetune.hub.download import download_weights
from finetune.report.screen import Screen
from tests.unit.finetune.hub.test_download import model
screen = Screen(Console(), is_verbose=False)
download_weights(model("own/model"), working=screen.working, note=screen.note)
"""


def test_a_download_that_was_killed_goes_on_where_it_was(served: Hub) -> None:
    """The hub's client keeps nothing of a file that has not come whole."""
    folder = served.folder / "own" / "model"
    write_shards(folder, 30 * MIB, 31 * MIB, MIB)
    served.piece_s = 0.05
    process = subprocess.Popen([sys.executable, "-c", FETCH], stdout=subprocess.DEVNULL)
    cache, deadline_s = Path(served.variables["HF_HOME"]), time.monotonic() + 60
    while len([one for one in cache.rglob("*.cut") if one.stat().st_size > 4 * MIB]) < 2:
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = sum(one.stat().st_size for one in cache.rglob("*.cut"))
    served.piece_s = 0.0
    served.starts.clear()
    shown = fetched("own/model")
    assert f"  {kept / MIB:.1f} MiB came before it was cut: it goes on from there" in shown
    starts = dict(served.starts)
    assert starts["model-0.safetensors"] > 4 * MIB
    assert starts["model-1.safetensors"] > 4 * MIB
    assert starts["model-0.safetensors"] + starts["model-1.safetensors"] == kept
    for name in ("model-0.safetensors", "model-1.safetensors", "model-2.safetensors"):
        (file,) = cache.glob(f"hub/models*/snapshots/*/{name}")
        assert file.read_bytes() == (folder / name).read_bytes()
    assert not list(cache.rglob("*.cut"))


def test_a_connection_that_breaks_is_taken_up_again(served: Hub, monkeypatch) -> None:
    folder = served.folder / "own" / "model"
    write_shards(folder, 25 * MIB)
    served.cuts = [12 * MIB]
    monkeypatch.setattr("time.sleep", lambda _s: None)
    fetched("own/model")
    assert cached(served)["model-0.safetensors"] == 25 * MIB
    assert [start for name, start in served.starts if name.startswith("model-")] == [0, 12 * MIB]


def test_a_connection_that_stays_broken_says_how_to_go_on(served: Hub, monkeypatch) -> None:
    write_shards(served.folder / "own" / "model", 25 * MIB)
    served.cuts = [12 * MIB, *(0 for _ in range(20))]
    monkeypatch.setattr("time.sleep", lambda _s: None)
    with pytest.raises(ModelError) as error:
        fetched("own/model")
    assert error.value.what == (
        "model.path: the connection to the hub broke in model-0.safetensors of own/model"
    )
    assert (error.value.limit, error.value.hint) == (
        "what has come is kept",
        "start again: the download goes on where it broke",
    )
    served.cuts.clear()
    assert "12.0 MiB came before it was cut" in fetched("own/model")
    assert cached(served)["model-0.safetensors"] == 25 * MIB


def test_parts_that_do_not_make_the_file_are_refused_and_removed(served: Hub) -> None:
    folder = served.folder / "own" / "model"
    write_shards(folder, 5 * MIB)
    (partial,) = download.missing_weights(_described("own/model")).partials
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(bytes(MIB))  # other bytes than the hub's
    with pytest.raises(ModelError, match=r"came in several parts, and together they are damaged"):
        fetched("own/model")
    assert not partial.exists()
    fetched("own/model")
    assert cached(served)["model-0.safetensors"] == 5 * MIB


@pytest.mark.parametrize("num_bytes", [5 * MIB, 6 * MIB])
@pytest.mark.parametrize("is_in_git", [False, True])
def test_what_is_left_of_a_cut_download_is_no_file_by_its_size(
    served: Hub, num_bytes: int, is_in_git: bool
) -> None:
    """What a crash of the machine may leave: as many bytes, or more, and all are zero."""
    folder = served.folder / "own" / "model"
    write_shards(folder, 5 * MIB)
    if is_in_git:
        (folder / ".in_git").touch()
    (partial,) = download.missing_weights(_described("own/model")).partials
    assert len(partial.stem) == (40 if is_in_git else 64)
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(bytes(num_bytes))
    with pytest.raises(ModelError, match=r"came in several parts, and together they are damaged"):
        fetched("own/model")
    fetched("own/model")
    (file,) = Path(served.variables["HF_HOME"]).rglob("model-0.safetensors")
    assert file.read_bytes() == (folder / "model-0.safetensors").read_bytes()


def _described(repo: str) -> Repository:
    return model(repo, download.fetch_description(model(repo)))


def test_a_file_that_plain_http_does_not_give_is_left_to_the_client(served, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE", 12 * MIB)
    write_shards(served.folder / "own" / "model", 11 * MIB)
    fetched("own/model")
    assert cached(served)["model-0.safetensors"] == 11 * MIB
    write_shards(served.folder / "own" / "larger", 13 * MIB)
    with pytest.raises(ValueError, match="too large to be downloaded using the regular"):
        fetched("own/larger")  # this hub has no xet, by which the client fetches such files


def test_a_full_disk_is_named_before_and_while_it_is_written(served: Hub, monkeypatch) -> None:
    write_shards(served.folder / "own" / "model", 3 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(download, "free_in_cache", lambda: 2 * MIB)
        with pytest.raises(ModelError, match=r"needs 3\.0 MiB at .*/hub, and 2\.0 MiB is fre") as e:
            fetched("own/model")
    assert "`export HF_HOME=DIR` on a larger disk" in e.value.hint
    assert not any(name.endswith(".safetensors") for name in served.asked)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.file_download.http_get", full)
        with pytest.raises(ModelError, match=r"the disk of .* is full, and own/model has not"):
            fetched("own/model")


def test_a_shard_that_the_hub_lacks_is_named(served: Hub) -> None:
    write_shards(served.folder / "own" / "model", MIB, MIB)
    (served.folder / "own" / "model" / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"own/model lacks model-1\.safetensors, which model\.saf"):
        fetched("own/model")
    assert not any(name.endswith(".safetensors") for name in served.asked)


def test_where_the_hub_may_not_be_asked_it_is_not(served: Hub, monkeypatch) -> None:
    write_shards(served.folder / "own" / "model", MIB)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"own/model .*; HF_HUB_OFFLINE forbids the hub") as error:
        fetched("own/model")
    assert error.value.hint.startswith("`unset HF_HUB_OFFLINE`")
    assert served.asked == []


def test_a_download_that_is_stopped_ends_soon(served: Hub) -> None:
    write_shards(served.folder / "own" / "model", 60 * MIB, 60 * MIB)
    served.piece_s = 0.2
    process = subprocess.Popen(
        [sys.executable, "-c", FETCH], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    cache, deadline_s = Path(served.variables["HF_HOME"]), time.monotonic() + 60
    while not any(one.stat().st_size for one in cache.rglob("*.cut")):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=5)  # all of it would take 12 s
    assert process.returncode not in (0, None)
    assert any(one.stat().st_size for one in cache.rglob("*.cut"))
