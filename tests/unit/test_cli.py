import errno
import json
from pathlib import Path

import pytest
import typer

from finetune import app, exits
from offload.plan.machine.machine import named_machine
from tests.command import run

ROOT = Path(__file__).parents[2]

# A new flag needs a line here, and a reason in its commit.
FLAGS = {
    # what a pipe or a log collector is given
    "finetune": {
        *("--resume", "--overwrite", "--machine"),
        *("--verbose", "--quiet", "--json-logs"),
    },
    "sweep": {
        "--zip",
        "--max-runs",
        "--together",
        "--resume",
        "--overwrite",
        "--machine",
        *("--verbose", "--quiet", "--json-logs"),
    },
    # an answer each, so that it runs without a terminal; a file; and no questions
    "init": {
        *("--model", "--data", "--machine", "--vram", "--ram", "--goal"),
        *("--out", "--yes"),
    },
    "plan": {
        "--machine",
        "--machines",
        "--ram",
        "--link",
        "--gpus",
        "--interconnect",
        "--what-if",
        "--sweep",
        "--runs",
        "--json",
        "--markdown",
        "--verbose",
    },
    "fit": {"--vram", "--ram", "--link", "--gpus", "--machine", "--json", "--markdown"},
    "probe": {"--dtype", "--json", "--save"},
    "doctor": {"--json"},
    "validate": set(),
    "data": {"--rows", "--json", "--html"},
    "explain": {"--html", "--json"},
    "compare": {"--out"},  # the page with their curves
    "generate": {
        *("--prompt", "--max-new-tokens", "--stop"),
        *("--temperature", "--top-k", "--top-p", "--seed"),
    },
    "chat": {
        *("--compare", "--max-new-tokens"),
        *("--temperature", "--top-k", "--top-p", "--seed"),
    },
    "score": {"--adapter", "--checkpoints", "--base", "--machine", "--json", "--out"},
    "adapter": {"--format", "--out"},
    "merge": {"--out"},
    "export": {"--gguf", "--llama-cpp"},
    "studio": {"--port", "--machine"},
    "recipes list": set(),
    "recipes show": set(),
    "recipes copy": set(),
    "recipes schema": set(),
    # a card, and what comes first; a suggested recipe goes to the terminal or a file
    "recipes for": {"--vram", "--ram", "--gpus", "--machine", "--goal", "--out"},
}


def commands(group, prefix: str = "") -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{name} ")
        else:
            options = [p for p in command.params if p.param_type_name == "option"]
            found[prefix + name] = {o for p in options for o in p.opts} - {"--help"}
    return found


def test_commands_and_flags_are_those_that_were_agreed_on() -> None:
    assert commands(typer.main.get_group(app.app)) == FLAGS


@pytest.mark.parametrize(
    ("overrides", "what", "hint"),
    [
        (["train.sead=1"], "train.sead", "train.seed"),
        (["train.lr=high"], "train.lr", "train.lr=0.0002"),
        (["adapter.rank=0"], "adapter.rank", "adapter.rank=1"),
        (["data.path=nowhere.jsonl"], "nowhere.jsonl", "`data.path: "),
    ],
)
def test_a_wrong_setting_is_refused_in_three_parts(overrides, what, hint, capsys) -> None:
    assert run("validate", "quickstart", *overrides) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert what in err
    problem, _, fix = err.partition("\n\nhint: ")
    assert ";" in problem
    assert hint in fix


@pytest.mark.slow  # measures the machine first
def test_an_empty_data_set_is_refused(tmp_path: Path, capsys) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    words = (f"data.path={empty}", f"output.dir={tmp_path / 'run'}")
    assert run("finetune", "quickstart", *words) == 1
    err = capsys.readouterr().err
    assert "empty.jsonl" in err
    assert "hint: " in err
    assert not (tmp_path / "run").exists()


def test_sequences_longer_than_the_model_allows_are_refused(tmp_path: Path, capsys) -> None:
    words = ("train.seq_len=100000", f"output.dir={tmp_path / 'run'}")
    assert run("plan", "quickstart", *words, "--machine", "rtx4090") == 1
    err = capsys.readouterr().err
    assert "train.seq_len: 100000 for a qwen3_moe model" in err
    assert "at most" in err
    assert "hint: `train.seq_len:" in err


@pytest.mark.parametrize("value", ["inf", "nan", "1e300", "-1"])
@pytest.mark.parametrize(
    "words",
    [
        ("plan", "qwen3_8b_lora_3060", "--machine", "rtx4090", "--ram"),
        ("plan", "qwen3_8b_lora_3060", "--machine", "rtx4090", "--link"),
        ("fit", "--vram"),
    ],
)
def test_memory_that_no_machine_has_is_wrong_usage(words, value, capsys) -> None:
    assert run(*words, value) == 2
    assert words[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("offload.vram_budget=1e300", "offload.vram_budget is 1e+300; it must be auto, or a "),
        ("train.tokens_per_step=1000000000000", "a step can have 10,000 micro-batches"),
        ("train.grad_accum_steps=1000000000", "train.grad_accum_steps is 1000000000; it must be"),
        ("train.micro_batch_size=1000000000000", "train.micro_batch_size is 1000000000000; it "),
    ],
)
def test_sizes_that_no_run_has_are_refused_and_not_computed(override, what, capsys) -> None:
    assert run("plan", "qwen3_8b_lora_3060", "--machine", "rtx4090", override) == 1
    assert what in capsys.readouterr().err


def test_a_damaged_machine_file_is_named(tmp_path: Path, capsys) -> None:
    file = tmp_path / "here.json"
    for text in ("", "[]", "[" * 100_000, named_machine("rtx4090").to_json()[:-9]):
        file.write_text(text)
        assert run("plan", "qwen3_8b_lora_3060", "--machine", file) == 1
        assert f"error: {file}: the machine file cannot be read: " in capsys.readouterr().err


