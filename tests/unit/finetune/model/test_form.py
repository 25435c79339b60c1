"""Published forms of quantised weights: their values, and what of them is refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from finetune.errors import ModelError
from finetune.model.base_weights import BaseWeights
from finetune.planning.request import facts_of
from finetune.recipe.sections import ModelSection
from tests.checkpoints import Pack, assert_same_model, is_linear, load, write_checkpoint

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MISTRAL: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "weight_block_size": None,
    "modules_to_not_convert": ["lm_head"],
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def groups(**weights: Any) -> dict[str, Any]:
    """Return what compressed-tensors writes into a config."""
    own = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None}
    scheme = {"targets": ["Linear"], "weights": own | weights, "input_activations": {"num_bits": 8}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


def codes_of(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (values.float() / scales.float()).to(torch.float8_e4m3fn)


def per_tensor(name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Pack as Mistral does: one number, and one for activations."""
    if not is_linear(name, values):
        return {name: values}
    scale = (values.float().abs().amax() / 448).to(torch.bfloat16)
    base = name.removesuffix("weight")
    return {
        name: codes_of(values, scale),
        f"{name}_scale_inv": scale,
        f"{base}activation_scale": torch.tensor(0.5),
    }


def pack_scaled(dtype: torch.dtype, *, by_row: bool) -> Pack:
    """Pack as compressed-tensors does: one number, or one for each row."""

    def pack(name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if not is_linear(name, values):
            return {name: values}
        top = values.float().abs().amax(1, keepdim=True) if by_row else values.float().abs().max()
        scale = (top / 448).to(dtype)
        input_scale = {name.removesuffix("weight") + "input_scale": torch.ones(1)}
        return {name: codes_of(values, scale), f"{name}_scale": scale} | input_scale

    return pack


def twin(folder: Path, config: Any, values: Mapping[str, torch.Tensor]) -> Path:
    """Write the plain model that a packed one stands for."""
    write_checkpoint(folder, config, pack=lambda name, own: {name: values.get(name, own)})
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_fp8_of_a_whole_tensor_is_what_transformers_dequantises(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **SHAPE | (EXPERTS if kind == "qwen3_moe" else {}))
    write_checkpoint(tmp_path, config, pack=per_tensor, quantization=MISTRAL)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=FineGrainedFP8Config(**MISTRAL | {"dequantize": True}),
    )
    found = load(tmp_path)
    assert_same_model(found, expected)
    stored, name = tensors(tmp_path), "model.layers.1.self_attn.q_proj.weight"
    exact = stored[name].double() * stored[f"{name}_scale_inv"].double()
    assert torch.equal(found.get_parameter(name).data, exact.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("by_row", [False, True])
def test_float8_of_compressed_tensors_is_code_times_scale(
    dtype: torch.dtype, *, by_row: bool, tmp_path: Path
) -> None:
    config = AutoConfig.for_model("llama", **SHAPE)
    fields = groups(strategy="channel" if by_row else "tensor")
    pack = pack_scaled(dtype, by_row=by_row)
    write_checkpoint(tmp_path / "packed", config, pack=pack, quantization=fields)
    stored = tensors(tmp_path / "packed")
    values = {  # codes of 4 bits times scales of 8 are exact in fp32, and round once
        name: (stored[name].double() * stored[f"{name}_scale"].double()).to(dtype).bfloat16()
        for name in stored
        if f"{name}_scale" in stored
    }
    assert len(values) == 14
    plain = load(twin(tmp_path / "plain", config, values))
    plain.name_or_path = plain.config.name_or_path = str(tmp_path / "packed")
    assert_same_model(load(tmp_path / "packed"), plain)
    published = BaseWeights(tmp_path / "packed")
    for name, expected in values.items():
        assert published.specs[name].dtype == "BF16"
        assert torch.equal(published.read(name), expected), name


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (MISTRAL | {"weight_block_size": [128, 128], "expert_dtype": "fp4"}, "expert_dtype: 'fp4'"),
        (MISTRAL | {"rotation": "hadamard"}, "rotation: 'hadamard'"),
        ({"quant_method": "fp8"}, "weight_block_size: missing"),
        (
            groups(strategy="token"),
            r"config_groups\.group_0\.weights\.strategy: 'token'",
        ),
        (groups(strategy="channel") | {"format": "marlin-24"}, "format: 'marlin-24'"),
        (
            groups(strategy="channel") | {"transform_config": {"R1": 1}},
            r"transform_config: \{'R1': 1\}",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups: missing"),
    ],
)
def test_a_field_that_is_not_read_is_named_before_anything_is_measured(
    fields: dict[str, Any], what: str, tmp_path: Path
) -> None:
    config = json.loads(AutoConfig.for_model("llama", **SHAPE).to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    method = fields["quant_method"]
    with pytest.raises(ModelError, match=rf"its quant_method is {method} with {what}; of quant"):
        facts_of(ModelSection(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3), r"q_proj\.weight has scales \(3,\) for weights \(64, 64\)"),
        (torch.ones(64, 2), r"q_proj\.weight has scales \(64, 2\) for weights \(64, 64\)"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    scale: torch.Tensor, message: str, tmp_path: Path
) -> None:
    def pack(name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        packed = dict(per_tensor(name, values))
        if name == "model.layers.1.self_attn.q_proj.weight":
            packed[f"{name}_scale_inv"] = scale
        return packed

    write_checkpoint(
        tmp_path, AutoConfig.for_model("llama", **SHAPE), pack=pack, quantization=MISTRAL
    )
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_scales_of_weights_that_are_not_packed_are_refused(tmp_path: Path) -> None:
    def pack(name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        scale = {f"{name}_scale": torch.ones(1)} if is_linear(name, values) else {}
        return {name: values} | scale

    write_checkpoint(
        tmp_path,
        AutoConfig.for_model("llama", **SHAPE),
        pack=pack,
        quantization=groups(strategy="tensor"),
    )
    with pytest.raises(ModelError, match=r"weight is torch\.bfloat16 and has scales of float8"):
        load(tmp_path)
