"""The command line: its commands, what they import, and what `plan` shows."""

import errno
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from finetune import app, exits
from finetune.commands.probe import save_machine
from finetune.errors import ConfigError
from offload.plan.machine.machine import GIB, named_machine
from tests.command import run
from tests.tiers import mostly_slow

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
        *("--vram", "--ram"),
        "--headless",  # a card without a desktop has more memory
        "--link",
        "--gpus",
        "--interconnect",
        "--what-if",
        "--sweep",
        "--runs",
        "--images",  # a plan reads no rows, and images cost time before them and bytes on disk
        "--json",
        "--markdown",
        "--verbose",
    },
    "fit": {
        *("--vram", "--ram", "--headless", "--link", "--gpus", "--machine"),
        *("--json", "--markdown"),
    },
    # --anyway: rates of a busy machine are written only if that is meant
    "probe": {"--dtype", "--json", "--save", "--anyway"},
    "doctor": {"--json"},
    "validate": set(),
    "data": {"--rows", "--json", "--html"},
    "explain": {"--html", "--json"},
    "compare": {"--out"},  # the page with their curves
    "generate": {
        *("--prompt", "--image", "--max-new-tokens", "--stop"),
        *("--temperature", "--top-k", "--top-p", "--seed"),
    },
    "chat": {
        *("--compare", "--max-new-tokens"),
        *("--temperature", "--top-k", "--top-p", "--seed"),
    },
    "score": {"--adapter", "--checkpoints", "--base", "--machine", "--json", "--out"},
    "adapter": {"--format", "--out"},
    "merge": {"--out", "--as-published"},
    # the form of the weights, a Modelfile too, where to, and whose programs
    "export": {"--gguf", "--ollama", "--out", "--llama-cpp"},
    "share": set(),
    "push": {"--repo", "--public"},
    "studio": {"--port", "--machine"},
    # where; who is served, at most; what clients call the base; where the key is, and the address
    "serve": {"--machine", "--ram"}
    | {"--clients", "--samplers", "--rank", "--row-tokens", "--cached-tokens"}
    | {"--name", "--folder", "--port"},
    "recipes list": set(),
    "recipes show": set(),
    "recipes copy": set(),
    "recipes schema": set(),
    # a card, and what comes first; a suggested recipe goes to the terminal or a file
    "recipes for": {"--vram", "--ram", "--headless", "--gpus", "--machine", "--goal", "--out"},
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


def test_what_is_said_on_a_terminal_breaks_between_words(monkeypatch, capsys) -> None:
    words = ("plan", "qwen3-8b", "--machine", "mi300")
    assert run(*words) == 1
    plain = capsys.readouterr().err
    assert max(map(len, plain.splitlines())) > 80
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*words) == 1
    wrapped = capsys.readouterr().err
    assert max(map(len, wrapped.splitlines())) <= 80
    assert wrapped.split() == plain.split()


