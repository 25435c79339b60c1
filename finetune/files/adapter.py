"""An adapter's folder as peft writes it, checked whole before anyone reads it.

If a file is missing in the folder, peft looks on the Hugging Face hub, in a repository with the
folder's name. So both files must be there before peft is called.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from finetune.errors import CheckpointError
from finetune.files.json import JsonFile
from finetune.files.tensors import Place, read_known_header

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ROW_TASK, TOKEN_TASK = "SEQ_CLS", "TOKEN_CLS"
"""What peft calls the task of an adapter for transformers' classification of rows, of tokens."""

_Rank = Annotated[int, Field(ge=1, le=2**20)]
_Alpha = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]


class _Adapter(BaseModel):
    """The settings of an adapter that this project reads; peft checks the rest."""

    model_config = ConfigDict(extra="ignore")

    peft_type: Annotated[str, Field(min_length=1)]
    task_type: str | None = None
    r: _Rank = 8
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


_CONFIG = JsonFile(
    holds=_Adapter,
    error=CheckpointError,
    limit="it is written by peft next to the adapter's weights",
    hint="restore it from a copy, or train again",
)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the settings of an adapter.

    Raises:
        CheckpointError: They are missing or damaged.
    """
    config: dict[str, Any] = _CONFIG.read(folder / CONFIG_FILE)
    return config


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
            hint="restore it from a copy, or train again",
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
