"""Plans next to each other: cards, settings, and what is suggested."""

import json
import re
import shlex
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import ConfigError
from finetune.planning.candidates import (
    GOALS,
    Goal,
    choose,
    chooser,
    chosen_plan,
    full_requests,
    in_forms,
    with_each_size,
)
from finetune.planning.compare import (
    LENGTH_STEP,
    Comparison,
    advice,
    budgeted,
    compare_within_memory,
    slowest_card,
    trained_models,
)
from finetune.planning.request import facts_of, full_request
from finetune.planning.subject import Subject, model_subject, subject_of, wanted_model
from finetune.planning.suggestion import Target, first_settings, suggest
from finetune.recipe.capabilities import broken_rules
from finetune.recipe.load import load_recipe, load_shape
from finetune.recipe.recipe import Recipe, resolved_yaml, with_settings
from finetune.run.run_dir import RunDir, as_begun
from finetune.training.prepare import with_chosen
from offload.errors import DoesNotFitError
from offload.plan.facts.codec import codecs_that
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.workload import record_bytes
from offload.plan.machine.cards import CARDS
from offload.plan.machine.machine import GIB, Machine, named_machine
from offload.plan.plan import plan
from offload.plan.request import PlanRequest, with_workload
from offload.plan.schedule.schedule import Order
from tests.builders import model_facts, recipe_values
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
    forms = {"native": "exact", "bf16_packed": "exact"}
    lines = [(line["machine"], forms.get(line["codec"], line["codec"])) for line in found]
    cards = [card for card in CARDS if CARDS[card].has_bf16]
    assert lines == [(card, codec) for card in cards for codec in ("exact", "fp8", "nf4")]


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
    assert line["tokens_per_s"] == pytest.approx(one["predicted"]["tokens_per_s"], rel=1e-9)
    runs = printed(capsys, *words, "offload.codec=nf4", "--machine", "rtx3060", "--runs", 2, *GPUS)
    assert runs["num_gpus"] == 2
    assert runs["sharings"][0]["step_s"] == one["predicted"]["step_s"]


@pytest.mark.thorough
def test_a_plan_of_gpus_says_whose_memory_it_is(capsys) -> None:
    words = ("plan", SMALL, "train.tokens_per_step=16384", *GPUS)
    assert run(*words, "--machine", "rtx3060") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Plan for 2 x rtx3060: it fits" in text
    assert "of 10.00 GiB, of each card, 1.50 GiB left to a desktop" in text
    assert "of 60.00 GiB, of all, 4.00 GiB left to the system" in text
    assert run(*words, "--machine", "rtx3060", "--verbose") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "in 8 micro-batches of 1 x 2048, at most 4 of them on each of 2 ranks" in text
    assert run(*words, "--machines", "rtx3060") == 0
    assert "VRAM is of each, RAM is of all" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("train.what=all",), "train.what is all and the number of processes is 2"),
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
    assert line["tokens_per_s"] == pytest.approx(one["predicted"]["tokens_per_s"], rel=1e-9)
    assert line["vram_bytes"] == one["predicted"]["peak_vram_bytes"]
    assert line["ram_bytes"] == one["predicted"]["host_bytes"]
    assert line["num_slots"] == one["schedule"]["num_slots"]
    assert line["break_even_tokens"] == one["schedule"]["break_even_tokens"]
    assert line["short"] == []


