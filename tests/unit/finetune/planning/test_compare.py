import json

import pytest

from finetune.errors import ConfigError
from finetune.planning.compare import (
    LENGTH_STEP,
    MACHINE_COLUMNS,
    Comparison,
    budgeted,
    compare_within_memory,
    slowest_card,
    trained_models,
)
from finetune.planning.request import full_request
from finetune.planning.subject import model_subject
from offload.errors import DoesNotFitError
from offload.plan.machine.cards import CARDS
from offload.plan.machine.machine import CARD_NAMES, GIB, named_machine
from offload.plan.plan import plan
from tests.command import run
from tests.tiers import mostly_slow

SMALL = "qwen3-1.7b"
GPUS = ("--gpus", 2)


def printed(capsys, *argv: object):
    assert run(*argv, "--json") == 0
    return json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------------------------------------
# Machines


@pytest.mark.slow
def test_all_machines_have_a_line_for_each_form_of_the_layers(capsys) -> None:
    found = printed(capsys, "plan", "tiny-qwen3", "--machines", "all", "train.seq_len=128")
    lines = [(line["machine"], line["codec"]) for line in found]
    cards = [card for card in CARD_NAMES if CARDS[card].has_bf16]
    assert lines == [(card, codec) for card in cards for codec in ("native", "fp8", "nf4")]


@pytest.mark.thorough
def test_gpus_share_the_tokens_of_a_step_and_one_slab(capsys) -> None:
    words = ("plan", SMALL, "train.tokens_per_step=16384", "--machine", "rtx3060")
    plain, one, two = (printed(capsys, *words, *more) for more in ((), ("--gpus", 1), GPUS))
    assert one.pop("gpus") == {
        "num_gpus": 1,
        "most_micro_batches": plain["schedule"]["num_micro_batches"],
    }
    assert one == plain
    assert two["schedule"]["tokens_per_step"] == plain["schedule"]["tokens_per_step"] == 16384
    assert two["gpus"]["most_micro_batches"] == plain["schedule"]["num_micro_batches"] / 2
    num_gradients = plain["model"]["num_adapter_parameters"]
    assert two["network"]["num_bytes"] == 4 * num_gradients  # half of each, twice, in fp32
    rates = [found["predicted"]["tokens_per_s"] for found in (plain, two)]
    assert 1.8 < rates[1] / rates[0] < 2.1
    slabs = [found["predicted"]["host_memory"]["slab"] for found in (plain, two)]
    assert slabs[0] == slabs[1]


@pytest.mark.thorough
def test_gpus_are_planned_in_a_table_of_cards_and_with_several_runs(capsys) -> None:
    words = ("plan", SMALL, "train.tokens_per_step=16384")
    lines = printed(capsys, *words, "--machines", "rtx3060", *GPUS)
    one = printed(capsys, *words, "offload.codec=nf4", "--machine", "rtx3060", *GPUS)
    line = next(x for x in lines if x["codec"] == "nf4")
    assert line["num_gpus"] == 2
    assert line["tokens_per_s"] == one["predicted"]["tokens_per_s"]
    runs = printed(capsys, *words, "offload.codec=nf4", "--machine", "rtx3060", "--runs", 2, *GPUS)
    assert runs["num_gpus"] == 2
    assert runs["sharings"][0]["step_s"] == one["predicted"]["step_s"]


@pytest.mark.thorough
def test_a_plan_of_gpus_says_whose_memory_it_is(capsys) -> None:
    words = ("plan", SMALL, "train.tokens_per_step=16384", *GPUS)
    assert run(*words, "--machine", "rtx3060") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Plan for 2 x rtx3060: it fits" in text
    assert "2 share the step, each with at most 4 of its 8 micro-batches" in text
    assert "VRAM is of each, RAM of all, layers in it once" in text
    assert run(*words, "--machines", "rtx3060") == 0
    assert "VRAM is of each, RAM is of all" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("train.tokens_per_step=2048",), "a step of 1 micro-batches for 2 processes"),
        (("train.what=all",), "train.what: all and train.parallel: stream, with 2 processes"),
        (("--what-if",), "--gpus 2 with --what-if"),
    ],
)
def test_gpus_that_cannot_share_a_step_are_refused(words, match: str, capsys) -> None:
    assert run("plan", SMALL, "--machine", "rtx3060", *GPUS, *words) == 1
    assert match in capsys.readouterr().err


