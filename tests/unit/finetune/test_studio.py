"""The studio: its answers, its server, and who may ask."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.testclient import TestClient

from finetune import app
from finetune.errors import CheckpointError, ConfigError, StudioError
from finetune.files.atomic import write_atomically
from finetune.loopback import listening
from finetune.report.explain import explain
from finetune.report.images import ImageFigures, write_images
from finetune.report.pages import NUM_SAMPLES
from finetune.report.prediction import read_predictions
from finetune.run.run_files import line_of, read_rows
from finetune.run.run_lock import locked
from finetune.studio import browser
from finetune.studio.answer import HERE, Json, Kind, Planner, Question
from finetune.studio.guard import inside, new_token, refusal
from finetune.studio.runs import Runs, report_of, run_names
from finetune.studio.server import (
    MAX_MESSAGE_BYTES,
    MAX_QUESTION_BYTES,
    NICENESS,
    Background,
)
from offload.plan.machine.machine import Machine, named_machine
from tests.studios import SETUP, question, question_values, served, studio_of
from tests.tools.site import write_archive
from tests.unit.finetune.studio.runs_made import begun, write_answers, write_run

ROOT = Path(__file__).parents[3]
FIELDS = ("machine", "model", "per_layer", "schedule", "predicted", "objective")


@pytest.fixture(name="planner")
def a_planner(tmp_path: Path) -> Planner:
    return Planner(here=None, folder=tmp_path / "configs")


def planned(words: list[str], capsys) -> dict[str, object]:
    """Return what the command prints as JSON."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        app.main(["plan", *words, "--json"])
    assert not ended.value.code
    figures: dict[str, object] = json.loads(capsys.readouterr().out)
    return figures


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": "dpo", "codec": "nf4"},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {},
                {"method": "dora", "rank": 64, "seq_len": 1000},
                {"method": "all", "tokens_per_step": 2048},
                {"model": "llama-3.1-8b", "ram_gib": 48.5, "link_gb_per_s": 11.5},
                {"micro_batch_size": "auto", "tokens_per_step": 65536, "card": "h100"},
                {"num_cards": 3, "codec": "nf4"},
                {"card": "t4"},
                {"num_cards": 4, "method": "all", "card": "h100", "ram_gib": 512.0},
            )
        ),
    ],
)
def test_the_recipe_of_a_question_plans_to_the_same_figures(
    changes, planner: Planner, tmp_path: Path, capsys, monkeypatch
) -> None:
    answer = planner.answer("plan", question(**changes))
    assert answer["error"] is None
    monkeypatch.chdir(tmp_path)
    Path("from-studio.yaml").write_text(answer["recipe"])
    program, command, *words = answer["command"].split()
    assert (program, command) == ("sluice", "plan")
    figures = planned(words, capsys)
    for field in FIELDS:
        assert answer["figures"][field] == figures[field], field
    # a setting that is asked for is in what is planned
    assert figures["machine"] == changes.get("card", SETUP["card"])


@pytest.mark.parametrize("image_tokens", [512, None])
def test_images_of_a_question_cost_what_the_command_says(
    image_tokens: int | None, planner: Planner, tmp_path: Path, capsys, monkeypatch
) -> None:
    seeing = {"model": "qwen3-vl-8b", "card": "rtx4090", "codec": "nf4"}
    answer = planner.answer(
        "plan", question(**seeing, num_images=10_000, image_tokens=image_tokens)
    )
    assert answer["sees"]
    monkeypatch.chdir(tmp_path)
    Path("from-studio.yaml").write_text(answer["recipe"])
    words = answer["command"].split()[2:]
    assert words[-2:] == ["--images", "10000"]
    figures = planned(words, capsys)
    for field in (*FIELDS, "images"):
        assert answer["figures"][field] == figures[field], field
    assert answer["figures"]["images"]["num_tokens"] == 10_000 * (image_tokens or 1024)
    assert yaml.safe_load(answer["recipe"])["image"] == {"max_tokens": image_tokens or 1024}
    is_said = any("assumed to have at most 1,024 tokens" in note for note in answer["notes"])
    assert is_said == (image_tokens is None)
    (line,) = [text for label, text in answer["rows"] if label == "images"]
    assert "GiB on disk, " in line
    assert " s before step 1" in line
    without = planner.answer("plan", question(**seeing))
    assert without["sees"]
    assert "images" not in without["figures"]


