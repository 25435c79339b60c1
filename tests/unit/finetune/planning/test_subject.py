"""What a plan is asked about, and that every command answers with the same figures."""

import itertools
import json
from pathlib import Path

import pytest

from finetune.errors import ConfigError
from finetune.planning.candidates import choose, full_requests
from finetune.planning.compare import Comparison, compare_on_cards, compare_within_memory
from finetune.planning.request import full_request
from finetune.planning.subject import Subject, model_subject, subject_of
from finetune.recipe.recipe import with_seq_len, with_settings
from finetune.recipe.sections import TrainSection
from offload.errors import DoesNotFitError
from offload.plan.machine.machine import GIB, Machine, named_machine
from offload.plan.plan import Plan
from tests.command import run
from tests.tiers import tiered

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
    assert recipe.adapter == type(recipe.adapter)()
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


def test_a_mistyped_shape_is_told_the_nearest_ones() -> None:
    with pytest.raises(ConfigError, match=r"no model and no recipe qwen9-8b") as error:
        subject_of("qwen9-8b", [])
    assert "qwen3-8b" in error.value.hint


def test_a_mistyped_recipe_is_still_taken_for_one(capsys) -> None:
    assert run("plan", "recipes/quikstart.yaml", "--machine", "rtx5090") == 1
    assert "there is no recipe recipes/quikstart.yaml" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------
# One question, one answer

CARDS = ("rtx3060", "rtx4060ti", "rtx5090")
RAMS_GIB = (6, 16, 64)


def planned(asked: Subject, machine: Machine, compared: Comparison) -> Plan:
    """Return what `plan` answers for the settings that were compared."""
    form = "auto" if compared.codec in ("native", "bf16_packed") else compared.codec
    recipe = with_settings(asked.recipe, {"offload.codec": form, "offload.tier": compared.tier})
    requests = full_requests(recipe, asked.facts, num_ranks=1)
    return choose(asked.facts, machine, requests).plan


def assert_answers_agree(model: str, machine: Machine) -> None:
    """Compare each row of both tables with the plan for it, figure by figure."""
    asked = subject_of(model, [])
    by_machine, by_model = (
        compare_on_cards(asked, [machine]),
        compare_within_memory([model_subject(model, [])], machine),
    )
    assert [(o.codec, o.tier) for o in by_machine] == [(o.codec, o.tier) for o in by_model]
    for one, other in zip(by_machine, by_model, strict=True):
        for name in ("short", "num_slots", "tokens_per_s", "vram_bytes", "ram_bytes", "stash"):
            assert getattr(one, name) == getattr(other, name), (one, name)
        if one.short:
            with pytest.raises(DoesNotFitError) as refused:
                planned(asked, machine, one)
            if "RAM" in one.short:
                assert f"{one.ram_bytes / GIB:.2f} GiB of RAM" in refused.value.what
            continue
        made = planned(asked, machine, one)
        assert one.tokens_per_s == made.tokens_per_step / made.step_s
        assert (one.vram_bytes, one.ram_bytes) == (made.peak_bytes, made.host_bytes)
        assert one.num_slots == made.num_slots
        assert one.codec == made.request.typical.codec
        assert (one.stash == "host") == made.request.is_stashed
        assert other.longest_seq_len is not None
        assert other.longest_seq_len >= 512


@pytest.mark.parametrize(
    ("model", "ram_gib"),
    tiered(
        itertools.product(["tinyllama-1.1b", "qwen3-4b"], RAMS_GIB),
        default=[("tinyllama-1.1b", 6)],
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
        (line,) = [x for x in lines if (x["codec"], x["tier"]) == ("native", "disk")]
        assert line["tokens_per_s"] == plan["predicted"]["tokens_per_s"]
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
    assert native["tokens_per_s"] == one["predicted"]["tokens_per_s"]


def test_a_form_that_the_recipe_s_rules_forbid_has_no_line(capsys) -> None:
    words = ("plan", "qwen3-0.6b", "--machines", "rtx4090", "--json")
    assert run(*words, "adapter.targets=attention", "adapter.modules_to_save=[up_proj]") == 0
    assert [line["codec"] for line in json.loads(capsys.readouterr().out)] == ["native"]
