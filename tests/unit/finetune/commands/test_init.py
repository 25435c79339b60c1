import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune.commands.init import card_of
from finetune.errors import ConfigError
from finetune.recipe.load import load_recipe
from offload.errors import MachineError
from tests.command import run

ROOT = Path(__file__).parents[4]
FLAGS = {"--model": "llama-3.2-1b", "--data": "rows.jsonl", "--vram": "8"}


@pytest.fixture(autouse=True)
def _rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "what follows", "completion": "this"}
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 300)


def words(**changes: str | None) -> list[str]:
    flags = FLAGS | {f"--{name}": value for name, value in changes.items()}
    return ["init", *(word for flag, value in flags.items() if value for word in (flag, value))]


@pytest.mark.thorough
def test_flags_answer_all_questions_and_the_plan_is_that_of_the_recipe(capsys) -> None:
    assert run(*words(goal="fastest"), "--out", "mine.yaml") == 0
    out = capsys.readouterr().out
    assert "rows.jsonl: 300 rows of the format prompt_completion, learned by sft\n" in out
    assert "Plan for rtx3060-8gb: it fits" in out
    assert "Written: mine.yaml\nWritten: mine.plan.json\n" in out
    recipe = load_recipe("mine.yaml", [])
    assert recipe.data.path == str(Path("rows.jsonl").absolute())
    assert (recipe.data.eval_frac, recipe.train.seq_len) == (0.05, 2048)
    command = re.search(r"#   sluice (plan mine.yaml .*)", Path("mine.yaml").read_text())
    assert command is not None
    assert run(*command[1].split(), "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("mine.plan.json").read_text())


@pytest.mark.slow
def test_preferences_are_learned_by_dpo(capsys) -> None:
    row = {"prompt": "which?", "chosen": "this", "rejected": "that"}
    Path("pairs.jsonl").write_text((json.dumps(row) + "\n") * 20)
    assert run(*words(data="pairs.jsonl"), "--yes") == 0
    text = Path("llama-3.2-1b-pairs.yaml").read_text()
    assert text.startswith("# DPO with LoRA on llama-3.2-1b")
    recipe = load_recipe("llama-3.2-1b-pairs.yaml", [])
    assert recipe.objective.method == "dpo"
    assert recipe.train.lr < 1e-5
    assert not recipe.data.has_eval  # too few rows to hold some out


def test_rows_decide_how_long_sequences_are_within_what_fits(capsys) -> None:
    rows = [{"prompt": "x" * 3 * n, "completion": "y"} for n in (5, 5500, 40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(*words(), "--yes") == 0
    recipe = load_recipe("llama-3.2-1b-rows.yaml", [])
    assert recipe.train.seq_len == 6144
    assert recipe.train.tokens_per_step == 12_288


@pytest.mark.slow
def test_evaluations_come_four_times_an_epoch_and_few_steps_are_said(capsys) -> None:
    row = {"prompt": "x" * 2997, "completion": "yyy"}  # 1,000 tokens, as they are assumed
    for num_rows, every in ((400, 6), (4000, 50)):
        Path("rows.jsonl").write_text((json.dumps(row) + "\n") * num_rows)
        assert run(*words(), "--out", f"{num_rows}.yaml", "--yes") == 0
        recipe = load_recipe(f"{num_rows}.yaml", [])
        assert (recipe.output.eval_every, recipe.output.checkpoint_every) == (every, every)
        out = capsys.readouterr().out
        assert f"an epoch is about {num_rows * 1000:,} tokens" in out
        assert ("25 steps are few to learn in" in out) == (num_rows == 400)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("row", "is_cut"),
    [
        ({"prompt": "x" * 179_997, "completion": "yyy"}, True),
        pytest.param({"text": "x" * 180_000}, False, marks=pytest.mark.slow),
    ],
)
def test_an_epoch_has_the_tokens_that_are_left_of_long_rows(row, is_cut: bool, capsys) -> None:
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 20)  # of 60,000 tokens each
    assert run(*words(vram="4"), "--out", "mine.yaml", "--yes") == 0
    seq_len = load_recipe("mine.yaml", []).train.seq_len
    assert seq_len < 60_000
    out = capsys.readouterr().out
    each = seq_len if is_cut else 60_000
    assert f"an epoch is about {20 * each:,} tokens" in out
    assert ("rows are longer than" in out) == is_cut


@pytest.mark.parametrize("flag", ["model", "data", "vram"])
def test_what_is_missing_without_a_terminal_is_named_by_its_flag(flag: str, capsys) -> None:
    assert run(*words(**{flag: None})) == 1
    err = capsys.readouterr().err
    assert f"--{flag}" in err
    assert "is missing; it is asked for on a terminal" in err
    assert not list(Path().glob("*.yaml"))


def test_nothing_is_written_over(capsys) -> None:
    Path("mine.plan.json").write_text("mine")
    assert run(*words(), "--out", "mine.yaml") == 1
    assert "mine.plan.json exists" in capsys.readouterr().err
    Path("mine.yaml").write_text("mine")
    assert run(*words(), "--out", "mine.yaml") == 1
    assert "mine.yaml exists" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == Path("mine.plan.json").read_text() == "mine"


@pytest.mark.thorough
def test_what_does_not_fit_writes_nothing(capsys) -> None:
    assert run(*words(ram="1"), "--yes") == 3
    assert "does not fit" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]


