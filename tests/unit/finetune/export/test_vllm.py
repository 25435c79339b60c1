"""What vLLM is given: plain LoRA by published names, whose products are what peft would merge."""

import copy
import json
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from finetune.adapter.lora import add_lora, save_adapter
from finetune.errors import CheckpointError, ConfigError, MergeError, ModelError
from finetune.export.vllm import PER_EXPERT, write_vllm_adapter
from finetune.recipe.adapters import AdapterSection
from tests.builders import adapter
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow

EVEN = adapter(experts=True)
UNEVEN = adapter(
    experts=True,
    rank_pattern={"o_proj": 3, "experts.down_proj": 1},
    alpha_pattern={"experts.gate_up_proj": 5.0},
    rslora=True,
)
SMALL = {"num_experts": 4}


def adapted(base: PreTrainedModel, folder: Path, section: AdapterSection = EVEN) -> Any:
    """Save an adapter whose B is not zero, and return the model."""
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


@pytest.mark.parametrize("section", mostly_slow({"even": EVEN, "uneven": UNEVEN}, "uneven"))
@pytest.mark.parametrize("model_type", mostly_slow(sorted(PER_EXPERT), "deepseek_v3", "mixtral"))
def test_each_matrix_is_changed_as_peft_changes_it_when_it_merges(
    model_type: str, section: AdapterSection, tmp_path: Path
) -> None:
    base = tiny_model(model_type, **SMALL)
    before = published(base, tmp_path / "before")
    model = adapted(copy.deepcopy(base), tmp_path / "adapter", section)
    config = base.config.to_dict()
    write_vllm_adapter(tmp_path / "adapter", tmp_path / "vllm", model_config=config)
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
    readers = write_vllm_adapter(
        tmp_path / "adapter", tmp_path / "vllm", model_config=base.config.to_dict()
    )
    own, as_peft_has_it, by_llama_cpp = readers
    assert f"--max-lora-rank 2 --lora-modules NAME={tmp_path / 'vllm'}" in own
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
    config = base.config.to_dict()
    (plain, *_) = write_vllm_adapter(tmp_path / "adapter", tmp_path / "a", model_config=config)
    assert "--generation-config" not in plain
    (tmp_path / "adapter" / "generation_config.json").write_text('{"eos_token_id": [7]}')
    readers = write_vllm_adapter(tmp_path / "adapter", tmp_path / "b", model_config=config)
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
    config = base.config.to_dict()
    readers = write_vllm_adapter(tmp_path / "adapter", tmp_path / "a", model_config=config)
    flag = """--default-chat-template-kwargs '{"enable_thinking": false}'"""
    assert all(flag in line for line in readers if "serve" in line)
    file.write_text('{"default_chat_template_kwargs": [1]}')
    with pytest.raises(ModelError, match=r"default_chat_template_kwargs is \[1\]"):
        write_vllm_adapter(tmp_path / "adapter", tmp_path / "b", model_config=config)


def test_gpt_oss_keeps_its_experts_fused_and_gets_one_scale(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = tiny_model("gpt_oss")
    model = adapted(base, tmp_path / "adapter", UNEVEN)
    (reader,) = write_vllm_adapter(
        tmp_path / "adapter", tmp_path / "vllm", model_config=base.config.to_dict()
    )
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
        write_vllm_adapter(
            tmp_path / "adapter", tmp_path / "vllm", model_config=base.config.to_dict()
        )
    assert not (tmp_path / "vllm").exists()


def test_a_family_that_vllm_reads_in_an_unknown_way_is_refused_by_name(tmp_path: Path) -> None:
    base = tiny_model("qwen3_moe", **SMALL)
    adapted(base, tmp_path / "adapter")
    config = base.config.to_dict() | {"model_type": "other_moe"}
    with pytest.raises(ConfigError, match="adapters on the experts of a other_moe model"):
        write_vllm_adapter(tmp_path / "adapter", tmp_path / "vllm", model_config=config)


def test_an_adapter_of_another_model_and_a_folder_in_use_are_refused(tmp_path: Path) -> None:
    base = tiny_model("qwen3_moe", **SMALL)
    adapted(base, tmp_path / "adapter")
    config = base.config.to_dict() | {"num_experts": 3}
    with pytest.raises(CheckpointError, match=r"not of the sizes .* has 3 experts"):
        write_vllm_adapter(tmp_path / "adapter", tmp_path / "vllm", model_config=config)
    with pytest.raises(MergeError, match="is there already"):
        write_vllm_adapter(tmp_path / "adapter", tmp_path / "adapter", model_config=config)


@pytest.mark.network
def test_llama_cpp_s_own_converter_reads_experts_one_by_one_only(
    llama_cpp_clone: Path, tmp_path: Path
) -> None:
    base = tiny_model("qwen3_moe", **SMALL)
    base.save_pretrained(tmp_path / "base")
    adapted(base, tmp_path / "adapter")
    write_vllm_adapter(tmp_path / "adapter", tmp_path / "one", model_config=base.config.to_dict())
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