@pytest.mark.parametrize("columns", [80, 100])
def test_a_table_of_machines_has_whole_names_in_narrow_terminals(
    columns: int, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    mine = tmp_path / "mine.json"
    name = "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz, 2 threads"
    mine.write_text(replace(named_machine("rtx3060"), name=name).to_json())
    words = ("qwen3-8b", "train.tokens_per_step=2048", "--machines", f"{mine},rtx4060ti-8gb")
    assert run("plan", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert [line.strip() for line in lines].count(name) == 1
    assert " rtx4060ti-8gb" in lines
    at = lines.index(f" {name}")
    assert len(lines[at - 1]) == len(lines[at + 1]) == len(lines[-1])


def test_a_form_that_the_recipe_asks_for_has_a_line_too(capsys) -> None:
    words = ("plan", SMALL, "train.tokens_per_step=4096", "offload.codec=int8")
    found = printed(capsys, *words, "--machines", "rtx3060")
    assert [line["codec"] for line in found] == ["native", "fp8", "nf4", "int8"]


def test_what_does_not_fit_names_the_memory_and_what_it_needs(capsys) -> None:
    words = ("plan", "qwen3-8b", "train.tokens_per_step=2048", "--machines", "rtx3060")
    assert run(*words, "--ram", "12", "--markdown") == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("qwen3-8b: 2,048 tokens per step in sequences of 2,048")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == ["card", "layers", "fits", "slots", "tok/s", "VRAM", "RAM", "N*"]
    assert set(rows[1]) == {"---"}
    cells = {row[1]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    assert cells["bf16_packed"]["fits"] == "no: RAM"
    assert cells["bf16_packed"]["tok/s"] == ""
    assert float(cells["bf16_packed"]["RAM"]) > 8
    assert cells["bf16_packed, disk"]["fits"] == "yes"
    assert float(cells["bf16_packed, disk"]["RAM"]) < 8
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
    assert "4.00 GiB of RAM is there on rtx3060" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--machines", "all", "--machine", "rtx3060"], "--machine with --machines"),
        (["--machines", "all", "--what-if"], "--what-if with --machines"),
        (["--machines", "all", "--json", "--markdown"], "both --json and --markdown"),
        (["--machines", "rtx3060,rtx5091"], "no machine is called 'rtx5091'"),
        (["--ram", "64"], "--ram 64 without a named card"),
        (["--link", "25"], "--link 25 without a named card"),
        (["--headless"], "--headless without a named card"),
    ],
)
def test_a_flag_without_effect_is_refused(words: list[str], what: str, capsys) -> None:
    assert run("plan", SMALL, *words) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"error: {what}")
    assert "\n\nhint: " in err


def test_memory_alone_takes_the_slowest_card_that_has_it_with_units_or_without(capsys) -> None:
    words = ("plan", SMALL, "--json")
    named = printed(capsys, *words[:2], "--machine", "rtx3060", "--ram", "64")
    for vram, ram in (("12", "64"), ("12GB", "64 GiB"), ("12g", "64gb")):
        assert run(*words, "--vram", vram, "--ram", ram) == 0
        out, err = capsys.readouterr()
        assert "slowest known desktop card with 12.00 GiB" in err
        assert json.loads(out) == named
    assert run("plan", SMALL, "--runs", "2", "--vram", "12") == 0
    assert "the rates are those of rtx3060, the slowest" in capsys.readouterr().err
    small = printed(capsys, *words[:2], "--vram", "8")
    assert small["machine"] == "rtx3060-8gb"
    for wrong in ("0", "twelve", "12MB", "-1", "inf"):
        assert run(*words, "--vram", wrong) == 2
        assert f"{wrong} is no number of GiB" in capsys.readouterr().err


def test_a_machine_file_cannot_be_given_other_memory(tmp_path, capsys) -> None:
    file = tmp_path / "mine.json"
    file.write_text(named_machine("rtx3060").to_json())
    assert run("plan", SMALL, "--machine", file, "--ram", "64") == 1
    assert f"--ram, --link or --headless with the machine file {file}; " in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------
# Models


def compared_in_12_gib(*models: str) -> list[Comparison]:
    machine = budgeted(named_machine("rtx3060", ram_bytes=52 * GIB), vram_gib=12)
    groups = compare_within_memory([model_subject(one, []) for one in models], machine)
    return list(chain.from_iterable(groups))


@pytest.fixture(scope="module")
def in_12_gib() -> list[Comparison]:
    return compared_in_12_gib(SMALL, "qwen3-14b")


@pytest.mark.slow
def test_what_fits_is_within_the_memory_and_what_does_not_is_short_of_one(
    in_12_gib: list[Comparison],
) -> None:
    in_12_gib = [*in_12_gib, *compared_in_12_gib("qwen3-30b-a3b")]
    found = {(compared.model, compared.codec, compared.tier): compared for compared in in_12_gib}
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
    machine = named_machine("rtx3060", ram_bytes=52 * GIB)
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
    machine = budgeted(named_machine("rtx4090", ram_bytes=52 * GIB), vram_gib=20)
    (in_20_gib,) = compare_within_memory([model_subject(SMALL, [])], machine)
    for less, more in zip(in_12_gib[:3], in_20_gib, strict=True):
        assert less.longest_seq_len is not None
        assert more.longest_seq_len is not None
        assert less.longest_seq_len <= more.longest_seq_len


