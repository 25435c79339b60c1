"""Preference runs by the command line: their files; killed, cut in other ways, on two ranks."""

import copy
import json
import math
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data.rows import Conversation
from finetune.data.tokenize import encode
from finetune.data.turns import Message
from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import shipped_recipe
from tests.doubles import tiny_tokenizer
from tests.e2e.runs import (
    LOSS_TOLERANCE,
    WEIGHT_TOLERANCE,
    adapter,
    assert_same_training,
    losses,
    rows_of,
    run,
)

PAIRS = [
    {
        "prompt": f"what follows {n}{'!' * (n % 5)}",
        "chosen": f"{n + 1}{'.' * (n % 3)}",
        "rejected": f"{n}{'?' * (n % 4)}",
    }
    for n in range(40)
]
LABELLED = [
    {
        "prompt": f"what follows {n}",
        "completion": f"{n + n % 2}{'.' * (n % 3)}",
        "label": bool(n % 2),
    }
    for n in range(40)
]
RANKED = [
    {
        "prompt": f"count to {n}",
        "completions": ["one", "two", f"{n}"],
        "scores": [n % 3, 4, 5 - n % 2],
    }
    for n in range(40)
    if n % 2 == 0
]
SAMPLED = [
    {"prompt": f"say {n}", "completions": [f"{n}", f"{n}!", "no"], "rewards": [1.0, 0.5, n % 2]}
    for n in range(40)
]


def distilled() -> list[dict[str, Any]]:
    """Rows whose teacher is sure of each token, but for three others."""
    tokenizer = tiny_tokenizer()
    rows = []
    for n in range(40):
        prompt, answer = f"what follows {n}{'!' * (n % 5)}", f"{n + 1}"
        turns = (Message(role="user", content=prompt), Message(role="assistant", content=answer))
        row = Conversation(messages=turns, source="")
        labels = encode(row, tokenizer, seq_len=64, loss_on="assistant").labels
        tokens = labels[labels != -100].tolist()
        ids = [[(t + 3) % 50, t, (t + 1) % 50, (t + 2) % 50][: 4 - n % 2] for t in tokens]
        logprobs = [[math.log(p) for p in (0.05, 0.75, 0.1, 0.05)[: len(top)]] for top in ids]
        rows.append(
            {"prompt": prompt, "completion": answer, "top_ids": ids, "top_logprobs": logprobs}
        )
    return rows


METHODS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "dpo": (PAIRS, {"method": "dpo"}),
    "kto": (LABELLED, {"method": "kto"}),
    "ranking": (RANKED, {"method": "dpo", "loss": "plackett_luce"}),
    "orpo": (PAIRS, {"method": "orpo"}),
    "grpo": (SAMPLED, {"method": "grpo", "beta": 0.1}),
    "distill": (distilled(), {"method": "distill", "sft_weight": 0.1}),
    "reward": (
        [row | {"margin": n % 2 / 4} for n, row in enumerate(PAIRS)],
        {"method": "reward", "beta": 0.01},
    ),
}


def recipe_for(write_recipe, tmp_path: Path, name: str, **sections: dict[str, Any]) -> Path:
    rows, objective = METHODS[name]
    file = tmp_path / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(file), "format": "auto", "columns": {}}
    if name == "reward":
        data["too_long"] = "drop"
    defaults: dict[str, dict[str, Any]] = {
        "objective": sections.pop("objective", objective),
        "data": data | sections.pop("data", {}),
        "output": {"eval_every": 3} | sections.pop("output", {}),
    }
    return write_recipe(**defaults, **sections)


