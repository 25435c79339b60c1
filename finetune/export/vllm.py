"""An adapter as vLLM reads it: plain LoRA on every expert's matrices, named as they are published.

peft keeps one A and one B for all experts of a fused weight. vLLM silently skips these
(vllm-project/vllm#41384), except in families whose experts it also holds fused: of those here,
gpt_oss. For the others each expert's share is written under the name that its matrix has in the
published weights: `...mlp.experts.3.gate_proj`. The gate and up halves of a fused weight share an
A, so it is written for both. vLLM 0.33 can be configured to read peft's form of experts, by a flag
and a keyword for each adapter; llama.cpp's adapter converter reads only the form of this module.

In vLLM the scale is one number for the whole adapter, alpha / r of its config. Where ranks or
alphas differ, each B is multiplied by its own scale, and the config's scale is 1.

Source: vLLM's vllm/lora/lora_model.py (`check_unexpected_modules`), lora/utils.py
(`process_packed_modules_mapping`), lora/model_manager.py (`_stack_moe_lora_weights`),
lora/lora_weights.py (`pack_moe`) and lora/peft_helper.py, read in 2026; peft 0.21's
`ParamWrapper.get_delta_weight` for the layout of A and B.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from finetune.data.chat_template import GENERATION_CONFIG, template_kwargs_in, vllm_flag
from finetune.errors import CheckpointError, ConfigError
from finetune.files.atomic import becoming, flush, require_free
from finetune.run.adapter_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_adapter_config,
    refuse_classifier,
    require_adapter_files,
)

_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Published:
    """The names of a family's experts in its published weights: their block and matrices."""

    block: str
    gate: str
    up: str
    down: str


