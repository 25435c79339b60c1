"""A merged model is the adapter's model in plain transformers; all else is as it was published."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    GptOssConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from finetune.export import merge as merge_module
from finetune.export.adapter_delta import Changes
from finetune.export.merge import BaseWeights, merge
from finetune.export.safetensors_writer import new_shards
from finetune.files.shards import INDEX
from finetune.files.tensors import Spec
from finetune.model.checkpoint import load_published
from finetune.model.empty import empty_published
from tests.checkpoints import Pack, pack_bnb_4bit, pack_fp8, pack_mxfp4, write_checkpoint
from tests.doubles import tiny_tokenizer
from tests.tiers import mostly_slow
from tests.unit.finetune.export.adapted import (
    EXPERTS,
    MODELS,
    SHAPE,
    edit,
    load,
    logits,
    publish,
    rel,
    train,
    with_adapter,
)

ROOT = Path(__file__).parents[4]
QUICKSTART = ROOT / "recipes" / "quickstart" / "model"


# ----------------------------------------------------------------------------------- the same model


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "gpt_oss", "qwen3, tied"))
def test_merged_in_float32_it_gives_the_adapter_model_s_logits(name: str, tmp_path: Path) -> None:
    base = publish(MODELS[name](), tmp_path / "base", torch.float32)
    adapter = train(base, tmp_path / "adapter")
    merged = merge(base, adapter, tmp_path / "out")
    wanted = logits(with_adapter(base, adapter))
    assert rel(logits(load(base)), wanted) > 0.1  # the adapter does something
    assert rel(logits(load(tmp_path / "out")), wanted) < 1e-5
    assert merged.notes == ()


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "gpt_oss", "qwen3, tied"))
def test_each_weight_is_rounded_once_and_others_keep_their_bits(name: str, tmp_path: Path) -> None:
    base = publish(MODELS[name](), tmp_path / "base", torch.bfloat16)
    adapter = train(base, tmp_path / "adapter")
    merged = merge(base, adapter, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = with_adapter(base, adapter).merge_and_unload().state_dict()
    plain, found = load(base).state_dict(), load(tmp_path / "out").state_dict()
    changed = {key for key in plain if not torch.equal(plain[key], exact[key])}
    assert changed
    for key, values in found.items():
        error = (values - exact[key]).abs()
        assert (error <= 2**-8 * exact[key].abs() * 1.001 + 1e-8).all(), key
    before, after = BaseWeights(base), BaseWeights(tmp_path / "out")
    assert before.specs.keys() == after.specs.keys()
    for key in before.specs:
        is_expert = ".experts." in key and not key.endswith("_bias")
        is_changed = is_expert or not changed.isdisjoint((key, f"transformer.{key}"))
        assert is_changed is (key in merged.changed), key
        assert is_changed or b"".join(before.raw(key)) == b"".join(after.raw(key)), key
    truth = logits(with_adapter(base, adapter))
    plain_error = rel(logits(with_adapter(base, adapter, torch.bfloat16)), truth)
    assert rel(logits(load(tmp_path / "out", torch.bfloat16)), truth) < 2 * plain_error


@pytest.mark.thorough
def test_pieces_of_experts_make_up_the_whole(tmp_path: Path, monkeypatch) -> None:
    base = publish(MODELS["qwen3_moe"](), tmp_path / "base", torch.bfloat16)
    fused = publish(
        MODELS["qwen3_moe"](), tmp_path / "fused", torch.bfloat16, save_original_format=False
    )
    assert any("experts.4.up_proj" in key for key in BaseWeights(base).specs)
    assert not any("experts.4." in key for key in BaseWeights(fused).specs)
    adapter = train(base, tmp_path / "adapter")
    merge(base, adapter, tmp_path / "whole")
    monkeypatch.setattr(merge_module, "PIECE_ELEMENTS", 2 * 3 * 24 * 32)  # 2 of 5 experts
    merge(base, adapter, tmp_path / "pieces")
    merge(fused, adapter, tmp_path / "fused pieces")
    whole = load(tmp_path / "whole").state_dict()
    for folder in ("pieces", "fused pieces"):
        for key, values in load(tmp_path / folder).state_dict().items():
            assert torch.equal(values, whole[key]), (folder, key)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}},
        {"layers_to_transform": [1]},
        {"modules_to_save": ["norm", "q_norm"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_parameters": ["self_attn.q_proj.weight"], "target_modules": ["v_proj"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=lambda settings: ", ".join(settings),
)
@pytest.mark.parametrize("name", mostly_slow(["qwen3", "qwen3, tied"], "qwen3, tied"))
def test_what_peft_offers_is_merged(name: str, settings: dict, tmp_path: Path) -> None:
    base = publish(MODELS[name](), tmp_path / "base", torch.float32)
    adapter = train(base, tmp_path / "adapter", **settings)
    merged = merge(base, adapter, tmp_path / "out")
    found = load(tmp_path / "out")
    assert rel(logits(found), logits(with_adapter(base, adapter))) < 1e-5
    is_torn = name == "qwen3, tied" and (
        settings.get("modules_to_save") == ["lm_head"] or "embed_tokens" in str(settings)
    )
    is_torn &= not settings.get("ensure_weight_tying", False)
    assert found.config.tie_word_embeddings is (name == "qwen3, tied" and not is_torn)
    assert [("has its own now" in note) for note in merged.notes] == [True] * is_torn


def test_an_adapter_in_bfloat16_is_added_in_float32_as_often_as_asked(tmp_path: Path) -> None:
    base = publish(MODELS["qwen3_moe"](), tmp_path / "base", torch.float32)
    adapter = train(base, tmp_path / "adapter", target_modules=["q_proj"])
    edit(
        adapter / "adapter_model.safetensors",
        lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}),
    )
    changes = Changes(empty_published(str(base), torch.float32).model, adapter)
    exact: Any = with_adapter(base, adapter).merge_and_unload()
    plain = dict(load(base).named_parameters())
    assert len(changes.names) == 6
    for name in changes.names:
        for _ in range(2):
            merged = changes.merged(name, plain[name].detach().clone())
            assert rel(merged, exact.get_parameter(name)) < 1e-6, name


def test_a_router_that_is_saved_whole_is_merged(tmp_path: Path) -> None:
    base = publish(MODELS["qwen3_moe"](), tmp_path / "base", torch.float32)
    adapter = train(base, tmp_path / "adapter", modules_to_save=["gate"])
    merge(base, adapter, tmp_path / "out")
    wanted = logits(with_adapter(base, adapter))
    assert rel(logits(load(tmp_path / "out")), wanted) < 1e-5


@pytest.mark.thorough
def test_the_quickstart_merged_answers_as_with_its_adapter(tmp_path: Path) -> None:
    adapter = train(QUICKSTART, tmp_path / "adapter")
    merge(QUICKSTART, adapter, tmp_path / "out")
    truth = logits(with_adapter(QUICKSTART, adapter))
    plain_error = rel(logits(with_adapter(QUICKSTART, adapter, torch.bfloat16)), truth)
    merged = load(tmp_path / "out", torch.bfloat16)
    assert rel(logits(merged), truth) < 2 * plain_error
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(QUICKSTART).chat_template
    asked: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer: Any = merged.generate(**asked, max_new_tokens=4)  # type: ignore[operator]  # a method
    assert answer.shape[1] > asked["input_ids"].shape[1]
    assert merged.generation_config.eos_token_id == 258


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "pack", "quantization"),
    [
        (
            Qwen3Config(**SHAPE),
            pack_bnb_4bit(quant_type="nf4", has_double_quantisation=True),
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        ),
        (
            GptOssConfig(**SHAPE | {"intermediate_size": 64}, **EXPERTS, sliding_window=8),
            pack_mxfp4,
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        ),
        (
            Qwen3MoeConfig(**SHAPE, **EXPERTS, moe_intermediate_size=24),
            pack_fp8(rows=32, columns=16),
            {"quant_method": "fp8", "weight_block_size": [32, 16]},
        ),
    ],
    ids=["bitsandbytes", "mxfp4", "fp8"],
)
def test_a_quantised_base_is_decoded_as_for_training(
    config: Any, pack: Pack, quantization: dict[str, Any], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    write_checkpoint(base, config, pack=pack, quantization=quantization, shard_bytes=20_000)
    loaded = load_published(str(base), "bfloat16").eval()
    loaded.save_pretrained(tmp_path / "plain")
    plain = dict(loaded.named_parameters())
    adapter = train(tmp_path / "plain", tmp_path / "adapter")
    merged = merge(base, adapter, tmp_path / "out")
    assert "its weights were decoded as for training" in merged.notes[0]
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    with_peft = with_adapter(tmp_path / "plain", adapter)
    assert rel(logits(load(tmp_path / "plain")), logits(with_peft)) > 0.1
    exact: Any = with_peft.merge_and_unload()
    for name, parameter in load(tmp_path / "out", torch.bfloat16).named_parameters():
        wanted = exact.get_parameter(name)
        if torch.equal(wanted, plain[name]):
            assert torch.equal(parameter, plain[name]), name
        assert ((parameter - wanted).abs() <= 2**-8 * wanted.abs() * 1.001 + 1e-8).all(), name


def test_a_tensor_that_the_model_has_no_place_for_is_copied(qwen3: SimpleNamespace) -> None:
    file = next(iter(sorted(qwen3.base.glob("model-*.safetensors"))))
    odd = {
        "visual.patch": torch.randn(3).to(torch.float8_e4m3fn),
        "visual.wide": torch.tensor([2.0**60], dtype=torch.float64),
        "visual.scalar": torch.tensor(7),
        "visual.empty": torch.empty(0, 4),
    }
    save_file({**load_file(file), **odd}, file, metadata={"format": "pt"})
    merge(qwen3.base, qwen3.adapter, qwen3.out)
    before, after = BaseWeights(qwen3.base), BaseWeights(qwen3.out)
    for name in odd:
        assert before.specs[name] == after.specs[name]
        assert b"".join(before.raw(name)) == b"".join(after.raw(name))


def test_shards_are_as_the_library_writes_them(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.randn(n + 1, 3).to(torch.bfloat16) for n in range(5)}
    tensors["wide"] = torch.randn(2, dtype=torch.float64)
    specs = {
        name: Spec(
            dtype={"torch.bfloat16": "BF16", "torch.float64": "F64"}[str(t.dtype)],
            shape=tuple(t.shape),
            num_bytes=t.numel() * t.dtype.itemsize,
        )
        for name, t in tensors.items()
    }
    specs = {"t0": specs.pop("t0"), "wide": specs.pop("wide"), **specs}  # 6 bytes come first
    with new_shards(tmp_path, specs, shard_bytes=40) as shards:
        for name in reversed(tensors):
            shards.write(name, tensors[name])
        shards.finish()
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(s.num_bytes for s in specs.values())
    assert len(set(index["weight_map"].values())) == 4
    first = (tmp_path / index["weight_map"]["wide"]).read_bytes()
    header = json.loads(first[8 : 8 + int.from_bytes(first[:8], "little")])
    assert header["wide"]["data_offsets"][0] % 8 == 0
    assert header["t0"]["data_offsets"][0] == 16
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


# --------------------------------------------------------------------------------------- companions


def test_the_folder_holds_what_belongs_to_a_model(qwen3: SimpleNamespace, tmp_path: Path) -> None:
    tiny_tokenizer(chat_template="stale").save_pretrained(qwen3.base)
    (qwen3.base / "LICENSE").write_text("mine")
    (qwen3.base / "README.md").write_text("the base's card")
    (qwen3.base / "original").mkdir()
    tokenizer = tmp_path / "tokenizer"
    tiny_tokenizer().save_pretrained(tokenizer)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": "older"})
    )
    merge(qwen3.base, qwen3.adapter, qwen3.out, tokenizer=tokenizer)
    names = {file.name for file in qwen3.out.iterdir()}
    assert names == {
        *("LICENSE", "config.json", "generation_config.json", "model.safetensors"),
        *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
    }
    assert "chat_template" not in json.loads((qwen3.out / "tokenizer_config.json").read_text())
    found = AutoTokenizer.from_pretrained(qwen3.out)
    assert found.chat_template == AutoTokenizer.from_pretrained(tokenizer).chat_template
