"""What a recipe asks a plan about."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.errors import ConfigError
from finetune.planning.candidates import choose, full_requests, in_forms
from finetune.planning.compare import Comparison, compare_on_cards, compare_within_memory
from finetune.planning.recipe_text import _scalar
from finetune.planning.request import facts_of, full_request
from finetune.planning.subject import Subject, model_subject, subject_of, wanted_model
from finetune.recipe.adapters import LoraSection
from finetune.recipe.draft import CoreLoader
from finetune.recipe.recipe import Recipe, resolved_yaml, with_seq_len, with_settings
from finetune.recipe.sections import TrainSection
from finetune.run.run_dir import RunDir, as_begun
from finetune.training.prepare import with_chosen
from offload.errors import DoesNotFitError
from offload.plan.machine.machine import GIB, Machine, named_machine
from offload.plan.plan import Plan
from offload.plan.request import PlanRequest, with_workload
from tests.bench.bench_launches import planned
from tests.bench.record import ROOT
from tests.builders import recipe_values
from tests.command import run
from tests.tiers import tiered


def plan_of(name: str, card: str, *settings: str) -> Plan:
    return planned(str(ROOT / f"recipes/{name}.yaml"), card, list(settings))


@pytest.mark.parametrize(("value", "num_kept"), [("true", 0), ("false", 36)])
def test_all_layers_are_computed_again_or_none(value: str, num_kept: int) -> None:
    plan = plan_of("qwen3_4b_8gb", "rtx3060", f"train.gradient_checkpointing={value}")
    assert plan.num_kept_graphs == num_kept
    assert plan.residency.num_sent_graphs == 0
    free = plan_of("qwen3_4b_8gb", "rtx3060")
    assert 0 < free.num_kept_graphs < 36
    assert free.step_s < plan.step_s


@pytest.mark.parametrize("name", ["qwen30b_lora_5090", "qwen3_32b_24gb"])
def test_none_is_refused_with_the_bytes_and_the_hint_plans(name: str) -> None:
    with pytest.raises(DoesNotFitError, match=r"GiB .* memory.* too much") as error:
        plan_of(name, "rtx3060", "train.gradient_checkpointing=false")
    hint = re.findall(r"`([\w.]+): ([^`]+)`", error.value.hint)
    plan = plan_of(name, "rtx3060", *(f"{field}={value}" for field, value in hint))
    assert plan.num_kept_graphs == int(dict(hint)["offload.kept_graphs"])


# --------------------------------------------------------------------------------------------- tied


CARD = named_machine("rtx4090")
ON_HOST = ("offload.embeddings=host", "offload.head=host")


def small_card(gib: float) -> Machine:
    return replace(CARD, vram_bytes=int(gib * GIB))


def requests(*overrides: str, model: str = "qwen3-4b", num_ranks: int = 1) -> list[PlanRequest]:
    asked = model_subject(model, ["train.tokens_per_step=4096", *overrides])
    return full_requests(asked.recipe, asked.facts, num_ranks=num_ranks)


def places(*overrides: str, **asked: Any) -> set[tuple[str, str]]:
    return {(x.typical.embeddings, x.typical.head) for x in requests(*overrides, **asked)}


def chosen(gib: float, *overrides: str, model: str = "qwen3-4b") -> tuple[str, str]:
    """Return where embedding and head are on a card with so much memory."""
    asked = model_subject(model, ["train.tokens_per_step=4096", *overrides])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    typical = choose(asked.facts, small_card(gib), ways).plan.request.typical
    return typical.embeddings, typical.head


def test_it_is_in_ram_only_where_nothing_else_fits() -> None:
    device, host = ("device", "device"), ("host", "host")
    assert [chosen(gib) for gib in (24, 4, 2.7)] == [device, device, host]
    assert chosen(24, *ON_HOST) == host
    with pytest.raises(DoesNotFitError) as refused:
        chosen(2.7, "offload.embeddings=device")
    assert "`offload.embeddings: host` and `offload.head: host`" in refused.value.hint
    with pytest.raises(DoesNotFitError, match="the embedding in RAM, the head in RAM"):
        chosen(1)


def test_auto_is_where_the_other_of_the_two_is() -> None:
    assert places() == {("device", "device"), ("host", "host")}
    for one in (*ON_HOST, "offload.embeddings=device", "offload.head=device"):
        place = one.rpartition("=")[2]
        assert places(one) == {(place, place)}
    assert places("offload.embeddings=device", model="qwen3-8b") == {
        ("device", "device"),
        ("device", "host"),
    }  # of a head of its own


@pytest.mark.parametrize(("here", "there"), [("head", "embeddings"), ("embeddings", "head")])
def test_one_weight_is_in_the_place_that_is_named_for_one(here: str, there: str) -> None:
    assert places(f"offload.{there}=host", f"offload.{here}=host") == {("host", "host")}
    assert places(f"offload.{here}=device", f"offload.{there}=device") == {("device", "device")}


@pytest.mark.parametrize(
    "words",
    [
        ["adapter.modules_to_save=[embed_tokens]"],
        ['train.what=["*embed_tokens*", "*q_proj*"]', "train.steps=3"],
        ["adapter.method=prompt"],
    ],
)
def test_one_that_trains_or_looks_virtual_tokens_up_is_on_the_device(words: list[str]) -> None:
    assert places(*words) == {("device", "device")}


@pytest.mark.parametrize("what", ['["*q_proj*"]', '["last_4_layers"]'])
def test_weights_of_layers_may_train_with_it_in_ram(what: str) -> None:
    words = (f"train.what={what}", "train.steps=3")
    assert places(*words, *ON_HOST) == {("host", "host")}
    assert places(*words) == {("device", "device"), ("host", "host")}


def test_the_other_place_comes_last_and_does_not_change_the_requests_before_it() -> None:
    found, plain = requests(), requests("offload.head=device")
    assert found[: len(plain)] == plain
    assert found[len(plain) :] == [
        with_workload(one, embeddings="host", head="host") for one in plain
    ]
    # where layers compute in RAM, nothing is saved there
    forms = in_forms(found, replace(CARD, device="cpu"))
    assert {one.typical.head for form in forms for one in form} == {"device"}


def test_where_a_plan_has_put_it_is_written_down() -> None:
    asked = model_subject("qwen3-4b", ["train.tokens_per_step=4096"])
    ways = full_requests(asked.recipe, asked.facts, num_ranks=1)
    for gib, place in ((24, "auto"), (2.7, "host")):
        made = choose(asked.facts, small_card(gib), ways).plan
        written = with_chosen(asked.recipe, made).offload
        assert (written.embeddings, written.head) == (place, place)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ("host", "host")),
        ({"head": "host"}, ("host", "host")),
        ({"head": "device"}, ("auto", "device")),
        ({"embeddings": "device"}, ("device", "auto")),
        ({"embeddings": "device", "head": "device"}, ("device", "device")),
    ],
)
def test_a_resumed_run_keeps_it_unless_one_of_both_is_asked_to_be_elsewhere(
    asked: dict[str, Any], expected: tuple[str, str], tmp_path: Path
) -> None:
    def recipe(**offload: Any) -> Recipe:
        changes = {f"offload__{name}": place for name, place in offload.items()}
        values = recipe_values(
            model__path=None, model__config="tiny-qwen3", model__init="random", **changes
        )
        return Recipe.model_validate(values)

    run = RunDir(tmp_path)
    begun = with_settings(recipe(), {"offload.embeddings": "host", "offload.head": "host"})
    run.recipe_file.write_text(resolved_yaml(begun))
    found = as_begun(recipe(**asked), run.begun())
    assert (found.offload.embeddings, found.offload.head) == expected
    before = with_settings(recipe(), {"offload.embeddings": "device", "offload.head": "device"})
    moved = as_begun(recipe(head="host"), before).offload
    assert (moved.embeddings, moved.head) == ("auto", "host")
    facts = facts_of(found.model)
    assert facts.tie_word_embeddings
    assert full_requests(found, facts, num_ranks=1)  # and none of them is refused


# -------------------------------------------------------------------------------------- recipe text


@pytest.mark.parametrize(
    "value",
    [
        "qwen3-8b",
        "/home/me/" + "a long folder/" * 20 + "rows.jsonl",  # longer than what tables show
        "C: #1 - {x}",
        "été 🙂.jsonl",
        "two\nlines\x7f",
        *("true", "Null", "FALSE", "yes", "on", "~", "0x1f", "1e3", ".inf", "", " "),
        *(None, True, 0.0002, 49_152, ["q_proj", "v_proj"]),
    ],
)
def test_a_setting_is_read_as_it_was_meant(value: object) -> None:
    assert yaml.load(f"key: {_scalar(value)}  # why\n", Loader=CoreLoader) == {"key": value}


# ------------------------------------------------------------------------------------------ subject


TINY = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
}


def config_in(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


# ---------------------------------------------------------------------------------------------
# A model's own settings


def test_a_model_is_planned_with_the_defaults_of_a_recipe_and_no_recipe_s_settings() -> None:
    recipe = model_subject("qwen3-8b", []).recipe
    defaults = TrainSection(tokens_per_step=16_384, epochs=1)
    assert recipe.train == defaults
    assert recipe.model.init == "pretrained"
    assert recipe.offload == type(recipe.offload)()
    assert recipe.adapter == LoraSection()
    assert recipe.data.eval_frac is None


@pytest.mark.parametrize(
    ("overrides", "tokens", "told"),
    [
        ((), 16_384, ""),
        (("train.seq_len=3000",), 15_000, "15,000 tokens per step, 5 sequences of 3,000: 16,384 "),
        (("train.seq_len=32768",), 32_768, "32,768 tokens per step, 1 sequences of 32,768: 16,3"),
        (("train.tokens_per_step=50000",), 49_152, "49,152 tokens per step, 24 sequences of 2,0"),
        (("train.micro_batch_size=3",), 12_288, "12,288 tokens per step, 6 sequences of 2,048:"),
    ],
)
def test_the_tokens_of_a_step_are_cut_to_whole_sequences_and_that_is_said(
    overrides: tuple[str, ...], tokens: int, told: str
) -> None:
    asked = model_subject("qwen3-8b", overrides)
    assert asked.recipe.train.tokens_per_step == tokens
    assert len(asked.notes) == bool(told)
    assert told in "".join(asked.notes)


def test_a_wrong_setting_of_a_model_blames_the_command_line_and_no_file(capsys) -> None:
    assert run("plan", "qwen3-8b", "--machine", "rtx5090", "train.lr=high", "train.sead=1") == 1
    err = capsys.readouterr().err
    assert "command line: train.lr=high" in err
    assert ".yaml" not in err


def test_a_model_made_for_short_sequences_is_planned_with_those_by_every_command(
    tmp_path: Path,
) -> None:
    asked = subject_of(str(config_in(tmp_path)), [])
    assert asked.recipe.train.seq_len == 1024
    with pytest.raises(ConfigError, match="at most 1024 positions"):
        full_request(with_seq_len(asked.recipe, 2048), asked.facts, num_ranks=1)


# ---------------------------------------------------------------------------------------------
# Where a model is found


def test_a_config_a_directory_and_a_hub_id_in_the_cache_are_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--own--tiny" / "snapshots" / "abc"
    config_in(snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = [
        subject_of(str(name), []).facts for name in (snapshot, snapshot / "config.json", "own/tiny")
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].num_layers == 4


def test_a_hub_id_that_is_a_shipped_shape_says_so() -> None:
    asked = subject_of("Qwen/Qwen3-0.6B", [])
    assert asked.facts == subject_of("qwen3-0.6b", []).facts
    assert asked.notes == (
        "Qwen/Qwen3-0.6B is not in the hub's cache: planned from the shipped shape qwen3-0.6b",
    )


def test_a_hub_id_that_is_nowhere_says_what_to_do_offline(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("plan", "own/Qwen3-9B", "--machine", "rtx5090") == 1
    err = capsys.readouterr().err
    assert err.startswith("error: own/Qwen3-9B is no recipe, shape or directory, and is not in")
    assert "`hf download own/Qwen3-9B config.json --local-dir DIR`" in err
    assert "qwen3-8b" in err


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "qwen3-8b"),
        ("own/Qwen3-8B-FP8", "qwen3-8b"),
    ],
)
def test_offline_words_of_training_and_form_are_left_out_of_a_name_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = subject_of(name, [])
    assert asked.facts == subject_of(shape, []).facts
    assert asked.notes == (
        f"{name} is not in the hub's cache, and the hub cannot be reached: planned from the shipped"
        f" shape {shape}, from which its config may differ",
    )


def test_a_mistyped_shape_is_told_the_nearest_ones() -> None:
    with pytest.raises(ConfigError, match=r"no model and no recipe qwen9-8b") as error:
        subject_of("qwen9-8b", [])
    assert "qwen3-8b" in error.value.hint
    with pytest.raises(ConfigError) as error:
        subject_of("Qwen3-30B", [])
    assert error.value.hint.endswith(", qwen3-30b-a3b")
    with pytest.raises(ConfigError) as error:
        subject_of("qwen30b", [])
    assert "qwen30b_lora_5090" in error.value.hint


def test_a_mistyped_recipe_is_still_taken_for_one(capsys) -> None:
    assert run("plan", "recipes/quikstart.yaml", "--machine", "rtx5090") == 1
    assert "there is no recipe recipes/quikstart.yaml" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------
# One question, one answer

CARDS = ("rtx3060", "rtx4060ti", "rtx5090")
RAMS_GIB = (6, 16, 64)


def planned_subject(asked: Subject, machine: Machine, compared: Comparison) -> Plan:
    """Return what `plan` answers for the settings that were compared."""
    form = "auto" if compared.codec in ("native", "bf16_packed") else compared.codec
    recipe = with_settings(asked.recipe, {"offload.codec": form, "offload.tier": compared.tier})
    requests = full_requests(recipe, asked.facts, num_ranks=1)
    return choose(asked.facts, machine, requests).plan


def assert_answers_agree(model: str, machine: Machine) -> None:
    """Compare each row of both tables with the plan for it, figure by figure."""
    asked = subject_of(model, [])
    (by_machine,) = compare_on_cards(asked, [machine])
    (by_model,) = compare_within_memory([model_subject(model, [])], machine)
    assert [(o.codec, o.tier) for o in by_machine] == [(o.codec, o.tier) for o in by_model]
    for one, other in zip(by_machine, by_model, strict=True):
        for name in ("short", "num_slots", "tokens_per_s", "vram_bytes", "ram_bytes", "stash"):
            assert getattr(one, name) == getattr(other, name), (one, name)
        if one.short:
            with pytest.raises(DoesNotFitError) as refused:
                planned_subject(asked, machine, one)
            if "RAM" in one.short:
                assert f"{one.ram_bytes / GIB:.2f} GiB of RAM" in refused.value.what
            continue
        made = planned_subject(asked, machine, one)
        assert one.tokens_per_s == pytest.approx(made.tokens_per_step / made.step_s, rel=1e-9)
        assert (one.vram_bytes, one.ram_bytes) == (made.peak_bytes, made.host_bytes)
        assert one.num_slots == made.num_slots
        assert one.codec == made.request.typical.codec
        assert (one.stash == "host") == made.request.is_stashed
        assert other.longest_seq_len is not None
        assert other.longest_seq_len >= 512


@pytest.mark.parametrize(
    ("model", "ram_gib"),
    tiered(
        itertools.product(["llama-3.2-1b", "qwen3-4b"], RAMS_GIB),
        default=[("llama-3.2-1b", 6)],
        slow=[("qwen3-4b", 16)],
    ),
)
def test_plan_fit_and_machines_answer_with_the_same_figures(model: str, ram_gib: int) -> None:
    assert_answers_agree(model, named_machine("rtx4060ti", ram_bytes=ram_gib * GIB))


MODELS = ("qwen3-0.6b", "llama-3.1-8b", "gpt-oss-20b", "olmoe-1b-7b", "qwen3-30b-a3b")
# every pair of a model and a card, and of a card and an amount of RAM, once or more
PAIRS = [
    (model, card, RAMS_GIB[(i + j) % len(RAMS_GIB)])
    for i, model in enumerate(MODELS)
    for j, card in enumerate(CARDS)
]


@pytest.mark.parametrize(
    ("model", "card", "ram_gib"), tiered(PAIRS, default=(), slow=[PAIRS[4 * i] for i in range(4)])
)
def test_plan_fit_and_machines_agree_on_many_cards(model: str, card: str, ram_gib: int) -> None:
    assert_answers_agree(model, named_machine(card, ram_bytes=ram_gib * GIB))


@pytest.mark.slow
def test_the_three_commands_print_the_same_figures(capsys) -> None:
    words = ("--ram", "16", "--json")
    assert run("plan", "gpt-oss-20b", "--machine", "rtx5090", "offload.tier=disk", *words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert run("plan", "gpt-oss-20b", "--machines", "rtx5090", *words) == 0
    machines = json.loads(capsys.readouterr().out)
    assert run("fit", "gpt-oss-20b", "--machine", "rtx5090", *words) == 0
    fit = json.loads(capsys.readouterr().out)
    for lines in (machines, fit):
        (line,) = [x for x in lines if (x["codec"], x["tier"]) == (plan["choice"]["codec"], "disk")]
        rate = plan["predicted"]["tokens_per_s"]
        assert line["tokens_per_s"] == pytest.approx(rate, rel=1e-9)
        assert line["vram_bytes"] == plan["predicted"]["peak_vram_bytes"]
        assert line["ram_bytes"] == plan["predicted"]["host_bytes"]


@pytest.mark.slow
def test_a_recipe_with_open_micro_batches_has_a_table_of_machines(capsys) -> None:
    words = ("plan", "qwen3-0.6b", "train.micro_batch_size=auto", "--json")
    assert run(*words, "--machines", "rtx4090") == 0
    lines = json.loads(capsys.readouterr().out)
    assert run(*words, "--machine", "rtx4090") == 0
    one = json.loads(capsys.readouterr().out)
    (native,) = [line for line in lines if line["codec"] == "native"]
    assert native["tokens_per_s"] == pytest.approx(one["predicted"]["tokens_per_s"], rel=1e-9)


def test_a_form_that_the_recipe_s_rules_forbid_has_no_line(capsys) -> None:
    words = ("plan", "qwen3-0.6b", "--machines", "rtx4090", "--json")
    assert run(*words, "adapter.targets=attention", "adapter.modules_to_save=[up_proj]") == 0
    assert [line["codec"] for line in json.loads(capsys.readouterr().out)] == ["native"]


# ------------------------------------------------------------------------------------- wanted model


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("Qwen3 30B", "Qwen/Qwen3-30B-A3B"),
        ("qwen3 30b a3b nvfp4", "nvidia/Qwen3-30B-A3B-NVFP4"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("llama3.1 8b", "meta-llama/Llama-3.1-8B"),
        ("Mixtral", "mistralai/Mixtral-8x7B-v0.1"),
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("google/gemma-3-27b-it", "google/gemma-3-27b-it"),
        ("unsloth/Qwen3-8B", "unsloth/Qwen3-8B"),  # a copy of a shipped shape
    ],
)
def test_a_model_is_found_by_a_loose_name(text: str, path: str) -> None:
    assert wanted_model(text).settings == {"path": path}


@pytest.mark.parametrize(
    ("text", "what", "near"),
    [
        ("qwen3-9b", "qwen3-9b is no model that is known", "`qwen3-8b`"),
        ("gpt-oss", "gpt-oss means several models", "`gpt-oss-120b`, `gpt-oss-20b`"),
        ("...", "... is no model that is known", "`qwen3-8b`"),
    ],
)
def test_a_miss_names_the_nearest(text: str, what: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wanted_model(text)
    assert caught.value.what == what
    assert near in caught.value.hint


def test_a_folder_with_weights_is_trained_from_and_a_config_alone_is_only_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "My Model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"model_type": "llama"}))
    alone = wanted_model(str(config))
    assert alone.settings == {"path": str(config)}
    assert "a config alone" in alone.note
    (config.parent / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    for text in ("My Model", "My Model/config.json"):
        found = wanted_model(text)
        assert (found.settings, found.note) == ({"path": str(config.parent)}, "")
        assert found.name == "my model"


def test_a_toy_has_random_weights() -> None:
    found = wanted_model("tiny-qwen3")
    assert found.settings == {"config": "tiny-qwen3", "init": "random"}


def test_a_hub_id_in_the_cache_is_taken_before_a_shape_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--own--qwen3-8b-of-mine" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    refs = tmp_path / "models--own--qwen3-8b-of-mine" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="not in the hub's cache"):
        wanted_model("own/qwen3-8b-of-mine")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert wanted_model("own/qwen3-8b-of-mine").settings == {"path": "own/qwen3-8b-of-mine"}
