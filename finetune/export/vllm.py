"""An adapter as vLLM reads it: plain LoRA on matrices named as the checkpoint names its weights.

vLLM serves the class that a checkpoint's config names, and maps an adapter's names as it maps those
of the weights. Of a checkpoint for images and text whose text alone was trained, peft's names are
those of the text class (`model.layers...`), and vLLM silently ignores them
(vllm-project/vllm#34186, #48019). So each matrix is named after the published tensor that it
changes, by transformers' own rules for loading them, read backwards.

peft keeps one A and one B for all experts of a fused weight. vLLM silently skips these (#41384),
except in the families of `FUSED`, whose experts it also holds fused. For the others each
expert's share is written under the name of its published matrix: `...mlp.experts.3.gate_proj`.
Published matrices that are rows of one fused weight share an A, so it is written for each. vLLM
0.33 can be configured to read peft's form of experts, by a flag and a keyword for each adapter;
llama.cpp's adapter converter reads only the form of this module.

In vLLM the scale is one number for the whole adapter, alpha / r of its config. Where ranks or
alphas differ, each B is multiplied by its own scale, and the config's scale is 1.

Source: vLLM's vllm/lora/lora_model.py (`check_unexpected_modules`, at 0306474e), lora/utils.py
(`parse_fine_tuned_lora_name`, `process_packed_modules_mapping`), lora/model_manager.py
(`_stack_moe_lora_weights`), lora/lora_weights.py (`pack_moe`) and lora/peft_helper.py, read in
2026; `is_3d_moe_weight` of its classes for `FUSED`; peft 0.21's `ParamWrapper.get_delta_weight` for
the layout of A and B.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from finetune.data.chat_template import GENERATION_CONFIG, template_kwargs_in, vllm_flag
from finetune.errors import CheckpointError, ConfigError
from finetune.files.atomic import becoming, flush, require_free
from finetune.files.tensors import Spec
from finetune.model.base_weights import BaseWeights
from finetune.model.empty import empty_published
from finetune.model.renaming import Renaming
from finetune.run.adapter_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_adapter_config,
    refuse_classifier,
    require_adapter_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFIX, _WRAPPED = "base_model.model.", ".base_layer"
_MERGE = "`sluice merge RUN_DIR --out DIR` gives a whole model, which it serves"


FUSED = ("gpt_oss", "qwen3_5_moe_text", "qwen3_vl_moe_text")
"""The types of text models whose experts vLLM holds, and reads adapters on, in one tensor."""
_OF_ROWS = {"MergeModulelist", "Concatenate"}
"""transformers' operations that stack rows and leave each row as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lora:
    """What changes one parameter: a matrix, or those of all experts."""

    a: torch.Tensor  # (r, in), or of experts (E, r, in)
    b: torch.Tensor  # (out, r), or of experts (E, out, r)
    scale: float
    wrapper: str  # what peft's name of the matrix adds to the module's

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def as_saved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B as peft saves them: A (E x r, in) and B (out, r x E) of experts."""
        if self.a.ndim == 2:
            return self.a, self.b
        return self.a.flatten(0, 1), self.b.permute(1, 2, 0).flatten(1)


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM reserves memory for (`MaxLoRARanks` of its vllm/config/lora.py)."""


def write_vllm_adapter(
    adapter: Path, out: Path, *, base: Path, served: str | None = None
) -> tuple[str, ...]:
    """Write an adapter of peft's in the layout that vLLM reads.

    Args:
        adapter: Folder of the adapter.
        out: Folder to write, which must be new; it appears when it is whole.
        base: Folder of the model that it is of: config.json and safetensors.
        served: Name by which vLLM is given that model; None for its folder.

    Returns:
        What reads it, and what reads the adapter in peft's own form, in a line each.

    Raises:
        CheckpointError: The adapter is damaged or not of this model.
        ConfigError: vLLM reads no such adapter.
        MergeError: `out` is there.
        ModelError: The base is not complete.
    """
    require_free(out)
    require_adapter_files(adapter)
    refuse_classifier(adapter, "exported for vLLM")
    config = read_adapter_config(adapter)
    _require_readable(config)
    model = empty_published(str(base), torch.float32).model
    specs = BaseWeights(base).specs
    loras = dict(_published(_read(adapter, config, model), model, specs))
    ranks, scales = {x.rank for x in loras.values()}, {x.scale for x in loras.values()}
    if max(ranks) > RANKS[-1]:
        raise ConfigError(
            f"the adapter has rank {max(ranks)}",
            limit=f"vLLM takes {RANKS[-1]} at most",
            hint=_MERGE,
        )
    is_even = len(ranks) == len(scales) == 1
    tensors = {}
    for name, lora in loras.items():
        a, b = lora.as_saved()
        b = b if is_even else b * lora.scale
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a.clone()  # two matrices may share one
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b.contiguous()
    scale = scales.pop() if is_even else 1.0
    config |= {
        "r": max(ranks),
        "lora_alpha": scale * max(ranks),
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_parameters": None,
        "target_modules": sorted({n.replace(_WRAPPED, "").rpartition(".")[2] for n in loras}),
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
    rank = next(rank for rank in RANKS if rank >= max(ranks))
    serve = f"vllm serve {served or base} --enable-lora --max-lora-rank {rank}"
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
            hint=_MERGE,
        )
    for setting, what in (("use_dora", "DoRA"), ("modules_to_save", "modules trained whole")):
        if config.get(setting):
            raise ConfigError(
                f"the adapter has {what}: {json.dumps(config[setting])}",
                limit="vLLM reads plain LoRA only",
                hint=_MERGE,
            )


