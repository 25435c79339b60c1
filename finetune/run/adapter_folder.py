"""An adapter's folder as peft writes it, checked whole before anyone reads it.

If a file is missing in the folder, peft looks on the Hugging Face hub, in a repository with the
folder's name. So both files must be there before peft is called.

peft has more methods and settings than are computed here, and each version adds some. Each method
states those that are understood, for all that reads adapters: merging, exports, scoring, answers,
and runs that go on from an adapter. A setting that is not stated is refused by name, unless it is
off.

Source: the configs of peft 0.21's tuners, and how its layers read them.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from finetune.errors import CheckpointError
from finetune.files.atomic import JsonFile
from finetune.files.tensors import Place, read_known_header
from finetune.recipe.adapters import ADAPTERS, Adapter

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ROW_TASK, TOKEN_TASK = "SEQ_CLS", "TOKEN_CLS"
"""What peft calls the task of an adapter for transformers' classification of rows, of tokens."""

_SHOWN = 80
_Rank = Annotated[int, Field(ge=1, le=2**20)]
_Alpha = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]


class _Adapter(BaseModel):
    """The settings of an adapter that this project reads; peft checks the types of the rest."""

    model_config = ConfigDict(extra="ignore")

    peft_type: Annotated[str, Field(min_length=1)]
    task_type: str | None = None
    r: Annotated[int, Field(ge=0, le=2**20)] = 8
    lora_alpha: _Alpha = 8
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0
    target_modules: str | list[str] | None = None
    target_parameters: list[str] | None = None
    exclude_modules: str | list[str] | None = None
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, _Alpha] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False

    @field_validator("r")
    @classmethod
    def _require_rank(cls, value: int, info: ValidationInfo) -> int:
        if value == 0 and info.data.get("peft_type") != "OFT":  # whose blocks have a size instead
            raise ValueError("should be greater than or equal to 1")
        return value


_CONFIG = JsonFile(
    holds=_Adapter,
    error=CheckpointError,
    limit="it is written by peft next to the adapter's weights",
    hint="restore it from a copy, or train again",
)

# ---------------------------------------------------------------------------------------------
# What is understood


_OF_ALL = (
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "target_modules", "exclude_modules", "modules_to_save"),
    *("layers_to_transform", "layers_pattern"),
)


def methods() -> Mapping[str, Adapter]:
    """Return what peft calls a method -> the method."""
    return {one.peft_type: one for one in ADAPTERS.values()}


_OFF: Collection[object] = (None, False, [], {}, "none")
_KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""The values of `init_lora_weights` with which LoRA leaves the base as it is."""

_BY_PEFT = (
    "with plain peft, `PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload()"
    ".save_pretrained(DIR)` writes a whole model"
)
_REFUSED: Mapping[str, tuple[str, str]] = {
    "bias": ("biases of the base were trained with it", _BY_PEFT),
    "alora_invocation_tokens": (
        "it is an activated LoRA, which acts only after these tokens",
        "load it on its base with plain peft",
    ),
    "layer_replication": ("it is of a model that repeats layers of its base", _BY_PEFT),
    "trainable_token_indices": ("rows of the embedding were trained with it", _BY_PEFT),
    "save_projection": ("VeRA's projections are not in its file", _BY_PEFT),
}
"""What a setting means that is not understood, and the way out."""


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the settings of an adapter, all of which are understood.

    Raises:
        CheckpointError: They are missing or damaged, or one of them is not understood.
    """
    config: dict[str, Any] = _CONFIG.read(folder / CONFIG_FILE)
    kind = config["peft_type"]
    every = methods()
    if kind not in every:
        raise CheckpointError(
            f"{folder} is an adapter of type {kind}",
            limit=f"{', '.join(every)} are understood",
            hint="load it on its base with plain peft",
        )
    _require_base_as_it_is(folder, config)
    known = {*_OF_ALL, *every[kind].computed.split(), *every[kind].others.split()}
    refused = {name: config[name] for name in config.keys() - known if config[name] not in _OFF}
    if config.get("save_projection") is False:
        refused["save_projection"] = False
    for name in sorted(refused):
        why, hint = _REFUSED.get(name, ("it is not known what that changes", _BY_PEFT))
        raise CheckpointError(
            f"{folder} has {name}: {json.dumps(refused[name])[:_SHOWN]}, and {why}",
            limit="an adapter is computed as peft computes it, or refused",
            hint=hint,
        )
    return config


def _require_base_as_it_is(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a LoRA that belongs to other weights than those that are published.

    PiSSA and its kin take what the adapter begins with out of the base. An adapter that was saved
    as it is adds to what was left of the base, and not to the base.
    """
    kept = config.get("init_lora_weights", True)
    if kept in _KEEPS_BASE:
        return
    raise CheckpointError(
        f"{folder} has init_lora_weights: {json.dumps(kept)[:_SHOWN]}, so its training changed the"
        " base before the first step, and it was not converted when it was saved",
        limit="an adapter is added to the published weights",
        hint="save the trained peft model again:"
        " `model.save_pretrained(DIR, path_initial_model_for_weight_conversion=INITIAL)`, where"
        " INITIAL is the adapter as saved before training"
        if kept != "loftq"
        else _BY_PEFT,
    )


def require_adapter_files(folder: Path) -> dict[str, Place]:
    """Check that a folder holds an adapter, settings and weights; return where its tensors are.

    Raises:
        CheckpointError: A file is missing, or the settings are damaged.
        ModelError: The weights are damaged.
    """
    read_adapter_config(folder)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise CheckpointError(
            f"{folder} has no {WEIGHTS_FILE}",
            limit=f"an adapter is {CONFIG_FILE} and {WEIGHTS_FILE}, and is looked for nowhere else",
            hint="load it with peft and save it again: `save_pretrained(DIR)` writes safetensors"
            if (folder / "adapter_model.bin").is_file()
            else "restore it from a copy, or train again",
        )
    return read_known_header(weights)


def refuse_classifier(folder: Path, doing: str) -> None:
    """Refuse the adapter of a reward model or a classifier where tokens are to be predicted.

    Args:
        folder: Of an adapter.
        doing: What is refused, as in "merged".

    Raises:
        CheckpointError: It is one, or its settings are damaged.
    """
    task = read_adapter_config(folder).get("task_type")
    if task in (ROW_TASK, TOKEN_TASK):
        kind = "Sequence" if task == ROW_TASK else "Token"
        raise CheckpointError(
            f"{folder} is of a reward model or a classifier (task_type {task}), which is not"
            f" {doing}",
            limit="its head returns a reward or classes, and predicts no tokens",
            hint=f"peft loads it on `AutoModelFor{kind}Classification.from_pretrained(BASE,"
            " num_labels=...)`, 1 of a reward model",
        )
