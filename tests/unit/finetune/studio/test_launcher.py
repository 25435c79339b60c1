"""Runs that the page starts: who may, what is refused, and that pages and servers do not fight."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from finetune.errors import StudioError
from finetune.run.run_dir import RUN_LOG
from finetune.run.run_lock import locked
from finetune.studio import launcher
from finetune.studio.answer import Planner
from finetune.studio.launcher import LOCK, Launcher, at_work, started
from tests.studios import studio_of
from tests.unit.finetune.studio.runs_made import begun

# In place of the command: it goes on until a signal, and says that it got one.
WAITING = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
    "print('ready', flush=True)\nwhile True: time.sleep(0.05)"
)


def wait_until(holds: Any) -> None:
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.fixture(name="folder")
def a_folder(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of the runs; what was started in it is ended."""
    (tmp_path / "recipe.yaml").write_text("model: {}\ndata: {}\n")
    (tmp_path / "notes.yaml").write_text("data is not a section here\n")
    (tmp_path.parent / "outside.yaml").write_text("data: {}\n")
    (tmp_path / "link.yaml").symlink_to(tmp_path.parent / "outside.yaml")
    folder = tmp_path / "runs"
    yield folder
    now = started(folder)
    if now is not None:
        with suppress(ProcessLookupError):
            os.kill(now.pid, signal.SIGKILL)
        wait_until(lambda: started(folder) is None)


@pytest.fixture(name="waiting")
def a_command_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_COMMAND", WAITING)


def launcher_of(folder: Path) -> Launcher:
    return Launcher(folder, root=folder.parent, machine_file=None)


def log_of(folder: Path, name: str) -> str:
    return (folder / name / RUN_LOG).read_text()


def posted(folder: Path, path: str, values: Any, **headers: str) -> tuple[int, str]:
    """Return the status of a request with the right token, and what it says."""
    made = studio_of(folder, Planner(here=None, folder=folder), root=folder.parent)
    client = TestClient(made.studio.app, base_url="http://127.0.0.1:8765")
    body = values if isinstance(values, bytes) else json.dumps(values)
    found = client.post(path.format(at=f"/{made.token}"), content=body, headers=headers)
    return found.status_code, found.text


def test_only_recipes_of_the_folder_are_listed(folder: Path) -> None:
    begun(folder / "one")
    (folder.parent / ".hidden").mkdir()
    (folder.parent / ".hidden" / "recipe.yaml").write_text("data: {}\n")
    (folder.parent / "deep").mkdir()
    (folder.parent / "deep" / "more.yml").write_text("data: {}\n")
    assert launcher_of(folder).recipes() == ["recipe.yaml", "deep/more.yml"]


START = {"recipe": "recipe.yaml", "name": "one"}


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize(
    ("path", "values", "headers", "status", "words"),
    [
        ("/wrong/start", START, {}, 403, "the token in the address is wrong"),
        ("/start", START, {}, 403, "the token in the address is wrong"),
        ("{at}/start", START, {"origin": "https://evil.example"}, 403, "another site"),
        ("{at}/start", START, {"origin": "null"}, 403, "another site"),
        ("{at}/start", START, {"sec-fetch-site": "cross-site"}, 403, "another site"),
        ("{at}/start", START, {"host": "evil.example:8765"}, 403, "the Host header"),
        ("{at}/stop", {"name": "one"}, {"origin": "https://evil.example"}, 403, "another site"),
        ("{at}/resume", {"name": "one"}, {"origin": "https://evil.example"}, 403, "another site"),
        ("{at}/start", b"", {}, 409, "the request: Invalid JSON"),
        ("{at}/start", START | {"recipe": "\ud800"}, {}, 409, "the request: Invalid JSON"),
        ("{at}/start", START | {"more": 1}, {}, 409, "more: Extra inputs"),
        ("{at}/start", b" " * (2**21 + 1), {}, 413, "too long"),
        ("{at}/stop", {"name": 1}, {}, 409, "name: Input should be a valid string"),
        *(
            ("{at}/start", START | {"recipe": recipe}, {}, 409, "is no recipe in")
            for recipe in (
                *("", ".", "/etc/passwd", "../outside.yaml", "link.yaml", "notes.yaml"),
                *("recipe.yaml\0", "runs/../../outside.yaml", "--help.yaml", "none.yaml"),
            )
        ),
        *(
            ("{at}/start", START | {"name": name}, {}, 409, "cannot name a run")
            for name in ("", ".", "..", "../out", "/tmp/out", "a/b", "-x", "a\n", "a b", "a\0")
        ),
        ("{at}/start", START | {"name": "linked"}, {}, 409, "is a link"),
        ("{at}/start", START | {"name": "there"}, {}, 409, "is there and holds no run"),
        ("{at}/start", START | {"name": "run"}, {}, 409, "holds a run already"),
        *(
            (f"{{at}}/{what}", {"name": name}, {}, 409, "is no run of")
            for what in ("stop", "resume")
            for name in ("none", "..", "../runs", "linked", "there", "")
        ),
        ("{at}/stop", {"name": "run"}, {}, 409, "run is not at work"),
        ("{at}/chat", {"name": "run", "said": "x"}, {"origin": "null"}, 403, "another site"),
        ("{at}/chat", {"name": "../runs", "said": "x"}, {}, 409, "is no run of"),
        ("{at}/chat", {"name": "run", "said": ""}, {}, 409, "said: String should have"),
        ("{at}/chat", {"name": "run", "said": " /image /etc/passwd"}, {}, 409, "shows no image"),
        ("{at}/resume", {"name": "sweep/a"}, {}, 409, "sweep/a is a run of a sweep"),
    ],
)
def test_what_may_not_be_started_stopped_or_resumed_is_refused(
    folder: Path, path: str, values: Any, headers: dict[str, str], status: int, words: str
) -> None:
    (folder / "there").mkdir(parents=True)
    (folder / "there" / "letter.txt").write_text("mine")
    begun(folder.parent / "elsewhere")
    (folder / "linked").symlink_to(folder.parent / "elsewhere")
    (begun(folder / "run") / "metrics.jsonl").touch()
    begun(folder / "sweep" / "a")
    before = sorted(folder.parent.rglob("*"))
    found, text = posted(folder, path, values, **headers)
    assert (found, words in text) == (status, True), text
    assert started(folder) is None
    made = set(folder.parent.rglob("*")) - set(before)
    assert made <= {folder / LOCK}


