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
from finetune.studio.answer import HERE, Planner
from finetune.studio.launcher import LOCK, Launcher, at_work, started
from offload.plan.machine.machine import Machine, named_machine
from tests.studios import question_values, studio_of
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


def planner_of(folder: Path, *, other: str | None = None) -> Planner:
    """Return a planner whose machine is a card that no test has."""

    def here() -> Machine:
        return named_machine("rtx4090")

    configs = folder.parent / "configs"
    return Planner(here=here, folder=configs, root=folder.parent, other=other)


def posted(
    folder: Path, path: str, values: Any, *, other: str | None = None, **headers: str
) -> tuple[int, str]:
    """Return the status of a request with the right token, and what it says."""
    made = studio_of(folder, planner_of(folder, other=other), root=folder.parent)
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


TAKEN = "hint: choose another name; a run that has stopped is resumed in the table"
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
        ("{at}/start", b" " * (2**21 + 1), {}, 413, "at most 2,097,152"),
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
        ("{at}/start", START | {"name": "run"}, {}, 409, TAKEN),
        *(
            (f"{{at}}/{what}", {"name": name}, {}, 409, "is no run of")
            for what in ("stop", "resume")
            for name in ("none", "..", "../runs", "linked", "there", "")
        ),
        ("{at}/stop", {"name": "run"}, {}, 409, "run is not at work"),
        ("{at}/chat", {"name": "run", "said": "x"}, {"origin": "null"}, 403, "another site"),
        ("{at}/chat", {"name": "../runs", "said": "x"}, {}, 409, "is no run of"),
        ("{at}/chat", {"name": "run", "said": ""}, {}, 409, "said: String should have"),
        ("{at}/chat", {"name": "run", "said": " /image /etc/passwd"}, {}, 409, "reads no files"),
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


def of_plan(*, rows: str = "rows.jsonl", name: str = "one", **setup: Any) -> dict[str, Any]:
    """Return what the plan room sends to start a run on this machine."""
    return question_values(**{"card": HERE} | setup) | {"run": {"rows": rows, "name": name}}


PLAN = "{at}/start-plan"


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize(
    ("path", "values", "headers", "status", "words"),
    [
        ("/wrong/start-plan", of_plan(), {}, 403, "the token in the address is wrong"),
        (PLAN, of_plan(), {"origin": "https://evil.example"}, 403, "another site"),
        (PLAN, of_plan(), {"origin": "null"}, 403, "another site"),
        (PLAN, of_plan(), {"sec-fetch-site": "cross-site"}, 403, "another site"),
        (PLAN, of_plan(), {"host": "evil.example:8765"}, 403, "the Host header"),
        (PLAN, b"", {}, 409, "the request: Invalid JSON"),
        (PLAN, b" " * (2**21 + 1), {}, 413, "at most 2,097,152"),
        (PLAN, of_plan() | {"recipe": "recipe.yaml"}, {}, 409, "recipe: Extra inputs"),
        (PLAN, of_plan(extra="x"), {}, 409, "setup.extra: Extra inputs"),
        *(
            (PLAN, of_plan(name=name), {}, 409, "run.name: String should match")
            for name in ("", ".", "..", "../out", "/tmp/out", "a/b", "-x", "a\n", "a b", "a\0")
        ),
        (PLAN, of_plan(name="a" * 101), {}, 409, "run.name: String should match"),
        (PLAN, of_plan(rows=""), {}, 409, "name one in the field `file of rows`"),
        *(
            (PLAN, of_plan(rows=rows), {}, 409, "is no file in")
            for rows in (
                *(".", "/etc/passwd", "../outside.yaml", "link.yaml", "none.jsonl", "runs"),
                *("rows.jsonl\0", "runs/../../outside.yaml", "x" * 300),
            )
        ),
        *(
            (PLAN, of_plan(model=model), {}, 409, "is no shipped model")
            for model in ("..", "/etc", "../elsewhere", "linked-model", "none", "x" * 300)
        ),
        (PLAN, of_plan(card="rtx4090"), {}, 409, "the plan is for rtx4090"),
        (PLAN, of_plan(num_cards=2), {}, 409, "2 cards share a step"),
        (PLAN, of_plan(model="config.json", config="{}"), {}, 409, "config.json has no weights"),
        (PLAN, of_plan(model="qwen3-235b-a22b"), {}, 409, "the plan does not fit"),
        (PLAN, of_plan(name="recipe"), {}, 409, "recipe.yaml is there and is not this recipe"),
        (PLAN, of_plan(name="link"), {}, 409, "link.yaml is there and is not this recipe"),
        (PLAN, of_plan(name="linked"), {}, 409, "is a link"),
        (PLAN, of_plan(name="there"), {}, 409, "is there and holds no run"),
        (PLAN, of_plan(name="run"), {}, 409, TAKEN),
    ],
)
def test_a_plan_that_may_not_be_started_is_refused_and_writes_nothing(
    folder: Path, path: str, values: Any, headers: dict[str, str], status: int, words: str
) -> None:
    root = folder.parent
    (root / "rows.jsonl").write_text("{}\n")
    (root.parent / "elsewhere").mkdir(exist_ok=True)
    (root.parent / "elsewhere" / "config.json").write_text("{}")
    (root / "linked-model").symlink_to(root.parent / "elsewhere")
    (folder / "there").mkdir(parents=True)
    (folder / "there" / "letter.txt").write_text("mine")
    (folder / "linked").symlink_to(root.parent / "elsewhere")
    (begun(folder / "run") / "metrics.jsonl").touch()
    before = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    found, text = posted(folder, path, values, **headers)
    assert (found, words in text) == (status, True), text
    assert started(folder) is None
    after = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    made = {
        file: after.get(file)
        for file in after.keys() | before
        if after.get(file) != before.get(file)
    }
    assert made.keys() <= {folder / LOCK}