@pytest.mark.thorough
def test_a_model_that_fits_with_its_embedding_in_ram_says_so(capsys) -> None:
    words = ("fit", "qwen3-14b", "--vram", "8")
    assert {line["embeddings"] for line in printed(capsys, *words)} == {"host"}
    assert {line["embeddings"] for line in printed(capsys, "fit", SMALL, "--vram", "12")} == {
        "device"
    }


def test_advice_names_the_exact_form_and_what_a_faster_one_rounds(
    in_12_gib: list[Comparison],
) -> None:
    by_form = {one.codec: one for one in in_12_gib if one.model == SMALL}
    rates = {"native": 100.0, "fp8": 99.0, "nf4": 100.4}

    def said(**others: float) -> str:
        known = {**rates, **others}
        return advice([replace(by_form[name], tokens_per_s=known[name]) for name in known])

    assert said() == "native is exact, and none is faster"
    assert said(nf4=125) == "native is exact; nf4 is 25% faster, rounds by 9.2%"
    del rates["native"]
    assert said() == "no exact form fits; nf4 rounds weights by 9.2%"


@pytest.mark.slow
def test_fit_lists_what_trains_at_the_rates_of_an_assumed_card(capsys) -> None:
    assert run("fit", SMALL, "--vram", "12", "--ram", "64") == 0
    out = capsys.readouterr().out
    assert "LoRA in 10.00 GiB of VRAM and 60.00 GiB of RAM, at the rates of rtx3060 (assum" in out
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
    assert "llama-3.2-1b" in models


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
    assert run("fit", "qwen3-8b", "--vram", "4", "--ram", "8") == 3
    err = capsys.readouterr().err
    assert "nothing fits: the nearest is qwen3-8b with `offload.codec: nf4`" in err
    assert "3.99 GiB of VRAM and 4.00 GiB of RAM may be used" in err


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


# --------------------------------------------------------------------------------------- candidates


CARD = named_machine("rtx4090")


def recipe(**changes: Any) -> Recipe:
    values = recipe_values(
        model__path=None, model__config="tiny-qwen3", model__init="random", **changes
    )
    return Recipe.model_validate(values)


def open_recipe(**changes: Any) -> Recipe:
    """Return a recipe of 12 sequences per step that leaves everything open."""
    return recipe(
        train__grad_accum_steps=None,
        train__tokens_per_step=12 * 512,
        train__micro_batch_size="auto",
        **changes,
    )


def requests(asked: Recipe, *, num_ranks: int = 1) -> list[PlanRequest]:
    return full_requests(asked, facts_of(asked.model), num_ranks=num_ranks)


def codecs(asked: Recipe) -> list[str]:
    return list(dict.fromkeys(one.largest.codec for one in requests(asked)))


def test_each_cut_of_a_step_has_its_sequences() -> None:
    found = with_each_size(open_recipe(), num_ranks=1)
    assert [one.train.micro_batch_size for one in found] == [1, 2, 3, 4, 6, 12]
    for one in found:
        assert one.train.sequences * one.train.num_micro_batches == 12
        assert one.train.global_batch_size == 12
        assert not list(broken_rules(one))
    for asked in requests(open_recipe()):
        assert asked.typical.num_tokens * asked.num_micro_batches == 12 * 512
        assert asked.typical.label_tokens == asked.typical.num_tokens


def test_attention_is_kept_unless_the_recipe_says_none_or_layers_are_compiled() -> None:
    for asked, has_outputs in (
        (recipe(), True),
        (recipe(offload__attention_outputs="none"), False),
        (recipe(train__compile=True), False),
    ):
        assert {one.has_outputs for one in requests(asked)} == {has_outputs}


def test_graphs_may_be_sent_unless_the_recipe_says_none_or_layers_are_compiled() -> None:
    for asked, has_sent_graphs in (
        (recipe(), True),
        (recipe(offload__sent_graphs="none"), False),
        (recipe(train__compile=True), False),
    ):
        assert {one.has_sent_graphs for one in requests(asked)} == {has_sent_graphs}