def test_images_for_a_model_that_sees_none_are_refused(planner: Planner) -> None:
    assert planner.answer("plan", question())["sees"] is False
    error = planner.answer("plan", question(num_images=5))["error"]
    assert error["limit"] == "only a tower sees images"


@pytest.mark.thorough
def test_a_pasted_config_is_planned_like_the_shape_that_it_is_of(
    planner: Planner, tmp_path: Path, capsys, monkeypatch
) -> None:
    from finetune.recipe.load import load_shape

    config = json.dumps(load_shape("qwen3-0.6b"))
    answer = planner.answer("plan", question(model="config.json", config=config))
    assert answer["figures"] == planner.answer("plan", question())["figures"]
    monkeypatch.chdir(tmp_path)
    Path("my-model").mkdir()
    Path("my-model/config.json").write_text(config)
    Path("from-studio.yaml").write_text(answer["recipe"])
    figures = planned(answer["command"].split()[2:], capsys)
    assert figures["predicted"] == answer["figures"]["predicted"]


def test_hours_and_money_are_those_of_the_predicted_rate(planner: Planner) -> None:
    answer = planner.answer("plan", question())
    rate = answer["figures"]["predicted"]["tokens_per_s"]
    hours = 36e6 / rate / 3600
    assert answer["work"]["hours"] == pytest.approx(hours)
    assert answer["work"]["kwh"] == pytest.approx(0.4 * hours)
    assert answer["work"]["cost"] == pytest.approx(0.5 * hours + 0.25 * 0.4 * hours)
    assert answer["work"]["steps"] == 4395  # 36e6 / 8192, rounded up
    values = question_values()
    values["work"] = values["work"] | {"power_watts": 0}  # the card's, as `plan` has it
    own = planner.answer("plan", Question.model_validate(values))["work"]
    assert own["kwh"] == pytest.approx(0.17 * hours)
    assert own["cost"] == pytest.approx(0.5 * hours + 0.25 * 0.17 * hours)


def test_what_does_not_fit_says_what_is_short_by_how_much_and_what_would(planner: Planner) -> None:
    asked = question(model="qwen3-235b-a22b", ram_gib=64, card="rtx3060-8gb")
    answer = planner.answer("plan", asked)
    assert answer["fits"] is False
    for one in answer["shortages"]:
        assert one["short_bytes"] == one["needed_bytes"] - one["limit_bytes"] > 0
    ram = next(one for one in answer["shortages"] if one["what"] == "RAM")
    assert ram["limit_bytes"] == (64 - 4) * 2**30  # the system has some
    sums = {p["name"]: sum(size for _, size in p["terms"]) for p in answer["memory"]}
    assert sums["RAM"] == ram["needed_bytes"]
    assert "more memory" in planner.answer("ways", asked)["hint"]
    assert planner.answer("rate", asked)["tokens_per_s"] is None


def test_what_would_fit_begins_with_a_control_of_the_page(planner: Planner) -> None:
    asked = question(model="qwen3-30b-a3b", ram_gib=32, card="rtx3090")
    assert planner.answer("plan", asked)["fits"] is False
    hint = planner.answer("ways", asked)["hint"]
    assert hint.startswith("layers wait as: nf4; or ")
    fits = question(model="qwen3-30b-a3b", ram_gib=32, card="rtx3090", codec="nf4")
    assert planner.answer("plan", fits)["fits"]


def test_memory_by_term_adds_up_to_the_peaks_that_are_shown(planner: Planner) -> None:
    answer = planner.answer("plan", question())
    sums = {p["name"]: sum(size for _, size in p["terms"]) for p in answer["memory"]}
    predicted = answer["figures"]["predicted"]
    assert sums == {"VRAM": predicted["peak_vram_bytes"], "RAM": predicted["host_bytes"]}


def test_a_point_of_the_curve_is_the_plan_of_as_many_tokens(planner: Planner) -> None:
    asked = question(tokens_per_step=32768)
    point, answer = planner.answer("rate", asked), planner.answer("plan", asked)
    assert point["tokens_per_step"] == 32768
    assert point["tokens_per_s"] == answer["figures"]["predicted"]["tokens_per_s"]


def test_a_wider_step_shows_more_ops(planner: Planner) -> None:
    asked = question(tokens_per_step=65536)
    wide = planner.answer("step", asked.model_copy(update={"zoom": 8}))["gantt"]
    assert wide.count("<rect") > 2 * planner.answer("plan", asked)["gantt"].count("<rect")


