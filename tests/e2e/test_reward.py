"""Reward runs by the command line: plain transformers and peft give the rewards of the trainer."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    Qwen3Config,
)

from tests.doubles import tiny_tokenizer
from tests.e2e.rewarding import MARGIN, PAIRS, WEIGHT, reward_recipe, write
from tests.e2e.runs import rows_of, run
from tests.e2e.sweeps import assert_same_bits

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
        for row in PAIRS[-4:]
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
    rows = write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    clone = tmp_path / "llama.cpp"
    clone.mkdir()
    (clone / "convert_hf_to_gguf.py").write_text("")
    for words, what in (
        (("merge", rewarding, "--out", tmp_path / "out"), "is not merged"),
        (
            ("export", rewarding, "--gguf", tmp_path / "out", "--llama-cpp", clone),
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
