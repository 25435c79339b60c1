"""What a checkpoint holds against what the model needs: each difference is named, or known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.errors import ModelError
from tests.checkpoints import Pack, assert_same_model, load, pack_fp8, write_checkpoint
from tests.tiers import diagonal, mostly_slow

Tier = Literal["ram", "disk"]
Tensors = dict[str, torch.Tensor]

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
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
}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def add_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change what the one shard holds."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def add_layer(tensors: Tensors, *, number: int) -> None:
    """Add a layer behind the last one, as the last is, with what such a layer has besides."""
    last = {name: t for name, t in tensors.items() if ".layers.2." in name}
    tensors |= {name.replace(".2.", f".{number}.", 1): t.clone() for name, t in last.items()}
    tensors[f"model.layers.{number}.eh_proj.weight"] = torch.ones(32, 64)
    tensors[f"model.layers.{number}.shared_head.norm.weight"] = torch.ones(32)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "is_quantised", "tier"),
    diagonal(["deepseek_v3", "glm4_moe"], [False, True], ["ram", "disk"]),
)
def test_layers_that_predict_further_tokens_are_left_out(
    kind: str, is_quantised: bool, tier: Tier, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(kind, **SHAPE, num_nextn_predict_layers=1)
    pack: Pack = pack_fp8(rows=16, columns=16) if is_quantised else lambda name, t: {name: t}
    quantization = FP8 if is_quantised else None
    for folder in ("with", "without"):
        write_checkpoint(tmp_path / folder, config, pack=pack, quantization=quantization)
    add_tensors(tmp_path / "with", lambda t: add_layer(t, number=3))
    found, expected = load(tmp_path / "with", tier), load(tmp_path / "without", tier)
    found.name_or_path = found.config.name_or_path = expected.name_or_path
    assert_same_model(found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "num_further"), [(3, 0), (4, 1)])
def test_other_layers_that_the_config_does_not_know_are_named(
    number: int, num_further: int, tmp_path: Path
) -> None:
    config = AutoConfig.for_model("glm4_moe", **SHAPE, num_nextn_predict_layers=num_further)
    write_checkpoint(tmp_path, config)
    add_tensors(tmp_path, lambda t: add_layer(t, number=number))
    with pytest.raises(ModelError, match=rf"unknown to the model, \d+ .*layers\.{number}\."):
        load(tmp_path, "ram")


@pytest.mark.thorough
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_what_older_checkpoints_hold_besides_weights_is_let_be(tier: Tier, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, AutoConfig.for_model("llama", **SHAPE))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    add_tensors(
        tmp_path,
        lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    assert_same_model(load(tmp_path, tier), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_head_that_is_tied_and_published_all_the_same_is_one_tensor(
    tier: Tier, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, AutoConfig.for_model("llama", **SHAPE, tie_word_embeddings=True))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    embedding = expected.model.embed_tokens.weight.detach()
    add_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    found = load(tmp_path, tier)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert_same_model(found, expected)


def rename(tensors: Tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


def drop(tensors: Tensors, part: str, *, of: str = "") -> None:
    for name in [name for name in tensors if part in name and of in name]:
        del tensors[name]


@pytest.mark.parametrize("is_quantised", mostly_slow([False, True], True))
@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        (lambda t: drop(t, "layers.1.mlp.experts.2.up_proj"), "2.up_proj"),
        (lambda t: drop(t, "layers.1.mlp.experts.3.up_proj"), "3.up_proj"),
        (lambda t: rename(t, "layers.1.mlp.experts.2.", "layers.1.mlp.experts.4."), "2.down_proj"),
        (lambda t: rename(t, "layers.1.mlp.experts.0.", "layers.1.mlp.experts.7."), "0.down_proj"),
    ],
)
def test_one_expert_that_is_missing_is_named(
    change: Callable[[Tensors], object], lacking: str, is_quantised: bool, tmp_path: Path
) -> None:
    """With the names changed transformers would stack as many experts as the config says."""
    pack: Pack = pack_fp8(rows=16, columns=16) if is_quantised else lambda name, t: {name: t}
    config = AutoConfig.for_model("glm4_moe", **SHAPE)
    write_checkpoint(tmp_path, config, pack=pack, quantization=FP8 if is_quantised else None)
    add_tensors(tmp_path, change)
    with pytest.raises(ModelError, match=rf"lacks \d tensors, such as .*\.experts\.{lacking}"):
        load(tmp_path, "ram")


def test_a_projection_that_all_experts_lack_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, AutoConfig.for_model("glm4_moe", **SHAPE))
    add_tensors(
        tmp_path,
        lambda t: drop(t, ".gate_proj.weight", of=".layers.1.mlp.experts."),
    )
    with pytest.raises(ModelError, match=r"lacks 4 tensors, such as .*experts\.0\.gate_proj"):
        load(tmp_path, "ram")


def test_the_last_experts_that_are_missing_are_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, AutoConfig.for_model("glm4_moe", **SHAPE))
    add_tensors(tmp_path, lambda t: drop(t, ".layers.1.mlp.experts.3."))
    with pytest.raises(
        ModelError, match=r"in other sizes .* 2 tensors, .*layers\.1\..*\.down_proj"
    ):
        load(tmp_path, "ram")


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_shard_that_the_index_names_and_is_not_there_is_named(tier: Tier, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, AutoConfig.for_model("llama", **SHAPE), shard_bytes=20_000)
    name = sorted(file.name for file in tmp_path.glob("*.safetensors"))[1]
    (tmp_path / name).unlink()
    with pytest.raises(ModelError, match=rf"has no {name}; a model holds"):
        load(tmp_path, tier)
