"""What a recipe's adapter section can ask for, from the command line to plain peft."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import offload
from finetune.adapter.lora import load_adapter
from tests.checkpoints import loaded
from tests.e2e.runs import run

# peft looks for patterns among modules only, and says that those of experts fit nothing
pytestmark = pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
EVERYTHING = {
    "rank_pattern": {"q_proj": 2, "experts.down_proj": 3},
    "alpha_pattern": {"q_proj": 3.0},
    "rslora": True,
    "loraplus_ratio": 4,
    "modules_to_save": ["norms", "router", "lm_head", "embed_tokens"],
}
DORA = {"dora": True, "experts": False, "modules_to_save": ["o_proj"]}
INPUT_IDS = torch.arange(5, 25).view(2, 10)


def plain_logits(model_dir: Path, adapter: Path | None) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=INPUT_IDS).logits
    return logits


def streamed_logits(model_dir: Path, adapter: Path) -> torch.Tensor:
    """Return what `sluice generate` computes: layers in the slab, the adapter on top."""
    base = loaded(model_dir)
    model = load_adapter(base.model, adapter).eval()
    engine = offload.attach(model, num_slots=2, device="cpu", backing=base.backing)
    logits = engine.forward({"input_ids": INPUT_IDS}).logits
    engine.close()
    assert logits is not None
    return logits


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(EVERYTHING, marks=pytest.mark.slow),
        pytest.param(DORA, marks=pytest.mark.slow),
    ],
    ids=["everything", "DoRA"],
)
def test_options_train_resume_to_the_bit_and_load_in_plain_peft(
    options: dict[str, Any], tmp_path: Path, write_recipe, machine_file, model_dir, capsys
) -> None:
    recipe = write_recipe(
        adapter=options,
        train={"steps": 2},
        output={"checkpoint_every": 1},
        data={"eval_frac": None},
    )
    run_dir, words = tmp_path / "run", ("--machine", machine_file)
    assert run("finetune", recipe, *words) == 0
    assert (
        "DoRA rank 4" if options is DORA else "rank 4 (experts.down_proj 3, q_proj 2) on q_proj"
    ) in capsys.readouterr().out
    whole = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    logits = plain_logits(model_dir, run_dir / "adapter")
    assert not torch.allclose(logits, plain_logits(model_dir, None), atol=1e-4)
    assert torch.allclose(streamed_logits(model_dir, run_dir / "adapter"), logits, atol=1e-6)

    predicted = json.loads((run_dir / "predicted.json").read_text())
    checkpoint = run_dir / "checkpoints" / "step-0000002"
    trained = load_file(checkpoint / "trained.safetensors")
    counts = predicted["before measuring"]["model"]
    planned = counts["num_adapter_parameters"] + counts["num_module_parameters"]
    assert planned == sum(tensor.numel() for tensor in trained.values())

    shutil.rmtree(checkpoint)
    shutil.rmtree(run_dir / "adapter")
    assert run("finetune", recipe, *words, "--resume") == 0
    resumed = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert run("generate", run_dir, "--prompt", "what follows 3", "--max-new-tokens", "2") == 0
    same = went_on(run_dir, recipe, machine_file, tmp_path / "next", "train.lr=1e-12")
    assert same.keys() == whole.keys()
    assert all(torch.allclose(same[name], whole[name], rtol=0, atol=1e-9) for name in whole)


def went_on(
    source: Path, recipe: Path, machine_file: Path, folder: Path, *settings: str
) -> dict[str, torch.Tensor]:
    """Return the adapter of a run that went on from another's, which trained it further."""
    words = ("--machine", machine_file, f"adapter.init_from={source}", f"output.dir={folder}")
    assert run("finetune", recipe, *words, *settings) == 0
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.mark.slow
def test_a_run_goes_on_from_an_adapter(
    finished: Path, tmp_path: Path, write_recipe, machine_file, capsys
) -> None:
    before = load_file(finished / "adapter" / "adapter_model.safetensors")
    recipe = write_recipe(train={"steps": 1, "lr": 1e-12}, output={"eval_every": None})
    config = finished / "adapter" / "adapter_config.json"
    other = json.loads(config.read_text()) | {"base_model_name_or_path": "another/model"}
    config.write_text(json.dumps(other))
    same = went_on(finished / "adapter", recipe, machine_file, tmp_path / "a")
    shown = " ".join(capsys.readouterr().out.split())
    assert "was trained on another/model, and this run trains one on" in shown
    assert same.keys() == before.keys()
    assert all(torch.allclose(same[name], before[name], rtol=0, atol=1e-9) for name in before)


def test_a_run_goes_on_from_an_adapter_that_is_there(write_recipe, capsys) -> None:
    assert run("finetune", write_recipe(), "adapter.init_from=runs/nothing/at/all") == 1
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("adapter.alpha=7", "lora_alpha is 8"),
        ("adapter.rslora=true", "use_rslora is False"),
        ("adapter.alpha_pattern={q_proj: 3}", "alpha_pattern is {}"),
        ("adapter.rank=3", "it has shape (3, 32) here"),
        ("adapter.experts=false", "holds, and the model has no place for,"),
    ],
)
def test_a_run_goes_on_from_an_adapter_of_its_kind(
    setting: str, text: str, finished: Path, tmp_path: Path, write_recipe, machine_file, capsys
) -> None:
    words = ("--machine", machine_file, f"adapter.init_from={finished}", setting)
    assert run("finetune", write_recipe(), *words, f"output.dir={tmp_path / 'c'}") == 1
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_norms_and_routers_move_and_are_saved_under_their_own_names(
    tmp_path: Path, write_recipe, machine_file, model_dir
) -> None:
    recipe = write_recipe(adapter={"modules_to_save": ["norms", "router"]}, train={"steps": 1})
    assert run("finetune", recipe, "--machine", machine_file) == 0
    saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict()
    whole = {name: t for name, t in saved.items() if "lora_" not in name}
    parts = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    assert set(whole) == {
        f"base_model.model.model.{name}.weight"
        for name in ("norm", *(f"layers.{i}.{p}" for i in range(4) for p in (*parts, "mlp.gate")))
    }
    for name, tensor in whole.items():
        assert not torch.equal(tensor, base[name.removeprefix("base_model.model.")]), name


@pytest.mark.thorough
def test_an_adapter_is_written_for_vllm(finished: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "vllm"
    assert run("adapter", finished, "--format", "vllm", "--out", out) == 0
    assert f"{out}\nvLLM: `vllm serve " in capsys.readouterr().out
    names = set(load_file(out / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.3.mlp.experts.3.up_proj.lora_B.weight" in names
    assert run("adapter", finished, "--format", "gguf", "--out", tmp_path / "x") == 1
    assert "--format gguf; an adapter is written for vllm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["adapter.modules_to_save=[gate]"], "adapter.modules_to_save names 'gate'"),
        (["adapter.rank_pattern={k: 3}"], "adapter.rank_pattern names 'k', which has no adapter"),
        (["adapter.dora=true"], "adapter.dora is true and adapter.experts is true"),
    ],
)
def test_what_can_have_no_effect_is_refused_before_anything_is_loaded(
    settings: list[str], text: str, tmp_path: Path, write_recipe, machine_file, capsys
) -> None:
    assert run("finetune", write_recipe(), "--machine", machine_file, *settings) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
