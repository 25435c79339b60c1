"""Runs of every objective by the command line, against plain torch, transformers and peft."""

import copy
import json
import math
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    Qwen3Config,
)

from finetune.data.rows import Conversation
from finetune.data.tokenize import encode
from finetune.data.turns import Message
from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import shipped_recipe
from tests.doubles import tiny_tokenizer
from tests.e2e.classifying import (
    NUM_CLASSES,
    NUM_TRAINED,
    ROWS,
    TAGGED_ROWS,
    classify_recipe,
    ids_and_places,
    tagging_recipe,
    write,
)
from tests.e2e.forked import Forked
from tests.e2e.plain_heads import Plain, cosine, steps_of
from tests.e2e.runs import (
    LOSS_TOLERANCE,
    ROOT,
    WEIGHT_TOLERANCE,
    adapter,
    assert_same_training,
    losses,
    rows_of,
    run,
)
from tests.e2e.sweeps import assert_same_bits, states

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
    assert "each prompt is scored with the answer of another row of the step" in shown
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


# ---------------------------------------------------------------------------------------- rewarding


REWARDING_PAIRS = [
    {"prompt": f"what follows {n}{'!' * (n % 5)}", "chosen": f"{n + 1}.", "rejected": f"{n}"}
    for n in range(36)
]
WEIGHT, MARGIN = 0.02, 0.25


def write_rewarding(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def reward_recipe(write_recipe, tmp_path: Path, model: Path, **sections: Any) -> Path:
    rows = write_rewarding(tmp_path / "pairs.jsonl", REWARDING_PAIRS[:-4])
    held_out = write_rewarding(
        tmp_path / "held.jsonl", [row | {"margin": MARGIN} for row in REWARDING_PAIRS[-4:]]
    )
    data = {"path": rows, "format": "auto", "columns": {}}
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "objective": {"method": "reward", "beta": WEIGHT},
        "adapter": {"experts": "moe" in model.name or model.name.startswith("model")},
        "data": data | {"too_long": "drop", "eval_path": held_out, "eval_frac": None},
        "output": {"eval_every": 3},
    }
    for name, section in sections.items():
        defaults[name] = defaults.get(name, {}) | section
    return write_recipe(**defaults)


# ------------------------------------------------------------------------------------------- reward


SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, Any] = {"qwen3": Qwen3Config, "llama": LlamaConfig}