@pytest.mark.parametrize("codec", mostly_slow(["native", "nf4"], "nf4"))
def test_a_line_is_the_plan_for_that_card_and_form(codec: str, capsys) -> None:
    words = ("plan", SMALL, "train.tokens_per_step=4096")
    lines = printed(capsys, *words, "--machines", "rtx3060, rtx4090")
    line = next(x for x in lines if (x["machine"], x["codec"]) == ("rtx3060", codec))
    one = printed(capsys, *words, f"offload.codec={codec}", "--machine", "rtx3060")
    assert line["tokens_per_s"] == one["predicted"]["tokens_per_s"]
    assert line["vram_bytes"] == one["predicted"]["peak_vram_bytes"]
    assert line["ram_bytes"] == one["predicted"]["host_bytes"]
    assert line["num_slots"] == one["schedule"]["num_slots"]
    assert line["break_even_tokens"] == one["schedule"]["break_even_tokens"]
    assert line["short"] == []


def test_a_form_that_the_recipe_asks_for_has_a_line_too(capsys) -> None:
    words = ("plan", SMALL, "train.tokens_per_step=4096", "offload.codec=int8")
    found = printed(capsys, *words, "--machines", "rtx3060")
    assert [line["codec"] for line in found] == ["native", "fp8", "nf4", "int8"]


def test_what_does_not_fit_names_the_memory_and_what_it_needs(capsys) -> None:
    words = ("plan", "qwen3-8b", "train.tokens_per_step=2048", "--machines", "rtx3060")
    assert run(*words, "--ram", "8", "--markdown") == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("qwen3-8b: 2,048 tokens per step in sequences of 2,048")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == list(MACHINE_COLUMNS)
    assert set(rows[1]) == {"---"}
    cells = {row[1]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    assert cells["bf16_packed"]["fits"] == "no: RAM"
    assert cells["bf16_packed"]["tok/s"] == ""
    assert float(cells["bf16_packed"]["RAM"]) > 8
    assert cells["native, disk"]["fits"] == "yes"
    assert float(cells["native, disk"]["RAM"]) < 8
    assert cells["nf4"]["fits"] == "yes"
    assert "nf4, disk" not in cells


@pytest.mark.thorough
def test_memory_and_link_beside_named_cards_can_be_given(capsys) -> None:
    words = ("plan", "qwen3-8b", "train.tokens_per_step=2048", "offload.kept_graphs=0")
    wide = printed(capsys, *words, "--machine", "rtx3060", "--ram", "32")
    slow = printed(capsys, *words, "--machine", "rtx3060", "--link", "2.5")
    breaks = [x["schedule"]["break_even_tokens"] for x in (wide, slow)]
    assert 0 < breaks[0] < breaks[1]
    assert run(*words, "--machine", "rtx3060", "--ram", "8") == 3
    assert "8.00 GiB of RAM is there on rtx3060" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--machines", "all", "--machine", "rtx3060"], "--machine with --machines"),
        (["--machines", "all", "--what-if"], "--what-if with --machines"),
        (["--machine", "rtx3060", "--markdown"], "--markdown without --machines"),
        (["--machines", "all", "--json", "--markdown"], "both --json and --markdown"),
        (["--machines", "rtx3060,rtx5091"], "no machine is called 'rtx5091'"),
        (["--ram", "64"], "--ram 64 without a named card"),
        (["--link", "25"], "--link 25 without a named card"),
    ],
)
def test_a_flag_without_effect_is_refused(words: list[str], what: str, capsys) -> None:
    assert run("plan", SMALL, *words) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"error: {what}")
    assert "\n\nhint: " in err


