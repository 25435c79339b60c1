import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from finetune.planning.candidates import GOALS, Goal
from finetune.planning.subject import wanted_model
from finetune.planning.suggestion import Target, first_settings, suggest
from finetune.recipe.load import load_recipe
from offload.plan.machine.machine import GIB, named_machine
from tests.command import run
from tests.tiers import mostly_slow


def planned(capsys, *argv: object) -> dict[str, Any]:
    capsys.readouterr()
    assert run("plan", *argv, "--json") == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def suggested(capsys, *argv: object) -> str:
    capsys.readouterr()
    assert run("recipes", "for", *argv) == 0
    return capsys.readouterr().out


def header(text: str) -> dict[str, str]:
    """Return the figures on top of a recipe, by name."""
    found = re.findall(r"^#   (step|speed|VRAM|RAM|streaming) +(.*)$", text, re.MULTILINE)
    assert len(found) == 5
    return dict(found)


def assert_header_is(figures: dict[str, Any], text: str) -> None:
    shown, predicted, schedule = header(text), figures["predicted"], figures["schedule"]
    tokens = schedule["tokens_per_step"]
    assert shown["step"] == f"{predicted['step_s']:.3f} s of {tokens:,} tokens"
    assert shown["speed"].startswith(f"{tokens / predicted['step_s']:,.1f} tokens/s; ")
    assert shown["VRAM"].startswith(f"{predicted['peak_vram_bytes'] / GIB:.2f} GiB of ")
    assert shown["RAM"].startswith(f"{predicted['host_bytes'] / GIB:.2f} GiB, to be free, of ")
    assert f" {schedule['break_even_tokens']:,} tokens per step" in shown["streaming"]


ASKED = {
    "dense on its smallest card": "qwen3-8b --vram 8 --ram 32",
    "a mixture from RAM": "Qwen3-30B --vram 12 --ram 64 --goal fastest",
    "more than RAM": "gpt-oss-120b --machine rtx3090 --ram 64",
    "half of a card": "llama-3.1-8b --machine rtx4090 --vram 12 --ram 64 --goal quality",
    "the longest sequence": "gemma-3-4b --vram 8 --ram 32 --goal context",
    "settings of one's own": "mistral-7b --vram 16 train.seq_len=4096 adapter.rank=64",
    "a card by its name": "Qwen/Qwen3-32B --machine 'RTX 5090'",
    "a server": "qwen3-235b --machine h200",
    "two cards": "qwen3-0.6b --machine rtx3060 --ram 64 --gpus 2",
    "the longest on four cards": "qwen3-8b --vram 16 --ram 64 --gpus 4 --goal context",
}


@pytest.mark.parametrize("words", mostly_slow(ASKED, "more than RAM", "two cards"))
def test_a_suggested_recipe_plans_to_the_figures_on_top_of_it(
    words: str, tmp_path: Path, capsys
) -> None:
    file = tmp_path / "suggested.yaml"
    suggested(capsys, *shlex.split(words), "--out", file)
    text = file.read_text(encoding="ascii")
    command = re.search(r"^#   sluice plan (\S+) (.*)$", text, re.MULTILINE)
    assert command is not None
    assert command[1] == str(file)
    assert_header_is(planned(capsys, file, *shlex.split(command[2])), text)
    assert "Predicted, not measured, from published rates" in text
    load_recipe(str(file), [])  # the strict reader takes it


@pytest.mark.thorough
def test_settings_of_the_command_line_are_written(capsys) -> None:
    words = ("llama-3.2-1b", "--vram", 8, "train.seq_len=4096", "train.lr=0.0001")
    text = suggested(capsys, *words, "adapter.targets=[q_proj, v_proj]", "train.steps=20")
    assert "\n  seq_len: 4096 " in text
    assert "\n  lr: 0.0001\n" in text
    assert '\n  targets: ["q_proj", "v_proj"]\n' in text
    assert "epochs" not in text  # the rival of train.steps
    assert run("recipes", "for", *words, "train.rank=8") == 1
    assert "train.rank is not a setting" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_recipe_for_experts_says_how_to_train_them(capsys) -> None:
    assert "\n  # experts: true " in suggested(capsys, "olmoe", "--vram", 24)
    assert "experts: true" not in suggested(capsys, "llama-3.2-1b", "--vram", 24)