EPOCH = ("data.eval_frac=null", "output.eval_every=null", "train.steps=null", "train.epochs=1")


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["on", "off"])
def test_an_epoch_compares_each_row_once(
    packing, tmp_path, write_recipe, machine_file, capsys
) -> None:
    words = ("--machine", machine_file, *EPOCH, f"data.packing={packing}")
    steps = ("train.micro_batch_size=2", "train.grad_accum_steps=13")
    assert run("finetune", recipe_for(write_recipe, tmp_path, "dpo"), *words, *steps) == 0
    assert "4 steps: 1 epoch of 40 rows, of which the last step has 1" in capsys.readouterr().out
    tokenizer = tiny_tokenizer()
    answers = [one[side] for one in PAIRS for side in ("chosen", "rejected")]
    learned = sum(len(tokenizer(a, add_special_tokens=False)["input_ids"]) + 1 for a in answers)
    assert sum(row["num_label_tokens"] for row in rows_of(tmp_path / "run")) == learned


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["on", "off"])
def test_a_last_step_of_one_row_is_not_compared_with_itself(
    packing, tmp_path, write_recipe, machine_file, capsys
) -> None:
    words = ("--machine", machine_file, *EPOCH, f"data.packing={packing}")
    steps = ("train.micro_batch_size=3", "train.grad_accum_steps=13")
    assert run("finetune", recipe_for(write_recipe, tmp_path, "kto"), *words, *steps) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "the last of 2 steps has 1 row of the last epoch" in shown
    assert "KTO scores each prompt with the answer of another row of the step" in shown
    assert "`train.steps: 1` in place of `train.epochs` leaves it out" in shown


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["dpo", *(pytest.param(n, marks=pytest.mark.slow) for n in METHODS if n != "dpo")]
)
def test_a_run_writes_what_is_compared(name, tmp_path, write_recipe, machine_file, capsys) -> None:
    recipe = recipe_for(write_recipe, tmp_path, name)
    assert run("finetune", recipe, "--machine", machine_file) == 0
    shown = capsys.readouterr().out
    rows = rows_of(tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    found = {"before": report["held_out"]["before"], "after": report["held_out"]["after"]}
    assert found["after"]["eval_loss"] == rows[-1]["eval_loss"]
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    if name in ("dpo", "ranking", "orpo"):
        assert all("rewards/margins" in row for row in rows)
        assert found["after"]["eval_logps/margins"] != found["before"]["eval_logps/margins"]
        assert "Before training: loss on held-out rows" in " ".join(shown.split())
        after = found["after"]["eval_rewards/margins"]
        assert f"| held-out rewards/margins, after training | {after:.4f} |" in card
    if name in ("dpo", "ranking"):
        assert found["after"]["eval_logps/margins"] > found["before"]["eval_logps/margins"]
    if name == "dpo":
        assert found["before"]["eval_loss"] == pytest.approx(0.6931, abs=1e-4)
        assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-4)  # nothing has been trained yet
    if name == "reward":
        assert rows[-1]["loss"] < rows[0]["loss"]
        before, after = found["before"], found["after"]
        assert after["eval_rewards/margins"] > before["eval_rewards/margins"]
        assert after["eval_rewards/min"] < after["eval_rewards/mean"] < after["eval_rewards/max"]
        assert not any("logps" in key for key in {*after, *rows[-1]})
    if name == "kto":
        assert rows[0]["kl"] == pytest.approx(0, abs=1e-5)
        assert max(row["kl"] for row in rows) > 0.01
    if name == "distill":
        assert rows[0]["loss"] == pytest.approx(rows[0]["kl"] + 0.1 * rows[0]["nll_loss"])
        assert found["after"]["eval_kl"] < found["before"]["eval_kl"]
        assert 0.9 < found["after"]["eval_teacher_top_k_mass"] < 1
        assert (
            found["after"]["eval_student_top_k_mass"] > found["before"]["eval_student_top_k_mass"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("packing", ["on", "off"])
def test_the_cut_of_a_step_changes_nothing(
    name, packing, tmp_path, write_recipe, machine_file
) -> None:
    # Gradients of experts by rewards are so small at some weights that Adam's steps are rounding.
    plain_steps = {"optimizer": "sgd", "lr": 1.0} if name == "reward" else {}
    for size in (1, 2, 6):
        recipe = recipe_for(
            write_recipe,
            tmp_path,
            name,
            adapter={"experts": True},
            data={"packing": packing},
            train={"micro_batch_size": size, "grad_accum_steps": 6 // size, **plain_steps},
        )
        words = ("finetune", recipe, "--machine", machine_file)
        assert run(*words, f"output.dir={tmp_path / str(size)}") == 0
    for size in (2, 6):
        ours, theirs = tmp_path / str(size), tmp_path / "1"
        for mine, other in zip(rows_of(ours), rows_of(theirs), strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5, abs=1e-6)
        expected = adapter(theirs)
        for key, tensor in adapter(ours).items():
            error = (tensor - expected[key]).norm() / expected[key].norm()
            assert error <= 10 * WEIGHT_TOLERANCE, key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto", "distill", "reward"])
def test_a_killed_run_resumes_to_the_bit(
    name, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = recipe_for(
        write_recipe,
        tmp_path,
        name,
        train={"steps": 12},
        adapter={"experts": False, "dropout": 0.2},
        data={"num_workers": 1},
    )
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    assert run("finetune", recipe, "--machine", machine_file, f"output.dir={whole}") == 0
    metrics, chance = run_dir / "metrics.jsonl", random.Random(name)
    words: tuple[object, ...] = ("finetune", recipe, "--machine", machine_file)
    for _ in range(2):
        process = forked.start(*words)
        steps = metrics.read_text().count("\n") if metrics.exists() else 0
        goal = steps + chance.randrange(1, 4)
        process.wait_for(
            lambda goal=goal: metrics.exists() and metrics.read_text().count("\n") >= goal
        )
        time.sleep(chance.random() * 0.05)
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
        words = (*words, "--resume")[:5]
    process = forked.start(*words)
    assert process.end() == 0, process.shown
    assert losses(run_dir) == losses(whole)
    names = ("rewards/margins", "kl", "eval_loss")
    for mine, other in zip(rows_of(run_dir), rows_of(whole), strict=True):
        assert [mine.get(n) for n in names] == [other.get(n) for n in names]
    resumed, uninterrupted = adapter(run_dir), adapter(whole)
    assert all(torch.equal(resumed[n], uninterrupted[n]) for n in uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shares"), [*((name, "equal") for name in METHODS), ("dpo", "[1,2]"), ("kto", "[1,2]")]
)
def test_two_ranks_train_as_one_process_does(
    name, shares, tmp_path, write_recipe, machine_file, forked
) -> None:
    # 3 micro-batches: one rank has two of them, the other one
    recipe = recipe_for(write_recipe, tmp_path, name, adapter={"experts": False, "dropout": 0.2})
    # a new head: at a higher rate some CPUs' roundings grow to 2.6e-6
    rate = ("train.lr=0.0005",) if name == "reward" else ()
    words = ("finetune", recipe, "--machine", machine_file, *rate)
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'two'}", f"train.shares={shares}")
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    assert_same_preferences(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto", "grpo"])
def test_a_slow_card_prefers_as_one_process_does(
    name, tmp_path, write_recipe, machine_file, slow_file, forked
) -> None:
    """The step's loss is of all rows: a rank's part of it depends on those of the other."""
    adapter, train = {"experts": False, "dropout": 0.2}, {"grad_accum_steps": 6}
    recipe = recipe_for(write_recipe, tmp_path, name, adapter=adapter, train=train)
    start = ("finetune", recipe)
    assert run(*start, "--machine", machine_file, f"output.dir={tmp_path / 'one'}") == 0
    more = {rank: ["--machine", file] for rank, file in enumerate((machine_file, slow_file))}
    where = f"output.dir={tmp_path / 'two'}"
    ranks = forked.start_machines(*start, where, sizes=(1, 1), more=more)
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert load_recipe(str(tmp_path / "two" / "recipe.yaml"), []).train.shares == (4, 2)
    assert_same_preferences(tmp_path / "two", tmp_path / "one")


def assert_same_preferences(ours: Path, theirs: Path) -> None:
    """Compare the training of two runs, and the rewards that they report."""
    assert_same_training(ours, theirs)
    for mine, other in zip(rows_of(ours), rows_of(theirs), strict=True):
        assert mine.keys() == other.keys()
        for key in other:
            if "/" in key or key == "kl":
                assert mine[key] == pytest.approx(other[key], rel=100 * LOSS_TOLERANCE, abs=1e-6)


@pytest.mark.slow
def test_the_quickstart_learns_to_prefer_capitals(tmp_path, cache) -> None:
    recipe = shipped_recipe("quickstart_dpo")
    words = ("train.steps=12", "output.eval_every=12")
    assert run("finetune", recipe, f"output.dir={tmp_path / 'run'}", *words) == 0
    found = json.loads((tmp_path / "run" / "report.json").read_text())["held_out"]
    assert found["before"]["eval_logps/accuracies"] < 0.2
    assert found["after"]["eval_logps/accuracies"] > 0.9
    assert found["after"]["eval_rewards/margins"] > 1


@pytest.mark.slow
def test_a_reference_taken_before_step_1_is_the_one_that_each_step_computes(
    tmp_path, write_recipe, machine_file
) -> None:
    words: tuple[object, ...] = ()
    for reference in ("base", "precomputed"):
        recipe = recipe_for(
            write_recipe,
            tmp_path,
            "dpo",
            objective={"method": "dpo", "reference": reference},
            adapter={"experts": False, "dropout": 0.2},
        )
        words = ("finetune", recipe, "--machine", machine_file)
        assert run(*words, f"output.dir={tmp_path / reference}") == 0
    known, computed = tmp_path / "precomputed", tmp_path / "base"
    assert (known / "reference.json").exists()
    for mine, other in zip(rows_of(known), rows_of(computed), strict=True):
        assert mine.keys() == other.keys()
        for key in {"loss", "rewards/margins", "eval_loss"} & mine.keys():
            assert mine[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5)
        assert mine["num_loads"] == other["num_loads"]
    assert max(row["rewards/margins"] for row in rows_of(known)) > 0.01
    for change in ("read again", "taken again"):
        if change == "taken again":
            (known / "reference.json").write_text("{}")
        shutil.rmtree(max((known / "checkpoints").iterdir()))
        before = losses(known)
        assert run(*words, f"output.dir={known}", "--resume") == 0
        assert losses(known) == before


@pytest.mark.slow
def test_references_of_the_rows_are_compared_with_the_model(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    whole: dict[str, dict[str, Any]] = {
        "data": {"eval_frac": None},
        "output": {"eval_every": None},
        "objective": {"method": "dpo", "reference": "precomputed"},
    }
    recipe = recipe_for(write_recipe, tmp_path, "dpo", **copy.deepcopy(whole))
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words, f"output.dir={tmp_path / 'taken'}") == 0
    assert "nats per token" not in capsys.readouterr().out
    taken = read_references_of(tmp_path / "taken")
    for name, apart in (("own", 0.0), ("foreign", 50.0)):
        rows = [
            row | {"ref_chosen_logps": chosen - apart, "ref_rejected_logps": rejected - apart}
            for row, chosen, rejected in zip(PAIRS, taken[0::2], taken[1::2], strict=True)
        ]
        (tmp_path / "dpo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert run(*words, f"output.dir={tmp_path / name}") == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("0.000 nats per token" in shown) == (name == "own")
        assert ("they are of another model or template" in shown) == (name == "foreign")
    assert losses(tmp_path / "own") == pytest.approx(losses(tmp_path / "taken"), rel=1e-6)


def read_references_of(run_dir: Path) -> list[float]:
    """Return the log-probabilities that a run has taken of its training rows."""
    found = json.loads((run_dir / "reference.json").read_text())
    sums: list[float] = found["sums"]["train"]
    return sums


@pytest.mark.slow
def test_weights_that_train_themselves_have_a_reference_taken_before_step_1(
    tmp_path, write_recipe, machine_file
) -> None:
    recipe = recipe_for(
        write_recipe,
        tmp_path,
        "dpo",
        objective={"method": "dpo", "reference": "precomputed"},
        adapter={"rank": 16, "alpha": 32.0, "targets": "all-linear", "experts": False},
        train={"what": "all", "lr": 0.001},
    )
    assert run("finetune", recipe, "--machine", machine_file) == 0
    rows = rows_of(tmp_path / "run")
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert rows[-1]["rewards/margins"] > 0.01


@pytest.mark.slow
def test_a_run_that_goes_on_from_an_adapter_is_compared_with_that_adapter(
    finished, tmp_path, write_recipe, machine_file
) -> None:
    recipe = recipe_for(
        write_recipe,
        tmp_path,
        "dpo",
        objective={"method": "dpo", "reference": "precomputed"},
        adapter={"init_from": str(finished)},
    )
    assert run("finetune", recipe, "--machine", machine_file) == 0
    first, *others = rows_of(tmp_path / "run")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)  # it differs from nothing yet
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert any(abs(row["rewards/margins"]) > 1e-4 for row in others)