_PLAIN = _Published(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
PER_EXPERT: Mapping[str, _Published] = {
    "deepseek_v3": _PLAIN,
    "glm4_moe": _PLAIN,
    "mixtral": _Published(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    "olmoe": _PLAIN,
    "qwen2_moe": _PLAIN,
    "qwen3_moe": _PLAIN,
}
FUSED = ("gpt_oss",)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lora:
    """The A (r, in) and B (out, r) of one matrix, or of all experts side by side."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    num_experts: int = 1

    @property
    def rank(self) -> int:
        return self.a.shape[0] // self.num_experts

    def of_expert(self, expert: int, rows: slice) -> "_Lora":
        """Return one expert's share, for some of the rows of its matrix."""
        a = self.a.reshape(self.num_experts, self.rank, -1)[expert].clone()
        b = self.b.reshape(-1, self.rank, self.num_experts)[rows, :, expert]
        return _Lora(a=a, b=b, scale=self.scale)


def write_vllm_adapter(
    adapter: Path, out: Path, *, model_config: Mapping[str, Any]
) -> tuple[str, ...]:
    """Write an adapter of peft's in the layout that vLLM reads.

    Args:
        adapter: Folder of the adapter.
        out: Folder to write, which must be new; it appears when it is whole.
        model_config: The base model's config.

    Returns:
        What reads it, and what reads the adapter in peft's own form, in a line each.

    Raises:
        CheckpointError: The adapter is damaged or not of this model.
        ConfigError: vLLM reads no such adapter.
        MergeError: `out` is there.
    """
    require_free(out)
    require_adapter_files(adapter)
    refuse_classifier(adapter, "exported for vLLM")
    config = read_adapter_config(adapter)
    _require_readable(config)
    loras = dict(_published(_read(adapter, config, model_config), model_config))
    ranks, scales = {x.rank for x in loras.values()}, {x.scale for x in loras.values()}
    is_even = len(ranks) == len(scales) == 1
    tensors = {}
    for name, lora in loras.items():
        b = lora.b if is_even else lora.b * lora.scale
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = lora.a.contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b.contiguous()
    scale = scales.pop() if is_even else 1.0
    config |= {
        "r": max(ranks),
        "lora_alpha": scale * max(ranks),
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_parameters": None,
        "target_modules": sorted({_module(name).rsplit(".", 1)[-1] for name in loras}),
    }
    with becoming(out) as folder:
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        flush(folder / WEIGHTS_FILE)
        flush(folder / CONFIG_FILE)
        has_stops = (adapter / GENERATION_CONFIG).exists()
        if has_stops:
            shutil.copy(adapter / GENERATION_CONFIG, folder)
            flush(folder / GENERATION_CONFIG)
    has_split = any(re.search(r"\.experts\.\d+\.", name) for name in loras)
    serve = f"vllm serve BASE --enable-lora --max-lora-rank {max(ranks)}"
    if has_stops:  # by default vLLM reads the tokens to stop at from the base
        serve += f" --generation-config {out}"
    if kwargs := template_kwargs_in(adapter):
        serve += f" {vllm_flag(kwargs)}"
    return _readers(adapter, out, serve=serve, has_split_experts=has_split)


def _readers(adapter: Path, out: Path, *, serve: str, has_split_experts: bool) -> tuple[str, ...]:
    """Return which programs read the two layouts.

    Source: vLLM's docs/features/lora.md (Mixing 2D and 3D MoE LoRA Adapters) and its engine
    arguments (`--generation-config` takes a folder), read in 2026;
    llama.cpp's convert_lora_to_gguf.py, which was run on both: of experts in one tensor it says
    "Unprocessed experts".
    """
    written = f"vLLM: `{serve} --lora-modules NAME={out}`"
    if not has_split_experts:
        return (written,)
    module = json.dumps({"name": "NAME", "path": str(adapter), "is_3d_lora_weight": True})
    return (
        written,
        f"vLLM from 0.33 on reads peft's layout too: `{serve} --enable-mixed-moe-lora-format"
        f" --lora-modules '{module}'`; with that flag this one is declared"
        ' `"is_3d_lora_weight": false`, and a wrong declaration may pass for wrong answers',
        f"llama.cpp reads this layout, experts one by one, and not peft's:"
        f" `convert_lora_to_gguf.py {out} --base BASE_DIR`",
    )


def _require_readable(config: Mapping[str, Any]) -> None:
    """Refuse adapters that vLLM cannot hold."""
    if config["peft_type"] != "LORA":
        raise ConfigError(
            f"the adapter is of type {config['peft_type']}",
            limit="vLLM reads plain LoRA only",
            hint="`sluice merge RUN_DIR --out DIR` gives a whole model, which it serves",
        )
    for setting, what in (("use_dora", "DoRA"), ("modules_to_save", "modules trained whole")):
        if config.get(setting):
            raise ConfigError(
                f"the adapter has {what}: {json.dumps(config[setting])}",
                limit="vLLM reads plain LoRA only",
                hint="`sluice merge RUN_DIR --out DIR` gives a whole model, which it serves",
            )


def _read(
    adapter: Path, config: Mapping[str, Any], model_config: Mapping[str, Any]
) -> dict[str, _Lora]:
    """Return an adapter's matrices by peft's name; those of experts hold all of them."""
    tensors = load_file(adapter / WEIGHTS_FILE)
    names = sorted(
        key.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        for key in tensors
        if key.endswith(".lora_A.weight")
    )
    loras = {}
    for name in names:
        a = tensors.pop(f"{_PREFIX}{name}.lora_A.weight")
        b = tensors.pop(f"{_PREFIX}{name}.lora_B.weight", None)
        if b is None or a.ndim != 2 or b.ndim != 2:
            raise _not_of_this_model(name, model_config)
        is_expert = _module(name).endswith(".experts")
        num_experts = _num_experts(model_config) if is_expert else 1
        if a.shape[0] % num_experts or a.shape[0] != b.shape[1]:
            raise _not_of_this_model(name, model_config)
        part = "down_proj" if name == _module(name) else "gate_up_proj"
        target = f"{_module(name)}.{part}" if is_expert else name
        alpha = _alpha(target, config)
        rank = a.shape[0] // num_experts
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        loras[name] = _Lora(a=a, b=b, scale=scale, num_experts=num_experts)
    if tensors:
        raise ConfigError(
            f"the adapter holds {min(tensors)}, which is no A and no B",
            limit="vLLM reads plain LoRA only",
            hint="`sluice merge RUN_DIR --out DIR` gives a whole model, which it serves",
        )
    return loras


def _published(
    loras: Mapping[str, _Lora], model_config: Mapping[str, Any]
) -> Iterator[tuple[str, _Lora]]:
    """Yield the matrices by published name, experts one by one where vLLM wants them so."""
    model_type = str(model_config["model_type"])
    for name, lora in loras.items():
        module = _module(name)
        if not module.endswith(".experts") or model_type in FUSED:
            yield name, lora
            continue
        if model_type not in PER_EXPERT:
            raise ConfigError(
                f"adapters on the experts of a {model_type} model",
                limit=f"it is known how vLLM reads those of {', '.join((*PER_EXPERT, *FUSED))}",
                hint="`sluice merge RUN_DIR --out DIR` gives a whole model, which it serves",
            )
        inner, outer = loras.get(f"{module}.base_layer"), loras.get(module)
        if inner is None or outer is None or inner.b.shape[0] != 2 * outer.a.shape[1]:
            raise _not_of_this_model(name, model_config)
        published = PER_EXPERT[model_type]
        block = module.removesuffix(".mlp.experts") + f".{published.block}.experts"
        for expert in range(lora.num_experts):
            width = lora.b.shape[0] // 2
            if name == module:  # the outer of two wrappers is that of the second weight
                yield f"{block}.{expert}.{published.down}", lora.of_expert(expert, slice(None))
            else:
                yield f"{block}.{expert}.{published.gate}", lora.of_expert(expert, slice(width))
                rest = slice(width, None)
                yield f"{block}.{expert}.{published.up}", lora.of_expert(expert, rest)


def _module(name: str) -> str:
    """Return the adapted module: peft puts a second adapter of one module around the first."""
    return name.removesuffix(".base_layer")


def _alpha(target: str, config: Mapping[str, Any]) -> float:
    """Return a projection's alpha by peft's rule: the first pattern that fits the name's end."""
    for pattern, alpha in (config.get("alpha_pattern") or {}).items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in (target, f"{target}.weight")):
            return float(alpha)
    return float(config["lora_alpha"])


def _num_experts(model_config: Mapping[str, Any]) -> int:
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(model_config[key]) for key in keys if model_config.get(key)), 1)


def _not_of_this_model(name: str, model_config: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"the adapter's matrices of {name} are not of the sizes that they should have",
        limit=f"the {model_config['model_type']} model has {_num_experts(model_config)} experts",
        hint="give the directory of the run that the adapter is of",
    )
