"""Commands that look at a recipe, its data and its model, or write a recipe."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import pytest

from finetune import app
from finetune.commands.init import card_of
from finetune.commands.look import look_at, seq_len_for
from finetune.commands.plan import in_groups
from finetune.commands.trained_model import Prepared
from finetune.data.dataset import load_rows
from finetune.errors import ConfigError, DataError
from finetune.model.tokenizer import load_tokenizer
from finetune.recipe.draft import Draft
from finetune.recipe.load import load_recipe, recipe_from
from finetune.recipe.recipe import Recipe
from finetune.report.rows import Table
from finetune.run.run_dir import RunDir
from offload.errors import DoesNotFitError, MachineError
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.plan import plan
from tests.builders import qwen3_8b, recipe_values, request
from tests.command import run
from tests.doubles import tiny_tokenizer

WORDS = ("plan", "qwen3-1.7b", "train.tokens_per_step=16384")
TWO = ("--machine", "rtx3090,rtx4060ti")


def test_groups_of_lines_come_one_by_one_and_are_as_wide_as_the_first() -> None:
    asked = list[int]()

    def groups() -> Iterator[Table]:
        for number, name in enumerate(("a name that is longer than all columns", "b")):
            asked.append(number)
            lines = [(name, "one", 10**number), (name, "two", None)]
            yield Table("the title", ["name", "way", "tok/s|whole"], lines)

    found = in_groups(groups(), [0, 6, 7])
    first = [next(found).plain for _ in range(3)]
    assert asked == [0]
    assert first[:2] == ["the title", "   way       tok/s"]
    assert first[2].splitlines() == [
        " a name that is longer than all columns",
        "   one           1",
        "   two           -",
    ]
    assert [text.plain.splitlines()[1] for text in found] == ["   one          10"]


@pytest.mark.thorough
def test_each_machine_has_its_share_and_the_slowest_is_waited_for(capsys) -> None:
    assert run(*WORDS, *TWO, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["ranks"]
    assert (first["machine"], second["machine"]) == ("rtx3090", "rtx4060ti")
    num = found["schedule"]["num_micro_batches"]
    assert first["num_micro_batches"] + second["num_micro_batches"] == num
    assert first["num_micro_batches"] > second["num_micro_batches"]
    step_s = found["predicted"]["step_s"]
    waiting, slowest = sorted((first, second), key=lambda rank: rank["alone_s"])
    assert waiting["alone_s"] + waiting["waits_s"] == pytest.approx(step_s, rel=0.01)
    assert waiting["waits_for"] == found["ranks"].index(slowest)
    assert slowest["waits_for"] is None
    assert run(*WORDS, *TWO, "--json", "train.shares=equal") == 0
    equal = json.loads(capsys.readouterr().out)
    assert equal["predicted"]["step_s"] > step_s
    assert equal["energy"]["board_w"] == 350 + 165
    assert equal["energy"]["at_most_j_per_token"] * 16384 == pytest.approx(
        (350 + 165) * equal["predicted"]["step_s"]
    )


def test_gpus_of_a_machine_take_the_shares_that_are_named(capsys) -> None:
    words = ("--machine", "rtx3090", "--gpus", "2", "train.shares=[5,3]")
    assert run(*WORDS, *words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Ranks: each one's share, and its step before it waits for others; above is" in shown
    assert "0 rtx3090 5 " in shown
    assert " for rank 0" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*TWO, "--gpus", "2"), "--gpus with --machine rtx3090,rtx4060ti; each of several"),
        ((*TWO, "--what-if"), "--what-if with --machine rtx3090,rtx4060ti; each of several"),
        ((*TWO, "--runs", "2"), "--machine rtx3090,rtx4060ti with several runs"),
        ((*TWO, "train.shares=[1,1,1]"), "train.shares: [1, 1, 1], with 2 processes"),
        (("--machine", "rtx3090", "train.shares=[3,1]"), "[3, 1], with 1 process; it has"),
        (("--machines", "rtx3090", "train.shares=[3,1]"), "train.shares: [3, 1] with --machines"),
        ((*TWO, "train.seq_len=16384"), "a step of 1 micro-batches for 2 processes"),
        ((*TWO, "train.shares=[2,1]"), "train.shares: [2, 1] for a step of 8 micro-batches"),
    ],
)
def test_what_several_machines_cannot_do_is_refused(
    words: tuple[str, ...], said: str, capsys
) -> None:
    assert run(*WORDS, *words) == 1
    assert said in " ".join(capsys.readouterr().err.split())


# --------------------------------------------------------------------------------------------- data


SETTINGS = (
    *("data.eval_path=null", "data.format=alpaca", "data.system=null", "data.skip_bad=1"),
    *("data.too_long=drop", "output.eval_every=null", "report.samples=0"),
)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows_file(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"instruction": "What is <b>1+1</b>?", "output": "It is <i>2</i> & no more."},
        {"instruction": "Clear \x1b[2J?", "output": "No."},
        {"instruction": "Long?", "output": "word " * 300},
        {"instruction": "Empty?", "output": ""},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run_data(capsys: pytest.CaptureFixture[str], file: Path, *words: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        app.main(["data", "quickstart", f"data.path={file}", *SETTINGS, *words])
    assert not exit_info.value.code, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.usefixtures("own_cache")
@pytest.mark.thorough
def test_data_shows_rows_with_their_loss_lengths_and_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = rows_file(tmp_path)
    for width in ("80", "100"):
        monkeypatch.setenv("COLUMNS", width)
        out = run_data(capsys, file)
        assert all(len(line) <= int(width) for line in out.splitlines())
        assert "tokens with a loss between \u00ab and \u00bb" in out
        assert "\u00abIt is <i>2</i> & no more.<|im_end|>\u00bb" in out
        assert "What is <b>1+1</b>?<|im_end|>" in out
        assert "\x1b" not in out
        assert "Clear \\x1b[2J?" in out
        flat = "".join(out.split())
        assert "1of3rowsweredropped:theyhavemorethan" in flat
        assert f"{file}:4:emptyanswer" in flat


@pytest.mark.usefixtures("own_cache")
def test_the_figures_are_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = rows_file(tmp_path)
    shown: dict[str, Any] = json.loads(run_data(capsys, file, "--json", "--rows", "1"))
    recipe = load_recipe("quickstart", [f"data.path={file}", "data.skip_bad=1"])
    data = recipe.data.model_copy(
        update={"eval_path": None, "format": "alpaca", "system": None, "too_long": "drop"}
    )
    rows = load_rows(
        data,
        load_tokenizer(recipe.model),
        seq_len=recipe.train.seq_len,
        seed=recipe.train.seed,
        cache_dir=tmp_path / "other",
    )
    assert shown["data_hash"] == rows.data_hash
    assert (shown["epoch_rows"], shown["epoch_tokens"]) == (2, sum(rows.train.lengths))
    assert shown["epoch_loss_tokens"] == sum(row.num_loss_tokens for row in rows.train)
    assert shown["fill"] == sum(rows.train.lengths) / 2 / recipe.train.seq_len
    # the 48 rows of a step are 24 of each, which two sequences of 16 times 64 tokens hold
    assert shown["packed_fill"] == 24 * sum(rows.train.lengths) / (2 * 16 * 64)
    shown = json.loads(run_data(capsys, file, "--json", "--rows", "1", "data.packing=off"))
    assert shown["packed_fill"] is None
    assert sum(one["num_rows"] for one in shown["lengths"]) == 2
    (source,) = shown["sources"]
    assert (source["num_rows"], source["num_used"]) == (3, 2)
    (row,) = source["rows"]
    first = rows.train[0]
    assert sum(piece["num_tokens"] for piece in row["pieces"]) == len(first.input_ids)
    learned = [piece for piece in row["pieces"] if piece["has_loss"]]
    assert [piece["text"] for piece in learned] == ["It is <i>2</i> & no more.<|im_end|>"]


class Page(HTMLParser):
    """The tags of a page, and the texts that are marked."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.marked: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [name for name, _ in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "mark":
            self.marked.append(data)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.thorough