def test_each_rank_has_a_micro_batch() -> None:
    assert [one.train.num_micro_batches for one in with_each_size(open_recipe(), num_ranks=4)] == [
        12,
        6,
        4,
    ]


def test_a_size_that_was_given_is_kept() -> None:
    asked = recipe(train__micro_batch_size=3)
    assert with_each_size(asked, num_ranks=1) == (asked,)


def test_auto_means_exact_forms_alone() -> None:
    assert codecs(recipe()) == ["native", "bf16_packed"]
    assert codecs(recipe(model__dtype="float32")) == ["native"]
    assert codecs(recipe(offload__codec="nf4")) == ["nf4"]
    assert codecs(recipe(adapter__modules_to_save=["norms"])) == ["native", "bf16_packed"]
    whole = recipe(adapter__targets=["q_proj"], adapter__modules_to_save=["v_proj"])
    assert codecs(whole) == ["native"]


def test_auto_keeps_experts_in_the_form_that_they_were_published_in() -> None:
    published = subject_of("gpt-oss-20b", [])
    assert published.facts.published == "mxfp4"
    assert codecs_of(published) == ["native", "bf16_packed", "mxfp4"]
    assert codecs_of(subject_of("gpt-oss-20b", ["model.dtype=float32"])) == ["native"]
    assert codecs_of(subject_of("gpt-oss-20b", ["offload.codec=nf4"])) == ["nf4"]
    random = subject_of("gpt-oss-20b", ["model.init=random"])
    assert random.facts.published == ""
    assert codecs_of(random) == ["native", "bf16_packed"]


def test_auto_keeps_matrices_in_the_form_that_they_were_published_in() -> None:
    published = subject_of("qwen3-30b-a3b-nvfp4", [])
    assert published.facts.published == "nvfp4"
    assert codecs_of(published) == ["native", "bf16_packed", "nvfp4"]
    assert codecs_of(subject_of("qwen3-30b-a3b", [])) == ["native", "bf16_packed"]
    packed = {x.name for x in published.facts.layers[0].linears if x.is_kept}
    assert packed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}
    layer = published.facts.layers[0]
    num_weights = layer.weights("attention") + layer.weights("experts")
    rest_bytes = record_bytes(layer, "native", 2) - 2 * num_weights
    assert record_bytes(layer, "nvfp4", 2) == num_weights * 5 // 8 + rest_bytes


def test_a_form_that_no_codec_keeps_is_planned_as_plain_weights(tmp_path: Path) -> None:
    fields = load_shape("qwen3-30b-a3b") | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    subject = subject_of(str(tmp_path), [])
    assert subject.facts.published == "fp8"
    assert codecs_of(subject) == ["native", "bf16_packed"]


def codecs_of(subject: Subject) -> list[str]:
    return list(dict.fromkeys(one.largest.codec for one in subject.requests()))


@pytest.mark.parametrize(("ram_gib", "is_on_disk"), [(64, True), (96, False)])
def test_the_largest_gpt_oss_is_exact_on_24_gib(ram_gib: int, *, is_on_disk: bool) -> None:
    """Packed layers take 165 GiB, in MXFP4 59, and from a disk a step takes a third less time."""
    subject = subject_of("gptoss_120b_24gb", [])
    machine = named_machine("rtx3090", ram_bytes=ram_gib * GIB)
    plans = {}
    for codec in ("auto", "bf16_packed"):
        settings = {"offload.codec": codec, "offload.tier": "disk" if is_on_disk else "auto"}
        asked = with_settings(subject.recipe, settings)
        plans[codec] = chosen_plan(subject.facts, machine, subject.requests(asked))
    found = plans["auto"]
    assert found is not None
    assert found.request.typical.codec == "mxfp4"
    experts = sum(layer.weights("experts") for layer in subject.facts.layers)
    rest = sum(layer.num_parameters for layer in subject.facts.layers) - experts
    stored_bytes = sum(found.request.typical.cargo_bytes(x) for x in subject.facts.layers)
    assert stored_bytes == pytest.approx(experts * (1 / 2 + 1 / 32) + 2 * rest, rel=1e-4)
    assert stored_bytes < 59 * GIB
    if not is_on_disk:
        assert plans["bf16_packed"] is None
        return
    assert plans["bf16_packed"] is not None
    assert found.step_s < 0.7 * plans["bf16_packed"].step_s