def test_versions_are_a_line(capsys) -> None:
    assert run("--version") == 0
    of_torch, of_transformers = version("torch"), version("transformers")
    line = rf"sluice \S.*, torch {re.escape(of_torch)}, transformers {re.escape(of_transformers)}\n"
    assert re.fullmatch(line, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("overrides", "what", "hint"),
    [
        (["train.sead=1"], "train.sead", "train.seed"),
        (["train.lr=high"], "train.lr", "train.lr=0.0002"),
        (["adapter.rank=0"], "adapter.rank", "adapter.rank=1"),
        (["data.path=nowhere.jsonl"], "nowhere.jsonl", "set `data.path`"),
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


def test_rates_of_a_busy_machine_are_written_if_that_is_meant(tmp_path: Path, capsys) -> None:
    busy, file = replace(named_machine("rtx4090"), others_frac=0.63), tmp_path / "my card"
    with pytest.raises(ConfigError, match=r"(?s)took 63% .*`sluice probe --save '.*' --anyway`"):
        save_machine(busy, file, is_anyway=False)
    assert not file.exists()
    save_machine(busy, file, is_anyway=True)
    assert run("plan", "qwen3-8b", "--machine", file) == 0
    assert "was measured while other programs took 63%" in capsys.readouterr().out
    assert run("probe", "--anyway") == 1
    assert "hint: `--save FILE --anyway`" in capsys.readouterr().err


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


# -------------------------------------------------------------------------------------- cli imports


HEAVY = {"torch", "transformers", "peft", "bitsandbytes", "numpy"}


@pytest.mark.thorough
def test_help_imports_no_torch() -> None:
    asked = [["--help"], ["finetune", "--help"], ["merge", "--help"], ["recipes", "list"]]
    code = (
        "import sys\nfrom finetune.app import main\n"
        f"for words in {asked!r}:\n"
        "    try:\n        main(words)\n    except SystemExit as end:\n"
        "        assert not end.code\n"
        f"    heavy = {HEAVY!r} & set(sys.modules)\n"
        "    assert not heavy, (words, heavy)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.thorough
def test_a_plan_for_a_card_imports_no_torch() -> None:
    code = (
        "import sys\nfrom finetune.app import main\n"
        "try:\n    main(['plan', 'qwen3-235b-a22b', '--machine', 'h100', '--json',"
        " 'train.seq_len=2048'])\n"
        "except SystemExit as end:\n    assert end.code == 3, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.thorough
def test_a_recipe_for_a_card_imports_no_torch() -> None:
    code = (
        "import sys\nfrom finetune.app import main\n"
        "try:\n    main(['recipes', 'for', 'llama-3.2-1b', '--vram', '8'])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.thorough
def test_a_plan_for_235b_needs_no_torch() -> None:
    words = ["plan", "qwen3-235b-a22b", "--machine", "h200", "offload.codec=nf4"]
    words += ["offload.sent_graphs=none", "offload.attention_outputs=none"]
    code = (
        "import sys\nfrom finetune.app import main\n"
        f"try:\n    main({words!r})\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    program = [sys.executable, "-c", code]
    done = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "235.09 B" in done.stdout


@pytest.mark.slow
def test_what_libraries_say_to_developers_is_not_shown(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "funny": 3, "partial_rotary_factor": 0.5}
    values = {"model_type": "stablelm", "max_position_embeddings": 512, "rope_parameters": rope}
    config.write_text(json.dumps(values | sizes))  # transformers logs a warning of `funny`
    words = ["plan", str(config), "--machine", "rtx3060"]
    code = (
        "import sys, logging\nfrom finetune.app import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'transformers' in sys.modules\n"
        "logging.getLogger('transformers').error('an error')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    shown = ["Building the model without its weights ...", "[transformers] an error"]
    assert done.stderr.splitlines() == shown


# What the model is built with: seconds of imports, for which rows and plan need not wait.
LATE = {"accelerate", "bitsandbytes", "peft", "sympy", "transformers", "triton"}
LATE |= {"torch._dynamo", "torch._inductor", "datasets"}


@pytest.mark.thorough
def test_a_run_plans_before_it_imports_what_its_model_is_built_with() -> None:
    code = "import sys\nimport finetune.train, finetune.training.prepare\nprint(*sys.modules)\n"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "torch" in loaded
    assert not loaded & LATE


@pytest.mark.parametrize(
    ("words", "first_line"),
    [
        (["finetune", "quickstart"], "Recipe quickstart, run directory runs/quickstart\n"),
        (["plan", "quickstart"], "Building the model without its weights ...\n"),
        (["plan", "qwen3-8b"], "Measuring this machine ...\n"),
        (["probe"], "Measuring this machine ...\n"),
    ],
)
def test_the_first_line_is_shown_before_torch_is_imported(
    words: list[str], first_line: str, tmp_path: Path
) -> None:
    code = (
        "import sys\nfrom finetune.app import main\n"
        "class Refusal:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'transformers'):\n"
        "            print(f'{name} is asked for', file=sys.stderr, flush=True)\n"
        "            sys.exit(9)\n"
        f"sys.meta_path.insert(0, Refusal())\nmain({words!r})\n"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 9
    assert done.stderr.endswith("torch is asked for\n")
    assert (done.stdout + done.stderr).startswith(first_line)


# ----------------------------------------------------------------------------------------- cli plan


# Everything that a recipe can leave open, and 24 sequences a step.
OPEN = (
    "offload.codec=auto",
    "offload.stash=auto",
    "offload.num_slots=auto",
    "train.micro_batch_size=auto",
    "train.tokens_per_step=49152",
)


def without_trailing_spaces(capsys) -> str:
    return "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())


@pytest.mark.long
@pytest.mark.slow
def test_the_largest_plan_with_everything_open_is_the_same_again(tmp_path: Path) -> None:
    server = replace(named_machine("h200"), ram_bytes=1024 * GIB, pinned_bytes=1024 * GIB)
    machine = tmp_path / "server.json"
    machine.write_text(server.to_json())
    words = ["plan", "qwen3-235b-a22b", "--machine", str(machine), "--json", *OPEN[:-1]]
    words += ["train.tokens_per_step=12288"]
    code = (
        "import sys\nfrom finetune.app import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
        for _ in range(2)
    ]
    assert done[0].stdout == done[1].stdout  # byte for byte, in another process
    plan = json.loads(done[0].stdout)
    assert plan["choice"]["micro_batch_size"] * plan["choice"]["num_micro_batches"] == 6
    assert len(plan["rejected"]) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("width", mostly_slow([80, 100, 120], 100))
def test_output_is_as_wide_as_columns_says_and_plain_in_a_pipe(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = ""
    for words in (
        ("plan", "qwen30b_lora_5090", "--machine", "rtx5090"),
        ("plan", "qwen3-4b", "--machines", "rtx4090,rtx3060-8gb", "--ram", "8"),
        ("fit", "gpt-oss-20b", "--vram", "48", "--ram", "24"),
    ):
        assert run(*words) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= width
        assert "\x1b" not in out
    # a table of figures keeps each row on one line
    rows = [line for line in out.splitlines() if line.split()[0].startswith(("nf4", "fp8"))]
    assert len(rows) == 2
    assert all(row.split()[-1] in ("VRAM", "RAM") for row in rows)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        ("qwen30b_lora_5090", "rtx5090"),
        pytest.param(("qwen3-8b", "rtx3060"), marks=pytest.mark.slow),
        pytest.param(("gpt-oss-120b", "rtx5090", "offload.tier=disk"), marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_one_screen_and_verbose_shows_every_table(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model, card, *overrides = words
    plan = ("plan", model, "--machine", card, *overrides)
    assert run(*plan) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 14
    assert shown.startswith(f"Plan for {card}: it fits\n model ")
    assert "bound R3" not in shown
    assert run(*plan, "--verbose") == 0
    all_shown = capsys.readouterr().out
    summary = shown.partition("Details: ")[0]
    assert all_shown.startswith(summary)
    for table in ("bound R3", "Predicted peak of device", "Rejected", "What if", "Memories"):
        assert table in all_shown


@pytest.mark.parametrize("flags", [("--json",), ("--machines", "rtx3060"), ("--markdown",)])
def test_verbose_is_refused_where_it_has_no_effect(flags: tuple[str, ...], capsys) -> None:
    assert run("plan", "qwen3-8b", *flags, "--verbose") == 1
    err = capsys.readouterr().err
    assert "--verbose" in err
    assert "\n\nhint: " in err


def test_the_plan_of_the_30b_recipe_has_the_known_figures(capsys) -> None:
    recipe = ROOT / "recipes" / "qwen30b_lora_5090.yaml"
    assert run("plan", recipe, "--machine", "rtx5090", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    layer = plan["per_layer"]
    assert layer["weight_bytes"] == 1_245_708_288
    assert layer["norm_bytes"] == 8_704
    assert layer["router_bytes"] == 524_288
    figures = {f["name"]: f["seconds"] for f in layer["compute_figures"]}
    assert figures["attention as 3 S x h products, 250.00 TFLOP/s (a round figure)"] == (
        pytest.approx(5.36e-3, rel=0.01)
    )
    assert figures["attention counted exactly, 250.00 TFLOP/s (a round figure)"] == (
        pytest.approx(5.9e-3, rel=0.01)
    )
    for name in ("step_s", "tokens_per_s", "peak_vram_bytes", "host_bytes"):
        assert plan["predicted"][name] > 0
    assert layer["forward_s"] > 0
    assert layer["h2d_s"] > 0


@pytest.mark.thorough
def test_a_plan_says_which_expert_kernels_it_assumes(capsys) -> None:
    words = ("plan", "qwen30b_lora_5090", "--machine", "rtx4090")
    assert run(*words, "--verbose") == 0  # what is shown without it, and more
    shown = without_trailing_spaces(capsys)
    assert " expert kernels  triton (assumed until a run measures it)\n" in shown
    assert " experts         63.95 TFLOP/s (assumed: 0.42 x GEMM)\n" in shown
    assert run(*words, "model.experts_implementation=eager", "--json") == 0
    assert json.loads(capsys.readouterr().out)["experts_implementation"] == {
        "value": "eager",
        "source": "as the recipe says",
    }
    dense = ("plan", "tiny-qwen3", *words[2:])
    assert run(*dense) == 0
    assert "expert" not in capsys.readouterr().out
    assert run(*dense, "--json") == 0
    assert json.loads(capsys.readouterr().out)["experts_implementation"] is None


@pytest.mark.slow
def test_other_ways_are_priced_against_the_plan_for_people_and_programs(capsys) -> None:
    words = ("plan", "qwen30b_lora_5090", "--machine", "rtx5090", "--what-if")
    assert run(*words) == 0
    table = capsys.readouterr().out.partition("What if: ")[2]
    sections = ("without", "with a setting", "only priced here")
    for line in ("this plan", *sections):
        assert f"\n {line} " in table
    for name in ("offload weights *", "4-bit weights", "shard (FSDP)"):
        assert f" {name} " in table
    assert run(*words, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["other_ways"]["plan"]["step_s"] == figures["predicted"]["step_s"]
    assert {"name", "standing", "how", "source", "figures", "fits"} == set(
        figures["other_ways"]["options"][0]
    )


def test_a_plan_of_images_says_what_they_cost_before_the_first_step(capsys) -> None:
    words = ("plan", "qwen3-vl-30b-a3b", "--machine", "rtx4090", "--images", "10000")
    assert run(*words) == 0
    shown = without_trailing_spaces(capsys)
    assert shown.startswith("images are assumed to have 1,024 tokens: ")
    assert " images       10,000 of at most 1,024 tokens: 156.25 GiB on disk, " in shown
    assert " before step 1 (`image.max_tokens: 512` halves it) " in " ".join(shown.split())
    assert run(*words, "image.max_tokens=512", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["images"]["feature_bytes"] == 10_000 * 512 * 4 * 2048 * 2
    assert figures["images"]["step_bytes"] == 16_384 * 4 * 2048 * 2
    assert (
        figures["images"]["step_vram_bytes"]
        == (figures["predicted"]["device_memory"]["features of images"])
    )
    assert not figures["notes"]


def test_a_plan_of_rows_with_images_needs_no_number_of_them(capsys) -> None:
    words = ("plan", "qwen3-vl-8b", "--machine", "rtx4090")
    assert run(*words, "image.max_tokens=512") == 0
    shown = without_trailing_spaces(capsys)
    assert " images       at most 512 tokens, 16.0 MiB on disk each; " in shown
    assert run(*words) == 0
    assert "images" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("qwen3-vl-8b", "--machines", "rtx4090"), "--images with --machines"),
        (("qwen3-vl-8b", "--machine", "rtx4090", "--runs", "2"), "--images with several runs"),
        (
            ("qwen3-vl-8b", "--machine", "rtx4090,rtx3090"),
            "--images with --machine rtx4090,rtx3090",
        ),
        (
            ("qwen3-8b", "--machine", "rtx4090"),
            "image.max_tokens is 1024 and the number of towers for images is 0",
        ),
        (
            ("qwen3-vl-8b", "--machine", "rtx4090", "train.what=all"),
            "train.what is all and what rows hold is text and images",
        ),
    ],
)
def test_images_that_could_not_be_planned_are_refused(
    words: tuple[str, ...], what: str, capsys
) -> None:
    assert run("plan", *words, "--images", "9") == 1
    assert what in capsys.readouterr().err


def test_the_same_plan_is_printed_byte_for_byte_again(capsys) -> None:
    words = ("plan", "tiny-qwen3", "--machine", "rtx 3060", "--json")
    assert run(*words) == 0
    first = capsys.readouterr().out
    assert run(*words) == 0
    assert capsys.readouterr().out == first


def test_a_plan_that_does_not_fit_exits_with_3_and_names_the_fix(capsys) -> None:
    words = ("plan", "qwen30b_lora_5090", "--machine", "rtx4090")
    assert run(*words, "offload.codec=native") == 3
    err = capsys.readouterr().err
    assert "with 2 slots of 48 layers the plan needs 60.28 GiB of RAM, 0.28 GiB too much" in err
    assert "60.00 GiB of RAM is there on rtx4090, with 4.00 GiB left to the system" in err
    assert "hint: `offload.codec: bf16_packed`\n" in err
    assert "\n  Most of RAM is for:\n    55.71 GiB  slab; less with `offload.tier: disk`" in err
    assert run(*words, "offload.codec=bf16_packed") == 0
    assert run(*words) == 0


def test_a_card_without_a_desktop_has_what_a_desktop_takes(capsys) -> None:
    words = ("plan", "qwen3-32b", "--machine", "rtx3060-8gb")
    assert run(*words) == 3
    err = capsys.readouterr().err
    desktop = "with 1.50 GiB left to a desktop (`--headless`: none)"
    assert f"5.96 GiB may be used on rtx3060-8gb, {desktop}" in err
    assert run(*words, "--headless") == 0
    assert "of 7.46 GiB " in capsys.readouterr().out
    assert run(*words[:2], "--headless") == 1
    assert "--headless without a named card" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_refusal_names_what_takes_the_memory_and_what_makes_it_less(capsys) -> None:
    words = ("plan", "gpt-oss-120b", "--machine", "rtx5090")
    assert run(*words, "train.seq_len=32768") == 3
    err = capsys.readouterr().err
    assert "422.36 GiB of device memory" in err
    assert "  256.18 GiB  one visit: gradients; less with a shorter `train.seq_len`\n" in err
    assert "  128.00 GiB  one visit: attention scores; less with a shorter `train.seq_len`" in err
    assert "`train.micro_batch_size`" not in err  # it is 1
    assert run(*words) == 3
    err = capsys.readouterr().err
    assert "    58.61 GiB  slab; less with `offload.tier: disk`, `offload.codec: nf4`\n" in err
    assert "of device memory" not in err
    assert "hint: `offload.tier: disk`" in err
    assert run(*words, "offload.tier=disk") == 0


@pytest.mark.thorough
def test_a_step_that_ram_is_too_small_for_runs_from_disk(capsys) -> None:
    words = ("plan", "qwen30b_lora_5090", "--machine", "rtx5090", "--ram", "16")
    assert run(*words) == 3
    assert "hint: `offload.tier: disk`" in capsys.readouterr().err
    assert run(*words, "offload.tier=disk", "--json") == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["tokens_per_s"] > 2000


def test_random_layers_are_not_sent_to_a_disk(capsys) -> None:
    words = ("plan", "gsm8k_lora", "--machine", "rtx3060", "--ram", "1")
    assert run(*words) == 3
    assert "offload.tier" not in capsys.readouterr().err