def model_of(family: str, tmp_path: Path, mixture: Path) -> Path:
    """Write a model of a family whose head is its embedding; a mixture is there already."""
    if family == "qwen3_moe":
        return mixture
    tokenizer = tiny_tokenizer()
    torch.manual_seed(1)
    config = CONFIGS[family](**SHAPE, vocab_size=len(tokenizer), tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
    tokenizer.save_pretrained(tmp_path / family)
    return tmp_path / family


def plain_rewards(base: Path, adapter: Path) -> list[tuple[float, float]]:
    """Return the rewards of held-out pairs by plain transformers and peft."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float32
    )
    model = PeftModel.from_pretrained(classifier, str(adapter)).eval()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def reward(prompt: str, answer: str) -> float:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        ids: Any = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
        ids = ids[: len(ids) - ids[::-1].index(end)]
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([ids])).logits)

    return [
        (reward(row["prompt"], row["chosen"]), reward(row["prompt"], row["rejected"]))
        for row in REWARDING_PAIRS[-4:]
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "offload"),
    [
        ("qwen3", {}),
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.slow),
        pytest.param("qwen3", {"tier": "disk"}, marks=pytest.mark.slow),
    ],
)
def test_plain_transformers_gives_the_rewards_of_the_trainer(
    family, offload, tmp_path, model_dir, write_recipe, machine_file
) -> None:
    base = model_of(family, tmp_path, model_dir)
    recipe = reward_recipe(write_recipe, tmp_path, base, offload=offload)
    assert run("finetune", recipe, "--machine", machine_file) == 0
    adapter = tmp_path / "run" / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"
    assert "score" in config["modules_to_save"]
    found, last = plain_rewards(base, adapter), rows_of(tmp_path / "run")[-1]
    apart = [chosen - rejected for chosen, rejected in found]
    every = [one for pair in found for one in pair]
    loss = sum(math.log(1 + math.exp(-(c - r - MARGIN))) + WEIGHT * (c + r) ** 2 for c, r in found)
    for name, expected in {
        "eval_loss": loss / 4,
        "eval_rewards/chosen": sum(c for c, _ in found) / 4,
        "eval_rewards/rejected": sum(r for _, r in found) / 4,
        "eval_rewards/margins": sum(apart) / 4,
        "eval_rewards/accuracies": sum(one > 0 for one in apart) / 4,
        "eval_rewards/min": min(every),
        "eval_rewards/max": max(every),
    }.items():
        assert last[name] == pytest.approx(expected, rel=2e-5, abs=2e-6), name
    assert max(map(abs, every)) > 0.05


@pytest.fixture(scope="module")
def rewarding(tmp_path_factory, model_dir, rows_file, machine_file) -> Path:
    from tests.e2e.conftest import recipe_writer

    folder = tmp_path_factory.mktemp("rewarding")
    writer = recipe_writer(folder, model_dir, rows_file)
    recipe = reward_recipe(writer, folder, model_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert run("finetune", recipe, "--machine", machine_file) == 0
    return folder / "run"


@pytest.mark.slow
def test_a_reward_model_is_refused_where_tokens_are_predicted(
    rewarding, model_dir, tmp_path, cache, capsys
) -> None:
    rows = write_rewarding(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    clone = tmp_path / "llama.cpp"
    clone.mkdir()
    (clone / "convert_hf_to_gguf.py").write_text("")
    for words, what in (
        (("merge", rewarding, "--out", tmp_path / "out"), "is not merged"),
        (
            ("export", rewarding, "--gguf", "f16", "--out", tmp_path / "out", "--llama-cpp", clone),
            "is not merged",
        ),
        (("chat", rewarding), "is not able to answer"),
        (("generate", rewarding, "--prompt", "a"), "is not able to answer"),
        (("adapter", rewarding, "--format", "vllm", "--out", tmp_path / "out"), "not exported for"),
        (("score", model_dir, rows, "--adapter", rewarding), "is not scored by"),
        (("score", rewarding / "recipe.yaml", rows), "trains a reward model"),
    ):
        assert run(*words) == 1, words
        assert what in " ".join(capsys.readouterr().err.split()), words
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_the_card_says_what_it_is(rewarding) -> None:
    card = (rewarding / "adapter" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "A reward model of" in card
    assert "base = AutoModelForSequenceClassification.from_pretrained(" in card
    assert ", num_labels=1)" in card
    assert "| held-out rewards/accuracies, after training |" in card


@pytest.mark.slow
def test_a_reward_run_goes_on_from_another(
    rewarding, model_dir, tmp_path, write_recipe, machine_file
) -> None:
    before = rows_of(rewarding)
    recipe = reward_recipe(
        write_recipe, tmp_path, model_dir, adapter={"init_from": str(rewarding)}, train={"lr": 1e-9}
    )
    assert run("finetune", recipe, "--machine", machine_file) == 0
    last = rows_of(tmp_path / "run")[-1]
    assert last["eval_loss"] == pytest.approx(before[-1]["eval_loss"], rel=1e-4)
    assert before[-1]["eval_loss"] < before[2]["eval_loss"]


@pytest.mark.slow
def test_reward_runs_that_share_their_steps_are_what_they_are_alone(
    model_dir, tmp_path, write_recipe, machine_file, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the directory of what they share is made there

    def recipe(name: str, folder: str, **train: float) -> Path:
        output = {"name": name, "dir": str(tmp_path / folder)}
        file = reward_recipe(write_recipe, tmp_path, model_dir, output=output, train=train)
        return file.rename(tmp_path / f"{folder}.yaml")

    rates = {"a": 0.02, "b": 0.005}
    together = [recipe(name, name, lr=rate) for name, rate in rates.items()]
    assert run("finetune", *together, "--machine", machine_file) == 0
    for name, rate in rates.items():
        alone = recipe(name, f"{name}-alone", lr=rate)
        assert run("finetune", alone, "--machine", machine_file) == 0
        assert_same_bits(tmp_path / name, tmp_path / f"{name}-alone")
    other = recipe("c", "c", lr=0.02, seed=5)
    assert run("finetune", together[0], other, "--machine", machine_file) == 1
    assert "train.seed is 0 in" in " ".join(capsys.readouterr().err.split())


# ----------------------------------------------------------------------------------------- classify


@pytest.mark.thorough
def test_plain_peft_gives_the_classes_that_a_run_reports(
    tmp_path, model_dir, write_recipe, machine_file, capsys
) -> None:
    recipe, run_dir = classify_recipe(write_recipe, tmp_path), tmp_path / "run"
    assert run("finetune", recipe, "--machine", machine_file, "train.steps=6") == 0
    stopped = losses(run_dir)
    assert run("finetune", recipe, "--machine", machine_file, "--resume") == 0
    assert losses(run_dir)[:6] == stopped
    last = [row for row in rows_of(run_dir) if "eval_loss" in row][-1]
    assert not {name for name in last if "hits/" in name}

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    base: Any = AutoModelForSequenceClassification.from_pretrained(
        model_dir, num_labels=NUM_CLASSES, dtype=torch.float32
    )
    plain = PeftModel.from_pretrained(base, str(run_dir / "adapter"), is_trainable=True).eval()
    peft_count = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    capsys.readouterr()
    assert run("plan", recipe, "--machine", machine_file, "--json") == 0
    planned = json.loads(capsys.readouterr().out)["model"]
    assert planned["num_adapter_parameters"] + planned["num_module_parameters"] == peft_count
    loss, hits, predicted = 0.0, 0, []
    for row in ROWS[36:]:
        ids = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            output = plain(input_ids=torch.tensor([ids])).logits[0]
        loss += float(torch.logsumexp(output, 0) - output[row["label"]]) / 12
        predicted.append(int(output.argmax()))
        hits += predicted[-1] == row["label"]
    assert last["eval_loss"] == pytest.approx(loss, rel=1e-4)
    assert last["eval_accuracy"] == pytest.approx(hits / 12)
    assert 0 < last["eval_f1"] <= 1
    assert "text-classification" in (run_dir / "adapter" / "README.md").read_text()
    assert run("merge", run_dir, "--out", tmp_path / "merged") == 1
    assert "is not merged" in " ".join(capsys.readouterr().err.split())


def test_a_class_beyond_those_of_the_model_is_refused(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = classify_recipe(write_recipe, tmp_path, model={"num_classes": 2})
    assert run("finetune", recipe, "--machine", machine_file) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "has the class 2, and model.num_classes is 2" in shown


def test_a_label_is_the_number_of_a_class(tmp_path, write_recipe, machine_file, capsys) -> None:
    path = write(tmp_path / "words.jsonl", [{"text": "a b", "label": "good"}] * 3)
    recipe = classify_recipe(write_recipe, tmp_path, data={"path": path})
    assert run("finetune", recipe, "--machine", machine_file) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "'label' is \"good\", and classes are numbered from 0" in shown


# ---------------------------------------------------------------------------------- classify tokens


def macro_f1(pairs: list[tuple[int, int]]) -> float:
    """Return the mean over classes of 2 hits / (predicted + labelled)."""
    scores = []
    for one in {value for pair in pairs for value in pair}:
        hits = sum(label == one == found for label, found in pairs)
        both = sum(label == one for label, _ in pairs) + sum(found == one for _, found in pairs)
        scores.append(2 * hits / both)
    return sum(scores) / len(scores)


@pytest.mark.thorough
def test_plain_peft_gives_the_classes_of_words_that_a_run_reports(
    tmp_path, model_dir, write_recipe, machine_file, capsys
) -> None:
    recipe, run_dir = tagging_recipe(write_recipe, tmp_path), tmp_path / "run"
    assert run("finetune", recipe, "--machine", machine_file, "train.steps=6") == 0
    stopped = losses(run_dir)
    assert run("finetune", recipe, "--machine", machine_file, "--resume") == 0
    assert losses(run_dir)[:6] == stopped
    last = [row for row in rows_of(run_dir) if "eval_loss" in row][-1]

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    base: Any = AutoModelForTokenClassification.from_pretrained(
        model_dir, num_labels=NUM_CLASSES, dtype=torch.float32
    )
    plain = PeftModel.from_pretrained(base, str(run_dir / "adapter"), is_trainable=True).eval()
    peft_count = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    capsys.readouterr()
    assert run("plan", recipe, "--machine", machine_file, "--json") == 0
    planned = json.loads(capsys.readouterr().out)["model"]
    assert planned["num_adapter_parameters"] + planned["num_module_parameters"] == peft_count
    total, pairs = 0.0, []
    for row in TAGGED_ROWS[NUM_TRAINED:]:
        ids, firsts = ids_and_places(tokenizer, row)
        with torch.no_grad():
            outputs = plain(input_ids=torch.tensor([ids])).logits[0]
        for place, label in zip(firsts, row["ner_tags"], strict=True):
            if label != -100:
                total += float(torch.logsumexp(outputs[place], 0) - outputs[place, label])
                pairs.append((label, int(outputs[place].argmax())))
    assert last["eval_loss"] == pytest.approx(total / len(pairs), rel=1e-4)
    assert last["eval_accuracy"] == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    assert last["eval_f1"] == pytest.approx(macro_f1(pairs))
    assert last["eval_f1"] > 0.5
    assert "token-classification" in (run_dir / "adapter" / "README.md").read_text()
    assert run("merge", run_dir, "--out", tmp_path / "merged") == 1
    assert "AutoModelForTokenClassification" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"tokens": ["a", "b"], "ner_tags": [0]}, "'tokens' has 2 words, 'ner_tags' 1 classes"),
        ({"tokens": ["a", " "], "ner_tags": [0, 1]}, "'tokens' has \" \", and no word"),
        ({"tokens": ["a"], "ner_tags": ["B-PER"]}, "'ner_tags' has \"B-PER\", and classes are"),
        ({"tokens": ["a"], "ner_tags": [-100]}, "'ner_tags' has no class"),
        ({"tokens": ["a"], "ner_tags": [3]}, "has the class 3, and model.num_classes is 3"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    row, shown, tmp_path, write_recipe, machine_file, capsys
) -> None:
    path = write(tmp_path / "bad.jsonl", [row] * 3)
    recipe = tagging_recipe(write_recipe, tmp_path, data={"path": path})
    assert run("finetune", recipe, "--machine", machine_file) == 1
    assert shown in " ".join(capsys.readouterr().err.split())


# --------------------------------------------------------------------------------------- head alone


LR, SEED, NUM_STEPS = 0.05, 3, 6
TRAIN = {
    # all rows in each step, so that their order does not matter
    **{"what": "head", "micro_batch_size": 4, "grad_accum_steps": 9, "lr": LR, "seed": SEED},
    "steps": NUM_STEPS,
}
NO_ADAPTER: dict[str, Any] = {"rank": 16, "alpha": 32.0, "experts": False, "targets": []}


def head_recipe(write_recipe: Any, tmp_path: Path, **train: Any) -> Path:
    return classify_recipe(
        write_recipe,
        tmp_path,
        adapter=NO_ADAPTER,
        train=TRAIN | train,
        data={"packing": "off"},
        output={"eval_every": 3, "checkpoint_every": 3},
    )


def test_reorder_a_head_alone_learns_as_in_plain_torch_and_plain_peft_loads_it(
    tmp_path, model_dir, write_recipe, machine_file, capsys
) -> None:
    recipe, run_dir = head_recipe(write_recipe, tmp_path), tmp_path / "run"
    assert run("finetune", recipe, "--machine", machine_file, "--verbose") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "trains 96 parameters: the head alone" in shown
    assert " features 48 " in shown
    assert "visited for the features, and in no step" in shown
    assert "Features: 48 features in" in shown

    plain, held_out = (Plain.of(model_dir, rows, seed=SEED) for rows in (ROWS[:36], ROWS[36:]))
    features, head = plain.features(), plain.model.score.weight
    expected = steps_of(
        [head], lambda: functional.linear(features, head), plain.labels, LR, NUM_STEPS
    )
    rows = rows_of(run_dir)
    assert losses(run_dir) == pytest.approx([one for one, _ in expected], rel=1e-5)
    assert [row["accuracy"] for row in rows] == pytest.approx([one for _, one in expected])
    assert expected[-1][0] < 0.9 * expected[0][0]
    assert [row["num_loads"] for row in rows] == [0] * NUM_STEPS
    with torch.no_grad():
        outputs = functional.linear(held_out.features(), head)
    assert rows[-1]["eval_loss"] == pytest.approx(
        functional.cross_entropy(outputs, held_out.labels).item(), rel=1e-5
    )
    hits = (outputs.argmax(1) == held_out.labels).float().mean().item()
    assert rows[-1]["eval_accuracy"] == pytest.approx(hits)
    assert 0 <= rows[-1]["eval_f1"] <= 1

    ((name, found),) = load_file(run_dir / "adapter" / "adapter_model.safetensors").items()
    assert name == "base_model.model.score.weight"
    torch.testing.assert_close(found, head.data, rtol=1e-4, atol=1e-5)
    base = Plain.of(model_dir, ROWS[:NUM_TRAINED], seed=SEED + 1)
    loaded = PeftModel.from_pretrained(base.model, str(run_dir / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            base.logits(loaded), functional.linear(features, head), rtol=1e-4, atol=1e-5
        )
    assert_reported(run_dir, capsys)


def assert_reported(run_dir: Path, capsys: Any) -> None:
    """What was predicted is compared with what was measured, and all say what has trained."""
    page = (run_dir / "report.html").read_text()
    assert "a new head alone, on features of the frozen layers" in page
    assert "48 features in" in page
    card = (run_dir / "adapter" / "README.md").read_text()
    assert "a head alone, on frozen layers" in card
    report = json.loads((run_dir / "report.json").read_text())
    assert report["features"]["num_features"] == 48
    (section,) = report["sections"]
    phases = {row["name"]: row for row in section["comparison"]}
    assert phases["head and loss"]["predicted"] > 0
    assert phases["forward"]["predicted"] == phases["backward"]["predicted"] == 0
    assert run("explain", run_dir) == 0
    assert "Features: 48 features in" in " ".join(capsys.readouterr().out.split())


def test_move_a_head_alone_resumes_to_the_bit(tmp_path, write_recipe, machine_file) -> None:
    recipe, run_dir = head_recipe(write_recipe, tmp_path), tmp_path / "run"
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words) == 0
    whole = tmp_path / "whole"
    shutil.copytree(run_dir, whole)
    shutil.rmtree(run_dir / "adapter")
    newest = max(run_dir.glob("checkpoints/*"), key=lambda one: int(one.name.rpartition("-")[2]))
    assert int(newest.name.rpartition("-")[2]) == NUM_STEPS
    shutil.rmtree(newest)
    assert run(*words, "--resume") == 0
    assert losses(run_dir) == losses(whole)
    ours, theirs = adapter(run_dir), adapter(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# -------------------------------------------------------------------------------------------- probe


PROBE_LRX, PROBE_LR, PROBE_SEED = 0.01, 0.05, 3
NUM_PROBE_STEPS, PROBE_NUM_STEPS = 6, 3
PROBE_TRAIN = {
    # all rows in each step, so that their order does not matter
    **{
        "micro_batch_size": 4,
        "grad_accum_steps": 9,
        "lr": PROBE_LRX,
        "steps": PROBE_NUM_STEPS,
        "seed": PROBE_SEED,
    },
    **{"probe_steps": NUM_PROBE_STEPS, "probe_lr": PROBE_LR},
}
ADAPTER = {"experts": False, "rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}


def probe_recipe(
    write_recipe: Any, tmp_path: Path, make: Callable[..., Path] = classify_recipe, **train: Any
) -> Path:
    return make(
        write_recipe,
        tmp_path,
        adapter=ADAPTER,
        train=PROBE_TRAIN | train,
        data={"packing": "off"},
        output={"eval_every": NUM_PROBE_STEPS},
    )


def probe_rows(run_dir: Path) -> list[dict[str, Any]]:
    from finetune.run.probe_folder import read_steps

    return read_steps(run_dir)


@pytest.mark.thorough
def test_reorder_both_phases_are_those_of_plain_torch_and_peft(
    tmp_path, model_dir, write_recipe, machine_file, capsys
) -> None:
    recipe, run_dir = probe_recipe(write_recipe, tmp_path), tmp_path / "run"
    assert run("finetune", recipe, "--machine", machine_file, "--verbose") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "head on them 96 parameters" in shown
    assert " features 48 " in shown
    assert f"{NUM_PROBE_STEPS} steps of the head (96 weights)" in shown

    assert_reported_probe(run_dir, capsys)

    plain, held_out = (
        Plain.of(model_dir, rows, seed=PROBE_SEED) for rows in (ROWS[:36], ROWS[36:])
    )
    features, head = plain.features(), plain.model.score.weight
    expected = steps_of(
        [head], lambda: functional.linear(features, head), plain.labels, PROBE_LR, NUM_PROBE_STEPS
    )
    ours = probe_rows(run_dir)
    assert [row["loss"] for row in ours] == pytest.approx([one for one, _ in expected], rel=1e-5)
    assert [row["accuracy"] for row in ours] == pytest.approx([one for _, one in expected])
    assert ours[-1]["loss"] < 0.9 * ours[0]["loss"]
    (name, found), *others = load_file(run_dir / "probe" / "head.safetensors").items()
    assert not others
    assert name.endswith("score.modules_to_save.default.weight")
    torch.testing.assert_close(found, head.data, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        outputs = functional.linear(held_out.features(), head)
    assert ours[-1]["eval_loss"] == pytest.approx(
        functional.cross_entropy(outputs, held_out.labels).item(), rel=1e-5
    )

    torch.manual_seed(PROBE_SEED)
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["score"],
    )
    adapted = get_peft_model(plain.model, config)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    expected = steps_of(
        trained, lambda: plain.logits(adapted), plain.labels, PROBE_LRX, PROBE_NUM_STEPS
    )
    assert losses(run_dir) == pytest.approx([one for one, _ in expected], rel=2e-5)
    base = Plain.of(model_dir, ROWS[:36], seed=PROBE_SEED)
    loaded = PeftModel.from_pretrained(base.model, str(run_dir / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            base.logits(loaded), plain.logits(adapted.eval()), rtol=1e-3, atol=1e-4
        )


def assert_reported_probe(run_dir: Path, capsys: Any) -> None:
    """The page, the card and the explanation say what the probe was."""
    last = probe_rows(run_dir)[-1]
    learned = f"-> {last['loss']:.4f}, accuracy"
    page = (run_dir / "report.html").read_text()
    assert "head of the probe" in page
    assert learned in page.replace("&gt;", ">")
    card = (run_dir / "adapter" / "README.md").read_text()
    assert f"| steps of the head alone, before | {NUM_PROBE_STEPS} |" in card
    assert learned in card
    assert json.loads((run_dir / "report.json").read_text())["probe"]["last"] == last
    assert run("explain", run_dir) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Probe: 48 features in" in shown
    assert f"Its head: loss {probe_rows(run_dir)[0]['loss']:.4f} {learned}" in shown


@pytest.mark.slow
def test_reorder_a_head_of_rewards_learns_as_in_plain_torch(
    tmp_path, model_dir, write_recipe, machine_file
) -> None:
    recipe = reward_recipe(
        write_recipe,
        tmp_path,
        model_dir,
        adapter=ADAPTER,
        train=PROBE_TRAIN | {"grad_accum_steps": 16},
        output={"eval_every": NUM_PROBE_STEPS},
    )
    assert run("finetune", recipe, "--machine", machine_file) == 0
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        model_dir, num_labels=1, dtype=torch.float32
    )
    head = model.score.weight
    torch.manual_seed(PROBE_SEED)
    torch.nn.init.normal_(head, std=model.config.initializer_range)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def features(answer: str) -> torch.Tensor:
        found = []
        for pair in REWARDING_PAIRS[:-4]:
            turns = [
                {"role": "user", "content": pair["prompt"]},
                {"role": "assistant", "content": pair[answer]},
            ]
            ids: Any = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
            ids = torch.tensor([ids[: len(ids) - ids[::-1].index(end)]])
            with torch.no_grad():
                found.append(model.model(input_ids=ids).last_hidden_state[0, -1])
        return torch.stack(found)

    chosen, rejected = features("chosen"), features("rejected")
    optimizer = torch.optim.AdamW([head], weight_decay=0.0)
    expected = []
    for step in range(NUM_PROBE_STEPS):
        better, worse = chosen @ head[0], rejected @ head[0]
        loss = -functional.logsigmoid(better - worse).mean()
        loss = loss + WEIGHT * (better + worse).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([head], 1.0)
        optimizer.param_groups[0]["lr"] = PROBE_LR * cosine(step, NUM_PROBE_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    ours = probe_rows(tmp_path / "run")
    assert [row["loss"] for row in ours] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < 0.99 * expected[0]
    assert rows_of(tmp_path / "run")[-1]["step"] == PROBE_NUM_STEPS


@pytest.mark.slow
def test_quant_features_of_a_model_in_bf16_are_its_own_and_the_head_learns_in_fp32(
    tmp_path, model_dir, write_recipe
) -> None:
    recipe = probe_recipe(write_recipe, tmp_path)
    assert run("finetune", recipe, "model.dtype=bfloat16") == 0
    plain = Plain.of(model_dir, ROWS[:36], seed=PROBE_SEED)
    exact, rounded = plain.features(), plain.model.bfloat16().model
    with torch.no_grad():
        states = [rounded(input_ids=one).last_hidden_state[:, -1] for one in plain.ids]
    features = torch.cat(states).float()
    apart = (features - exact).norm() / exact.norm()
    assert 1e-3 < apart < 0.05  # what bf16 rounds
    torch.manual_seed(PROBE_SEED)
    drawn = torch.nn.init.normal_(
        plain.model.score.weight, std=plain.model.config.initializer_range
    )
    head = torch.nn.Parameter(drawn.detach().float())
    expected = steps_of(
        [head], lambda: functional.linear(features, head), plain.labels, PROBE_LR, NUM_PROBE_STEPS
    )
    ours = probe_rows(tmp_path / "run")
    assert [row["loss"] for row in ours] == pytest.approx([one for one, _ in expected], rel=2e-3)
    (found,) = load_file(tmp_path / "run" / "probe" / "head.safetensors").values()
    assert found.dtype == torch.float32
    assert (found - head.data).norm() < 0.05 * head.data.norm()


@pytest.mark.slow
def test_move_a_run_killed_in_its_probe_or_after_it_ends_as_one_that_was_not(
    tmp_path, write_recipe, machine_file, forked: Forked
) -> None:
    recipe = probe_recipe(write_recipe, tmp_path, probe_steps=300)
    words = ("finetune", recipe, "--machine", machine_file)
    whole, run_dir = tmp_path / "whole", tmp_path / "killed"
    assert forked.start(*words, f"output.dir={whole}").end() == 0
    process = forked.start(*words, f"output.dir={run_dir}")
    process.wait_until(lambda: "Before training" in process.shown)
    assert process.end(9) == -9
    assert not (run_dir / "probe").exists()
    process = forked.start(*words, f"output.dir={run_dir}", "--resume")
    process.wait_until((run_dir / "probe").exists)
    assert process.end(9) == -9
    process = forked.start(*words, f"output.dir={run_dir}", "--resume")
    assert process.end() == 0
    assert "The head is that of the probe" in " ".join(process.shown.split())
    assert [row["loss"] for row in probe_rows(run_dir)] == [
        row["loss"] for row in probe_rows(whole)
    ]
    assert_same_bits_probe(run_dir, whole)


@pytest.mark.thorough
def test_move_a_run_resumed_after_its_probe_begins_with_its_head(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe, run_dir = probe_recipe(write_recipe, tmp_path), tmp_path / "run"
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words) == 0
    whole = tmp_path / "whole"
    shutil.copytree(run_dir, whole)
    for folder in (
        "adapter",
        *(f"checkpoints/{one.name}" for one in run_dir.glob("checkpoints/*")),
    ):
        shutil.rmtree(run_dir / folder)
    (run_dir / "metrics.jsonl").unlink()
    capsys.readouterr()
    assert run(*words, "--resume") == 0
    assert "The head is that of the probe" in " ".join(capsys.readouterr().out.split())
    assert_same_bits_probe(run_dir, whole)


@pytest.mark.slow
def test_reorder_a_head_of_words_learns_as_in_plain_torch(
    tmp_path, model_dir, write_recipe, machine_file
) -> None:
    recipe = probe_recipe(write_recipe, tmp_path, tagging_recipe)
    assert run("finetune", recipe, "--machine", machine_file) == 0
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForTokenClassification.from_pretrained(
        model_dir, num_labels=NUM_CLASSES, dtype=torch.float32
    )
    head = model.score
    torch.manual_seed(PROBE_SEED)
    torch.nn.init.normal_(head.weight, std=model.config.initializer_range)
    torch.nn.init.zeros_(head.bias)
    features, labels = [], []
    for row in TAGGED_ROWS[:NUM_TRAINED]:
        ids, firsts = ids_and_places(tokenizer, row)
        with torch.no_grad():
            states = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        for place, label in zip(firsts, row["ner_tags"], strict=True):
            if label != -100:
                features.append(states[place])
                labels.append(label)
    values = torch.stack(features)
    expected = steps_of(
        [head.weight, head.bias],
        lambda: functional.linear(values, head.weight, head.bias),
        torch.tensor(labels),
        PROBE_LR,
        NUM_PROBE_STEPS,
    )
    ours = probe_rows(tmp_path / "run")
    assert [row["loss"] for row in ours] == pytest.approx([one for one, _ in expected], rel=1e-5)
    assert [row["accuracy"] for row in ours] == pytest.approx([one for _, one in expected])


@pytest.mark.slow
def test_move_each_run_of_a_sweep_has_its_own_probe_or_none(
    tmp_path, write_recipe, machine_file
) -> None:
    recipe = probe_recipe(write_recipe, tmp_path, probe_lr=None, probe_steps=None)
    words = ("--machine", machine_file)
    folder = tmp_path / "run"
    assert run("sweep", recipe, *words, f"train.probe_steps=null,{NUM_PROBE_STEPS}") == 0
    without, having = (folder / name for name in states(folder))
    assert not (without / "probe").exists()
    alone = tmp_path / "alone"
    setting = f"train.probe_steps={NUM_PROBE_STEPS}"
    assert run("finetune", recipe, *words, setting, f"output.dir={alone}") == 0
    found, expected = (load_file(one / "probe" / "head.safetensors") for one in (having, alone))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert_same_bits_probe(having, alone)
    assert losses(without)[0] != losses(having)[0]


def assert_same_bits_probe(run_dir: Path, whole: Path) -> None:
    assert losses(run_dir) == losses(whole)
    assert [row.get("eval_loss") for row in rows_of(run_dir)] == [
        row.get("eval_loss") for row in rows_of(whole)
    ]
    ours, theirs = adapter(run_dir), adapter(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# ------------------------------------------------------------------------------------- distillation


QUICKSTART = ROOT / "recipes" / "quickstart"
NUM_ROWS, NUM_HELD_OUT, NUM_TOP = 240, 32, 8


def taught(folder: Path, name: str, num: int, teacher: Any) -> Path:
    """Write the first rows of a file with what a teacher says, by the guide's own function."""
    guide = (ROOT / "docs" / "guides" / "distillation.md").read_text()
    names: dict[str, Any] = {"torch": torch}
    exec(guide.split("```python\n")[1].split("```")[0], names)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    lines = (QUICKSTART / f"{name}.jsonl").read_text().splitlines()[:num]
    turns = [json.loads(line)["messages"] for line in lines]
    plain = [{"prompt": asked["content"], "completion": said["content"]} for asked, said in turns]
    rows = [names["taught"](row, teacher, tokenizer, k=NUM_TOP) for row in plain]
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_the_quickstart_learns_from_a_teacher(tmp_path: Path) -> None:
    words = ("train.steps=24", "output.eval_every=24", "report.samples=0")
    recipe = shipped_recipe("quickstart")
    assert run("finetune", recipe, f"output.dir={tmp_path / 'teacher'}", *words) == 0
    base = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model")
    teacher = PeftModel.from_pretrained(base, tmp_path / "teacher" / "adapter").eval()
    student = yaml.safe_load(Path(recipe).read_text())
    student["objective"] = {"method": "distill"}
    student["model"]["path"] = str(QUICKSTART / "model")
    student["data"] = {
        "path": str(taught(tmp_path, "train", NUM_ROWS, teacher)),
        "eval_path": str(taught(tmp_path, "heldout", NUM_HELD_OUT, teacher)),
    }
    del student["report"]
    file = tmp_path / "student.yaml"
    file.write_text(yaml.safe_dump(student))
    assert run("finetune", file, f"output.dir={tmp_path / 'student'}", *words[:2]) == 0
    found = json.loads((tmp_path / "student" / "report.json").read_text())["held_out"]
    before, after = found["before"], found["after"]
    assert after["eval_kl"] < 0.3 * before["eval_kl"]
    assert after["eval_top_1_agreement"] > before["eval_top_1_agreement"] + 0.2
    assert after["eval_teacher_top_k_mass"] == before["eval_teacher_top_k_mass"] > 0.9


# -------------------------------------------------------------------------------------- router loss


def first_loss(run_dir: Path) -> float:
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    loss: float = row["loss"]
    return loss


@pytest.mark.slow
def test_a_recipes_router_loss_is_trained_on_and_planned_for(
    tmp_path: Path, write_recipe, machine_file
) -> None:
    recipe = write_recipe(train={"steps": 1}, data={"eval_frac": None})
    found, terms = {}, {}
    for coefficient in ("null", "0", "0.5"):
        run_dir = tmp_path / coefficient
        settings = (f"train.router_loss_coef={coefficient}", f"output.dir={run_dir}")
        assert run("finetune", recipe, "--machine", machine_file, *settings) == 0
        found[coefficient] = first_loss(run_dir)
        terms[coefficient] = (run_dir / "predicted.json").read_text()
    assert found["null"] == found["0"]
    # f and p sum to top_k and 1, so the loss is about 2 where 2 of 4 experts are taken alike
    assert found["0.5"] - found["0"] == pytest.approx(0.5 * 2, rel=0.2)
    assert "a layer's router loss" in terms["0.5"]
    assert "router" not in terms["0"].replace("router_loss_", "").replace('"router', "")


def test_a_router_loss_of_another_kind_is_refused_before_anything_is_read(
    tmp_path: Path, write_recipe, machine_file, capsys
) -> None:
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "vocab_size": 64,
        "max_position_embeddings": 128,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    tiny_tokenizer().save_pretrained(tmp_path)
    recipe = write_recipe(
        model={"path": None, "config": str(file), "init": "random", "tokenizer": str(tmp_path)},
        train={"router_loss_coef": 0.01},
    )
    assert run("finetune", recipe, "--machine", machine_file) == 1
    error = capsys.readouterr().err
    assert "the router loss is on, and DeepseekV3ForCausalLM has no" in error
