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
from finetune.model.empty import empty_from
from finetune.model.form import find_packed, kept_parameters
from finetune.model.forms.fp8 import scaled
from finetune.planning.request import facts_of
from finetune.recipe.recipe import Recipe
from finetune.recipe.sections import ModelSection
from finetune.training.pins import check
from offload.engine.codec import form_named
from offload.engine.host.slab import lay_out
from offload.engine.model.encoding import Encoding
from offload.engine.model.layers import LayeredModel
from offload.plan.facts.workload import record_bytes
from tests.builders import recipe_values
from tests.checkpoints import assert_same_model, is_linear, load, write_checkpoint
from tests.encoded import decoded, peak_bytes
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


@pytest.mark.parametrize("group", [-1, 2])
def test_a_feature_of_no_group_is_refused(group: int, tmp_path: Path) -> None:
    def publish(name: str, values: torch.Tensor) -> Decoded:
        parts, decoded = FORMS["gptq"].publish(name, values)
        if name == Q_PROJ:
            parts[name.removesuffix("weight") + "g_idx"][5] = group
        return parts, decoded

    form = Published(publish=publish, quantization=FORMS["gptq"].quantization)
    packed, _ = write_both(tmp_path, AutoConfig.for_model("llama", **SHAPE), form)
    with pytest.raises(ModelError, match=rf"{Q_PROJ} has scales \(64, 2\) and 64 codes a row"):
        load(packed)


# ------------------------------------------------------------------ what a codec keeps as published

