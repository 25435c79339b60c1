"""Adapters merged into their model, and what cannot be merged."""

import json
import os
import shutil
import subprocess
import sys
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
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from finetune.errors import CheckpointError, MergeError, ModelError
from finetune.export import merge as merge_module
from finetune.export.adapter_delta import Changes
from finetune.export.merge import merge
from finetune.files.shard_writer import new_shards
from finetune.files.shards import INDEX
from finetune.files.tensors import Spec
from finetune.model import renaming
from finetune.model.base_weights import BaseWeights
from finetune.model.checkpoint import load_published
from finetune.model.empty import empty_published
from finetune.model.form import kept_parameters
from offload.engine.codec import form_named
from offload.plan.facts.codec import CODECS
from tests.checkpoints import Pack, pack_bnb_4bit, pack_fp8, pack_mxfp4, write_checkpoint
from tests.doubles import tiny_tokenizer
from tests.encoded import decoded
from tests.quantised import FORMS, write_both
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
    assert f"published in {quantization['quant_method']}: " in merged.notes[0]
    assert "its weights were decoded as for training" in merged.notes[0]
    assert "the merged model is written in bfloat16" in merged.notes[0]
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    with_peft = with_adapter(tmp_path / "plain", adapter)
    assert rel(logits(load(tmp_path / "plain")), logits(with_peft)) > 0.1
    exact: Any = with_peft.merge_and_unload()
    for name, parameter in load(tmp_path / "out", torch.bfloat16).named_parameters():
        wanted = exact.get_parameter(name)
        if torch.equal(wanted, plain[name]):
            assert torch.equal(parameter, plain[name]), name
        assert ((parameter - wanted).abs() <= 2**-8 * wanted.abs() * 1.001 + 1e-8).all(), name


# The most that a form may round a matrix by, of its norm, of codes that are drawn evenly.
WRITTEN = {
    **{"fp8 per tensor": 0.04, "float8 per row": 0.04, "modelopt": 0.12, "nvfp4": 0.12},
    **{"mxfp4": 0.2, "int4": 0.12},
}


@pytest.mark.thorough
@pytest.mark.parametrize("is_moe", [False, True])
@pytest.mark.parametrize("form", WRITTEN)
def test_on_request_the_form_of_the_base_is_written_again(
    form: str, is_moe: bool, tmp_path: Path
) -> None:
    sizes = SHAPE | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    experts = EXPERTS | {"moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**sizes, **experts) if is_moe else Qwen3Config(**sizes)
    base, plain = write_both(tmp_path, config, FORMS[form])
    adapter = train(plain, tmp_path / "adapter")
    merge(plain, adapter, tmp_path / "full")
    out = tmp_path / "out"
    merged = merge(base, adapter, out, as_published=True)
    before, after, full = BaseWeights(base), BaseWeights(out), BaseWeights(tmp_path / "full")
    assert after.stored == before.stored
    assert merged.num_bytes == sum(spec.num_bytes for spec in after.stored.values())
    settings = [json.loads((folder / "config.json").read_text()) for folder in (base, out)]
    assert settings[0]["quantization_config"] == settings[1]["quantization_config"]
    errors = json.loads((out / "quantisation_errors.json").read_text())
    changed = {n for n in before.specs if not torch.equal(before.read(n), full.read(n))}
    assert errors.keys() == {name for name in changed if not before.is_copied(name)} != set()
    for name in before.specs:
        wanted, found = full.read(name).float(), after.read(name).float()
        if name not in errors:
            assert torch.equal(found, wanted), name
            continue
        assert rel(found, wanted) == pytest.approx(errors[name], rel=1e-5)
        assert 1e-4 < errors[name] < WRITTEN[form], name
    for name in before.stored:  # scales of activations, and what was not changed
        if name.endswith(("input_scale", "activation_scale", "norm.weight", "_shape")):
            assert b"".join(before.raw(name)) == b"".join(after.raw(name)), name
    assert f"in {settings[0]['quantization_config']['quant_method']} again" in merged.notes[0]
    assert f"{len(errors)} matrices by" in merged.notes[0]
    assert next(iter(errors)) in merged.notes[0]
    loaded = load_published(str(out), "bfloat16")
    codec, names = kept_parameters(loaded, settings[1]["quantization_config"])
    for name in names if codec in CODECS and CODECS[codec].published else ():
        if not name.endswith("gate.weight"):
            values = loaded.get_parameter(name).detach()
            assert torch.equal(decoded(form_named(codec), values), values), name


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ("gptq", "the base is published in gptq"),
        ("awq", "the base is published in awq"),
        ("int4 with zeros", "the base is published in compressed-tensors"),
        ("", "the base is published in full"),
    ],
)
def test_a_form_that_is_not_written_is_refused_by_name(
    form: str, what: str, tmp_path: Path
) -> None:
    config = Qwen3Config(**SHAPE | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96})
    packed, plain = write_both(tmp_path, config, FORMS[form or "nvfp4"])
    adapter = train(plain, tmp_path / "adapter")
    with pytest.raises(MergeError) as caught:
        merge(packed if form else plain, adapter, tmp_path / "out", as_published=True)
    assert caught.value.what == what
    assert caught.value.hint == "without `--as-published` the merged model is written in full"
    assert not (tmp_path / "out").exists()


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