@pytest.mark.thorough
def test_all_weights_have_no_adapter_and_a_lower_rate(capsys) -> None:
    words = ("qwen3-0.6b", "--vram", 24, "train.what=all")
    text = suggested(capsys, *words)
    assert text.startswith("# All weights of qwen3-0.6b, exact from RAM, for rtx3090")
    assert "\nadapter:" not in text
    assert "\n  lr: 1e-05\n" in text
    assert "\n  lr: 3e-05\n" in suggested(capsys, *words, "train.lr=3e-5")


# ---------------------------------------------------------------------------------------- goals


def rates(capsys, *argv: object) -> dict[str, float]:
    """Return the tokens/s of a recipe in each form that fits, by its codec."""
    found = {}
    for codec in ("auto", "int8", "fp8", "nf4"):
        for tier in ("ram", "disk"):
            words = (*argv, f"offload.codec={codec}", f"offload.tier={tier}", "--json")
            if codec not in found and run("plan", *words) == 0:
                found[codec] = json.loads(capsys.readouterr().out)["predicted"]["tokens_per_s"]
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("goal", mostly_slow(GOALS, *(name for name in GOALS if name != "context")))
def test_a_goal_takes_what_rounds_least_of_the_forms_that_are_good_enough(goal: Goal) -> None:
    machine = named_machine("rtx3090", ram_bytes=32 * GIB)
    model = wanted_model("qwen3-1.7b")
    found = suggest(
        model,
        Target(machine=machine, options=""),
        goal,
        settings=first_settings(model, name="a-run"),
        overrides=["train.tokens_per_step=8192"],
    )
    values = [form.seq_len if goal.name == "context" else form.tokens_per_s for form in found.forms]
    share = {"balanced": 0.5, "fastest": 1.0, "quality": 0.0, "context": 0.9}[goal.name]
    enough = [x for x, v in zip(found.forms, values, strict=True) if v >= share * max(values)]
    assert found.chosen in enough
    assert found.chosen.rounding == min(form.rounding for form in enough)


@pytest.mark.slow
def test_each_goal_chooses_by_what_it_says(tmp_path: Path, capsys) -> None:
    asked, machine = ("qwen3-235b-a22b",), ("--machine", "rtx3090", "--ram", "32")
    by_goal = {}
    for goal in ("balanced", "fastest", "quality"):
        file = tmp_path / f"{goal}.yaml"
        suggested(capsys, *asked, *machine, "--goal", goal, "--out", file)
        by_goal[goal] = load_recipe(str(file), []).offload.codec
    found = rates(capsys, str(tmp_path / "quality.yaml"), *machine)
    assert list(found) == ["auto", "int8", "fp8", "nf4"]  # the one that rounds least first
    fastest = max(found, key=lambda codec: found[codec])
    enough = [codec for codec, rate in found.items() if rate >= found[fastest] / 2]
    assert by_goal == {"balanced": enough[0], "fastest": fastest, "quality": "auto"}
    assert len(set(by_goal.values())) == 3  # the case tells the goals apart


@pytest.mark.slow
def test_the_longest_sequence_is_one_that_hardly_fits(tmp_path: Path, capsys) -> None:
    file, machine = tmp_path / "long.yaml", ("--machine", "rtx3060", "--ram", "32")
    suggested(capsys, "qwen3-14b", *machine, "--goal", "context", "--out", file)
    recipe = load_recipe(str(file), [])
    seq_len = recipe.train.seq_len
    assert 2048 < seq_len < 40_960
    assert seq_len % 1024 == 0
    longer = seq_len + 1024
    words = (f"train.seq_len={longer}", f"train.tokens_per_step={longer}")
    assert run("plan", file, *machine, *words) == 3


@pytest.mark.parametrize("setting", ["train.seq_len=4096", "train.grad_accum_steps=8"])
def test_a_length_that_is_set_is_none_to_be_found(setting: str, capsys) -> None:
    assert run("recipes", "for", "qwen3-0.6b", "--vram", 8, "--goal", "context", setting) == 1
    err = capsys.readouterr().err
    assert f"{setting} with the goal context" in err
    assert f"leave out `{setting.partition('=')[0]}`" in err


def test_a_longer_sequence_keeps_whole_micro_batches(capsys) -> None:
    words = ("gemma-3-1b", "--vram", 8, "--goal", "context", "train.micro_batch_size=2")
    text = suggested(capsys, *words, "offload.codec=nf4")
    found = re.search(r"seq_len: (\d+) .*\n  tokens_per_step: (\d+)", text)
    assert found is not None
    assert int(found[2]) % (2 * int(found[1])) == 0


