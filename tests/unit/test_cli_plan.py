"""What `sluice plan` shows: its screen, tables, JSON, and refusals that name the fix."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from offload.plan.machine.machine import GIB, named_machine
from tests.command import run
from tests.tiers import mostly_slow

ROOT = Path(__file__).parents[2]

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
    rows = [line for line in out.splitlines() if "nf4" in line or "fp8" in line]
    assert len(rows) == 2
    assert all(row.split()[-1] in ("VRAM", "RAM") for row in rows)


@pytest.mark.slow
def test_a_plan_shows_what_it_chose_and_turned_down(capsys) -> None:
    words = ("plan", "qwen3_8b_lora_3060", "--machine", "rtx3060", *OPEN)
    assert run(*words, "--verbose") == 0
    shown = capsys.readouterr().out
    assert "The choice" in shown
    assert "chosen" in shown
    assert "What if" in shown
    assert "a link of twice the rate" in shown


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
    assert len(shown.splitlines()) <= 40
    assert shown.startswith(f"Plan for {card}: it fits\n step ")
    assert "3 S x h" not in shown
    assert run(*plan, "--verbose") == 0
    all_shown = capsys.readouterr().out
    summary = shown.partition("`--verbose`")[0]
    assert all_shown.startswith(summary)
    for table in ("3 S x h", "Predicted peak memory", "The choice", "What if", "RAM ──"):
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
    assert " experts  63.95 TFLOP/s (assumed: 0.42 x GEMM)\n" in shown
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
    sections = ("without what this plan does:", "with a setting:", "only priced here:")
    for line in (
        "this plan",
        *sections,
        "  offload weights *",
        "  4-bit weights",
        "  shard (FSDP)",
    ):
        assert f"\n {line}" in table
    assert run(*words, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["other_ways"]["plan"]["step_s"] == figures["predicted"]["step_s"]
    assert {"name", "standing", "how", "source", "figures", "fits"} == set(
        figures["other_ways"]["options"][0]
    )


def test_the_same_plan_is_printed_byte_for_byte_again(capsys) -> None:
    words = ("plan", "tiny-qwen3", "--machine", "rtx 3060", "--json")
    assert run(*words) == 0
    first = capsys.readouterr().out
    assert run(*words) == 0
    assert capsys.readouterr().out == first


def test_a_plan_that_does_not_fit_exits_with_3_and_names_the_fix(capsys) -> None:
    words = ("plan", "qwen30b_lora_5090", "--machine", "rtx3060", "--ram", "58")
    assert run(*words) == 3
    err = capsys.readouterr().err
    assert "with 2 slots of 48 layers the plan needs 60.28 GiB" in err
    assert "2.28 GiB too much; 58.00 GiB of RAM is there on rtx3060" in err
    assert "hint: `offload.codec: bf16_packed` with `offload.stash: host`" in err
    assert "\n  Most of RAM is for:\n    55.71 GiB  slab; less with `offload.tier: disk`" in err
    assert run(*words, "offload.codec=bf16_packed", "offload.stash=host") == 0
    assert run(*words, "offload.codec=bf16_packed") == 0


@pytest.mark.thorough
def test_a_refusal_names_what_takes_the_memory_and_what_makes_it_less(capsys) -> None:
    words = ("plan", "gpt-oss-120b", "--machine", "rtx5090")
    assert run(*words, "train.seq_len=32768") == 3
    err = capsys.readouterr().err
    assert "428.43 GiB of device memory" in err
    assert "  256.18 GiB  one visit: gradients; less with a shorter `train.seq_len`\n" in err
    assert "  128.00 GiB  one visit: attention scores; less with a shorter `train.seq_len`" in err
    assert "`train.micro_batch_size`" not in err  # it is 1
    assert run(*words) == 3
    err = capsys.readouterr().err
    assert "  164.56 GiB  slab; less with `offload.tier: disk`, `offload.codec: nf4`\n" in err
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


def test_an_mlp_in_chunks_is_refused_where_every_mlp_is_a_mixture(capsys) -> None:
    setting = "offload.mlp_chunk=512"
    assert run("plan", "qwen30b_lora_5090", "--machine", "rtx5090", setting) == 1
    error = capsys.readouterr().err
    assert "offload.mlp_chunk: 512, but every MLP of this qwen3_moe model is a mixture" in error
    assert "hint: `offload.mlp_chunk: auto`" in error
    assert run("plan", "qwen3_8b_lora_3060", "--machine", "rtx3060", setting) == 0