@pytest.mark.thorough
def test_other_ways_are_those_of_the_command(planner: Planner, capsys) -> None:
    words = ["qwen3-0.6b", "train.tokens_per_step=8192", "--machine", "rtx3060", "--what-if"]
    ways = json.loads(json.dumps(planner.answer("ways", question())["other_ways"]))
    assert ways == planned(words, capsys)["other_ways"]


def test_several_cards_share_a_step(planner: Planner) -> None:
    one, two = (planner.answer("plan", question(num_cards=n))["figures"] for n in (1, 2))
    assert one["schedule"]["tokens_per_step"] == two["schedule"]["tokens_per_step"]
    # a little more than twice, as each holds the inputs of half the step
    assert 1.9 < two["predicted"]["tokens_per_s"] / one["predicted"]["tokens_per_s"] < 2.1
    assert planner.answer("ways", question(num_cards=2))["other_ways"] is None


def test_several_cards_train_all_weights_sharded(planner: Planner) -> None:
    answer = planner.answer("plan", question(num_cards=4, method="all", card="h100", ram_gib=512.0))
    assert answer["error"] is None
    assert "parallel: fsdp2" in answer["recipe"]
    assert answer["fits"]
    short = planner.answer("plan", question(num_cards=2, method="all", model="llama-3.1-8b"))[
        "error"
    ]
    assert short["what"].startswith("sharded over 2 ranks the plan needs")
    assert short["hint"].startswith("`train.parallel: stream` with one process, more processes")


def test_cards_that_cannot_share_a_step_are_refused(planner: Planner) -> None:
    error = planner.answer("plan", question(num_cards=5))["error"]
    assert error["what"] == "a step of 4 micro-batches for 5 processes"
    assert "`cards: 4`" in error["hint"]


def test_this_machine_is_measured_once_and_only_if_it_is_asked_about(tmp_path: Path) -> None:
    measured = []

    def here():
        measured.append(1)
        return named_machine("rtx4070")

    planner = Planner(here=here, folder=tmp_path)
    planner.answer("plan", question())
    assert not measured
    answers = [planner.answer("plan", question(card=HERE, rank=rank)) for rank in (4, 8)]
    assert len(measured) == 1
    assert {answer["figures"]["machine"] for answer in answers} == {"rtx4070"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"card": "abacus"}, "no machine is called 'abacus'"),
        ({"card": HERE}, "this machine was not measured"),
        ({"model": "/etc/passwd"}, "/etc/passwd is no shipped model"),
        ({"model": "recipes/shapes"}, "recipes/shapes is no shipped model"),
        ({"model": "config.json", "config": "{"}, "is not"),
        ({"seq_len": 65536, "tokens_per_step": 65536}, "train.seq_len: 65536"),
        ({"method": "all", "objective": "dpo"}, "objective.reference is base"),
    ],
)
def test_what_cannot_be_planned_says_why_and_the_fix(changes, words, planner: Planner) -> None:
    answer = planner.answer("plan", question(**changes))
    assert words in answer["error"]["what"]
    assert answer["error"]["hint"]


def test_a_machine_that_was_measured_in_another_type_is_refused(tmp_path: Path) -> None:
    planner = Planner(here=lambda: named_machine("t4", dtype="float16"), folder=tmp_path)
    error = planner.answer("plan", question(card=HERE))["error"]
    assert error["what"].startswith(
        "this machine was measured in float16, and the page plans it in"
    )
    assert "`sluice init --machine here`" in error["hint"]
    assert planner.answer("plan", question(card="t4"))["fits"]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("fortune", "{}", "'fortune' is no kind of question"),
        ("plan", "{", "the question: Invalid JSON"),
        ("plan", "{}", "setup: Field required"),
        ("plan", json.dumps(question_values(rank=0)), "setup.rank: Input should be greater"),
        ("plan", json.dumps(question_values(speed=9)), "setup.speed: Extra inputs"),
    ],
)
def test_a_malformed_question_is_refused_by_its_field(kind, text, words, planner: Planner) -> None:
    assert words in json.loads(planner.answered(kind, text))["error"]["what"]


def test_the_static_page_s_door_answers_what_the_server_does(planner: Planner) -> None:
    text = json.dumps(question_values(rank=32))
    assert browser.answered("plan", text) == planner.answered("plan", text)


