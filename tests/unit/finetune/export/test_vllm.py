"""What vLLM is given: plain LoRA by published names, whose products are what peft would merge."""

import copy
import json
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from finetune.adapter.lora import add_lora, expert_parameters, linear_names, save_adapter
from finetune.errors import CheckpointError, ConfigError, MergeError, ModelError
from finetune.export.vllm import write_vllm_adapter
from finetune.model.checkpoint import load_published
from finetune.recipe.adapters import AdapterSection
from tests.builders import adapter
from tests.parity.tiny_models import tiny_model
from tests.published import publish
from tests.tiers import mostly_slow
from tests.vllm_classes import SERVED

EVEN = adapter(experts=True)


def uneven(model: PreTrainedModel) -> AdapterSection:
    """Return an adapter of several ranks and alphas, which has no one scale."""
    return adapter(
        experts=True,
        rank_pattern={linear_names(model)[0]: 3, "experts.down_proj": 1},
        alpha_pattern={"experts.down_proj": 5.0},
        rslora=True,
    )


SMALL = {"num_experts": 4}
PER_EXPERT = (
    *("deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "jamba", "lfm2_moe", "mixtral"),
    *("nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next"),
)


def adapted(base: PreTrainedModel, folder: Path, section: AdapterSection = EVEN) -> Any:
    """Save a base, and an adapter whose B is not zero next to it; return the adapted model."""
    if not (folder.parent / "base").exists():
        base.save_pretrained(folder.parent / "base")
    model = add_lora(base, section, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    save_adapter(model, folder)
    return model


def published(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights as the model is published: experts one by one."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def deltas(folder: Path) -> dict[str, torch.Tensor]:
    """Return scale * B A of each matrix, as vLLM computes it from the one scale in the config."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    tensors = load_file(folder / "adapter_model.safetensors")
    names = {key.removesuffix(".lora_A.weight") for key in tensors if ".lora_A." in key}
    assert len(tensors) == 2 * len(names)
    return {
        name.removeprefix("base_model.model.") + ".weight": scale
        * (tensors[f"{name}.lora_B.weight"].double() @ tensors[f"{name}.lora_A.weight"].double())
        for name in names
    }


@pytest.mark.parametrize("is_even", mostly_slow({"even": True, "uneven": False}, "uneven"))
@pytest.mark.parametrize("model_type", mostly_slow(PER_EXPERT, "mixtral", "nemotron_h"))
def test_each_matrix_is_changed_as_peft_changes_it_when_it_merges(
    model_type: str, is_even: bool, tmp_path: Path
) -> None:
    base = tiny_model(model_type, **SMALL)
    section = EVEN if is_even else uneven(base)
    before = published(base, tmp_path / "base")
    model = adapted(copy.deepcopy(base), tmp_path / "adapter", section)
    write_vllm_adapter(tmp_path / "adapter", tmp_path / "vllm", base=tmp_path / "base")
    after = published(model.merge_and_unload(), tmp_path / "after")
    found = deltas(tmp_path / "vllm")
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert set(found) == changed
    assert any(".experts.3." in name for name in changed)
    for name, delta in found.items():
        merged = after[name].double() - before[name].double()
        assert torch.allclose(delta, merged, atol=1e-5), name


def test_one_scale_for_all_leaves_the_tensors_as_they_were_trained(tmp_path: Path) -> None:
    base = tiny_model("qwen3_moe", **SMALL)
    adapted(base, tmp_path / "adapter", adapter(experts=True, rslora=True))
    readers = write_vllm_adapter(tmp_path / "adapter", tmp_path / "vllm", base=tmp_path / "base")
    own, as_peft_has_it, by_llama_cpp = readers
    assert f"--max-lora-rank 8 --lora-modules NAME={tmp_path / 'vllm'}" in own
    assert f'"path": "{tmp_path / "adapter"}", "is_3d_lora_weight": true' in as_peft_has_it
    assert "--enable-mixed-moe-lora-format" in as_peft_has_it
    assert f"convert_lora_to_gguf.py {tmp_path / 'vllm'} --base" in by_llama_cpp
    trained = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    written = load_file(tmp_path / "vllm" / "adapter_model.safetensors")
    experts = "base_model.model.model.layers.1.mlp.experts"
    both = trained[f"{experts}.base_layer.lora_B.weight"].reshape(32, 2, 4)
    gate, up = (written[f"{experts}.3.{name}.lora_B.weight"] for name in ("gate_proj", "up_proj"))
    assert torch.equal(torch.cat([gate, up]), both[..., 3])
    first_a = trained[f"{experts}.base_layer.lora_A.weight"].reshape(4, 2, -1)[3]
    assert torch.equal(written[f"{experts}.3.gate_proj.lora_A.weight"], first_a)
    assert torch.equal(written[f"{experts}.3.up_proj.lora_A.weight"], first_a)
    config = json.loads((tmp_path / "vllm" / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == pytest.approx(4 / 2**0.5)
    assert (config["use_rslora"], config["target_parameters"]) == (False, None)
    assert config["target_modules"] == [
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    ]


def test_the_tokens_that_end_answers_go_along(tmp_path: Path) -> None:
    base = tiny_model("qwen3_moe", **SMALL)
    adapted(base, tmp_path / "adapter")
    (plain, *_) = write_vllm_adapter(tmp_path / "adapter", tmp_path / "a", base=tmp_path / "base")
    assert "--generation-config" not in plain
    (tmp_path / "adapter" / "generation_config.json").write_text('{"eos_token_id": [7]}')
    readers = write_vllm_adapter(tmp_path / "adapter", tmp_path / "b", base=tmp_path / "base")
    assert (tmp_path / "b" / "generation_config.json").read_text() == '{"eos_token_id": [7]}'
    assert all(
        f"--generation-config {tmp_path / 'b'}" in line for line in readers if "serve" in line
    )


def test_the_prompt_that_answers_were_trained_after_goes_along(tmp_path: Path) -> None:
    base = tiny_model("qwen3_moe", **SMALL)
    adapted(base, tmp_path / "adapter")
    fields = {"eos_token_id": [7], "default_chat_template_kwargs": {"enable_thinking": False}}
    file = tmp_path / "adapter" / "generation_config.json"
    file.write_text(json.dumps(fields))
    readers = write_vllm_adapter(tmp_path / "adapter", tmp_path / "a", base=tmp_path / "base")
    flag = """--default-chat-template-kwargs '{"enable_thinking": false}'"""
    assert all(flag in line for line in readers if "serve" in line)
    file.write_text('{"default_chat_template_kwargs": [1]}')
    with pytest.raises(ModelError, match=r"default_chat_template_kwargs is \[1\]"):
        write_vllm_adapter(tmp_path / "adapter", tmp_path / "b", base=tmp_path / "base")


def test_gpt_oss_keeps_its_experts_fused_and_gets_one_scale(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = tiny_model("gpt_oss")
    model = adapted(base, tmp_path / "adapter", uneven(base))
    (reader,) = write_vllm_adapter(tmp_path / "adapter", tmp_path / "vllm", base=tmp_path / "base")
    assert reader.startswith("vLLM: ")  # one layout for peft and for vLLM
    tensors = load_file(tmp_path / "vllm" / "adapter_model.safetensors")
    for name, part in (("experts.base_layer", "gate_up_proj"), ("experts", "down_proj")):
        key = f"base_model.model.model.layers.1.mlp.{name}"
        a = tensors[f"{key}.lora_A.weight"]
        b = tensors[f"{key}.lora_B.weight"]
        a = a.reshape(4, -1, a.shape[1])  # as vLLM takes them apart
        b = b.reshape(b.shape[0], -1, 4).permute(2, 0, 1)
        wrapper = model.get_submodule(key)
        assert wrapper.parameter_name == part
        assert torch.allclose((b @ a).mT, wrapper.get_delta_weight("default"), atol=1e-5)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (adapter(dora=True), "the adapter has DoRA: true"),
        (adapter(experts=True, modules_to_save=("norms",)), "has modules trained whole: "),
    ],
)
def test_what_vllm_has_no_place_for_is_refused(
    section: AdapterSection, text: str, tmp_path: Path
) -> None:
    base = tiny_model("qwen3_moe", **SMALL)
    adapted(base, tmp_path / "adapter", section)
    with pytest.raises(ConfigError, match=f"{text}(?s:.*)hint: `sluice merge"):
        write_vllm_adapter(tmp_path / "adapter", tmp_path / "vllm", base=tmp_path / "base")
    assert not (tmp_path / "vllm").exists()


def test_experts_that_vllm_reads_in_an_unknown_way_are_refused_by_name(tmp_path: Path) -> None:
    adapted(tiny_model("granitemoe"), tmp_path / "adapter")
    with pytest.raises(ConfigError, match="granitemoe model, and its experts are published in one"):
        write_vllm_adapter(tmp_path / "adapter", tmp_path / "vllm", base=tmp_path / "base")


def test_an_adapter_of_another_model_and_a_folder_in_use_are_refused(tmp_path: Path) -> None:
    adapted(tiny_model("qwen3_moe", **SMALL), tmp_path / "adapter")
    tiny_model("qwen3_moe", num_experts=3).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"not of the sizes .* the weight has"):
        write_vllm_adapter(tmp_path / "adapter", tmp_path / "vllm", base=tmp_path / "other")
    tiny_model("gpt2").save_pretrained(tmp_path / "third")
    with pytest.raises(CheckpointError, match="the weight has no place in this model"):
        write_vllm_adapter(tmp_path / "adapter", tmp_path / "vllm", base=tmp_path / "third")
    with pytest.raises(MergeError, match="is there already"):
        write_vllm_adapter(tmp_path / "adapter", tmp_path / "adapter", base=tmp_path / "base")


CHANGES: Mapping[str, Mapping[str, Any]] = {"gemma4": {"hidden_size_per_layer_input": 0}}


@pytest.mark.parametrize(
    "model_type", mostly_slow(list(SERVED), "gpt_oss", "mistral3", "mixtral", "qwen3_5")
)
def test_each_name_is_that_of_a_module_of_the_class_that_serves_the_checkpoint(
    model_type: str, tmp_path: Path
) -> None:
    """Names of the text class are ignored in silence (vllm-project/vllm#34186, #48019)."""
    served = SERVED[model_type]
    base = publish(model_type, tmp_path / "base", **CHANGES.get(model_type, {}))
    model = load_published(str(base), "float32")
    takes = {name.rpartition(".")[2] for name in served.modules}
    section = adapter(
        experts=bool(expert_parameters(model)),
        targets=tuple(name for name in linear_names(model) if name in takes),
    )
    adapted(model, tmp_path / "adapter", section)
    write_vllm_adapter(tmp_path / "adapter", tmp_path / "vllm", base=base)
    keys = load_file(tmp_path / "vllm" / "adapter_model.safetensors")
    modules = {key: served.module(key) for key in keys}
    assert None not in modules.values(), [key for key, module in modules.items() if module is None]
    peft = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(keys) >= len(peft)


def test_names_of_a_text_class_are_of_no_module_that_serves_images_too(tmp_path: Path) -> None:
    """What the test above would miss if the table took any name."""
    base = publish("qwen3_5", tmp_path / "base")
    adapted(load_published(str(base), "float32"), tmp_path / "adapter", adapter())
    keys = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {SERVED["qwen3_5"].module(key) for key in keys} == {None}


@pytest.mark.network
def test_llama_cpp_s_own_converter_reads_experts_one_by_one_only(
    llama_cpp_clone: Path, tmp_path: Path
) -> None:
    base = tiny_model("qwen3_moe", **SMALL)
    adapted(base, tmp_path / "adapter")
    write_vllm_adapter(tmp_path / "adapter", tmp_path / "one", base=tmp_path / "base")
    ended = {}
    for name in ("adapter", "one"):
        file = tmp_path / f"{name}.gguf"
        ended[name] = subprocess.run(
            [
                *(llama_cpp_clone / ".venv" / "bin" / "python",),
                *(llama_cpp_clone / "convert_lora_to_gguf.py", tmp_path / name),
                *("--base", tmp_path / "base", "--outfile", file),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    assert "Unprocessed experts" in ended["adapter"].stderr
    assert ended["one"].returncode == 0, ended["one"].stderr
    assert b"blk.1.ffn_down_exps.weight.lora_a" in (tmp_path / "one.gguf").read_bytes()