def test_the_page_is_one_file_with_every_text_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data.html"
    run_data(capsys, rows_file(tmp_path), "--html", str(out))
    text = out.read_text()
    page = Page(text)
    assert not {"b", "i", "script", "link", "img"} & {*page.tags}
    assert page.links == []
    assert "It is <i>2</i> & no more.<|im_end|>" in page.marked
    assert "\x1b" not in text
    assert "prefers-color-scheme: dark" in text


# --------------------------------------------------------------------------------------------- init


ROOT = Path(__file__).parents[3]
FLAGS = {"--model": "llama-3.2-1b", "--data": "rows.jsonl", "--vram": "8"}


@pytest.fixture
def _rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "what follows", "completion": "this"}
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 300)


def words(**changes: str | None) -> list[str]:
    flags = FLAGS | {f"--{name}": value for name, value in changes.items()}
    return ["init", *(word for flag, value in flags.items() if value for word in (flag, value))]


@pytest.mark.usefixtures("_rows")
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


@pytest.mark.usefixtures("_rows")
def test_a_card_without_bfloat16_gets_a_recipe_in_float16(capsys) -> None:
    assert run(*words(vram=None, machine="t4"), "--out", "mine.yaml") == 0
    assert "Plan for t4: it fits" in capsys.readouterr().out
    assert load_recipe("mine.yaml", []).model.dtype == "float16"


