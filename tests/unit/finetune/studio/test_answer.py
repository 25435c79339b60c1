"""Answers are those of `sluice plan`, for a question and for the recipe that it gives."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from finetune import app
from finetune.studio import server
from finetune.studio.answer import HERE, Planner
from offload.plan.machine.machine import named_machine
from tests.studios import SETUP, question, question_values
from tests.tools.site import write_archive

ROOT = Path(__file__).parents[4]
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
                {"model": "llama-2-7b", "ram_gib": 48.5, "link_gb_per_s": 11.5},
                {"micro_batch_size": "auto", "tokens_per_step": 65536, "card": "h100"},
                {"num_cards": 3, "codec": "nf4"},
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
    machine = named_machine(str(changes.get("card", SETUP["card"])))
    assert figures["machine"] == machine.name


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


def test_what_does_not_fit_says_what_is_short_by_how_much_and_what_would(planner: Planner) -> None:
    asked = question(model="qwen3-235b-a22b", ram_gib=64, card="rtx3060-8gb")
    answer = planner.answer("plan", asked)
    assert answer["fits"] is False
    for one in answer["shortages"]:
        assert one["short_bytes"] == one["needed_bytes"] - one["limit_bytes"] > 0
    ram = next(one for one in answer["shortages"] if one["what"] == "RAM")
    assert ram["limit_bytes"] == 64 * 2**30
    sums = {p["name"]: sum(size for _, size in p["terms"]) for p in answer["memory"]}
    assert sums["RAM"] == ram["needed_bytes"]
    assert "more memory" in planner.answer("ways", asked)["hint"]
    assert planner.answer("rate", asked)["tokens_per_s"] is None


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
    short = planner.answer("plan", question(num_cards=2, method="all", model="llama-2-7b"))["error"]
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
        ({"card": "abacus"}, "abacus is no known card"),
        ({"card": HERE}, "this machine was not measured"),
        ({"card": "t4"}, "t4 does not compute in bfloat16"),
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
    assert server.answered("plan", text) == planner.answered("plan", text)


_ALONE = """
import json, sys
text = json.dumps(json.loads(sys.argv[1]))
from finetune.studio.server import answered
print(answered("plan", text))
assert not {"torch", "transformers", "numpy", "huggingface_hub"} & set(sys.modules)
"""


@pytest.mark.thorough
def test_the_static_page_s_archive_holds_all_that_its_answers_import(tmp_path: Path) -> None:
    import pydantic_core

    write_archive(tmp_path / "sluice.zip")
    with zipfile.ZipFile(tmp_path / "sluice.zip") as archive:
        archive.extractall(tmp_path / "alone")
    core = Path(pydantic_core.__file__).parent  # the browser has a wheel of it
    (tmp_path / "alone" / "pydantic_core").symlink_to(core)
    text = json.dumps(question_values())
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
    assert answer == json.loads(server.answered("plan", text))