def test_what_prepares_images_is_copied_from_the_base(
    qwen3: SimpleNamespace, tmp_path: Path
) -> None:
    names = ("processor_config", "preprocessor_config", "video_preprocessor_config")
    for name in names:
        (qwen3.base / f"{name}.json").write_text(json.dumps({"is": name}))
    tiny_tokenizer().save_pretrained(tokenizer := tmp_path / "tokenizer")
    (tokenizer / "chat_template.json").write_text('{"chat_template": "older"}')
    merge(qwen3.base, qwen3.adapter, qwen3.out, tokenizer=tokenizer)
    for name in names:
        assert (qwen3.out / f"{name}.json").read_bytes() == (
            qwen3.base / f"{name}.json"
        ).read_bytes()
    for name in ("chat_template.jinja", "chat_template.json"):
        assert (qwen3.out / name).read_bytes() == (tokenizer / name).read_bytes()


# ----------------------------------------------------------------------------------- merge refusals


def test_an_adapter_s_tensor_that_finds_no_place_is_named(qwen3: SimpleNamespace) -> None:
    file = qwen3.adapter / "adapter_model.safetensors"
    stray = "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"
    edit(file, lambda tensors: tensors.update({stray: torch.zeros(4, 32)}))
    with pytest.raises(MergeError, match=r"holds, and the model has no place for, 1 .*layers\.7"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert not qwen3.out.exists()


def test_an_adapter_that_lacks_a_tensor_is_refused(qwen3: SimpleNamespace) -> None:
    gone = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    edit(qwen3.adapter / "adapter_model.safetensors", lambda tensors: tensors.pop(gone))
    with pytest.raises(MergeError, match=r"lacks 1 tensors, such as .*layers\.1\.mlp\.up_proj"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)


def test_an_adapter_of_another_model_is_refused(qwen3: SimpleNamespace, tmp_path: Path) -> None:
    config = Qwen3Config(**SHAPE | {"intermediate_size": 56})
    other = publish(Qwen3ForCausalLM(config), tmp_path / "other", torch.float32)
    with pytest.raises(
        MergeError, match=r"adapter has .* of shape \(48, 4\); it has shape \(56, 4\) here"
    ):
        merge(other, qwen3.adapter, qwen3.out)
    assert not qwen3.out.exists()


def test_a_base_that_lacks_a_tensor_is_refused(qwen3: SimpleNamespace) -> None:
    gone = "model.layers.1.mlp.up_proj.weight"
    index = json.loads((qwen3.base / INDEX).read_text())
    edit(qwen3.base / index["weight_map"].pop(gone), lambda tensors: tensors.pop(gone))
    with pytest.raises(ModelError, match=rf"lacks {gone}; {INDEX} says that it is there"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    (qwen3.base / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"no published tensor becomes {gone}; "):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    (qwen3.base / next(iter(index["weight_map"].values()))).unlink()
    with pytest.raises(ModelError, match=r"has no model-.*; a model holds"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)


def test_a_base_of_another_shape_than_its_config_is_refused(qwen3: SimpleNamespace) -> None:
    config = json.loads((qwen3.base / "config.json").read_text())
    (qwen3.base / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(ModelError, match=r"becomes .* of \(.*48.*the model of config\.json has"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)


def test_a_torn_file_is_refused(qwen3: SimpleNamespace) -> None:
    file = next(qwen3.base.glob("model-*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ModelError, match=rf"{file.name} is cut off or damaged: "):
        merge(qwen3.base, qwen3.adapter, qwen3.out)


@pytest.mark.parametrize("method", ["hqq", "fp8", "bitsandbytes"])
def test_other_quantised_bases_are_refused(method: str, qwen3: SimpleNamespace) -> None:
    config = json.loads((qwen3.base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "load_in_8bit": True}
    (qwen3.base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"is quantised, its quant_method is {method}"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)


def test_an_adapter_of_another_kind_is_refused(qwen3: SimpleNamespace) -> None:
    settings = {"peft_type": "BOFT", "target_modules": ["q_proj"]}
    (qwen3.adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"an adapter of type BOFT; LORA, .* are understood"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    (qwen3.adapter / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    with pytest.raises(MergeError, match=r"is of type PROMPT_TUNING; LORA, .* can be merged"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)


def test_a_shared_tensor_that_is_published_twice_is_not_parted(tmp_path: Path) -> None:
    base = publish(MODELS["qwen3, tied"](), tmp_path / "base", torch.float32)
    index = json.loads((base / INDEX).read_text())
    file = index["weight_map"]["model.embed_tokens.weight"]
    index["weight_map"]["lm_head.weight"] = file
    (base / INDEX).write_text(json.dumps(index))
    edit(base / file, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 0}))
    merge(base, train(base, tmp_path / "attention"), tmp_path / "out")
    head = train(base, tmp_path / "head", modules_to_save=["lm_head"])
    with pytest.raises(MergeError, match=r"lm_head.weight and .* share a tensor, .* holds both"):
        merge(base, head, tmp_path / "other")


def test_an_adapter_with_biases_is_refused(tmp_path: Path) -> None:
    base = publish(MODELS["gpt2"](), tmp_path / "base", torch.float32)
    adapter = train(base, tmp_path / "adapter", lora_bias=True)
    with pytest.raises(MergeError, match="has a bias; adapters on linear layers"):
        merge(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("damage", ["values", "names", "number"])
def test_a_rule_that_cannot_be_turned_round_is_refused(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def revert(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = revert_weight_conversion(model, state)
        name = next(iter(tensors))
        if damage == "values":
            tensors[name] = tensors[name].flip(0)
        else:
            values = tensors.pop(name)
            if damage == "names":
                tensors["model.other"] = values
        return tensors

    base = publish(MODELS["mixtral"](), tmp_path / "base", torch.bfloat16)
    adapter = train(base, tmp_path / "adapter")
    monkeypatch.setattr(renaming, "revert_weight_conversion", revert)
    with pytest.raises(ModelError, match=r"rule for .*experts\..* cannot be turned round: "):
        merge(base, adapter, tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize(
    ("kind", "message"), [("down", r"becomes .* of \(4, "), ("gate", "and 8 others do not make")]
)
def test_experts_with_a_gap_are_refused(kind: str, message: str, tmp_path: Path) -> None:
    base = publish(MODELS["qwen3_moe"](), tmp_path / "base", torch.bfloat16)
    adapter = train(base, tmp_path / "adapter")
    index = json.loads((base / INDEX).read_text())
    gone = f"model.layers.1.mlp.experts.2.{kind}_proj.weight"
    edit(base / index["weight_map"].pop(gone), lambda tensors: tensors.pop(gone))
    (base / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        merge(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("factor", [1e7, float("nan")])
def test_weights_that_are_not_finite_are_refused_and_named(factor: float, tmp_path: Path) -> None:
    base = publish(MODELS["qwen3"](), tmp_path / "base", torch.float16)
    adapter = train(base, tmp_path / "adapter")
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    edit(
        adapter / "adapter_model.safetensors",
        lambda tensors: tensors.update({name: tensors[name] * factor}),
    )
    with pytest.raises(
        MergeError, match=r"layers\.0\.mlp\.up_proj\.weight has values that are not"
    ):
        merge(base, adapter, tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter", "base"]


def test_a_directory_that_is_there_is_not_touched(qwen3: SimpleNamespace) -> None:
    qwen3.out.mkdir()
    with pytest.raises(MergeError, match="out is there already; "):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert not any(qwen3.out.iterdir())


def test_a_full_disk_is_found_before_anything_is_written(
    qwen3: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(qwen3.base)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(MergeError, match=r"takes 0\.\d MiB and 0\.0 MiB is free; it is written to"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert sorted(file.name for file in qwen3.out.parent.iterdir()) == ["adapter", "base"]


def test_what_is_like_a_folder_in_the_making_is_never_touched(qwen3: SimpleNamespace) -> None:
    """A merge emptied any folder called partial-NAME, through a link as well (#16)."""
    home = qwen3.out.parent
    (home / "mine").mkdir()
    (home / "mine" / "thesis.txt").write_text("ten years")
    (home / "partial-out").symlink_to(home / "mine")
    (home / "partial-out-mine").mkdir()
    (home / "partial-out-mine" / "thesis.txt").write_text("ten years")
    (home / "partial-out-link").symlink_to(home / "mine")
    (home / "partial-out-file").write_text("ten years")
    merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert (home / "mine" / "thesis.txt").read_text() == "ten years"
    assert (home / "partial-out-mine" / "thesis.txt").read_text() == "ten years"
    assert (home / "partial-out-file").read_text() == "ten years"
    assert {path.name for path in home.iterdir()} == {
        *("adapter", "base", "mine", "out", "partial-out", "partial-out-mine"),
        *("partial-out-link", "partial-out-file"),
    }


def test_a_link_that_leads_nowhere_is_in_the_way(qwen3: SimpleNamespace) -> None:
    qwen3.out.symlink_to(qwen3.out.parent / "nowhere")
    with pytest.raises(MergeError, match="out is there already; "):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert qwen3.out.is_symlink()


def test_what_a_killed_merge_left_is_cleared_and_a_living_one_is_not(
    qwen3: SimpleNamespace,
) -> None:
    home = qwen3.out.parent
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from pathlib import Path\n"
            "from finetune.files.atomic import becoming\n"
            "with becoming(Path(sys.argv[1])) as folder:\n"
            "    (folder / 'model.safetensors').write_text('torn')\n"
            "    print('held', flush=True)\n"
            "    sys.stdin.read()",
            str(qwen3.out),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    (left,) = home.glob("partial-out-*")
    with pytest.raises(MergeError, match=r"partial-out-.* is being written by another process"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert (left / "out" / "model.safetensors").exists()
    holder.kill()
    holder.communicate()
    assert left.exists()
    merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert not left.exists()
    assert {file.name for file in qwen3.out.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors")
    }
