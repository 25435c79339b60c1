"""The router loss that a recipe asks for, from the command line."""

import json
from pathlib import Path

import pytest

from tests.e2e.runs import run


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


def test_a_router_loss_is_refused_where_there_is_no_router(write_recipe, capsys) -> None:
    recipe = write_recipe(
        model={"path": None, "config": "qwen3-0.6b", "init": "random"}, adapter={"experts": False}
    )
    settings = ("train.router_loss_coef=0.01", "data.eval_frac=null")
    assert run("plan", recipe, "--machine", "rtx4090", *settings) == 1
    error = capsys.readouterr().err
    assert "train.router_loss_coef: 0.01, but a qwen3 model has no router" in error
    assert "hint: `train.router_loss_coef: null`" in error


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
    recipe = write_recipe(
        model={"path": None, "config": str(file), "init": "random", "tokenizer": "absent"},
        train={"router_loss_coef": 0.01},
    )
    assert run("finetune", recipe, "--machine", machine_file) == 1
    error = capsys.readouterr().err
    assert "the router loss is on, and DeepseekV3ForCausalLM has no" in error