_ALONE = """
import json, sys
text = json.dumps(json.loads(sys.argv[1]))
from finetune.studio.browser import answered
print(answered("plan", text))
assert not {"torch", "transformers", "numpy", "huggingface_hub"} & set(sys.modules)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes", [{}, {"model": "qwen3-vl-8b", "card": "rtx4090", "num_images": 10}]
)
def test_the_static_page_s_archive_holds_all_that_its_answers_import(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    import pydantic_core

    write_archive(tmp_path / "sluice.zip")
    with zipfile.ZipFile(tmp_path / "sluice.zip") as archive:
        archive.extractall(tmp_path / "alone")
    core = Path(pydantic_core.__file__).parent  # the browser has a wheel of it
    (tmp_path / "alone" / "pydantic_core").symlink_to(core)
    text = json.dumps(question_values(**changes))
    found = subprocess.run(
        [sys.executable, "-S", "-c", _ALONE, text],
        cwd=tmp_path / "alone",
        env={"PYTHONPATH": str(tmp_path / "alone")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    answer = json.loads(found.stdout)
    assert answer == json.loads(browser.answered("plan", text))


# --------------------------------------------------------------------------------------- background


# Prints the second process's id, and goes on until a signal.
COMMAND = """
import multiprocessing, signal, sys, time
from contextlib import suppress
from pathlib import Path
from finetune.interrupts import raised
from finetune.studio.server import Background
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for background jobs
with suppress(KeyboardInterrupt), raised(), Background(Path(sys.argv[1]), root=Path()):
    print(multiprocessing.active_children()[0].pid, flush=True)
    for _ in range(600):  # a signal just before a sleep does not end it: Python sees it afterwards
        time.sleep(0.1)