def test_a_place_that_was_given_is_kept() -> None:
    for stash, expected in (("auto", {False, True}), ("host", {True}), ("device", {False})):
        asked = recipe(offload__stash=stash)
        assert {one.is_stashed for one in requests(asked)} == expected


def test_the_plainest_request_stands_first() -> None:
    found = requests(open_recipe())
    assert found[0].largest.codec == "native"
    assert not found[0].is_stashed
    assert found[0].largest.micro_batch_size == 1
    keys = [
        (
            one.order is Order.MICRO_BATCH_MAJOR,
            -one.largest.head_chunk_tokens,
            one.largest.codec != "native",
            one.is_stashed,
            one.largest.micro_batch_size,
        )
        for one in found
        if one.largest.mlp_chunk_tokens is None and one.typical.head == "device"
    ]
    assert keys == sorted(keys)
    # tiles come after all of these, and then a weight of embedding and head in RAM
    others = found[len(keys) :]
    assert all(one.largest.mlp_chunk_tokens or one.typical.head == "host" for one in others)
    layers, rounds = 3 * 2 * 2 * 6, 3 * 2 * 5  # a step of one micro-batch is no round
    assert len(set(keys)) == len(keys) == layers + rounds


def test_a_router_loss_of_each_micro_batch_does_not_leave_the_cut_open(tmp_path) -> None:
    config = tmp_path / "config.json"
    shape = load_shape("tiny-qwen3-moe")
    config.write_text(json.dumps(shape | {"output_router_logits": True}))
    asked = open_recipe()
    asked = asked.model_copy(
        update={"model": asked.model.model_copy(update={"config": str(config)})}
    )
    assert len(with_each_size(asked, num_ranks=1)) > 1


def test_rounding_is_suggested_only_where_the_run_could_have_it() -> None:
    slow = named_machine("rtx4090", link_bytes_per_s=1e6)

    def suggested(asked: Recipe) -> set[str]:
        facts: ModelFacts = facts_of(asked.model)
        found = choose(facts, slow, full_requests(asked, facts, num_ranks=1))
        return {str(what_if.change) for what_if in found.what_ifs} & set(
            codecs_that(lambda codec: codec.is_suggested)
        )

    few_slots = {"offload__num_slots": 2, "train__seq_len": 8}
    assert suggested(recipe(**few_slots)) == {"int8", "nf4"}
    whole = recipe(adapter__targets=["q_proj"], adapter__modules_to_save=["v_proj"], **few_slots)
    assert suggested(whole) == set()
    assert suggested(recipe(offload__codec="nf4", **few_slots)) == set()


# ------------------------------------------------------------------------------------------ head


def small_card(gib: float) -> Machine:
    return replace(named_machine("rtxa2000"), vram_bytes=int(gib * GIB))


def chosen_chunk(gib: float, *overrides: str) -> int:
    asked = model_subject(
        "qwen3-4b", ["train.tokens_per_step=2048", "model.layer_kernels=plain", *overrides]
    )
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    return choose(asked.facts, small_card(gib), ways).plan.request.largest.head_chunk_tokens


@pytest.mark.thorough
def test_fewer_logits_exist_at_a_time_only_where_more_would_not_fit() -> None:
    assert [chosen_chunk(gib) for gib in (12, 6, 3.5, 3.3)] == [1024, 1024, 256, 256]


def test_a_head_chunk_that_the_recipe_names_is_kept_or_refused() -> None:
    assert chosen_chunk(12, "offload.head_chunk=100") == 100
    with pytest.raises(DoesNotFitError, match="of device memory") as refused:
        chosen_chunk(3.5, "offload.head_chunk=1024")
    assert "head chunk; less with a smaller `offload.head_chunk`" in refused.value.limit