def test_a_studio_that_plans_for_another_machine_starts_no_plan(folder: Path) -> None:
    (folder.parent / "rows.jsonl").write_text("{}\n")
    status, text = posted(folder, PLAN, of_plan(), other="rtx4090")
    assert (status, "the plan is for rtx4090" in text) == (409, True), text
    answer = planner_of(folder, other="rtx4090").answered("plan", json.dumps(of_plan()))
    assert "without `--machine NAME`" in json.loads(answer)["obstacle"]


@pytest.mark.usefixtures("waiting")
def test_of_many_pages_that_start_one_plan_one_does_and_its_recipe_is_what_it_showed(
    folder: Path,
) -> None:
    (folder.parent / "rows.jsonl").write_text("{}\n")
    ranks = [4, 8, 16, 32] * 3

    with ThreadPoolExecutor(len(ranks)) as pool:
        said = list(pool.map(lambda rank: posted(folder, PLAN, of_plan(rank=rank)), ranks))
    assert [status for status, _ in said].count(200) == 1
    assert {text.split(";")[0] for status, text in said if status != 200} == {
        '{"problem":"one is at work'
    }
    (rank,) = [rank for rank, (status, _) in zip(ranks, said, strict=True) if status == 200]
    answer = planner_of(folder).answered("plan", json.dumps(of_plan(rank=rank)))
    assert (folder.parent / "one.yaml").read_text() == json.loads(answer)["recipe"]
    assert json.loads(answer)["obstacle"] is None
    assert launcher_of(folder).recipes() == ["one.yaml", "recipe.yaml"]


def test_a_plan_whose_run_fails_at_once_is_listed_and_starts_again_unchanged_or_is_named_anew(
    folder: Path,
) -> None:
    (folder.parent / "rows.jsonl").write_text("no JSON\n")
    for _ in range(2):
        status, text = posted(folder, PLAN, of_plan(objective="orpo"))
        assert status == 200, text
        wait_until(lambda: started(folder) is None)
    assert log_of(folder, "one").count("$ sluice finetune ") == 2
    assert log_of(folder, "one").count("\nhint: ") == 2, log_of(folder, "one")
    status, text = posted(folder, PLAN, of_plan(rank=4))
    assert (status, "one.yaml is there and is not this recipe" in text) == (409, True), text
    made = studio_of(folder, planner_of(folder), root=folder.parent)
    client = TestClient(made.studio.app, base_url="http://127.0.0.1:8765")
    (line,) = client.get(f"/{made.token}/runs.json").json()["runs"]
    assert (line["name"], line["state"], line["can"]) == ("one", "died before step 1", None)


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