@pytest.mark.usefixtures("_rows")
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
    assert recipe.data.eval_frac is None  # too few rows to hold some out


@pytest.mark.usefixtures("_rows")
def test_rows_decide_how_long_sequences_are_within_what_fits(capsys) -> None:
    rows = [{"prompt": "x" * 3 * n, "completion": "y"} for n in (5, 5500, 40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(*words(), "--yes") == 0
    recipe = load_recipe("llama-3.2-1b-rows.yaml", [])
    assert recipe.train.seq_len == 6144
    assert recipe.train.tokens_per_step == 6144
    assert recipe.train.num_warmup_steps(1) == 0
    out = capsys.readouterr().out
    assert "\n1 step an epoch: a step has one sequence, the least; `train.epochs: 3` " in out
    written = Path("llama-3.2-1b-rows.yaml").read_text()
    why = "# 1 step an epoch: a step has one sequence, the least:"
    assert f"  {why}\n  tokens_per_step: 6144\n" in written


@pytest.mark.usefixtures("_rows")
def test_a_shape_without_a_tokenizer_learns_no_rows(capsys) -> None:
    assert run(*words(model="tiny-qwen3"), "--yes") == 1
    assert (
        "tiny-qwen3 is a shape without weights and without a tokenizer" in capsys.readouterr().err
    )
    assert not list(Path().glob("*.yaml"))


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize(
    ("num_rows", "tokens", "num_steps", "every"),
    [
        (200, 4096, 49, 12),
        pytest.param(400, 8192, 49, 12, marks=pytest.mark.slow),
        pytest.param(4000, 16_384, 245, 50, marks=pytest.mark.slow),
    ],
)
def test_an_epoch_has_some_fifty_steps_or_more_and_four_evaluations(
    num_rows: int, tokens: int, num_steps: int, every: int, capsys
) -> None:
    row = {"prompt": "x" * 2997, "completion": "yyy"}  # 1,000 tokens, as they are assumed
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * num_rows)
    assert run(*words(), "--out", "mine.yaml", "--yes") == 0
    recipe = load_recipe("mine.yaml", [])
    assert recipe.train.tokens_per_step == tokens
    assert (recipe.output.eval_every, recipe.output.checkpoint_every) == (every, every)
    out = capsys.readouterr().out
    assert f"an epoch is about {num_rows * 1000:,} tokens" in out
    assert f"\n{num_steps} steps an epoch\n" in out


@pytest.mark.usefixtures("_rows")
@pytest.mark.thorough
def test_a_step_has_the_tokens_that_hide_its_copies(capsys) -> None:
    row = {"prompt": "x" * 2997, "completion": "yyy"}
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 100)
    assert run(*words(model="llama-3.1-70b", vram="24", ram="64"), "--out", "a.yaml", "--yes") == 0
    written, out = Path("a.yaml").read_text(), capsys.readouterr().out
    hiding = re.search(r"streaming  adds less than 1% from ([\d,]+) tokens per step", written)
    assert hiding is not None
    tokens = int(hiding[1].replace(",", ""))
    assert load_recipe("a.yaml", []).train.tokens_per_step == tokens > 2048
    assert "steps an epoch: fewer tokens do not hide the copies of layers" in out
    assert "steps an epoch: fewer tokens do not hide the copies of layers" in written


