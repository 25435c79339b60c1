"""Adapters of other methods than LoRA on linear layers, as peft's settings."""

from collections.abc import Collection
from functools import partial
from typing import Any

import peft
from peft import PeftConfig
from peft.tuners.lycoris_utils import LycorisLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING
from torch import nn

from finetune.errors import ConfigError
from finetune.files.adapter import ROW_TASK, TOKEN_TASK
from finetune.recipe.sections import AdapterSection

# What peft calls the fields that a method reads. A rank of OFT is a number of blocks, in place of
# their size.
_FIELDS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "loha": ("LoHaConfig", {"rank": "r", "alpha": "alpha"}, {}),
    "lokr": ("LoKrConfig", {"rank": "r", "alpha": "alpha"}, {}),
    "ia3": ("IA3Config", {}, {}),
    "vera": ("VeraConfig", {"rank": "r", "dropout": "vera_dropout"}, {}),
    "oft": ("OFTConfig", {"rank": "r"}, {"oft_block_size": 0}),
    "miss": ("MissConfig", {"rank": "r", "dropout": "miss_dropout"}, {}),
    "hira": ("HiraConfig", {"rank": "r", "dropout": "hira_dropout"}, {}),
}


def method_config(
    adapter: AdapterSection,
    *,
    targets: Collection[str],
    excluded: Collection[str],
    modules_to_save: Collection[str],
    model_type: str,
    task: str,
) -> PeftConfig:
    """Return peft's settings of an adapter.

    IA3 scales what a linear layer reads where peft says for the type of model that it ends an
    MLP, and what it returns elsewhere.

    Args:
        adapter: Whose method is not `lora`.
        targets: The last names of the linear layers.
        excluded: Full names of modules that have such a name and get no adapter.
        modules_to_save: Of modules trained whole.
        model_type: Of the model's config.
        task: See `task_type`.

    Raises:
        ConfigError: The method cannot leave modules out.
    """
    class_name, fields, fixed = _FIELDS[adapter.method]
    config_class = getattr(peft, class_name)
    settings: dict[str, Any] = {own: getattr(adapter, name) for name, own in fields.items()} | fixed
    if adapter.method == "ia3":
        ends = TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.get(model_type, [])
        settings["feedforward_modules"] = sorted({*ends, "down_proj"} & set(targets))
    if excluded:
        if "exclude_modules" not in config_class.__dataclass_fields__:
            raise ConfigError(
                f"adapter.method: {adapter.method}, and {min(excluded)} is in an image or audio"
                " tower",
                limit=f"peft's {class_name} cannot leave modules out by their full names",
                hint="`adapter.method: lora`",
            )
        settings["exclude_modules"] = sorted(excluded)
    config: PeftConfig = config_class(
        target_modules=sorted(targets),
        modules_to_save=list(modules_to_save) or None,
        task_type=task,
        **settings,
    )
    return config


def task_type(model: nn.Module) -> str:
    """Return peft's name of what a model is for, by the name that transformers gives it."""
    ends = {"ForSequenceClassification": ROW_TASK, "ForTokenClassification": TOKEN_TASK}
    name = type(model).__name__
    return next((task for end, task in ends.items() if name.endswith(end)), "CAUSAL_LM")


def is_adapted(module: nn.Module, adapter: str) -> bool:
    """Return whether an adapter of peft's, of any method, is on a module."""
    return isinstance(module, BaseTunerLayer) and any(
        adapter in getattr(module, name) for name in module.adapter_layer_names
    )


def leave_out_draws(model: nn.Module) -> None:
    """Keep LoHa and LoKr in evaluation mode, which changes no value.

    In training mode each forward draws a number for a dropout of whole modules, which recipes do
    not have, and the code that runs depends on it.
    """
    for module in model.modules():
        if isinstance(module, LycorisLayer):
            vars(module)["train"] = partial(_evaluated, module)
            module.train()


def _evaluated(module: nn.Module, mode: bool = True) -> nn.Module:  # noqa: FBT001
    """Set evaluation mode, in place of `nn.Module.train`."""
    del mode
    return nn.Module.train(module, mode=False)