def test_an_unknown_card_names_the_nearest(capsys) -> None:
    assert run("plan", "quickstart", "--machine", "rtx5091") == 1
    assert "rtx5090" in capsys.readouterr().err


def test_a_recipe_is_copied_once(tmp_path: Path, capsys) -> None:
    target = tmp_path / "mine.yaml"
    assert run("recipes", "copy", "gsm8k_lora", target) == 0
    assert target.read_text() == (ROOT / "recipes" / "gsm8k_lora.yaml").read_text()
    assert run("recipes", "copy", "gsm8k_lora", target) == 1
    assert f"{target} exists" in capsys.readouterr().err


def test_a_copied_recipe_finds_its_model_and_rows_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    folder, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert run("recipes", "copy", "quickstart", folder / "mine.yaml") == 0
    assert capsys.readouterr().out.splitlines()[0] == str(folder / "mine.yaml")
    assert run("validate", folder / "mine.yaml") == 0  # which requires its files
    shown = capsys.readouterr().out
    for name in ("model", "train.jsonl", "heldout.jsonl"):
        assert f"{folder / 'quickstart' / name}\n" in shown
        assert (folder / "quickstart" / name).exists()
    assert not list((folder / "quickstart").glob("README*"))


def test_files_beside_a_copied_recipe_are_not_overwritten(tmp_path: Path, capsys) -> None:
    assert run("recipes", "copy", "quickstart", tmp_path / "one.yaml") == 0
    assert run("recipes", "copy", "quickstart", tmp_path / "two.yaml") == 0  # the same files
    capsys.readouterr()
    rows = tmp_path / "quickstart" / "train.jsonl"
    rows.write_text("mine")
    assert run("recipes", "copy", "quickstart", tmp_path / "three.yaml") == 1
    assert f"{rows} exists" in capsys.readouterr().err
    assert rows.read_text() == "mine"
    assert not (tmp_path / "three.yaml").exists()


def test_recipes_are_shown_and_listed(capsys) -> None:
    assert run("recipes", "show", "quickstart") == 0
    assert run("recipes", "list") == 0
    out = capsys.readouterr().out
    assert "model:" in out
    assert "qwen30b_lora_5090" in out
    assert run("recipes", "show", "quikstart") == 1
    assert "shipped are" in capsys.readouterr().err


def test_the_schema_describes_every_section(capsys) -> None:
    assert run("recipes", "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"model", "adapter", "data", "train", "offload"} <= set(schema["properties"])


def test_wrong_usage_exits_with_2(capsys) -> None:
    assert run("finetune") == 2
    assert run("plan", "quickstart", "--nonsense") == 2
    assert "--nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "card"),
    [
        pytest.param("qwen3_8b_lora_3060", "rtx3060", marks=pytest.mark.slow),
        pytest.param("qwen30b_qlora_4060ti", "rtx4060ti", marks=pytest.mark.slow),
        ("qwen30b_lora_5090", "rtx5090"),
        pytest.param("qwen30b_dpo_5090", "rtx5090", marks=pytest.mark.slow),
        pytest.param("qwen30b_kto_5090", "rtx5090", marks=pytest.mark.slow),
        pytest.param("qwen3_8b_dpo_4090", "rtx4090", marks=pytest.mark.slow),
        pytest.param("qwen3_8b_kto_4090", "rtx4090", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_fits_the_card_that_it_is_named_for(recipe: str, card: str, capsys) -> None:
    assert run("plan", recipe, "--machine", card) == 0
    assert f"Plan for {card}" in capsys.readouterr().out


def test_a_path_that_cannot_be_written_is_an_error_not_a_traceback(tmp_path: Path, capsys) -> None:
    target = tmp_path / "nowhere" / "mine.yaml"
    assert run("recipes", "copy", "gsm8k_lora", target) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {target}: No such file or directory; a file is read or written")
    assert "\n\nhint: give another path" in err


def test_a_full_disk_is_an_error_that_names_the_command_s_subject(capsys) -> None:
    with pytest.raises(typer.Exit) as caught, exits.explained("quickstart"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.exit_code == 1
    assert capsys.readouterr().err.startswith("error: quickstart: No space left on device; ")


def test_a_reader_that_leaves_early_is_no_error(capsys) -> None:
    with pytest.raises(BrokenPipeError), exits.explained("quickstart"):
        raise BrokenPipeError
    assert not capsys.readouterr().err


def test_a_probe_in_an_unknown_dtype_is_refused(capsys) -> None:
    assert run("probe", "--dtype", "float64") == 1
    err = capsys.readouterr().err
    assert "dtype 'float64' cannot be measured; it must be bfloat16 or float16 or float32" in err
    assert "hint: `--dtype bfloat16`" in err


@pytest.mark.thorough
def test_the_doctor_shows_a_line_for_each_finding_and_fixes_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    assert run("doctor") == 0
    out, err = capsys.readouterr()
    assert err == "Looking at this machine ...\n"
    rows = [line for line in out.splitlines() if not line.lstrip().startswith("fix: ")]
    assert {line.split()[0] for line in rows} <= {"ok", "warning"}
    num_fixes = len(out.splitlines()) - len(rows)
    assert num_fixes == sum(line.startswith("warning") for line in rows)
    assert any("versions" in line and "transformers" in line for line in rows)


def test_a_world_size_that_is_no_number_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert run("finetune", "quickstart", f"output.dir={tmp_path / 'run'}") == 1
    assert "error: the environment variable WORLD_SIZE is 'abc'; " in capsys.readouterr().err
