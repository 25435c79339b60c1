"""Checkpoints that are published quantised: the plain model of the values that they stand for."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.utils.quantization_config import Mxfp4Config

from finetune.errors import ModelError
from offload.engine.model.hooks import CaptureWeights
from tests.checkpoints import (
    Pack,
    assert_same_model,
    load,
    pack_bnb_4bit,
    pack_fp8,
    pack_mxfp4,
    write_checkpoint,
)
from tests.tiers import diagonal, mostly_slow

Tier = Literal["ram", "disk"]

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 8},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **SHAPE | KINDS[kind] | changes)


def unpacked(pack: Pack, name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return what bitsandbytes makes of a tensor that it has packed."""
    parts = dict(pack(name, values))
    packed = parts.pop(name)
    if not parts:
        return {name: values}
    state = {key.removeprefix(name + "."): part for key, part in parts.items()}
    return {name: dequantize_4bit(packed, QuantState.from_dict(state, torch.device("cpu")))}


# ------------------------------------------------------------------------------------ bitsandbytes


@pytest.mark.parametrize("tier", mostly_slow(["ram", "disk"], "disk"))
@pytest.mark.parametrize(
    ("kind", "quant_type", "has_double_quantisation", "storage", "dtype"),
    mostly_slow(
        [
            ("llama", "nf4", True, torch.uint8, "bfloat16"),
            ("qwen3_moe", "nf4", True, torch.uint8, "bfloat16"),
            ("qwen3_moe", "fp4", False, torch.bfloat16, "float32"),
            ("mixtral", "nf4", False, torch.uint8, "float32"),
        ],
        ("qwen3_moe", "nf4", True, torch.uint8, "bfloat16"),
        ("qwen3_moe", "fp4", False, torch.bfloat16, "float32"),
    ),
)
def test_4_bit_weights_are_those_that_bitsandbytes_dequantises(
    kind: str,
    quant_type: str,
    has_double_quantisation: bool,
    storage: torch.dtype,
    dtype: str,
    tier: Tier,
    tmp_path: Path,
) -> None:
    pack = pack_bnb_4bit(
        quant_type=quant_type, has_double_quantisation=has_double_quantisation, storage=storage
    )
    write_checkpoint(
        tmp_path / "packed", config_of(kind), pack=pack, quantization=BNB, shard_bytes=50_000
    )
    write_checkpoint(tmp_path / "plain", config_of(kind), pack=partial(unpacked, pack))
    found = load(tmp_path / "packed", tier=tier, dtype=dtype)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=getattr(torch, dtype))
    expected.name_or_path = expected.config.name_or_path = found.name_or_path
    assert_same_model(found, expected)
    assert all(type(m) is nn.Linear for m in found.modules() if isinstance(m, nn.Linear))
    assert not hasattr(found.config, "quantization_config")