def test_a_machine_file_cannot_be_given_other_memory(tmp_path, capsys) -> None:
    file = tmp_path / "mine.json"
    file.write_text(named_machine("rtx3060").to_json())
    assert run("plan", SMALL, "--machine", file, "--ram", "64") == 1
    assert f"--ram or --link with the machine file {file}; " in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------
# Models


def compared_in_12_gib(*models: str) -> list[Comparison]:
    machine = budgeted(named_machine("rtx3060", ram_bytes=48 * GIB), vram_gib=12)
    return compare_within_memory([model_subject(one, []) for one in models], machine)


@pytest.fixture(scope="module")
def in_12_gib() -> list[Comparison]:
    return compared_in_12_gib(SMALL, "qwen3-14b")


@pytest.mark.slow
def test_what_fits_is_within_the_memory_and_what_does_not_is_short_of_one(
    in_12_gib: list[Comparison],
) -> None:
    in_12_gib = [*in_12_gib, *compared_in_12_gib("qwen3-30b-a3b")]
    found = {(compared.model, compared.codec, compared.tier): compared for compared in in_12_gib}
    assert found["qwen3-14b", "nf4", "ram"].stash == "host"
    assert found["qwen3-30b-a3b", "bf16_packed", "ram"].short == ()
    assert found["qwen3-30b-a3b", "nf4", "ram"].short == ()
    for compared in in_12_gib:
        assert (compared.tokens_per_s is None) == bool(compared.short)
        if not compared.short:
            assert compared.vram_bytes <= 12 * GIB
            assert compared.ram_bytes <= 48 * GIB


@pytest.mark.thorough
def test_the_longest_sequence_fits_and_one_that_is_a_step_longer_does_not(
    in_12_gib: list[Comparison],
) -> None:
    compared = next(x for x in in_12_gib if (x.model, x.codec) == ("qwen3-14b", "nf4"))
    assert compared.longest_seq_len is not None
    assert compared.longest_limit == "VRAM"
    words = ["offload.codec=nf4", "offload.stash=host"]
    words += ["offload.embeddings=host", "offload.head=host"]
    words += ["offload.head_chunk=64", "offload.mlp_chunk=512"]  # the least memory
    machine = named_machine("rtx3060", ram_bytes=48 * GIB)
    for seq_len, is_fitting in (
        (compared.longest_seq_len, True),
        (compared.longest_seq_len + LENGTH_STEP, False),
    ):
        asked = model_subject("qwen3-14b", [*words, f"train.seq_len={seq_len}"])
        facts = asked.facts
        request = full_request(asked.recipe, facts, num_ranks=1)
        if is_fitting:
            assert plan(facts, machine, request).num_slots >= 2
        else:
            with pytest.raises(DoesNotFitError):
                plan(facts, machine, request)


@pytest.mark.thorough
def test_more_memory_never_shortens_the_longest_sequence(in_12_gib: list[Comparison]) -> None:
    machine = budgeted(named_machine("rtx4090", ram_bytes=48 * GIB), vram_gib=20)
    in_20_gib = compare_within_memory([model_subject(SMALL, [])], machine)
    for less, more in zip(in_12_gib[:3], in_20_gib, strict=True):
        assert less.longest_seq_len is not None
        assert more.longest_seq_len is not None
        assert less.longest_seq_len <= more.longest_seq_len


@pytest.mark.thorough
def test_a_model_that_fits_with_its_embedding_in_ram_says_so(capsys) -> None:
    words = ("fit", "qwen3-14b", "--vram", "8")
    assert {line["embeddings"] for line in printed(capsys, *words)} == {"host"}
    assert run(*words, "--markdown") == 0
    assert "| qwen3-14b | native | RAM, embedding too | 2 |" in capsys.readouterr().out
    assert {line["embeddings"] for line in printed(capsys, "fit", SMALL, "--vram", "12")} == {
        "device"
    }