def test_a_resumed_run_keeps_its_head_chunk(tmp_path: Path) -> None:
    begun = with_settings(recipe(), {"offload.head_chunk": 256})
    run = RunDir(tmp_path)
    run.recipe_file.write_text(resolved_yaml(begun))
    assert as_begun(recipe(), run.begun()).offload.head_chunk == 256
    assert as_begun(recipe(offload__head_chunk=64), run.begun()).offload.head_chunk == 64
    before = resolved_yaml(recipe()).replace("  head_chunk: auto\n", "")
    run.recipe_file.write_text(before)  # of a run that knew no such setting
    assert as_begun(recipe(), run.begun()) == recipe()


# ------------------------------------------------------------------------------------------- MLP


def chosen_tile(seq_len: int, *overrides: str, model: str = "llama-3.1-8b") -> int | None:
    sizes = [f"train.seq_len={seq_len}", f"train.tokens_per_step={seq_len}"]
    asked = model_subject(model, [*sizes, "offload.codec=nf4", *overrides])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    card = named_machine("rtx4090")
    return choose(asked.facts, card, ways).plan.request.largest.mlp_chunk_tokens


def test_mlps_compute_in_tiles_only_where_nothing_fits_otherwise() -> None:
    assert [chosen_tile(n) for n in (2048, 65536, 81920, 120832)] == [None, None, 8192, 8192]
    assert chosen_tile(2048, "offload.mlp_chunk=100") == 100
    with pytest.raises(DoesNotFitError):
        chosen_tile(81920, "offload.mlp_chunk=whole")
    with pytest.raises(DoesNotFitError):
        chosen_tile(81920, "train.compile=true")


def test_tiles_do_not_change_the_requests_before_them() -> None:
    words = ["train.seq_len=16384", "train.tokens_per_step=16384"]
    words += ["offload.embeddings=device", "offload.head=device"]
    asked = model_subject("llama-3.1-8b", words)
    whole = model_subject("llama-3.1-8b", [*words, "offload.mlp_chunk=whole"])
    found, plain = (full_requests(x.recipe, x.facts, num_ranks=1) for x in (asked, whole))
    assert found[: len(plain)] == plain
    assert {x.largest.mlp_chunk_tokens for x in found[len(plain) :]} == {8192, 2048, 512}