"""


def test_its_answers_are_those_of_the_first_process_and_its_death_is_said(tmp_path: Path) -> None:
    asked, here = question(), named_machine("rtx4090")
    with Background(tmp_path, root=tmp_path) as background:
        (process,) = multiprocessing.active_children()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)  # Ctrl-C reaches it too: it is left to the command
        planner = Planner(here=lambda: here, folder=tmp_path)
        assert background.answer("rate", asked, None) == planner.answer("rate", asked)
        assert background.answer("ways", asked, None) == planner.answer("ways", asked)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == NICENESS + os.nice(0)
        about_here = question(card=HERE)
        assert background.answer("rate", about_here, here) == planner.answer("rate", about_here)
        refused = background.answer("rate", question(card="abacus"), None)
        assert refused["error"]["what"].startswith("no machine is called 'abacus'")

        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(
            StudioError, match=r"died \(exit code -9\)(.|\n)*hint: change a control"
        ):
            background.answer("rate", asked, None)
        assert background.answer("rate", asked, None) == planner.answer("rate", asked)
    assert not multiprocessing.active_children()


def test_a_plan_waits_for_no_point_of_the_curve_and_the_machine_is_measured_once(
    tmp_path: Path,
) -> None:
    begun, may_end, machines = threading.Event(), threading.Event(), list[Machine | None]()
    here = named_machine("rtx4090")
    num_measured = [0]

    def measured() -> Machine:
        num_measured[0] += 1
        return here

    def slow(kind: Kind, asked: Question, given: Machine | None) -> Json:
        machines.append(given)
        begun.set()
        assert may_end.wait(timeout=20)
        return {"error": None}

    planner = Planner(here=measured, folder=tmp_path, background=slow)
    asked = question(card=HERE)
    thread = threading.Thread(target=planner.answer, args=("rate", asked))
    thread.start()
    assert begun.wait(timeout=20)
    assert planner.answer("plan", asked)["fits"]
    assert planner.answer("step", asked)["gantt"]
    may_end.set()
    thread.join()
    planner.answer("ways", question())
    assert machines == [here, None]
    assert num_measured == [1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_the_command(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        if number == signal.SIGKILL:
            os.kill(process.pid, number)
        else:
            os.killpg(process.pid, number)  # as a terminal does: to both processes
        _, said = process.communicate(timeout=20)  # their ends of the pipe are closed
    assert said == ""
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


# -------------------------------------------------------------------------------------------- guard


TOKEN = "right"
OWN = {"host": "127.0.0.1:8765"}


@pytest.mark.parametrize(
    "headers",
    [
        OWN,
        {"host": "localhost:8765"},
        OWN | {"origin": "http://127.0.0.1:8765"},
        OWN | {"sec-fetch-site": "same-origin"},
        OWN | {"sec-fetch-site": "none"},
    ],
)
def test_the_page_itself_and_a_typed_address_are_let_in(headers) -> None:
    assert refusal(headers, "/right/", token=TOKEN, port=8765) is None


@pytest.mark.parametrize(
    ("headers", "path", "why"),
    [
        ({}, "/right/", "Host"),
        ({"host": "evil.example:8765"}, "/right/", "Host"),
        ({"host": "127.0.0.1"}, "/right/", "Host"),
        ({"host": "127.0.0.1:8766"}, "/right/", "Host"),
        ({"host": "127.0.0.1:8765.evil.example"}, "/right/", "Host"),
        (OWN | {"origin": "http://evil.example"}, "/right/", "another site"),
        (OWN | {"origin": "null"}, "/right/", "another site"),
        (OWN | {"origin": "https://127.0.0.1:8765"}, "/right/", "another site"),
        (OWN | {"sec-fetch-site": "cross-site"}, "/right/", "another site"),
        (OWN | {"sec-fetch-site": "same-site"}, "/right/", "another site"),
        (OWN, "/", "token"),
        (OWN, "/wrong/", "token"),
        (OWN, "/rightly/", "token"),
        (OWN, "/r\u00e4ght/", "token"),
        (OWN, "//right/", "token"),
    ],
)
def test_others_are_refused(headers, path, why) -> None:
    assert why in str(refusal(headers, path, token=TOKEN, port=8765))


def test_tokens_are_long_and_differ() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 32


def test_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    (folder / "a").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (folder / "link").symlink_to(tmp_path / "other")
    (folder / "near").symlink_to(folder / "a")
    assert inside(folder, "a") == (folder / "a").resolve()
    assert inside(folder, "near") == (folder / "a").resolve()
    for name in ("../other", "a/../../other", "link", "link/x", "/etc", "", ".", "a\0b"):
        assert inside(folder, name) is None, name


# --------------------------------------------------------------------------------------------- runs


def line(folder: Path, name: str) -> dict[str, object]:
    found: dict[str, object] = next(r for r in Runs(folder).all()["runs"] if r["name"] == name)
    return found


def test_a_run_that_died_before_its_first_step_reads_well(tmp_path: Path) -> None:
    begun(tmp_path / "dead")
    assert line(tmp_path, "dead")["state"] == "died before step 1"
    found = Runs(tmp_path).one("dead")
    assert found["charts"] == {}
    assert "problem" not in found
    assert "The run has done no step yet." in report_of(tmp_path, "dead")


def test_a_run_that_is_written_to_shows_when_it_ends(tmp_path: Path) -> None:
    run = begun(tmp_path / "live")
    with locked(run):
        assert line(tmp_path, "live")["state"] == "starting"
        write_run(run, slow_s=[0.0] * 3)
        with (run / "metrics.jsonl").open("a") as file:  # a line that is half written
            file.write(line_of({"step": 4})[:7])
        now = line(tmp_path, "live")
        assert now["state"] == "training"
        assert (now["steps"], now["of"]) == (3, 12)
        rows = read_rows(run / "metrics.jsonl")
        each = rows[0]["phases_s"]["step"] + rows[0]["phases_s"]["data wait"]
        assert now["eta_s"] == pytest.approx(9 * each)
        points = Runs(tmp_path).one("live")["charts"]["run-loss"]["data"]["values"]
        assert [point["step"] for point in points] == [1, 2, 3]
    assert line(tmp_path, "live")["state"] == "stopped"
    assert line(tmp_path, "live")["eta_s"] is None


def test_a_finished_run_says_so_and_those_of_a_sweep_are_found(tmp_path: Path) -> None:
    run = begun(tmp_path / "sweep" / "lr-1")
    write_run(run, slow_s=[0.0] * 2)
    (run / "adapter").mkdir()
    assert run_names(tmp_path) == ["sweep/lr-1"]
    assert line(tmp_path, "sweep/lr-1")["state"] == "finished"


def test_answers_are_there_as_soon_as_they_were_given(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    assert Runs(tmp_path).one("run")["samples"] == []
    write_answers(run, "before", *"abcdefg")
    first = {"prompt": "p0", "wanted": "w0", "before": "a", "after": None, "images": ()}
    assert Runs(tmp_path).one("run")["samples"][0] == first
    assert len(Runs(tmp_path).one("run")["samples"]) == NUM_SAMPLES
    write_answers(run, "after", *"xyzuvwt")
    samples = Runs(tmp_path).one("run")["samples"]
    assert [(one["before"], one["after"]) for one in samples] == [
        *zip("abcde", "xyzuv", strict=True)
    ]
    (run / "samples_before.json").unlink()
    assert Runs(tmp_path).one("run")["samples"][0] == first | {"before": None, "after": "x"}


def test_a_damaged_run_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    for name in ("whole", "torn"):
        write_run(begun(tmp_path / name), slow_s=[0.0] * 2)
    metrics = tmp_path / "torn" / "metrics.jsonl"
    metrics.write_text("no json\n" + metrics.read_text())
    assert line(tmp_path, "whole")["state"] == "stopped"
    assert line(tmp_path, "torn")["state"] == "damaged"
    for found in (line(tmp_path, "torn"), Runs(tmp_path).one("torn")):
        assert "metrics.jsonl:1" in str(found["problem"])


def test_a_run_whose_metrics_are_no_file_is_named(tmp_path: Path) -> None:
    (begun(tmp_path / "odd") / "metrics.jsonl").mkdir()
    assert line(tmp_path, "odd")["state"] == "damaged"
    assert "metrics.jsonl" in Runs(tmp_path).one("odd")["problem"]


def test_a_run_that_is_not_there_is_an_error_and_an_empty_folder_is_not(tmp_path: Path) -> None:
    assert Runs(tmp_path / "none").all()["runs"] == []
    with pytest.raises(CheckpointError, match="'x' is no run of"):
        Runs(tmp_path).one("x")


# ------------------------------------------------------------------- looking again and again


def num_read() -> int:
    """Return the bytes that this process has read so far."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["rchar"])