@pytest.mark.usefixtures("waiting")
def test_of_a_hundred_starts_one_starts_and_it_is_asked_to_stop_once(folder: Path) -> None:
    def start(i: int) -> str:
        servers = launcher_of(folder)  # each as from another server
        try:
            servers.start("recipe.yaml", f"run-{i % 10}")
        except StudioError as error:
            return str(error)
        return "started"

    with ThreadPoolExecutor(20) as pool:
        said = list(pool.map(start, range(100)))
    assert said.count("started") == 1
    now = started(folder)
    assert now is not None
    assert {words.split(";")[0] for words in said} == {"started", f"{now.name} is at work"}
    assert [path.parent.name for path in folder.glob(f"*/{RUN_LOG}")] == [now.name]

    wait_until(lambda: "ready" in log_of(folder, now.name))
    assert os.getsid(now.pid) == now.pid  # no terminal's signals reach it
    launcher_of(folder).stop(now.name)
    for _ in range(3):
        with pytest.raises(StudioError, match="was asked to stop already"):
            launcher_of(folder).stop(now.name)
    wait_until(lambda: "asked" in log_of(folder, now.name))
    assert log_of(folder, now.name).count("asked") == 1
    os.kill(now.pid, signal.SIGKILL)
    wait_until(lambda: started(folder) is None)
    assert at_work(folder, now.name) is None
    launcher_of(folder).start("recipe.yaml", now.name)  # the lock went with the process


@pytest.mark.usefixtures("waiting")
def test_a_run_of_a_terminal_is_not_resumed_beside_it(folder: Path) -> None:
    begun(folder / "one")
    with (
        locked(folder / "one"),
        pytest.raises(StudioError, match=rf"one is in use by process {os.getpid()} "),
    ):
        launcher_of(folder).resume("one")
    launcher_of(folder).resume("one")
    now = started(folder)
    assert now is not None
    assert now.name == "one"


def test_a_run_that_fails_at_once_is_listed_with_what_it_said_and_can_start_again(
    folder: Path,
) -> None:
    for _ in range(2):
        status, text = posted(folder, "{at}/start", START)
        assert status == 200, text
        wait_until(lambda: started(folder) is None)
    said = log_of(folder, "one")
    assert said.count("$ sluice finetune ") == 2
    assert said.count("data.path is not set") == 2, said
    made = studio_of(folder, Planner(here=None, folder=folder), root=folder.parent)
    client = TestClient(made.studio.app, base_url="http://127.0.0.1:8765")
    (line,) = client.get(f"/{made.token}/runs.json").json()["runs"]
    assert (line["name"], line["state"], line["can"]) == ("one", "died before step 1", None)
    one = client.get(f"/{made.token}/run.json", params={"name": "one"}).json()
    assert one["log"] == said[-4096:]
    assert posted(folder, "{at}/resume", {"name": "one"})[1].count("it ended before it began") == 1
