"""Tiny checkpoints as they are published: of the class that the config names, towers and all."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from tests.parity.tiny_models import SPECIAL, small, tiny_model


def publish(model_type: str, folder: Path, **changes: Any) -> Path:
    """Write a tiny model with random weights; return the folder."""
    kind = CONFIG_MAPPING[model_type]
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        config = small(kind, SPECIAL.get(model_type, {}))
        for name, value in changes.items():
            setattr(config.get_text_config(), name, value)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
            model = model_class._from_config(config)
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    else:
        model = tiny_model(model_type, **changes)
    model.save_pretrained(folder)
    if model_type == "kimi_k25":  # saved with a rule reversed that is for the tower alone
        file = folder / "model.safetensors"
        tensors = {
            re.sub(r"^(language_model.*)\.blocks\.", r"\1.layers.", name): tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return folder