def with_steps(run: Path, *steps: int) -> str:
    row = read_rows(run / "metrics.jsonl")[-1]
    return "".join(line_of(row | {"step": step, "loss": step / 2}) for step in steps)


def three_steps(folder: Path) -> Path:
    """Write a run whose lines have checksums."""
    write_run(begun(folder), slow_s=[0.0] * 3)
    (folder / "metrics.jsonl").write_text(with_steps(folder, 1, 2, 3))
    return folder


def steps_of(runs: Runs) -> list[int]:
    points = runs.one("run")["charts"]["run-loss"]["data"]["values"]
    return [point["step"] for point in points]


def test_only_the_new_lines_of_a_run_are_read(tmp_path: Path) -> None:
    run = three_steps(tmp_path / "run")
    metrics = run / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write(with_steps(run, *range(4, 3000)))
    runs = Runs(tmp_path)
    assert runs.all()["runs"][0]["steps"] == 2999
    with metrics.open("a") as file:
        file.write(with_steps(run, 3000))
    before = num_read()
    found = runs.all()["runs"][0]
    assert (found["steps"], found["loss"]) == (3000, 1500.0)
    assert num_read() - before < metrics.stat().st_size / 20
    before = num_read()
    assert runs.all()["runs"][0] == found
    assert num_read() - before < metrics.stat().st_size / 20
    assert runs.all()["runs"] == Runs(tmp_path).all()["runs"], "as who reads all of it sees it"
    assert runs.one("run") == Runs(tmp_path).one("run")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_that_drops_steps_and_goes_on_is_read_anew(tmp_path: Path, is_replaced: bool) -> None:
    run = three_steps(tmp_path / "run")
    metrics, runs = run / "metrics.jsonl", Runs(tmp_path)
    assert steps_of(runs) == [1, 2, 3]
    text = with_steps(run, 1, 2, 5, 6, 7, 8)
    if is_replaced:
        write_atomically(metrics, text)
    else:
        metrics.write_text(text)  # in place: the same file, and longer
    assert steps_of(runs) == [1, 2, 5, 6, 7, 8]
    metrics.write_text(with_steps(run, 1))
    assert steps_of(runs) == [1]
    metrics.unlink()
    assert runs.one("run")["charts"] == {}
    metrics.write_text(text)
    assert steps_of(runs) == [1, 2, 5, 6, 7, 8]


def test_a_line_has_the_course_of_the_loss_and_the_predicted_step_by_the_measured(
    tmp_path: Path,
) -> None:
    run = three_steps(tmp_path / "run")
    found = Runs(tmp_path).all()["runs"][0]
    assert found["spark"] == [0.5, 1.0, 1.5]
    assert found["pace"] == explain(run).sections[-1].pace.shown
    (run / "metrics.jsonl").write_text(with_steps(run, *range(1, 641)))
    course = Runs(tmp_path).all()["runs"][0]["spark"]
    assert course == [10 * i + 5.25 for i in range(32)]  # means of twenty steps each


def test_a_line_in_two_halves_is_read_once_it_is_whole(tmp_path: Path) -> None:
    run = three_steps(tmp_path / "run")
    metrics, runs = run / "metrics.jsonl", Runs(tmp_path)
    new = with_steps(run, 4)
    for part, steps in ((new[:9], [1, 2, 3]), (new[9:-1], [1, 2, 3]), ("\n", [1, 2, 3, 4])):
        with metrics.open("a") as file:
            file.write(part)
        assert steps_of(runs) == steps


