"""Matrices as quantised checkpoints publish them, and what they mean by definition.

Codes and scales are random, and what they mean is computed number by number, with numpy or in
float64, in the order of products that each format's library has.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from tests.checkpoints import is_linear, write_checkpoint

Decoded = tuple[Mapping[str, torch.Tensor], torch.Tensor]
"""What is published of a matrix, and the values that this means."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A form of checkpoints."""

    publish: Callable[[str, torch.Tensor], Decoded]  # given a matrix's name and values
    quantization: dict[str, Any]  # what config.json says of it


def write_both(folder: Path, config: PreTrainedConfig, form: Published) -> tuple[Path, Path]:
    """Write a checkpoint in a form, and a plain one of the same values."""

    def packed(name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return form.publish(name, values)[0] if is_linear(name, values) else {name: values}

    def plain(name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {name: form.publish(name, values)[1] if is_linear(name, values) else values}

    write_checkpoint(folder / "packed", config, pack=packed, quantization=form.quantization)
    write_checkpoint(folder / "plain", config, pack=plain)
    return folder / "packed", folder / "plain"


def _random(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def _e2m1(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    signs = np.where(codes > 7, np.float32(-1), np.float32(1))
    return (signs * E2M1[codes & 7]).astype(np.float32)


def _paired(codes: np.ndarray[Any, Any]) -> torch.Tensor:
    """Pack codes of 4 bits along rows, the low half of a byte first."""
    return torch.from_numpy((codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8))


def fp8_per_tensor(name: str, values: torch.Tensor) -> Decoded:
    """Pack as Mistral does: one number, and one for activations."""
    scale = (values.double().abs().amax() / 448).bfloat16()
    codes = (values.double() / scale.double()).to(torch.float8_e4m3fn)
    inputs = {name.removesuffix("weight") + "activation_scale": torch.tensor(0.5)}
    decoded = (codes.double() * scale.double()).bfloat16()
    return {name: codes, f"{name}_scale_inv": scale} | inputs, decoded


def float8_per_row(name: str, values: torch.Tensor) -> Decoded:
    scale = (values.double().abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (values.double() / scale.double()).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale": scale}, (codes.double() * scale.double()).bfloat16()


def _nvfp4(name: str, values: torch.Tensor) -> tuple[Any, torch.Tensor, Any]:
    rows, columns = values.shape
    codes = _random(name).integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = torch.from_numpy(_random(name + "s").uniform(1, 440, (rows, columns // 16)))
    scales = scales.to(torch.float8_e4m3fn)
    return codes, scales, np.repeat(scales.float().numpy(), 16, axis=1)


def nvfp4(name: str, values: torch.Tensor) -> Decoded:
    """Pack as compressed-tensors does: the tensor's scale divides."""
    codes, scales, grid = _nvfp4(name, values)
    by = np.float32(61234.5)
    decoded = torch.from_numpy(_e2m1(codes) * (grid / by)).bfloat16()
    parts = {"_packed": _paired(codes), "_scale": scales, "_global_scale": torch.tensor([by])}
    return {name + ending: part for ending, part in parts.items()}, decoded


def nvfp4_but_attention(name: str, values: torch.Tensor) -> Decoded:
    return ({name: values}, values) if "self_attn" in name else nvfp4(name, values)


def mixed(name: str, values: torch.Tensor) -> Decoded:
    """Pack attention in float8 and the rest in NVFP4, as one checkpoint of compressed-tensors."""
    return (float8_per_row if "self_attn" in name else nvfp4)(name, values)


def modelopt(name: str, values: torch.Tensor) -> Decoded:
    """Pack as Model Optimizer does a mixed checkpoint: attention in e4m3, the rest in NVFP4."""
    inputs = {name.removesuffix("weight") + "input_scale": torch.tensor(0.5)}
    if "self_attn" in name:
        scale = (values.double().abs().amax() / 448).float()
        e4m3 = (values.double() / scale.double()).to(torch.float8_e4m3fn)
        product = (e4m3.double() * scale.double()).float()
        return {name: e4m3, f"{name}_scale": scale} | inputs, product.bfloat16()
    codes, scales, grid = _nvfp4(name, values)
    times = np.float32(1.7e-5)
    decoded = torch.from_numpy(_e2m1(codes) * (grid * times)).bfloat16()
    parts = {"": _paired(codes), "_scale": scales, "_scale_2": torch.tensor(times)}
    return {name + ending: part for ending, part in parts.items()} | inputs, decoded


def mxfp4(name: str, values: torch.Tensor) -> Decoded:
    """Pack as compressed-tensors does: powers of two for 32 weights of a row."""
    rows, columns = values.shape
    codes = _random(name).integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = _random(name + "s").integers(116, 123, (rows, columns // 32), dtype=np.uint8)
    grid = np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=1)
    decoded = torch.from_numpy((_e2m1(codes) * grid).astype(np.float32)).bfloat16()
    parts = {"_packed": _paired(codes), "_scale": torch.from_numpy(scales)}
    return {name + ending: part for ending, part in parts.items()}, decoded


def _words(codes: np.ndarray[Any, Any]) -> torch.Tensor:
    """Pack unsigned codes of 4 bits along rows in int32, the lowest bits first."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8)))
    wide = codes.astype(np.uint32).reshape(len(codes), -1, 8) << shifts
    words = np.ascontiguousarray(np.bitwise_or.reduce(wide, axis=2))
    return torch.from_numpy(words.view(np.int32))


def int4(name: str, values: torch.Tensor, *, has_zeros: bool = False) -> Decoded:
    """Pack as compressed-tensors does, in groups of 32."""
    rows, columns = values.shape
    codes = _random(name).integers(0, 16, (rows, columns))
    zeros = _random(name + "z").integers(0, 16, (rows, columns // 32))
    scales = torch.from_numpy(_random(name + "s").uniform(1e-3, 4e-3, (rows, columns // 32)))
    scales = scales.bfloat16()
    parts = {
        "_packed": _words(codes),
        "_scale": scales,
        "_shape": torch.tensor([rows, columns]),
    }
    middle: Any = 8
    if has_zeros:
        parts["_zero_point"] = _words(zeros.T).t().contiguous()
        middle = np.repeat(zeros, 32, axis=1)
    grid = scales.double().repeat_interleave(32, 1)
    decoded = (torch.from_numpy(codes - middle).double() * grid).bfloat16()
    return {name + ending: part for ending, part in parts.items()}, decoded


def int4_with_zeros(name: str, values: torch.Tensor) -> Decoded:
    return int4(name, values, has_zeros=True)


def gptq(
    name: str, values: torch.Tensor, *, is_v2: bool = False, is_in_order: bool = False
) -> Decoded:
    """Pack in groups of 32 features that are not one after the other, as `desc_act` leaves them."""
    rows, columns = values.shape
    codes, zeros, scales = _float16(name, rows, columns)
    order = np.arange(columns) // 32
    order = order if is_in_order else _random(name + "o").permutation(order)
    base, stored = name.removesuffix("weight"), zeros if is_v2 else zeros - 1
    parts = {
        "qweight": _words(codes).t().contiguous(),
        "qzeros": _words(stored.T),
        "scales": scales.t().contiguous(),
        "g_idx": torch.from_numpy(order.astype(np.int32)),
    }
    product = (codes - zeros[:, order]).astype(np.float64) * scales.double().numpy()[:, order]
    decoded = torch.from_numpy(product).half().bfloat16()
    return {base + part: tensor for part, tensor in parts.items()}, decoded


def gptq_in_order(name: str, values: torch.Tensor) -> Decoded:
    return gptq(name, values, is_in_order=True)


def gptq_v2(name: str, values: torch.Tensor) -> Decoded:
    return gptq(name, values, is_v2=True)


def awq(name: str, values: torch.Tensor) -> Decoded:
    """Pack in groups of 32 features; a router of 4 experts is left as it is."""
    rows, columns = values.shape
    if rows % 8:
        return {name: values}, values
    codes, zeros, scales = _float16(name, rows, columns)
    base = name.removesuffix("weight")

    def words(unpacked: np.ndarray[Any, Any]) -> torch.Tensor:
        eights = unpacked.reshape(len(unpacked), -1, 8)
        return _words(eights[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(unpacked), -1))

    parts = {
        "qweight": words(codes.T),
        "qzeros": words(zeros.T),
        "scales": scales.t().contiguous(),
    }
    middle, grid = np.repeat(zeros, 32, axis=1), scales.double().repeat_interleave(32, 1)
    decoded = (torch.from_numpy(codes - middle).double() * grid).half().bfloat16()
    return {base + part: tensor for part, tensor in parts.items()}, decoded


def _float16(name: str, rows: int, columns: int) -> tuple[Any, Any, torch.Tensor]:
    """Return codes (N, K), zero points of 1 to 15 and scales (N, K / 32)."""
    codes = _random(name).integers(0, 16, (rows, columns))
    zeros = _random(name + "z").integers(1, 16, (rows, columns // 32))
    scales = torch.from_numpy(_random(name + "s").uniform(1e-3, 4e-3, (rows, columns // 32)))
    return codes, zeros, scales.half()


def groups(form: str, **weights: Any) -> dict[str, Any]:
    """Return what compressed-tensors writes into a config."""
    own = {"symmetric": True, "dynamic": False, "observer": "minmax", "observer_kwargs": {}}
    inputs = {"num_bits": 8, "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": own | weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


_FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_GPTQ = {
    **{"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True},
    **{"damp_percent": 0.01, "true_sequential": True, "static_groups": False},
}
FORMS: Mapping[str, Published] = {
    "fp8 per tensor": Published(
        publish=fp8_per_tensor,
        quantization={
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "float8 per row": Published(
        publish=float8_per_row,
        quantization=groups("float-quantized", **_FLOAT8),
    ),
    "nvfp4": Published(
        publish=nvfp4,
        quantization=groups("nvfp4-pack-quantized", **_NVFP4),
    ),
    "nvfp4 and plain attention": Published(
        publish=nvfp4_but_attention,
        quantization=groups("nvfp4-pack-quantized", **_NVFP4)
        | {"ignore": ["lm_head", "re:.*self_attn.*", "model.layers.1.mlp.gate"]},
    ),
    "mixed": Published(
        publish=mixed,
        quantization={
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {"format": "float-quantized", "weights": _FLOAT8},
                "group_1": {"format": "nvfp4-pack-quantized", "weights": _NVFP4},
            },
        },
    ),
    "modelopt": Published(
        publish=modelopt,
        quantization={
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                "model.layers.*.mlp*": {"quant_algo": "NVFP4", "group_size": 16},
            },
            "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.47.0"},
        },
    ),
    "mxfp4": Published(
        publish=mxfp4,
        quantization=groups(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
        ),
    ),
    "int4": Published(publish=int4, quantization=groups("pack-quantized", **_INT4)),
    "gptq": Published(publish=gptq, quantization=_GPTQ),
    "gptq in order": Published(publish=gptq_in_order, quantization=_GPTQ | {"desc_act": False}),
    "gptq_v2": Published(
        publish=gptq_v2, quantization=_GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}
    ),
    "awq": Published(
        publish=awq,
        quantization={
            **{"quant_method": "awq", "bits": 4, "group_size": 32},
            **{"zero_point": True, "version": "gemm", "modules_to_not_convert": None},
        },
    ),
    "int4 with zeros": Published(
        publish=int4_with_zeros,
        quantization=groups("pack-quantized", **_INT4, symmetric=False),
    ),
}
