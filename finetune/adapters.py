"""LoRA adapters, by peft and in peft's format."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import ConfigError
from finetune.planning import ATTENTION_LINEARS
from offload.engine.model.stack import find_towers


def linear_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the last names of all linear layers inside the decoder layers."""
    names = {
        name.rsplit(".", 1)[-1]
        for name, module in model.get_decoder().named_modules()
        if isinstance(module, nn.Linear) and re.search(r"(^|\.)layers?\.\d+\.", name)
    }
    return tuple(sorted(names))


def expert_parameters(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the fused expert weights, as peft's `target_parameters` names them."""
    found = {
        f"{_within_layer(name)}.{parameter_name}"
        for name, module in model.named_modules()
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if name.endswith("experts") and parameter.dim() == 3
    }
    return tuple(sorted(found))


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: str | Sequence[str],
    has_experts: bool,
    seed: int,
) -> PeftModel:
    """Freeze the model and add adapters, with weights drawn from `seed`.

    Raises:
        ConfigError: A target that the model does not have, or experts where there are none.
    """
    known = linear_names(model)
    if targets == "all-linear":
        modules = known
    elif targets == "attention":
        modules = tuple(name for name in known if name in ATTENTION_LINEARS)
    else:
        modules = tuple(targets)
    unknown = sorted(set(modules) - set(known))
    if unknown or not modules:
        raise ConfigError(
            f"adapter.targets: {', '.join(unknown) or targets} is not in this model",
            limit=f"its linear layers are {', '.join(known)}",
            hint="`adapter.targets: all-linear`",
        )
    experts = expert_parameters(model) if has_experts else ()
    if has_experts and not experts:
        raise ConfigError(
            f"adapter.experts: true, but {type(model).__name__} has no fused experts",
            limit="only mixture-of-experts models have them",
            hint="`adapter.experts: false`",
        )
    if experts and dropout:
        raise ConfigError(
            f"adapter.dropout: {dropout} with adapter.experts: true",
            limit="adapters on fused experts have no dropout",
            hint="`adapter.dropout: 0.0`",
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft takes floats
        lora_dropout=dropout,
        target_modules=list(modules),
        exclude_modules=_in_towers(model, modules) or None,
        target_parameters=list(experts) or None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    model.save_pretrained(str(folder))


def load_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Put a saved adapter on a base model, for inference."""
    return PeftModel.from_pretrained(model, str(folder))


def _in_towers(model: PreTrainedModel, modules: Sequence[str]) -> list[str]:
    """Return the modules of towers that a target's name matches too; text trains none of them."""
    inside = {module for tower in find_towers(model) for module in tower.modules()}
    return [
        name
        for name, module in model.named_modules()
        if module in inside and name.rsplit(".", 1)[-1] in modules
    ]


def _within_layer(name: str) -> str:
    """Return a module's name from its layer on: model.layers.3.mlp.experts -> mlp.experts."""
    return re.sub(r"^.*\blayers?\.\d+\.", "", name)