def test_a_damaged_line_that_is_added_is_named_until_the_file_is_another(tmp_path: Path) -> None:
    run = three_steps(tmp_path / "run")
    metrics, runs = run / "metrics.jsonl", Runs(tmp_path)
    whole, new = metrics.read_text(), with_steps(run, 4)
    assert steps_of(runs) == [1, 2, 3]
    for text in (new.replace('"loss": 2.0', '"loss": 1.0'), with_steps(run, 5)):
        with metrics.open("a") as file:
            file.write(text)
        for _ in range(2):
            found = runs.one("run")
            assert found["state"] == "damaged"
            assert "metrics.jsonl:4" in found["problem"]
            assert found["charts"] == {}
    write_atomically(metrics, whole + new)
    assert steps_of(runs) == [1, 2, 3, 4]


def test_a_prediction_that_cannot_be_read_for_a_while_loses_no_steps(tmp_path: Path) -> None:
    run = three_steps(tmp_path / "run")
    runs, text = Runs(tmp_path), (run / "predicted.json").read_text()
    (run / "predicted.json").write_text("{")
    assert runs.one("run")["state"] == "damaged"
    (run / "predicted.json").write_text(text)
    assert steps_of(runs) == [1, 2, 3]
    shutil.rmtree(run)
    assert runs.all()["runs"] == []


# ------------------------------------------------------------------------------------------- server


@pytest.fixture(name="site")
def a_site(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    made = studio_of(tmp_path / "runs", Planner(here=None, folder=tmp_path / "configs"))
    return TestClient(made.studio.app, base_url="http://127.0.0.1:8765"), f"/{made.token}"


def test_pages_load_only_their_own_files_and_each_is_there(site) -> None:
    client, at = site
    for room in ("/", "/runs"):
        found = client.get(at + room)
        assert found.status_code == 200
        loaded = re.findall(r'(?:src|href)="([^"]+)"', found.text)
        files = [name for name in loaded if name.startswith("assets/")]
        assert files
        assert set(loaded) - set(files) <= {"data:,", "./", "runs"}
        for name in files:
            assert client.get(f"{at}/{name}").status_code == 200
    assert client.get(f"{at}/assets/LICENSE").status_code == 404
    assert client.get(f"{at}/assets/..%2fpages.py").status_code == 404


def test_every_answer_carries_the_policy_and_nothing_may_be_loaded_from_elsewhere(site) -> None:
    client, at = site
    for path in (f"{at}/", f"{at}/runs.json", f"{at}/none", "/wrong/", f"{at}/assets/plan.js"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "http" not in policy
        assert "unsafe" not in policy
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/wrong/", {}),
        ("/", {}),
        ("{at}/", {"host": "evil.example"}),
        ("{at}/", {"host": "evil.example:8765"}),
        ("{at}/runs.json", {"origin": "https://evil.example"}),
        ("{at}/assets/plan.js", {"sec-fetch-site": "cross-site"}),
    ],
)
def test_strangers_get_403_and_are_told_nothing(site, path, headers) -> None:
    client, at = site
    found = client.get(path.format(at=at), headers=headers)
    assert found.status_code == 403
    assert found.text.startswith("refused: ")
    assert at[1:] not in found.text


def test_a_question_is_answered_and_one_from_another_site_is_not(site) -> None:
    client, at = site
    body = json.dumps(question_values())
    answer = client.post(f"{at}/ask/plan", content=body)
    assert answer.json()["figures"]["predicted"]["tokens_per_s"] > 0
    assert client.post(f"{at}/ask/x", content=body).json()["error"]["what"].startswith("'x' is no")
    long = client.post(f"{at}/ask/plan", content=b" " * (MAX_QUESTION_BYTES + 1))
    assert long.status_code == 413
    stranger = {"origin": "http://evil.example"}
    assert client.post(f"{at}/ask/plan", content=body, headers=stranger).status_code == 403
    assert client.get(f"{at}/ask/plan").status_code == 405