def _read(adapter: Path, config: Mapping[str, Any], model: "PreTrainedModel") -> dict[str, _Lora]:
    """Return an adapter's matrices by the name of the parameter that they change."""
    tensors, state = load_file(adapter / WEIGHTS_FILE), model.state_dict()
    targets = tuple(f".{name}" for name in config.get("target_parameters") or ())
    names = sorted(
        key.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        for key in tensors
        if key.endswith(".lora_A.weight")
    )
    loras = {}
    for name in names:
        a = tensors.pop(f"{_PREFIX}{name}.lora_A.weight")
        b = tensors.pop(f"{_PREFIX}{name}.lora_B.weight", torch.empty(0))
        module = name.replace(_WRAPPED, "")
        # peft puts the adapter of each further parameter of a module around the one before
        own = [key for key in state if key.rpartition(".")[0] == module and key.endswith(targets)]
        places = own[::-1] or [f"{module}.weight"]
        parameter = places[min(name.count(_WRAPPED), len(places) - 1)]
        shape = tuple(state[parameter].shape) if parameter in state else ()
        num_experts = shape[0] if len(shape) == 3 else 1
        rank = len(a) // num_experts if a.ndim == b.ndim == 2 else 0
        if not rank or (
            ((a.shape[0], b.shape[1]) != (num_experts * rank,) * 2)
            or {*shape[-2:]} != {a.shape[1], b.shape[0]}
            or parameter in loras
        ):
            raise _not_of_this_model(name, shape)
        if len(shape) == 3:
            a = a.unflatten(0, (num_experts, rank))
            b = b.unflatten(1, (rank, num_experts)).permute(2, 0, 1)
        alpha = _alpha(parameter.removesuffix(".weight"), config)
        loras[parameter] = _Lora(
            a=a,
            b=b,
            scale=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
            wrapper=name.removeprefix(module),
        )
    if tensors:
        raise ConfigError(
            f"the adapter holds {min(tensors)}, which is no A and no B",
            limit="vLLM reads plain LoRA only",
            hint=_MERGE,
        )
    return loras


def _published(
    loras: Mapping[str, _Lora], model: "PreTrainedModel", specs: Mapping[str, Spec]
) -> Iterator[tuple[str, _Lora]]:
    """Yield the matrices by the names that vLLM maps, experts one by one where it wants them so."""
    renaming = Renaming(model, specs)
    groups = {name: group for group in renaming.groups for name in group.parameters}
    model_type = str(model.config.get_text_config().model_type)
    for parameter, lora in loras.items():
        group = groups.get(parameter)
        if group is None:
            raise _unread(parameter, model_type, "its tensor is that of another weight")
        name = group.names[0]
        if lora.a.ndim == 3 and model_type in FUSED:
            owner, experts, _ = name.partition(".experts.")
            yield owner + experts.removesuffix(".") + lora.wrapper, lora
            continue
        if len(group.names) == 1 == len(group.parameters):
            if lora.a.ndim == 3:
                raise _unread(parameter, model_type, "its experts are published in one tensor")
            is_bare = parameter == f"{model.base_model_prefix}.{name}"  # published as a base model
            yield (parameter if is_bare else name).removesuffix(".weight"), lora
            continue
        if not {type(one).__name__ for one in group.converter.operations} <= _OF_ROWS:
            raise _unread(parameter, model_type, "it is published in another layout")
        number = {name: n for names in group.published.values() for n, name in enumerate(names)}
        for name, b in renaming.backward(group, {parameter: lora.b}).items():
            a = lora.a[number[name]] if lora.a.ndim == 3 else lora.a
            if (b.shape[0], *a.shape[1:]) != specs[name].shape:
                raise _unread(parameter, model_type, "it is published in another layout")
            yield name.removesuffix(".weight"), replace(lora, a=a, b=b)


def _alpha(target: str, config: Mapping[str, Any]) -> float:
    """Return a projection's alpha by peft's rule: the first pattern that fits the name's end."""
    for pattern, alpha in (config.get("alpha_pattern") or {}).items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in (target, f"{target}.weight")):
            return float(alpha)
    return float(config["lora_alpha"])


def _not_of_this_model(name: str, shape: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        f"the adapter's matrices of {name} are not of the sizes that they should have",
        limit=f"the weight has {shape or 'no place in this model'}",
        hint="give the directory of the run that the adapter is of",
    )


def _unread(parameter: str, model_type: str, why: str) -> ConfigError:
    return ConfigError(
        f"the adapter changes {parameter} of a {model_type} model, and {why}",
        limit="it is known how vLLM reads adapters on published matrices, and on experts in one"
        f" tensor of {', '.join(FUSED)}",
        hint=_MERGE,
    )