ATTENTION = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
MLP = {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
STACKS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
ALL = {f"layers.{i}.{name}" for i in range(2) for name in ATTENTION | MLP}
NVFP4, MODELOPT = FORMS["nvfp4"].quantization, FORMS["modelopt"].quantization
MIXED = FORMS["mixed"].quantization
INTEGERS = groups("pack-quantized", **INT4)


def of_layers(*layers: int, names: set[str]) -> set[str]:
    return {f"layers.{i}.{name}" for i in layers for name in names}


def named_groups(*targets: str) -> dict[str, Any]:
    """Return a config of several groups, each with the layers that it is for."""
    both = MIXED["config_groups"].items()
    listed = zip(both, targets, strict=True)
    return MIXED | {
        "config_groups": {name: group | {"targets": [own]} for (name, group), own in listed}
    }


@pytest.mark.parametrize(
    ("fields", "codec", "names"),
    [
        (NVFP4, "nvfp4", ALL),
        (NVFP4 | {"ignore": ["re:.*self_attn.*"]}, "nvfp4", of_layers(0, 1, names=MLP)),
        (
            NVFP4 | {"ignore": ["language_model.model.layers.1.mlp.up_proj"]},
            "nvfp4",
            ALL - {"layers.1.mlp.up_proj.weight"},
        ),
        (
            NVFP4 | {"ignore": [r"re:^model\.layers\.(0|7)\..*"]},
            "nvfp4",
            of_layers(1, names=ATTENTION | MLP),
        ),
        (NVFP4 | {"ignore": ["re:.*layers.*"]}, "compressed-tensors", set()),
        (FORMS["mxfp4"].quantization, "nvfp4", ALL),
        (FORMS["float8 per row"].quantization, "compressed-tensors", set()),
        (MIXED, "compressed-tensors", set()),
        (named_groups("re:.*self_attn.*", "Linear"), "nvfp4", of_layers(0, 1, names=MLP)),
        (named_groups("Linear", "re:.*self_attn.*"), "nvfp4", of_layers(0, 1, names=ATTENTION)),
        (MODELOPT, "nvfp4", of_layers(0, 1, names=MLP)),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*layers.0.self_attn*"]},
            "nvfp4",
            ALL - of_layers(0, names=ATTENTION),
        ),
        (
            {
                **{"quant_method": "modelopt", "quant_algo": "NVFP4"},
                "ignore": ["model.layers.1.mlp", "model.layers.0"],
            },
            "nvfp4",
            of_layers(1, names=ATTENTION),
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt", set()),
        (INTEGERS, "int4", ALL),
        (groups("pack-quantized", **INT4 | {"group_size": 16}), "compressed-tensors", set()),
        (
            groups("pack-quantized", **INT4 | {"strategy": "channel", "group_size": None}),
            "int4",
            ALL,
        ),
        (groups("pack-quantized", **INT4 | {"num_bits": 8}), "compressed-tensors", set()),
        (
            groups("pack-quantized", **INT4, scale_dtype="torch.float32"),
            "compressed-tensors",
            set(),
        ),
        (GPTQ, "gptq", set()),
        (GPTQ | {"desc_act": False}, "int4", ALL),
        (GPTQ | {"desc_act": False, "group_size": -1}, "int4", ALL),
        (
            GPTQ | {"desc_act": False, "modules_in_block_to_quantize": [["self_attn.q_proj"]]},
            "int4",
            of_layers(0, 1, names={"self_attn.q_proj.weight"}),
        ),
        (AWQ, "int4", ALL),
        (AWQ | {"modules_to_not_convert": ["mlp"]}, "int4", of_layers(0, 1, names=ATTENTION)),
        (MISTRAL, "fp8", set()),
    ],
)
def test_a_config_says_what_a_codec_keeps(
    fields: dict[str, Any], codec: str, names: set[str], tmp_path: Path
) -> None:
    config = json.loads(AutoConfig.for_model("llama", **SHAPE).to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    facts = facts_of(ModelSection(path=str(tmp_path)))
    assert facts.published == codec
    model = empty_from(config)
    found, parameters = kept_parameters(model, fields)
    assert (found, {*parameters}) == (codec, {f"model.{name}" for name in names})
    for number, layer in enumerate(facts.layers):
        kept = {linear.name for linear in layer.linears if linear.is_kept}
        assert kept == {name.split(".")[3] for name in names if name.startswith(f"layers.{number}")}


def test_random_weights_are_planned_whatever_form_a_config_names(tmp_path: Path) -> None:
    config = json.loads(AutoConfig.for_model("llama", **SHAPE).to_json_string())
    file = tmp_path / "config.json"
    for fields in ({"quant_method": "hqq"}, {"quant_method": "compressed-tensors"}, NVFP4):
        file.write_text(json.dumps(config | {"quantization_config": fields}))
        facts = facts_of(ModelSection(config=str(file), init="random"))
        assert facts.published == ""
        assert not any(linear.is_kept for layer in facts.layers for linear in layer.linears)


def test_experts_are_kept_by_the_names_of_each() -> None:
    config = AutoConfig.for_model("qwen3_moe", **SHAPE | EXPERTS)
    fields = NVFP4 | {"ignore": ["re:.*self_attn.*", "re:.*mlp.gate$"]}
    _, names = kept_parameters(empty_from(json.loads(config.to_json_string())), fields)
    assert names == {f"model.{name}" for name in of_layers(0, 1, names=STACKS)}
    fields["ignore"] = ["re:.*experts.*"]
    _, names = kept_parameters(empty_from(json.loads(config.to_json_string())), fields)
    assert names == {f"model.{name}" for name in of_layers(0, 1, names=ATTENTION | {GATE})}


GATE = "mlp.gate.weight"  # which no codec encodes, published so or not


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("form", FORMS)
def test_what_a_config_says_is_kept_comes_back_to_the_bit(
    form: str, kind: str, tmp_path: Path
) -> None:
    """And takes what a plan says."""
    config = AutoConfig.for_model(kind, **SHAPE | (EXPERTS if kind == "qwen3_moe" else {}))
    packed, _ = write_both(tmp_path, config, FORMS[form])
    model, fields = load(packed), FORMS[form].quantization
    codec, names = kept_parameters(model, fields)
    assert bool(names) == (codec in ("nvfp4", "int4"))
    for name in names - {f"model.layers.{i}.{GATE}" for i in range(2)}:
        values = model.get_parameter(name).detach()
        found = decoded(form_named(codec), values)
        assert torch.equal(found.view(torch.int16), values.view(torch.int16)), name
    facts = facts_of(ModelSection(path=str(packed)))
    assert facts.published == codec
    if names:
        layers = LayeredModel(model)
        encoding = Encoding(layers, codec, names=names)
        for layer, planned in zip(layers.layers, facts.layers, strict=True):
            own = list(layer.parameters())
            record = lay_out(own, encoding.codecs(own))
            assert record.num_bytes == record_bytes(planned, codec, 2)
            assert record.num_bytes < 0.7 * record_bytes(planned, "native", 2)


# --------------------------------------------------------------------------------------------------


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