def test_a_card_is_a_name_or_its_memory_with_ram_after_a_comma() -> None:
    for text, expected in {
        "12": (None, 12.0, None),
        "16 GB, 32": (None, 16.0, 32.0),
        "RTX 4090, 128": ("RTX 4090", None, 128.0),
        "here": ("here", None, None),
    }.items():
        asked = card_of(text, ram_gib=None)
        assert (asked.machine, asked.vram_gib, asked.ram_gib) == expected
    with pytest.raises(MachineError, match="no machine is called 'rtx9999'"):
        card_of("rtx9999", ram_gib=None)
    with pytest.raises(ConfigError, match="'much' is no number of GiB of RAM"):
        card_of("12, much", ram_gib=None)
    with pytest.raises(ConfigError, match="--ram 64 and 12, 32"):
        card_of("12, 32", ram_gib=64)


class Terminal:
    """The program on a terminal of its own, to which answers are typed."""

    def __init__(self, *argv: str) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "cli.py"), *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.shown = ""

    def read_until(self, text: str) -> None:
        end_s = time.monotonic() + 60
        while text not in self.shown:
            assert time.monotonic() < end_s, self.shown
            if select.select([self._ours], [], [], 0.1)[0]:
                self.shown += os.read(self._ours, 4096).decode()

    def answer(self, question: str, text: str) -> None:
        """Wait for a question that has not been answered, and answer it."""
        self.read_until(question)
        self.shown = self.shown.partition(question)[2]
        os.write(self._ours, f"{text}\n".encode())

    def code(self) -> int:
        code = self._process.wait(60)
        os.close(self._ours)
        return code


@pytest.mark.slow
def test_four_questions_are_asked_on_a_terminal_and_wrong_answers_again() -> None:
    terminal = Terminal("init", "--out", "asked.yaml")
    terminal.answer("Model (", "lama 3.2 1b")
    terminal.read_until("is no model that is known")
    terminal.answer("Model (", "llama 3.2 1b")
    terminal.answer("Rows (", "nowhere.jsonl")
    terminal.read_until("nowhere.jsonl does not exist")
    terminal.answer("Rows (", "rows.jsonl")
    terminal.read_until("300 rows of the format prompt_completion")
    terminal.answer("Card (", "8, 32")
    terminal.answer("Goal (", "")
    terminal.read_until("Written: asked.plan.json")
    assert terminal.code() == 0
    recipe = load_recipe("asked.yaml", [])
    assert recipe.model.path == "meta-llama/Llama-3.2-1B"
    assert "32 GiB of RAM" in Path("asked.yaml").read_text()
    assert "Goal balanced" in Path("asked.yaml").read_text()


@pytest.mark.slow  # measures the machine
def test_this_machine_is_measured_and_its_file_kept(capsys) -> None:
    assert run(*words(vram=None), "--machine", "here", "--out", "here.yaml") == 0
    text = Path("here.yaml").read_text()
    assert "--machine here.machine.json" in text
    assert "rates measured on the machine" in text
    assert run("plan", "here.yaml", "--machine", "here.machine.json", "--json") == 0
