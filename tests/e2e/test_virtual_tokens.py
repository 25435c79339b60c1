"""Prompt tuning, p-tuning and prefix tuning against plain transformers and peft."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from tests.doubles import tiny_tokenizer
from tests.e2e.plain_heads import cosine
from tests.e2e.runs import adapter, losses, run

LR, SEED, NUM_STEPS, NUM = 0.05, 3, 4, 7
SEQ_LEN, NUM_ROWS = 64, 5  # the last of which is short
CONFIGS: dict[str, Any] = {
    "prompt": PromptTuningConfig,
    "p_tuning": PromptEncoderConfig,
    "prefix": PrefixTuningConfig,
    "prefix_mlp": partial(PrefixTuningConfig, prefix_projection=True),
}
SHOWN = {
    "prompt": f"prompt tuning, {NUM} virtual tokens in front of each row: ",
    "p_tuning": f"p-tuning, {NUM} virtual tokens in front of each row: ",
    "prefix": f"prefix tuning, {NUM} keys and values in front of each layer's: ",
}
SHOWN["prefix_mlp"] = SHOWN["prefix"]
ROWS = [{"text": f"what follows {n}{'!' * (n % 5)} is {n + 1}"} for n in range(12)]
UNUSED: dict[str, Any] = {"rank": 16, "alpha": 32.0, "targets": "all-linear", "experts": False}


def dense_dir(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer()
    torch.manual_seed(1)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    config = Qwen3Config(**shape, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def plain_run(base: Path, method: str) -> tuple[list[float], Any, list[torch.Tensor]]:
    """Train on all rows in each step, one at a time, by transformers and peft alone."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(SEED)
    model = get_peft_model(model, CONFIGS[method](num_virtual_tokens=NUM, task_type="CAUSAL_LM"))
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0)
    texts = [[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id] for row in ROWS]
    joined = torch.tensor([[token for ids in texts for token in ids]])  # documents, as one
    rows = list(joined.split(SEQ_LEN, dim=1))
    assert len(rows) == NUM_ROWS
    is_in_layers = method.startswith("prefix")
    nums = [row.shape[1] - is_in_layers for row in rows]  # else the first token is predicted too
    found = []
    for step in range(NUM_STEPS):
        losses_ = [
            model(input_ids=r, labels=r).loss * n / sum(nums)
            for r, n in zip(rows, nums, strict=True)
        ]
        loss = torch.stack(losses_).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.param_groups[0]["lr"] = LR * cosine(step, NUM_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, model.eval(), rows


def text_recipe(write_recipe: Any, tmp_path: Path, base: Path, method: str) -> Path:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    recipe: Path = write_recipe(
        model={"path": str(base)},
        adapter={**UNUSED, "method": method, "num_virtual_tokens": NUM},
        data={"path": str(file), "format": "text", "eval_frac": None} | {"columns": {}},
        train={"steps": NUM_STEPS, "lr": LR, "seed": SEED, "micro_batch_size": NUM_ROWS}
        | {"grad_accum_steps": 1, "seq_len": SEQ_LEN},
        report={"samples": 0},
        output={"eval_every": None, "checkpoint_every": 2},
    )
    return recipe


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("dense", "prompt"),
        ("mixture", "p_tuning"),
        ("dense", "prefix"),
        pytest.param("mixture", "prefix", marks=pytest.mark.slow),
        pytest.param("dense", "prefix_mlp", marks=pytest.mark.slow),
        pytest.param("dense", "p_tuning", marks=pytest.mark.slow),
        pytest.param("mixture", "prompt", marks=pytest.mark.slow),
    ],
)
def test_reorder_virtual_tokens_learn_as_in_plain_peft(
    family, method, tmp_path, model_dir, write_recipe, machine_file, capsys
) -> None:
    base, run_dir = dense_dir(tmp_path) if family == "dense" else model_dir, tmp_path / "run"
    recipe = text_recipe(write_recipe, tmp_path, base, method)
    assert run("finetune", recipe, "--machine", machine_file) == 0
    expected, plain, rows = plain_run(base, method)
    num = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{SHOWN[method]}{num:,} trained" in shown
    assert losses(run_dir) == pytest.approx(expected, rel=2e-5)
    assert expected[-1] < expected[0]
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(whole, str(run_dir / "adapter")).eval()
    with torch.no_grad():
        for row in rows[-2:]:
            torch.testing.assert_close(
                loaded(input_ids=row).logits, plain(input_ids=row).logits, rtol=1e-3, atol=1e-3
            )


@pytest.mark.slow
def test_move_a_run_goes_on_to_the_bit_and_other_commands_refuse_its_adapter(
    tmp_path, model_dir, write_recipe, machine_file, capsys
) -> None:
    recipe = text_recipe(write_recipe, tmp_path, model_dir, "p_tuning")
    words, run_dir = ("finetune", recipe, "--machine", machine_file), tmp_path / "run"
    assert run(*words) == 0
    whole = losses(run_dir), adapter(run_dir)
    shutil.rmtree(run_dir / "adapter")
    shutil.rmtree(max(run_dir.glob("checkpoints/*")))
    assert run(*words, "--resume") == 0
    ours = losses(run_dir), adapter(run_dir)
    assert ours[0] == whole[0]
    assert all(torch.equal(ours[1][name], tensor) for name, tensor in whole[1].items())
    capsys.readouterr()
    for command in (
        ("merge", run_dir, "--out", tmp_path / "merged"),
        ("generate", run_dir, "--prompt", "what"),
    ):
        assert run(*command) != 0
        assert "P_TUNING" in capsys.readouterr().err