def by_definition(pack: Pack, name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return what the format says of a packed tensor: flat blocks of 64, each with its scale."""
    parts = dict(pack(name, values))
    packed = parts.pop(name)
    if not parts:
        return {name: values}
    state = QuantState.from_dict(
        {key.removeprefix(name + "."): part for key, part in parts.items()}, torch.device("cpu")
    )
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
    nibbles = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], dim=1).view(-1)
    found = state.code[nibbles[: values.numel()].long()]
    found *= scales.repeat_interleave(64)[: values.numel()]
    return {name: found.to(values.dtype).view(values.shape)}


@pytest.mark.thorough
@pytest.mark.parametrize("has_double_quantisation", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_4_bit_rows_that_are_no_whole_blocks_are_dequantised_as_the_format_says(
    quant_type: str, has_double_quantisation: bool, tmp_path: Path
) -> None:
    """On a CPU bitsandbytes 0.50 itself does not, for rows of 48 or 96 weights."""
    pack = pack_bnb_4bit(quant_type=quant_type, has_double_quantisation=has_double_quantisation)
    config = config_of("llama", hidden_size=48, intermediate_size=96)
    write_checkpoint(tmp_path / "packed", config, pack=pack, quantization=BNB)
    write_checkpoint(tmp_path / "plain", config, pack=partial(by_definition, pack))
    found, expected = load(tmp_path / "packed"), load(tmp_path / "plain")
    for name, weight in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), weight), name


def test_only_one_tensor_is_dequantised_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every parameter is taken out of the loader's hands before the next one is read."""
    pack = pack_bnb_4bit(quant_type="nf4", has_double_quantisation=True)
    write_checkpoint(tmp_path, config_of("llama"), pack=pack, quantization=BNB)
    order: list[str] = []

    def note(*_arguments: Any, told: str, then: Any, **_keywords: Any) -> Any:
        order.append(told)
        return then(*_arguments, **_keywords)

    catch = CaptureWeights._catch

    def caught(self: Any, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta and parameter.ndim == 2:
            order.append("put")
        catch(self, module, name, parameter)

    import bitsandbytes.functional as functional

    monkeypatch.setattr(CaptureWeights, "_catch", caught)
    monkeypatch.setattr(
        functional, "dequantize_4bit", partial(note, told="read", then=dequantize_4bit)
    )
    load(tmp_path)
    in_layers = order[order.index("read") :]
    assert in_layers[:28] == ["read", "put"] * 14


# ------------------------------------------------------------------------------------- mxfp4, fp8


@pytest.mark.parametrize(("dtype", "tier"), diagonal(["bfloat16", "float32"], ["ram", "disk"]))
def test_mxfp4_experts_are_those_that_transformers_dequantises(
    dtype: str, tier: Tier, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, config_of("gpt_oss"), pack=pack_mxfp4, quantization=MXFP4)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=getattr(torch, dtype), quantization_config=Mxfp4Config(dequantize=True)
    )
    for parameter in expected.parameters():  # which 5.17 leaves in bfloat16
        parameter.data = parameter.data.to(getattr(torch, dtype))
    found = load(tmp_path, tier=tier, dtype=dtype)
    assert_same_model(found, expected)
    assert found.model.layers[1].mlp.experts.down_proj.abs().max() > 0.05
    assert not hasattr(found.config, "quantization_config")


@pytest.mark.parametrize("tier", ["ram", "disk"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_fp8_weights_are_those_that_transformers_dequantises(
    kind: str, tier: Tier, tmp_path: Path
) -> None:
    pack = pack_fp8(rows=32, columns=16)
    write_checkpoint(tmp_path, config_of(kind), pack=pack, quantization=FP8)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=FineGrainedFP8Config(weight_block_size=(32, 16), dequantize=True),
    )
    assert_same_model(load(tmp_path, tier=tier), expected)


def test_fp8_rows_that_are_no_whole_blocks_are_near_what_was_packed(tmp_path: Path) -> None:
    config = config_of("llama", hidden_size=40, intermediate_size=72)
    quantization = FP8 | {"weight_block_size": [32, 32]}
    write_checkpoint(
        tmp_path / "packed", config, pack=pack_fp8(rows=32, columns=32), quantization=quantization
    )
    write_checkpoint(tmp_path / "plain", config)
    found, expected = load(tmp_path / "packed"), load(tmp_path / "plain")
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(
            found.get_parameter(name), weight, rtol=2**-4 + 2**-8, atol=1e-4, msg=name
        )


# ------------------------------------------------------------------------------------------ errors


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("bnb", lambda t: t.pop(GATE), rf"{GATE} lacks {GATE}"),
        ("bnb", lambda t: t.pop(f"{GATE}.absmax"), rf"{GATE} lacks {GATE}\.absmax"),
        ("bnb", lambda t: t.pop(f"{GATE}.quant_map"), rf"{GATE} lacks {GATE}\.quant_map"),
        ("bnb", lambda t: t.pop(f"{GATE}.nested_absmax"), rf"lacks {GATE}\.nested_absmax"),
        ("bnb", lambda t: t.pop(f"{GATE}.nested_quant_map"), rf"lacks {GATE}\.nested_quant_map"),
        (
            "bnb",
            lambda t: t.pop(f"{GATE}.quant_state.bitsandbytes__nf4"),
            rf"{GATE}\S* \(torch.uint8\) lacks the scales",
        ),
        ("bnb", lambda t: t.pop("model.norm.weight"), r"lacks 1 tensors, such as model\.norm"),
        ("bnb", lambda t: t.update(x=torch.ones(2)), "unknown to the model, 1 tensors, such as x"),
        (
            "fp8",
            lambda t: t.pop(f"{GATE}_scale_inv"),
            rf"{GATE} \(torch.float8_e4m3fn\) lacks the scales",
        ),
        ("fp8", lambda t: t.pop(GATE), rf"{GATE} lacks {GATE}"),
    ],
)
def test_a_missing_part_is_named(
    form: str, change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    packs: dict[str, tuple[Pack, dict[str, Any]]] = {
        "bnb": (pack_bnb_4bit(quant_type="nf4", has_double_quantisation=True), BNB),
        "fp8": (pack_fp8(rows=32, columns=16), FP8),
    }
    pack, quantization = packs[form]
    write_checkpoint(tmp_path, config_of("llama"), pack=pack, quantization=quantization)
    change_tensors(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes with 8 bits"),
        ({"load_in_8bit": True}, "bitsandbytes with 8 bits"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8"),
    ],
)
def test_other_quantised_weights_are_refused_by_name(
    quantization: dict[str, Any], name: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, config_of("llama"), quantization=quantization)
    with pytest.raises(ModelError, match=rf"is quantised, its quant_method is {name};"):
        load(tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    pack = pack_bnb_4bit(quant_type="nf4", has_double_quantisation=True)
    write_checkpoint(tmp_path, config_of("llama"), pack=pack, quantization=BNB, shard_bytes=50_000)
    shutil.move(tmp_path / "model-00002-of-00004.safetensors", tmp_path / "elsewhere")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    with pytest.raises(ModelError, match=r"has no model-00002-of-00004"):
        load(tmp_path)
