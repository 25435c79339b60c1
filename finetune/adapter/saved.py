"""A saved adapter: its settings and tensors, as all that reads adapters puts them on a model.

peft loads a file by names. It renames them by transformers' rules for the weights of the model,
passes over those that it finds no place for, and lets tensors named like weights of the base
replace these. So each tensor is put here where peft would save it from, under the same name.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
)
from safetensors.torch import load_file
from torch import nn

from finetune.errors import FinetuneError
from finetune.files.adapter import WEIGHTS_FILE, require_adapter_files

_OF_BASE = ".base_layer.weight"


def saved_config(folder: Path) -> PeftConfig:
    """Return an adapter's settings for inference, as peft holds them.

    All values come from the file, so its initialisation is not run again: it may read weights that
    are encoded, or not there yet.

    Raises:
        CheckpointError: A file is missing or damaged, or a setting is not understood.
        ModelError: The weights are damaged.
    """
    require_adapter_files(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of settings that are off, unknown to peft
        config: PeftConfig = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = True
    config.base_model_name_or_path = None  # readers compare it with their base, and peft would warn
    if isinstance(config, LoraConfig):
        config.init_lora_weights = True
    return config


@contextmanager
def patterns_of_parameters() -> Iterator[None]:
    """Silence peft's warning that patterns match nothing; it checks modules, not parameters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensors:
    """The tensors of an adapter's file.

    Attributes:
        own: By their names in the model.
        base: Weights of the base that peft saves with an adapter on them, by their names in the
            model: such as those of an embedding.
    """

    own: Mapping[str, torch.Tensor]
    base: Mapping[str, torch.Tensor]


def saved_tensors(
    adapted: PeftModel, folder: Path, *, name: str, error: type[FinetuneError], hint: str
) -> SavedTensors:
    """Return the tensors of a saved adapter that a model has the place for.

    Args:
        adapted: With an adapter of the same settings.
        folder: In peft's format.
        name: The adapter's in the model.
        error: Raised if they are not those of the model.
        hint: What to do then.

    Raises:
        FinetuneError: Of this kind: a tensor is missing, has no place or is of another shape.
    """
    found = load_file(folder / WEIGHTS_FILE)
    state = adapted.state_dict()
    places = _places(adapted, state, name)
    if not places.keys() <= found.keys():  # of transformers 4, whose experts were not fused
        renamed = convert_peft_adapter_state_dict_for_transformers(
            adapted, adapted.peft_config[name], dict(found), name
        )
        found = renamed if places.keys() <= renamed.keys() else found
    base = {key: tensor for key, tensor in found.items() if _is_adapted_base(key, places)}
    for problem, names in (
        ("lacks", places.keys() - found.keys()),
        ("holds, and the model has no place for,", found.keys() - places.keys() - base.keys()),
    ):
        if names:
            raise error(
                f"{folder} {problem} {len(names)} tensors, such as {min(names)}",
                limit="an adapter holds its own tensors, and modules that were trained whole",
                hint=hint,
            )
    own = {place: found[key] for key, place in places.items()}
    for key, tensor in (own | base).items():
        if tensor.shape != state[key].shape:
            raise error(
                f"{folder} has {key} of shape {tuple(tensor.shape)}",
                limit=f"it has shape {tuple(state[key].shape)} here",
                hint=hint,
            )
    return SavedTensors(own=own, base=base)


def put(adapted: PeftModel, tensors: SavedTensors) -> None:
    """Give an adapter the values of a saved one, in float32 where it has no memory yet."""
    for key, tensor in tensors.own.items():
        path, _, name = key.rpartition(".")
        module = adapted.get_submodule(path)
        place = module._parameters[name] if name in module._parameters else module._buffers[name]
        assert place is not None, "a name of the state dict"
        if not place.is_meta:
            with torch.no_grad():
                place.copy_(tensor)
        elif name in module._parameters:
            module._parameters[name] = nn.Parameter(tensor.float(), requires_grad=False)
        else:
            module._buffers[name] = tensor.float()


def require_same_base(
    folder: Path, key: str, saved: torch.Tensor, own: torch.Tensor, *, error: type[FinetuneError]
) -> None:
    """Check that a weight of the base in an adapter's file is that of the base here.

    Raises:
        FinetuneError: Of this kind: it is not.
    """
    if saved.shape != own.shape or not torch.equal(saved.to(own.dtype), own):
        raise error(
            f"{folder} holds {key}, and the base has other values of it",
            limit="an adapter is added to the weights of its base",
            hint="name the base that the adapter was trained on; if the weight was trained too,"
            " plain peft's `merge_and_unload()` writes a whole model",
        )


def _places(adapted: PeftModel, state: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return each name in an adapter's file -> the name in the model that it is saved from."""
    places: dict[str, str] = get_peft_model_state_dict(
        adapted,
        state_dict={key: key for key in state},
        adapter_name=name,
        save_embedding_layers=False,
    )
    return places


def _is_adapted_base(key: str, places: Mapping[str, str]) -> bool:
    prefix = key.removesuffix(_OF_BASE)
    return prefix != key and any(place.startswith(f"{prefix}.") for place in places)