@pytest.mark.usefixtures("_rows")
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


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("flag", ["model", "data", "vram"])
def test_what_is_missing_without_a_terminal_is_named_by_its_flag(flag: str, capsys) -> None:
    assert run(*words(**{flag: None})) == 1
    err = capsys.readouterr().err
    assert f"--{flag}" in err
    assert "is missing; it is asked for on a terminal" in err
    assert not list(Path().glob("*.yaml"))


@pytest.mark.usefixtures("_rows")
def test_nothing_is_written_over(capsys) -> None:
    Path("mine.plan.json").write_text("mine")
    assert run(*words(), "--out", "mine.yaml") == 1
    assert "mine.plan.json exists" in capsys.readouterr().err
    Path("mine.yaml").write_text("mine")
    assert run(*words(), "--out", "mine.yaml") == 1
    assert "mine.yaml exists" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == Path("mine.plan.json").read_text() == "mine"


@pytest.mark.usefixtures("_rows")
@pytest.mark.thorough
def test_what_does_not_fit_writes_nothing(capsys) -> None:
    assert run(*words(ram="1"), "--yes") == 3
    assert "does not fit" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]


@pytest.mark.usefixtures("_rows")
def test_a_card_is_a_name_or_its_memory_with_ram_after_a_comma() -> None:
    for text, expected in {
        "12": (None, 12.0, None),
        "16 GB, 32": (None, 16.0, 32.0),
        "RTX 4090, 128": ("RTX 4090", None, 128.0),
        "3060, 64": ("3060", None, 64.0),
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


@pytest.mark.usefixtures("_rows")
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


@pytest.mark.usefixtures("_rows")
@pytest.mark.slow  # measures the machine
def test_this_machine_is_measured_and_its_file_kept(monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(*words(vram=None), "--machine", "here", "--out", "here.yaml") == 0
    text = Path("here.yaml").read_text()
    assert "PyTorch sees no NVIDIA GPU on this machine" in capsys.readouterr().err
    assert "--machine here.machine.json" in text
    assert "measured rates" in text
    assert run("plan", "here.yaml", "--machine", "here.machine.json", "--json") == 0


# --------------------------------------------------------------------------------------------- look


def written(tmp_path: Path, rows: Sequence[Any]) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def looked(path: str, tokenizer: Path | None = None):
    return look_at(path, tokenizer=None if tokenizer is None else str(tokenizer), note=print)


PAIR = {"prompt": "which?", "chosen": "this", "rejected": "that"}
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "sft",
    ),
    "alpaca": ({"instruction": "a", "output": "b"}, "sft"),
    "prompt_completion": ({"prompt": "a", "completion": "b"}, "sft"),
    "text": ({"text": "a document"}, "sft"),
    "preference": (PAIR, "dpo"),
    "labelled": ({"prompt": "a", "completion": "b", "label": True}, "kto"),
    "ranking": ({"prompt": "a", "completions": ["b", "c"], "scores": [1.0, 0.5]}, "dpo"),
    "sampled": ({"prompt": "a", "completions": ["b", "c"], "rewards": [1.0, 0.0]}, "grpo"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_say_what_they_are_and_what_learns_from_them(name: str, tmp_path: Path) -> None:
    row, method = ROWS[name]
    found = looked(written(tmp_path, [row] * 3))
    assert (found.data_format, found.num_rows) == (name, 3)
    assert found.objective.get("method", "sft") == method
    draft = Draft(name="x")
    draft.values.update(
        model={"path": "Qwen/Qwen3-8B"},
        data={"path": found.path, "format": found.data_format},
        train={"tokens_per_step": 16384, "epochs": 1},
        output={"name": "x"},
    )
    if found.objective:
        draft.values["objective"] = found.objective
    assert recipe_from(draft, tmp_path, check_files=True).objective.method == method


def test_lengths_are_those_of_the_tokenizer_where_there_is_one(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()  # a token a character
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": "a" * n, "completion": "b"} for n in (10, 400, 30)]
    found = looked(written(tmp_path, rows), tmp_path / "model")
    assert found.is_tokenised
    base = found.lengths[0] - 10
    assert found.lengths == (base + 10, base + 30, base + 400)
    assert found.num_tokens(2048) == 3 * base + 440
    assert (found.quantile(0.5), found.quantile(1.0)) == (base + 30, base + 400)
    assert "by the model's tokenizer" in list(found.lines())[1]


def test_without_a_tokenizer_lengths_are_assumed_and_it_is_said(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * 299, "completion": "b"}]
    found = looked(written(tmp_path, rows))
    assert (found.lengths, found.is_tokenised) == ((100,), False)
    assert "assumed at 3 characters a token" in list(found.lines())[1]


def test_both_answers_of_a_pair_count_as_tokens_of_its_row(tmp_path: Path) -> None:
    found = looked(written(tmp_path, [PAIR] * 4))
    assert len(found.lengths) == 8
    assert found.num_tokens(2048) == sum(found.lengths)


def test_all_rows_are_counted_and_the_first_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.commands.look.NUM_LOOKED", 10)
    found = looked(written(tmp_path, [{"text": "abc" * (n + 1)} for n in range(25)]))
    assert (found.num_rows, found.num_looked, found.lengths) == (25, 10, tuple(range(1, 11)))
    assert found.num_tokens(2048) == round(25 * 5.5)


def test_sequences_hold_99_of_100_rows_in_whole_thousands(tmp_path: Path) -> None:
    found = looked(written(tmp_path, [{"text": "a" * 3 * n} for n in (10, 3000, 2049)]))
    assert seq_len_for(found, least=2048) == 3072
    short = looked(written(tmp_path, [{"text": "short"}]))
    assert seq_len_for(short, least=2048) == 2048


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([], "holds no rows"),
        ([{"nothing": "known"}], "fit no format"),
        ([{"text": "good"}, {"text": " "}], "1 of 2 rows in"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(
    rows: list[dict[str, str]], what: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        looked(written(tmp_path, rows))
    assert what in caught.value.what


# ------------------------------------------------------------------------------------ trained model


POSITIONS = 2048
PREFIX = {"method": "prefix", "num_virtual_tokens": 20}


def prepared(**adapter: Any) -> Prepared:
    facts = qwen3_8b(max_position_embeddings=POSITIONS)
    machine = named_machine("rtx4090", ram_bytes=64 * GIB)
    values = recipe_values(**{f"adapter__{name}": value for name, value in adapter.items()})
    return Prepared(
        run=RunDir(Path("run")),
        step=None,
        recipe=Recipe.model_validate(values),
        tokenizer=cast("Any", None),
        facts=facts,
        machine=machine,
        plan=plan(facts, machine, request()),
    )


def test_an_answer_may_take_the_last_position() -> None:
    prepared().require_room(2000, 49)
    prepared(**PREFIX).require_room(1980, 49)


@pytest.mark.parametrize(
    ("adapter", "num_prompt", "num_new", "message"),
    [
        (
            {},
            2000,
            50,
            r"a prompt of 2,000 tokens and an answer of up to 50 take 2,049 positions; the model"
            r" was made for at most 2,048\n\nhint: `--max-new-tokens 49`",
        ),
        (
            PREFIX,
            2000,
            50,
            r"20 virtual tokens, a prompt of 2,000 tokens and an answer of up to 50 take 2,069"
            r" positions; .*\n\nhint: `--max-new-tokens 29`",
        ),
        (PREFIX, 2029, 1, r"20 virtual tokens, .* take 2,049 positions; .*\n\nhint: a shorter"),
    ],
)
def test_an_answer_past_the_model_s_positions_is_refused(
    adapter, num_prompt, num_new, message
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(**adapter).require_room(num_prompt, num_new)


def test_virtual_tokens_and_images_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="an image, and run trained virtual tokens"):
        prepared(**PREFIX).seeing()


def test_a_cache_without_room_is_refused_with_the_tokens_in_front() -> None:
    facts = qwen3_8b(max_position_embeddings=10**9)
    one = prepared(**PREFIX)
    long = Prepared(
        run=one.run,
        step=None,
        recipe=one.recipe,
        tokenizer=one.tokenizer,
        facts=facts,
        machine=one.machine,
        plan=one.plan,
    )
    with pytest.raises(DoesNotFitError):
        long.require_room(10**8, 1)
