"""Runs whose embedding or head waits in RAM: the same bits in all they do."""

import copy
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from offload.plan.machine.machine import Machine
from offload.plan.memory.memory import EMBEDDINGS, HEAD, OUTER, ROWS, SLOTS
from tests.doubles import tiny_tokenizer
from tests.e2e.conftest import RecipeWriter, recipe_writer
from tests.e2e.full_runs import assert_same_runs, full_recipe, weights
from tests.e2e.runs import assert_same_training, losses, rows_of, run, same_adapter
from tests.e2e.sweeps import Sections, assert_same_bits, trained_together
from tests.tiers import mostly_slow

PLACED = {"embedding": ["embeddings"], "head": ["head"], "both": ["head", "embeddings"]}
PLACED["tied"] = PLACED["both"]
"""What waits in RAM, and its settings; a tied head has the weight of the embedding."""


def placed(place: str, what: str = "tied") -> list[str]:
    return [f"offload.{setting}={place}" for setting in PLACED[what]]


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model that multiplies what it looks up, and of its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("tied"), tiny_tokenizer()
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=True,
    )
    model = Gemma3ForCausalLM(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def write_tied(tmp_path: Path, tied_dir: Path, rows_file: Path, cache: Path) -> RecipeWriter:
    write = recipe_writer(tmp_path, tied_dir, rows_file)
    return lambda **sections: write(**{"adapter": {"experts": False}, **sections})


def terms_of(run_dir: Path) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return memory by name: as measured, and as planned on the device and in RAM."""
    measured, predicted = (
        json.loads((run_dir / f"{name}.json").read_text()) for name in ("measured", "predicted")
    )
    planned = predicted["calibrated"]["predicted"]
    terms = {term["name"]: term["num_bytes"] for term in measured["memory"]}
    return terms, planned["device_memory"], planned["host_memory"]


def in_host_memory(run_dir: Path) -> dict[str, int]:
    measured = json.loads((run_dir / "measured.json").read_text())["memory"]
    return {term["name"]: term["num_bytes"] for term in measured if term["is_on_host"]}


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["embedding", "head", "tied"])
def test_a_run_its_evaluation_its_samples_and_its_answers_are_the_same(
    what, tmp_path, tied_dir, write_tied, write_recipe, machine_file, rows_file, capsys
) -> None:
    write = write_tied if what == "tied" else write_recipe
    recipe = write(output={"eval_every": 3}, report={"samples": 2})
    shown = {}
    for place in ("device", "host"):
        folder = tmp_path / place
        words = ("--machine", machine_file, *placed(place, what))
        assert run("finetune", recipe, *words, f"output.dir={folder}") == 0
        capsys.readouterr()
        assert run("generate", folder, "--prompt", "what follows 7", "--max-new-tokens", 4) == 0
        answer = capsys.readouterr().out
        assert run("score", recipe, rows_file, "--base", *words, "--json") == 0
        scored = json.loads(capsys.readouterr().out)["scores"]
        trained = [(row["loss"], row.get("eval_loss")) for row in rows_of(folder)]
        samples = [(folder / f"samples_{when}.json").read_text() for when in ("before", "after")]
        shown[place] = (trained, samples, answer, scored)
    assert shown["device"] == shown["host"]
    assert same_adapter(tmp_path / "device", tmp_path / "host")
    terms, on_device, in_ram = terms_of(tmp_path / "host")
    table = AutoModelForCausalLM.from_pretrained(tied_dir).get_input_embeddings().weight.nbytes
    name = EMBEDDINGS if what == "embedding" else HEAD
    assert terms[name] == in_ram[name]
    assert (EMBEDDINGS in in_ram) == (what == "embedding")
    if what != "head":
        assert 0 < in_host_memory(tmp_path / "host")[ROWS] <= in_ram[ROWS]
    for name in (OUTER, SLOTS):
        assert terms[name] == on_device[name]
    if what == "tied":
        before, planned_before, _ = terms_of(tmp_path / "device")
        assert before[OUTER] - terms[OUTER] == terms[HEAD] == table
        assert planned_before[OUTER] - on_device[OUTER] == table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "place"),
    [
        ("embedding", "host"),
        *((what, at) for what in ("both", "tied") for at in ("host", "device")),
    ],
)
def test_a_killed_run_resumes_to_the_bit_in_either_place(
    what, place, tmp_path, write_recipe, write_tied, machine_file, forked
) -> None:
    recipe = (write_tied if what == "tied" else write_recipe)(train={"steps": 8})
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words, f"output.dir={whole}") == 0
    metrics = run_dir / "metrics.jsonl"
    process = forked.start(*words, *placed("host", what))
    process.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    process.end(signal.SIGKILL)
    assert run(*words, *placed(place, what), "--resume") == 0
    assert losses(run_dir) == losses(whole)
    assert same_adapter(run_dir, whole)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["embedding", "both", "tied"])
def test_two_ranks_train_alike(
    what, tmp_path, write_recipe, write_tied, machine_file, forked
) -> None:
    recipe = (write_tied if what == "tied" else write_recipe)()
    words = ("finetune", recipe, "--machine", machine_file, *placed("host", what))
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'two'}")
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    assert_same_training(tmp_path / "two", tmp_path / "one")
    terms, _, _ = terms_of(tmp_path / "two")
    assert (HEAD in terms) == (what != "embedding")
    assert (EMBEDDINGS in terms) == (what != "tied")


WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "dpo": {
        "objective": {"method": "dpo"},
        "data": {"format": "auto", "columns": {}},
        "train": {"steps": 3},
    },
    "packed": {"data": {"packing": "on"}, "train": {"steps": 3}},
    "float16": {"model": {"dtype": "float16"}, "train": {"steps": 3, "lr": 0.001}},
    "bfloat16": {
        "model": {"dtype": "bfloat16"},
        "train": {"steps": 3},
        "offload": {"codec": "bf16_packed", "num_slots": 2, "device": "cpu"},
    },
    "prefix": {
        "adapter": {"method": "prefix", "num_virtual_tokens": 3},
        "train": {"steps": 3},
    },
    "noise": {"train": {"steps": 3, "neftune_alpha": 5.0}},
    "disk": {"train": {"steps": 3}, "offload": {"tier": "disk", "num_slots": 2, "device": "cpu"}},
}


@pytest.mark.parametrize("way", mostly_slow(list(WAYS), "dpo", "disk"))
@pytest.mark.thorough
def test_other_runs_are_the_same(way, tmp_path, write_tied, machine_file) -> None:
    sections = copy.deepcopy(WAYS[way])
    if way == "dpo":
        pairs = tmp_path / "pairs.jsonl"
        rows = [
            {"prompt": f"{n} and", "chosen": f"{n + 1}", "rejected": f"{n}!"} for n in range(40)
        ]
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sections["data"]["path"] = str(pairs)
    recipe = write_tied(**sections, output={"eval_every": 3})
    here: Any = Machine.from_json(machine_file.read_text())
    dtype = sections.get("model", {}).get("dtype", "float32")
    (tmp_path / "here.json").write_text(replace(here, dtype=dtype).to_json())
    for place in ("device", "host"):
        words = ("--machine", tmp_path / "here.json", *placed(place))
        assert run("finetune", recipe, *words, f"output.dir={tmp_path / place}") == 0
    assert losses(tmp_path / "host") == losses(tmp_path / "device")
    evaluated = [[x.get("eval_loss") for x in rows_of(tmp_path / y)] for y in ("host", "device")]
    assert evaluated[0] == evaluated[1]
    assert same_adapter(tmp_path / "device", tmp_path / "host")


@pytest.mark.slow
def test_runs_that_share_a_stream_are_each_what_they_are_alone_on_the_device(
    tmp_path, write_tied, machine_file
) -> None:
    offload: dict[str, object] = {"device": "cpu", "num_slots": 2}
    offload |= {"head": "host", "embeddings": "host"}
    runs: list[Sections] = [
        {"train": {"lr": 0.02}, "output": {"eval_every": 2}, "offload": offload},
        {"adapter": {"rank": 2, "targets": ["q_proj"]}, "train": {"seed": 3}, "offload": offload},
    ]
    folders, _ = trained_together(write_tied, runs, machine_file, tmp_path)
    for folder in folders:
        assert run_alone(folder, machine_file, *placed("device"))
        assert_same_bits(folder, folder.with_name(f"{folder.name}-alone"))


def run_alone(folder: Path, machine_file: Path, *words: str) -> bool:
    """Run the recipe that a run has left in its directory by itself, with some settings."""
    own = folder.with_name(f"{folder.name}-alone")
    recipe = folder / "recipe.yaml"
    return run("finetune", recipe, "--machine", machine_file, *words, f"output.dir={own}") == 0


@pytest.mark.thorough
def test_layers_that_train_are_saved_with_the_table_as_it_was(
    tmp_path, tied_dir, write_tied, machine_file
) -> None:
    recipe = full_recipe(write_tied, what=["last_2_layers"])
    for place in ("device", "host"):
        words = ("--machine", machine_file, *placed(place), f"output.dir={tmp_path / place}")
        assert run("finetune", recipe, *words) == 0
    assert_same_runs(tmp_path / "host", tmp_path / "device")
    found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "host" / "model")
    base: Any = AutoModelForCausalLM.from_pretrained(tied_dir)
    assert found.lm_head.weight is found.get_input_embeddings().weight
    assert torch.equal(found.lm_head.weight, base.lm_head.weight)
    last = "model.layers.3.mlp.down_proj.weight"
    assert not torch.equal(weights(tmp_path / "host")[last], base.state_dict()[last])
    terms, _, in_ram = terms_of(tmp_path / "host")
    assert terms[HEAD] == in_ram[HEAD] == base.lm_head.weight.nbytes
