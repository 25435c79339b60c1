"""Runs on bases that are published quantised, and on plain bases of the same values."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from finetune.model.checkpoint import load_published
from tests.checkpoints import pack_mxfp4, write_checkpoint
from tests.doubles import tiny_tokenizer
from tests.e2e.runs import losses, run, same_adapter
from tests.quantised import FORMS, write_both
from tests.tiers import mostly_slow

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="session")
def bfloat16_file(machine_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the rates of this machine's CPU as if they were those of bfloat16."""
    file = tmp_path_factory.mktemp("machine") / "bfloat16.json"
    file.write_text(json.dumps(json.loads(machine_file.read_text()) | {"dtype": "bfloat16"}))
    return file


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


STEPS = {"steps": 20, "warmup_steps": 0, "lr": 2e-3}


@pytest.mark.thorough
@pytest.mark.parametrize("form", mostly_slow(list(FORMS), "fp8 per tensor", "nvfp4", "int4"))
def test_a_base_in_its_published_form_trains_as_the_plain_one_to_the_bit(
    form: str, tmp_path: Path, write_recipe: Callable[..., Path], bfloat16_file: Path
) -> None:
    config = AutoConfig.for_model("qwen3", **SHAPE, vocab_size=len(tiny_tokenizer()))
    for base in write_both(tmp_path, config, FORMS[form]):
        tiny_tokenizer().save_pretrained(base)
        recipe = write_recipe(
            model={"path": str(base), "dtype": "bfloat16"},
            adapter={"experts": False, "targets": "all-linear"},
            train=STEPS,
            offload={"num_slots": 2},
            output={"dir": str(tmp_path / f"run {base.name}")},
        )
        assert run("finetune", recipe, "--machine", bfloat16_file) == 0
    ours, theirs = tmp_path / "run packed", tmp_path / "run plain"
    assert len(losses(ours)) == 20
    assert losses(ours) == losses(theirs)
    assert same_adapter(ours, theirs)
    method = FORMS[form].quantization["quant_method"]
    assert f"The base is published in {method}." in (ours / "adapter/README.md").read_text()
    assert "The base is published in" not in (theirs / "adapter/README.md").read_text()


KEPT = {
    **dict.fromkeys(("nvfp4", "modelopt", "mxfp4", "nvfp4 and plain attention"), "nvfp4"),
    **dict.fromkeys(("int4", "int4 with zeros", "awq", "gptq in order"), "int4"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("form", mostly_slow(list(KEPT), "nvfp4 and plain attention", "awq"))
def test_weights_kept_as_published_train_as_their_dequantised_twins_to_the_bit(
    form: str,
    tmp_path: Path,
    cache: Path,
    write_recipe: Callable[..., Path],
    bfloat16_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    is_moe = form not in ("modelopt", "int4 with zeros", "awq")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    shape = SHAPE | (experts if is_moe else {}) | {"vocab_size": len(tiny_tokenizer())}
    config = AutoConfig.for_model("qwen3_moe" if is_moe else "qwen3", **shape)
    codec = KEPT[form]
    for base in write_both(tmp_path, config, FORMS[form]):
        tiny_tokenizer().save_pretrained(base)
        recipe = write_recipe(
            model={"path": str(base), "dtype": "bfloat16"},
            adapter={"experts": is_moe, "targets": "all-linear"},
            train=STEPS,
            offload={"num_slots": 2, "codec": codec if base.name == "packed" else "native"},
            output={"dir": str(tmp_path / f"run {base.name}")},
        )
        assert run("finetune", recipe, "--machine", bfloat16_file) == 0
    ours, theirs = tmp_path / "run packed", tmp_path / "run plain"
    assert len(losses(ours)) == 20
    assert losses(ours) == losses(theirs)
    assert same_adapter(ours, theirs)
    (store,) = cache.rglob(f"*-{codec}-*.store")
    plain_bytes = weight_bytes(tmp_path / "plain")
    num_kept = 3 * 3 * 64 * 96 * (4 if is_moe else 1)  # of MLPs
    saved_bytes = plain_bytes - store.stat().st_size  # less what fills pages
    assert saved_bytes > (1.2 if is_moe else 0.9) * num_kept  # 0.6 bytes, not 2
    is_written = "attention" in form or form in ("nvfp4", "modelopt", "mxfp4", "int4")
    merged = tmp_path / "merged"
    assert run("merge", ours, "--out", merged, "--as-published") == int(not is_written)
    said = " ".join("".join(capsys.readouterr()).split())
    method = FORMS[form].quantization["quant_method"]
    if not is_written:
        assert f"the base is published in {method}" in said
        assert "without `--as-published` the merged model is written in full" in said
        return
    errors = json.loads((merged / "quantisation_errors.json").read_text())
    worst, error = next(iter(errors.items()))
    assert f"is written in {method} again" in said
    assert f"at worst {worst} by {100 * error:.2g} %; quantisation_errors.json has all" in said
    assert f"weights in {method} again" in (merged / "README.md").read_text()
    weights = (weight_bytes(tmp_path / name) for name in ("merged", "packed"))
    assert next(weights) < 1.05 * next(weights)
    load_published(str(merged), "bfloat16")


@pytest.mark.thorough
def test_experts_kept_in_mxfp4_train_as_their_dequantised_twin_to_the_bit(
    tmp_path: Path,
    cache: Path,
    write_recipe: Callable[..., Path],
    bfloat16_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
    tokenizer = tiny_tokenizer()
    config = AutoConfig.for_model("gpt_oss", **SHAPE | experts, vocab_size=len(tokenizer))
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    write_checkpoint(packed, config, pack=pack_mxfp4, quantization=quantization)
    AutoModelForCausalLM.from_pretrained(
        packed, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).save_pretrained(plain)
    for base, codec in ((packed, "mxfp4"), (plain, "native"), (plain, "mxfp4")):
        tokenizer.save_pretrained(base)
        recipe = write_recipe(
            model={"path": str(base), "dtype": "bfloat16"},
            adapter={"experts": True, "targets": "all-linear"},
            train=STEPS,
            offload={"num_slots": 2, "codec": codec},
            output={"dir": str(tmp_path / f"{base.name} {codec}")},
        )
        refused = (base, codec) == (plain, "mxfp4")
        assert run("finetune", recipe, "--machine", bfloat16_file) == int(refused)
    ours, theirs = tmp_path / "packed mxfp4", tmp_path / "plain native"
    assert len(losses(ours)) == 20
    assert losses(ours) == losses(theirs)
    assert same_adapter(ours, theirs)
    (store,) = cache.rglob("*-mxfp4-*.store")
    plain_bytes = weight_bytes(plain)
    num_expert_weights = 3 * 4 * 3 * 64 * 96
    assert plain_bytes - store.stat().st_size > 1.3 * num_expert_weights  # 0.53 bytes, not 2
    assert run("generate", ours, "--prompt", "what follows 3") == 0
    assert run("merge", ours, "--out", tmp_path / "merged") == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "The base is published in mxfp4: " in said
    assert "the merged model is written in bfloat16" in said
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