def test_an_image_that_cannot_be_shown_to_a_run_is_refused_before_its_model_is_loaded(
    site, tmp_path: Path
) -> None:
    client, at = site
    begun(tmp_path / "runs" / "own")

    def problem(image: str) -> str:
        asked = {"name": "own", "said": "what", "image": image}
        found = client.post(f"{at}/chat", content=json.dumps(asked))
        assert found.status_code in (409, 413)
        return str(found.json()["problem"])

    assert "of the type 'image/svg+xml'" in problem("data:image/svg+xml;base64,AAAA")
    assert "broken base64" in problem("data:image/png;base64,A")
    assert "broken base64" in problem("/etc/passwd")  # no path is read
    assert f"at most {MAX_MESSAGE_BYTES:,} are read" in problem("A" * MAX_MESSAGE_BYTES)


def test_the_runs_room_offers_an_image_where_rows_had_some(tmp_path: Path) -> None:
    write_run(begun(tmp_path / "seen"), slow_s=[0.0])
    write_run(begun(tmp_path / "text"), slow_s=[0.0])
    figures = ImageFigures(
        num_images=6,
        num_tokens=60,
        feature_bytes=2**20,
        predicted_bytes=2**20,
        num_encoded=6,
        pass_s=2.0,
        predicted_pass_s=1.0,
    )
    write_images(tmp_path / "seen", figures)
    seen, text = (Runs(tmp_path).one(name) for name in ("seen", "text"))
    planned = read_predictions(tmp_path / "text")[-1].calibrated["schedule"]["tokens_per_step"]
    assert dict(text["settings"])["tokens per step"] == f"{planned:,}"
    assert seen["sees"]
    assert ["images", figures.line] in seen["settings"]
    assert not text["sees"]
    assert "images" not in dict(text["settings"])


def test_only_runs_of_the_folder_are_shown(site, tmp_path: Path) -> None:
    client, at = site
    begun(tmp_path / "secret")
    begun(tmp_path / "runs" / "own")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "runs" / "half").mkdir()
    (tmp_path / "runs" / "half" / "recipe.yaml").symlink_to(tmp_path / "secret" / "recipe.yaml")
    listed = client.get(f"{at}/runs.json").json()["runs"]
    assert [run["name"] for run in listed] == ["own"]
    for name in (
        "../secret",
        "link",
        "half",
        "own/../../secret",
        str(tmp_path / "secret"),
        "",
        ".",
    ):
        for page in ("run.json", "report", "rows"):
            found = client.get(f"{at}/{page}", params={"name": name})
            assert found.status_code == 404, name


def test_a_report_is_the_page_of_the_run_and_reaches_nothing(site, tmp_path: Path) -> None:
    client, at = site
    write_run(begun(tmp_path / "runs" / "one"), slow_s=[0.0] * 3)
    found = client.get(f"{at}/report", params={"name": "one"})
    assert found.status_code == 200
    assert "3 of 12 steps" in found.text
    assert "connect-src" not in found.headers["content-security-policy"]
    assert found.headers["content-security-policy"].startswith("default-src 'none'")
    (tmp_path / "runs" / "one" / "metrics.jsonl").write_text("no json\n")
    broken = client.get(f"{at}/report", params={"name": "one"})
    assert broken.status_code == 404
    assert "metrics.jsonl" in broken.text


def test_rows_that_cannot_be_shown_are_said_in_the_words_of_the_command(site, tmp_path) -> None:
    client, at = site
    begun(tmp_path / "runs" / "one", data__path=str(tmp_path / "none.jsonl"))
    found = client.get(f"{at}/rows", params={"name": "one"})
    assert found.status_code == 404
    assert "there is no such file or folder" in " ".join(found.text.split())
    assert "hint: " in found.text


def test_it_listens_on_the_loopback_address_alone(tmp_path: Path) -> None:
    with served(tmp_path, tmp_path / "configs") as made:
        with socket.create_connection(("127.0.0.1", made.port), timeout=5) as connection:
            assert connection.getpeername()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="refused"):  # another address of this machine
            socket.create_connection(("127.0.0.2", made.port), timeout=5)


def test_a_port_in_use_is_an_error_with_its_fix(tmp_path: Path, capsys) -> None:
    with listening(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} of 127\.0\.0\.1 cannot be had"):
            listening(port)
        with pytest.raises(SystemExit) as ended:
            app.main(["studio", str(tmp_path), "--port", str(port)])
    assert ended.value.code == 1
    assert "hint: `--port 0` takes one that is free" in capsys.readouterr().err


def test_without_its_extra_the_command_says_what_to_install(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "finetune.studio.server")
    with pytest.raises(SystemExit) as ended:
        app.main(["studio", str(tmp_path)])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "the page needs uvicorn, which is not installed" in said
    assert "hint: `pip install 'sluice-finetune[studio]'`" in said