def test_a_resumed_run_keeps_its_tiles(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.recipe_file.write_text(resolved_yaml(with_settings(recipe(), {"offload.mlp_chunk": 512})))
    assert as_begun(recipe(), run.begun()).offload.mlp_chunk == 512
    assert as_begun(recipe(offload__mlp_chunk=64), run.begun()).offload.mlp_chunk == 64


def test_parts_of_a_model_whose_config_asks_for_a_router_loss_are_refused(tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(load_shape("tiny-qwen3-moe") | {"output_router_logits": True}))
    values = recipe_values(
        model__path=None, model__config=str(file), model__init="random", train__parallel="fsdp2"
    )
    asked = Recipe.model_validate(values)
    with pytest.raises(
        ConfigError, match=r"config asks for a router loss; .*\n\nhint: .*_coef: 0`"
    ):
        chooser(asked)
    assert chooser(with_settings(asked, {"train.parallel": "stream"})) is choose


def full_8b(**offload: Any) -> Recipe:
    values = recipe_values(
        model__path=None,
        model__config="qwen3-8b",
        model__init="random",
        train__what="all",
        train__steps=100,
        **{f"offload__{name}": value for name, value in offload.items()},
    )
    return Recipe.model_validate(values)


# ------------------------------------------------------------------------------------ embeddings


def chosen_place(gib: float, *overrides: str, model: str = "qwen3-8b") -> str:
    asked = model_subject(model, ["train.tokens_per_step=4096", *overrides])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    return choose(asked.facts, small_card(gib), ways).plan.request.typical.embeddings


def test_the_embedding_is_in_ram_only_where_nothing_else_fits() -> None:
    assert [chosen_place(gib) for gib in (24, 6, 4)] == ["device", "device", "host"]
    assert chosen_place(24, "offload.embeddings=host") == "host"
    with pytest.raises(DoesNotFitError) as refused:
        chosen_place(4, "offload.embeddings=device")
    assert "`offload.embeddings: host`" in refused.value.hint
    with pytest.raises(DoesNotFitError, match="the embedding in RAM"):
        chosen_place(2)


def test_the_other_place_does_not_change_the_requests_before_it() -> None:
    asked = model_subject("qwen3-8b", ["offload.head=device"])
    fixed = model_subject("qwen3-8b", ["offload.head=device", "offload.embeddings=device"])
    found, plain = (full_requests(x.recipe, x.facts, num_ranks=1) for x in (asked, fixed))
    assert found[: len(plain)] == plain
    assert found[len(plain) :] == [with_workload(one, embeddings="host") for one in plain]
    # where layers compute in RAM, an embedding there saves nothing
    forms = in_forms(found, replace(CARD, device="cpu"))
    assert {one.typical.embeddings for form in forms for one in form} == {"device"}
    assert len(in_forms(found, CARD)) == 2 * len(forms)


def test_a_resumed_run_keeps_the_place_that_was_chosen(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.recipe_file.write_text(
        resolved_yaml(with_settings(recipe(), {"offload.embeddings": "host"}))
    )
    assert as_begun(recipe(), run.begun()).offload.embeddings == "host"
    asked = recipe(offload__embeddings="device")
    assert as_begun(asked, run.begun()).offload.embeddings == "device"
    assert as_begun(recipe(), run.begun(), num_ranks=2).offload.embeddings == "host"
    begun = full_8b(embeddings="host")
    split = with_settings(full_8b(), {"train.parallel": "fsdp2"})
    assert as_begun(split, begun, num_ranks=2).offload.embeddings == "auto"
    before = resolved_yaml(recipe()).replace("  embeddings: auto\n", "")
    run.recipe_file.write_text(before)  # of a run that knew no such setting
    assert as_begun(recipe(), run.begun()) == recipe()


def test_a_place_that_others_of_a_wave_exclude_is_written_down() -> None:
    asked = model_subject("qwen3-8b", ["offload.embeddings=host", "offload.head=host"])
    on_device = model_subject("qwen3-8b", []).recipe
    ways = full_requests(on_device, asked.facts, num_ranks=1)
    made = choose(asked.facts, CARD, ways[:1]).plan
    written = with_chosen(asked.recipe, made).offload
    assert (written.embeddings, written.head) == ("device", "device")


def test_what_a_plan_has_chosen_is_written_down() -> None:
    asked = model_subject("qwen3-8b", ["train.tokens_per_step=4096"])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    for gib, place in ((24, "auto"), (4, "host")):
        made = choose(asked.facts, small_card(gib), ways).plan
        assert with_chosen(asked.recipe, made).offload.embeddings == place


@pytest.mark.thorough
def test_an_embedding_that_is_not_among_the_weights_that_train_is_looked_up_in_ram() -> None:
    words = ["offload.embeddings=host", "train.steps=3"]
    asked = model_subject("qwen3-8b", [*words, 'train.what=["*q_proj*"]'])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    assert {one.typical.embeddings for one in ways} == {"host"}


# ------------------------------------------------------------------------------------------ head


def places_of(gib: float, *overrides: str, model: str = "qwen3-8b") -> tuple[str, str]:
    """Return where the embedding and the head are on a card with so much memory."""
    asked = model_subject(model, ["train.tokens_per_step=4096", *overrides])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    typical = choose(asked.facts, small_card(gib), ways).plan.request.typical
    return typical.embeddings, typical.head


def test_the_head_is_in_ram_only_where_nothing_fits_with_the_embedding_alone_there() -> None:
    found = [places_of(gib) for gib in (24, 6, 4, 3.4)]
    assert found == [("device", "device")] * 2 + [("host", "device"), ("host", "host")]
    assert places_of(24, "offload.head=host") == ("device", "host")
    assert places_of(4.8, "offload.embeddings=device") == ("device", "host")
    with pytest.raises(DoesNotFitError) as refused:
        places_of(3.4, "offload.head=device")
    assert "`offload.head: host`" in refused.value.hint
    with pytest.raises(DoesNotFitError, match="the embedding in RAM, the head in RAM"):
        places_of(2)


def test_the_other_place_of_the_head_does_not_change_the_requests_before_it() -> None:
    asked = model_subject("qwen3-8b", [])
    fixed = model_subject("qwen3-8b", ["offload.head=device"])
    found, plain = (full_requests(x.recipe, x.facts, num_ranks=1) for x in (asked, fixed))
    assert found[: len(plain)] == plain
    moved = [one for one in plain if one.typical.embeddings == "host"]
    assert found[len(plain) :] == [with_workload(one, head="host") for one in moved]
    # where layers compute in RAM, a head there saves nothing
    forms = in_forms(found, replace(CARD, device="cpu"))
    assert {one.typical.head for form in forms for one in form} == {"device"}


def test_a_resumed_run_keeps_the_place_of_its_head(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.recipe_file.write_text(resolved_yaml(with_settings(recipe(), {"offload.head": "host"})))
    assert as_begun(recipe(), run.begun()).offload.head == "host"
    assert as_begun(recipe(offload__head="device"), run.begun()).offload.head == "device"
    before = resolved_yaml(recipe()).replace("  head: auto\n", "")
    run.recipe_file.write_text(before)  # of a run that knew no such setting
    assert as_begun(recipe(), run.begun()) == recipe()


def test_where_a_plan_has_put_the_head_is_written_down() -> None:
    asked = model_subject("qwen3-8b", ["train.tokens_per_step=4096"])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    for gib, place in ((24, "auto"), (3.4, "host")):
        made = choose(asked.facts, small_card(gib), ways).plan
        assert with_chosen(asked.recipe, made).offload.head == place


@pytest.mark.thorough
def test_a_head_that_is_not_among_the_weights_that_train_may_be_in_ram() -> None:
    words = ["offload.head=host", "train.steps=3"]
    asked = model_subject("qwen3-8b", [*words, 'train.what=["*q_proj*"]'])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    assert {one.typical.head for one in ways} == {"host"}


@pytest.mark.parametrize("is_tied", [False, True])
def test_what_trains_around_the_layers_is_on_the_device(*, is_tied: bool) -> None:
    facts = model_facts(load_shape("qwen3-8b"))
    if is_tied:
        facts = replace(facts, tie_word_embeddings=True, head_parameters=0)
    ways = full_requests(full_8b(), facts, num_ranks=1)
    assert {(one.typical.embeddings, one.typical.head) for one in ways} == {("device", "device")}


# --------------------------------------------------------------------------------------- suggestion


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
    assert max(len(line) for line in text.splitlines() if not line.startswith("#   ")) <= 80


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


def test_a_card_without_bfloat16_has_a_recipe_in_float16(capsys) -> None:
    text = suggested(capsys, "qwen3-0.6b", "--machine", "t4")
    assert "\n  dtype: float16\n" in text
    assert "dtype: float16" not in suggested(capsys, "qwen3-0.6b", "--machine", "l4")


def test_a_model_is_planned_in_float16_on_such_a_card_and_a_recipe_in_its_own_type(capsys) -> None:
    note = "t4 does not compute in bfloat16: planned with model.dtype=float16"
    assert run("plan", "qwen3-0.6b", "--machine", "t4", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == [note]
    assert run("plan", "qwen3-0.6b", "--machine", "t4", "--json", "model.dtype=float16") == 0
    asked = json.loads(capsys.readouterr().out)
    assert (asked["notes"], asked["predicted"]) == ([], found["predicted"])
    assert run("plan", "qwen3_8b_lora_3060", "--machine", "t4") == 1
    assert "hint: `model.dtype: float16`" in capsys.readouterr().err
    assert run("fit", "qwen3-0.6b", "--machine", "t4") == 0
    assert "at the rates of t4" in capsys.readouterr().out


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
        settings=first_settings(model, name="a-run", dtype="bfloat16"),
        overrides=["train.tokens_per_step=8192"],
    )
    values = [form.seq_len if goal.name == "context" else form.tokens_per_s for form in found.forms]
    share = {"balanced": 0.5, "fastest": 1.0, "quality": 0.0, "context": 0.9}[goal.name]
    enough = [x for x, v in zip(found.forms, values, strict=True) if v >= share * max(values)]
    assert found.chosen in enough
    assert found.chosen.rounding == min(form.rounding for form in enough)


@pytest.mark.slow
def test_each_goal_chooses_by_what_it_says(tmp_path: Path, capsys) -> None:
    asked, machine = ("qwen3-235b-a22b",), ("--machine", "rtx4090", "--ram", "32")
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
    assert found[2] == "16"
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
    assert "4.00 GiB of VRAM and 28.00 GiB of RAM may be used, so it is short of VRAM\n" in err
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