@pytest.mark.slow
def test_fit_lists_what_trains_at_the_rates_of_an_assumed_card(capsys) -> None:
    assert run("fit", SMALL, "--vram", "12", "--ram", "64") == 0
    out = capsys.readouterr().out
    assert "LoRA in 10.69 GiB of VRAM and 64.00 GiB of RAM, at the rates of rtx3060 (assum" in out
    assert out.count(SMALL) == 1  # a name that repeats is written once
    found = printed(capsys, "fit", SMALL, "--vram", "10", "--machine", "rtx4090")
    assert [line["codec"] for line in found] == ["native", "fp8", "nf4"]
    assert {line["machine"] for line in found} == {"rtx4090"}
    assert max(line["vram_bytes"] for line in found) <= 10 * GIB


@pytest.mark.thorough
def test_fit_of_two_gpus_has_the_figures_of_their_plan(capsys) -> None:
    words = ("--machine", "rtx3060", "--ram", "64", "--gpus", "2")
    first, figures = (
        printed(capsys, "fit", SMALL, *words)[0],
        printed(capsys, "plan", SMALL, *words),
    )
    assert first["num_gpus"] == 2
    assert first["tokens_per_s"] == pytest.approx(figures["predicted"]["tokens_per_s"])
    assert first["ram_bytes"] == figures["predicted"]["host_bytes"]
    assert run("fit", SMALL, *words) == 0
    assert "2 GPUs of a machine share each step: VRAM is of each" in capsys.readouterr().out
    assert run("fit", SMALL, *words[:-1], "9") == 1
    assert "a step of 8 micro-batches for 9 processes" in capsys.readouterr().err


def test_a_model_made_for_short_sequences_is_planned_with_those(tmp_path, capsys) -> None:
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 8, "vocab_size": 1000, "max_position_embeddings": 1024}
    file.write_text(json.dumps({"model_type": "llama"} | sizes))
    found = printed(capsys, "fit", file, "--vram", "8")
    assert {(line["seq_len"], line["longest_seq_len"]) for line in found} == {(1024, 1024)}


def test_fit_takes_all_shipped_shapes_but_toys() -> None:
    models = trained_models(None)
    assert "qwen3-235b-a22b" in models
    assert not any(model.startswith("tiny-") for model in models)
    assert "tinyllama-1.1b" in models


@pytest.mark.parametrize(
    ("vram_gib", "card"),
    [
        (8, "rtx3060-8gb"),
        (10, "rtx3080"),
        (12, "rtx3060"),
        (16, "rtx4060ti"),
        (20, "rtxa4500"),
        (24, "rtx3090"),
        (32, "rtx5090"),
        (48, "rtxa6000"),
        (96, "rtxpro6000"),
    ],
)
def test_a_budget_is_priced_at_the_slowest_card_for_a_desk_that_has_it(
    vram_gib: float, card: str
) -> None:
    assert slowest_card(vram_gib) == card


def test_what_fits_nothing_exits_with_3_and_names_the_nearest(capsys) -> None:
    assert run("fit", "llama-2-7b", "--vram", "4", "--ram", "4") == 3
    err = capsys.readouterr().err
    assert "nothing fits: the nearest is llama-2-7b with `offload.codec: nf4`" in err
    assert "4.00 GiB of VRAM and 4.00 GiB of RAM may be used" in err


def test_fit_without_a_budget_or_with_too_large_a_one_is_refused(capsys) -> None:
    assert run("fit") == 1
    assert "neither --vram nor --machine is given; " in capsys.readouterr().err
    assert run("fit", "--vram", "1000") == 1
    assert "--vram 1000 is more than any known card has; b200 has 179" in capsys.readouterr().err
    assert run("fit", "--vram", "120") == 1
    err = capsys.readouterr().err
    assert "--vram 120 is more than any known desktop card has; rtxpro6000 has 96 GiB" in err
    assert "hint: `--machine h200` takes a server's rates" in err
    with pytest.raises(ConfigError, match=r"--vram 24, but rtx3060 has 12\.00 GiB"):
        budgeted(named_machine("rtx3060"), vram_gib=24)
