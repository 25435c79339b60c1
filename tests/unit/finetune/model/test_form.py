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
from finetune.model.form import find_packed
from finetune.model.forms.fp8 import scaled
from finetune.planning.request import facts_of
from finetune.recipe.recipe import Recipe
from finetune.recipe.sections import ModelSection
from finetune.training.pins import check
from tests.builders import recipe_values
from tests.checkpoints import assert_same_model, is_linear, load, write_checkpoint
from tests.encoded import peak_bytes
from tests.quantised import FORMS, Decoded, Published, fp8_per_tensor, groups, write_both

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
MISTRAL = FORMS["fp8 per tensor"].quantization
GPTQ, AWQ = FORMS["gptq"].quantization, FORMS["awq"].quantization
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float"}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_fp8_of_a_whole_tensor_is_what_transformers_dequantises(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **SHAPE | (EXPERTS if kind == "qwen3_moe" else {}))
    packed, _ = write_both(tmp_path, config, FORMS["fp8 per tensor"])
    expected = AutoModelForCausalLM.from_pretrained(
        packed,
        dtype=torch.bfloat16,
        quantization_config=FineGrainedFP8Config(**MISTRAL | {"dequantize": True}),
    )
    assert_same_model(load(packed), expected)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("form", FORMS)
def test_a_published_form_is_read_as_what_it_means(form: str, kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **SHAPE | (EXPERTS if kind == "qwen3_moe" else {}))
    packed, plain = write_both(tmp_path, config, FORMS[form])
    expected = load(plain)
    expected.name_or_path = expected.config.name_or_path = str(packed)
    assert_same_model(load(packed), expected)
    merged_into = BaseWeights(packed)
    assert merged_into.published == FORMS[form].quantization["quant_method"]
    assert merged_into.specs.keys() == BaseWeights(plain).specs.keys()
    for name, values in tensors(plain).items():
        assert merged_into.specs[name] == BaseWeights(plain).specs[name]
        assert torch.equal(merged_into.read(name), values), name


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (MISTRAL | {"weight_block_size": [128, 128], "expert_dtype": "fp4"}, "expert_dtype: 'fp4'"),
        (MISTRAL | {"rotation": "hadamard"}, "rotation: 'hadamard'"),
        ({"quant_method": "fp8"}, "weight_block_size: missing"),
        (
            groups("float-quantized", **FLOAT8, strategy="token"),
            r"config_groups\.group_0\.weights\.strategy: 'token'",
        ),
        (groups("marlin-24", **INT4), "format: 'marlin-24'"),
        (
            groups("pack-quantized", **INT4 | {"num_bits": 3}),
            r"config_groups\.group_0\.weights\.num_bits: 3",
        ),
        (
            groups("pack-quantized", **INT4, actorder="group"),
            r"config_groups\.group_0\.weights\.actorder: 'group'",
        ),
        (
            groups("nvfp4-pack-quantized", **INT4),
            r"config_groups\.group_0\.weights\.type: 'int'",
        ),
        (
            groups("pack-quantized", **INT4) | {"transform_config": {"R1": 1}},
            r"transform_config: \{'R1': 1\}",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups: missing"),
        (FORMS["gptq"].quantization | {"bits": 3}, "bits: 3"),
        (FORMS["gptq"].quantization | {"dynamic": {"-:.*q_proj": {}}}, r"dynamic: \{'-:.*\}\}"),
        (
            FORMS["gptq"].quantization | {"checkpoint_format": "marlin"},
            "checkpoint_format: 'marlin'",
        ),
        (FORMS["awq"].quantization | {"version": "gemv"}, "version: 'gemv'"),
        (FORMS["awq"].quantization | {"zero_point": False}, "zero_point: False"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo: 'NVFP4_AWQ'"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "W4A16_AWQ"}},
            },
            r"quantized_layers\.a\.quant_algo: 'W4A16_AWQ'",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "config_groups": {"group_0": {"pre_quant_scale": True}},
            },
            r"config_groups\.group_0\.pre_quant_scale: True",
        ),
    ],
)
def test_a_field_that_is_not_read_is_named_before_anything_is_measured(
    fields: dict[str, Any], what: str, tmp_path: Path
) -> None:
    config = json.loads(AutoConfig.for_model("llama", **SHAPE).to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    method = fields["quant_method"]
    message = rf"its quant_method is {method} with {what}; of quant"
    with pytest.raises(ModelError, match=message):
        facts_of(ModelSection(path=str(tmp_path)))
    recipe = Recipe.model_validate(recipe_values(model__path=str(tmp_path)))
    with pytest.raises(ModelError, match=message):
        check(recipe, note=pytest.fail)


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
    def publish(name: str, values: torch.Tensor) -> Decoded:
        parts, decoded = fp8_per_tensor(name, values)
        return {**parts, **({f"{name}_scale_inv": scale} if name == Q_PROJ else {})}, decoded

    form = Published(publish=publish, quantization=MISTRAL)
    packed, _ = write_both(tmp_path, AutoConfig.for_model("llama", **SHAPE), form)
    with pytest.raises(ModelError, match=message):
        load(packed)


def test_scales_of_weights_that_are_not_packed_are_refused(tmp_path: Path) -> None:
    def pack(name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        scale = {f"{name}_scale": torch.ones(1)} if is_linear(name, values) else {}
        return {name: values} | scale

    write_checkpoint(
        tmp_path,
        AutoConfig.for_model("llama", **SHAPE),
        pack=pack,
        quantization=groups("float-quantized", **FLOAT8, strategy="tensor"),
    )
    with pytest.raises(ModelError, match=r"weight is torch\.bfloat16 and has scales of codes"):
        load(tmp_path)


def test_a_zero_point_that_programs_read_differently_is_refused(tmp_path: Path) -> None:
    def publish(name: str, values: torch.Tensor) -> Decoded:
        parts, decoded = FORMS["gptq"].publish(name, values)
        zeros = name.removesuffix("weight") + "qzeros"
        return {**parts, zeros: parts[zeros] | (0xF if name == Q_PROJ else 0)}, decoded

    form = Published(publish=publish, quantization=FORMS["gptq"].quantization)
    packed, _ = write_both(tmp_path, AutoConfig.for_model("llama", **SHAPE), form)
    with pytest.raises(ModelError, match=rf"{Q_PROJ} has a zero point of 0, which programs"):
        load(packed)


@pytest.mark.parametrize("form", [form for form in FORMS if "8" not in form])
def test_decoding_a_matrix_takes_its_values_and_a_few_megabytes(form: str) -> None:
    values = torch.empty(8192, 1024, dtype=torch.bfloat16)
    published = FORMS[form].publish("model.layers.0.mlp.up_proj.weight", values)[0]
    fields = FORMS[form].quantization
    packed, _ = find_packed({k: lambda t=t: t for k, t in published.items()}, fields, "a model")  # type: ignore[misc]
    (tensor,) = packed.values()
    assert peak_bytes(tensor.values) < values.nbytes + 20 * 2**20


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((6, 4), ()),
        ((6, 4), (1,)),
        ((6, 4), (6,)),
        ((6, 4), (6, 1)),
        ((3, 6, 4), (3,)),
        ((3, 6, 4), (3, 1, 1)),
        ((3, 6, 4), (3, 6, 1)),
    ],
)
def test_a_scale_is_of_a_tensor_a_matrix_or_a_row(
    shape: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    values = torch.rand(scales) + 0.5
    grid = values.reshape(*scales, *[1] * (len(shape) - len(scales))).expand(shape)
    expected = torch.tensor(
        [float(c) * float(s) for c, s in zip(codes.flatten(), grid.flatten(), strict=True)]
    )
    assert torch.equal(scaled(codes, values, None), expected.view(shape))


@pytest.mark.parametrize("scales", [(4,), (6, 4), (1, 4), (2, 6, 1)])
def test_a_scale_of_anything_else_is_refused(scales: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"has scales .* for weights \(6, 4\)"):
        scaled(torch.zeros(6, 4).to(torch.float8_e4m3fn), torch.ones(scales), None)