@pytest.mark.thorough
def test_every_form_has_a_line_and_one_is_chosen(capsys) -> None:
    text = suggested(capsys, "qwen3-1.7b", "--machine", "rtx3090", "--ram", 64)
    lines = re.findall(r"^#   ((?:exact|int8|fp8|nf4).*)$", text, re.MULTILINE)
    assert [line.split(" from ")[0] for line in lines] == ["exact", "int8", "fp8", "nf4"]
    assert all("tokens/s" in line or "does not fit: short of" in line for line in lines)
    assert sum(line.endswith("<- chosen") for line in lines) == 1


def test_an_unknown_goal_names_the_nearest(capsys) -> None:
    assert run("recipes", "for", "qwen3-8b", "--vram", 12, "--goal", "quick") == 1
    assert "'quick' is not a goal; goals are balanced, fastest" in capsys.readouterr().err


# ----------------------------------------------------------------------------------- what misses


@pytest.mark.slow
def test_what_does_not_fit_names_the_least_that_does(capsys) -> None:
    asked = ("recipes", "for", "llama-3.1-70b", "offload.codec=nf4", "--ram", 32)
    assert run(*asked, "--vram", 8) == 3
    err = capsys.readouterr().err
    assert "llama-3.1-70b does not fit rtx3060-8gb in any form: the nearest, nf4 from disk" in err
    assert "short of VRAM\n" in err
    found = re.search(r"`--machine (\S+)` \((\d+) GiB\) with as much RAM", err)
    assert found is not None
    assert run(*asked, "--machine", found[1]) == 0
    assert found[2] == "12"
    assert run(*asked, "--vram", 10) == 3


@pytest.mark.slow
def test_too_little_ram_names_how_much_would_do(capsys) -> None:
    asked = ("recipes", "for", "gpt-oss-120b", "--machine", "rtx5090", "offload.tier=ram")
    assert run(*asked, "--ram", 32) == 3
    err = capsys.readouterr().err
    assert "short of RAM" in err
    found = re.search(r"`--ram (\d+)` with as much VRAM", err)
    assert found is not None
    assert run(*asked, "--ram", found[1]) == 0
    assert run(*asked, "--ram", int(found[1]) // 2) == 3


def test_a_budget_is_kept_to_by_what_would_do(capsys) -> None:
    asked = ("recipes", "for", "qwen3-14b", "offload.codec=nf4", "--machine", "rtx4090")
    assert run(*asked, "--vram", 4, "--ram", 32) == 3
    err = capsys.readouterr().err
    assert "4.00 GiB of VRAM and 32.00 GiB of RAM may be used, so it is short of VRAM\n" in err
    assert "`--ram" not in err  # no RAM helps
    assert "`--machine rtx" in err


# ------------------------------------------------------------------------------------ the asking


@pytest.mark.thorough
def test_memory_alone_takes_the_rates_of_a_card_and_says_so(capsys) -> None:
    assert run("recipes", "for", "qwen3-8b", "--vram", 12) == 0
    out, err = capsys.readouterr()
    assert "the rates are those of rtx3060, the slowest known desktop card with 12.00 GiB" in err
    assert out.startswith("# LoRA on qwen3-8b, exact from RAM, for rtx3060 with 64 GiB of RAM.\n")


@pytest.mark.slow
def test_a_part_of_a_card_is_a_budget_of_the_recipe(capsys) -> None:
    words = ("qwen3-8b", "--machine", "rtx4090")
    assert "\n  vram_budget: 10" in suggested(capsys, *words, "--vram", 10)
    assert "vram_budget" not in suggested(capsys, *words, "--vram", 24)
    assert run("recipes", "for", *words, "--vram", 32) == 1
    assert "--vram 32, but rtx4090 has 24.00 GiB" in capsys.readouterr().err


def test_a_card_is_needed(capsys) -> None:
    assert run("recipes", "for", "qwen3-8b") == 1
    err = capsys.readouterr().err
    assert "neither --vram nor --machine is given" in err
    assert "`--vram 12 --ram 64`" in err


def test_no_file_is_written_over(tmp_path: Path, capsys) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine\n")
    assert run("recipes", "for", "qwen3-8b", "--vram", 12, "--out", file) == 1
    assert f"{file} exists" in capsys.readouterr().err
    assert file.read_text() == "mine\n"
    assert run("recipes", "for", "qwen3-8b", "--vram", 12, "--out", tmp_path / "mine.txt") == 1
    assert "a recipe ends in .yaml" in capsys.readouterr().err
