"""The files next to a model's weights: its config, its tokenizer, its licence."""

import json
import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel, RootModel

from finetune.errors import ModelError
from finetune.files.json import JsonFile
from finetune.recipe.shipped import published_shape

TOKENIZER_CONFIG = "tokenizer_config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_TOKENIZER = ("tokenizer", "vocab", "merges.txt", "special_tokens", "added_tokens", "chat_template")
_TOKENIZER_SUFFIXES = (".tiktoken", ".model")


class NamedTemplate(BaseModel):
    """One chat template of several."""

    name: str
    template: str


class _TokenizerConfig(BaseModel):
    chat_template: str | list[NamedTemplate] | None = None


class _Any(RootModel[Any]):
    pass


_HINT = "download the model again, or restore the file from a copy"
TOKENIZER_SETTINGS = JsonFile(
    holds=_TokenizerConfig,
    error=ModelError,
    limit="it holds the tokenizer's settings, and perhaps its chat template",
    hint=_HINT,
)
_COMPANION = JsonFile(
    holds=_Any, error=ModelError, limit="it is copied next to the new weights", hint=_HINT
)


def copy_companions(base: Path, tokenizer: Path, folder: Path) -> None:
    """Copy what belongs to the weights: configs, code, licence, and the tokenizer that was used."""
    for file in sorted(base.iterdir()):
        is_weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        is_named = file.name.startswith((".", "README"))
        if not is_weights and not is_named and not _is_tokenizer(file):
            _copy(file, folder)
    for file in sorted(tokenizer.iterdir()):
        if _is_tokenizer(file):
            _copy(file, folder)
    templates = tokenizer / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name)
    settings = folder / TOKENIZER_CONFIG
    if (folder / "chat_template.jinja").exists() and settings.exists():
        # transformers prefers the file, and llama.cpp's converter the setting: leave one
        fields = TOKENIZER_SETTINGS.read(settings)
        if fields.pop("chat_template", None) is not None:
            settings.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def _copy(file: Path, folder: Path) -> None:
    """Copy a file; folders are left, unless they are called like a file.

    Raises:
        ModelError: It is damaged, or no file.
    """
    if file.is_dir() and not file.suffix:
        return
    if not file.is_file():
        raise _COMPANION.refusal(str(file), "it is no file")
    if file.suffix == ".json":
        _COMPANION.read(file)
    shutil.copyfile(file, folder / file.name)


def _is_tokenizer(file: Path) -> bool:
    return file.name.startswith(_TOKENIZER) or file.suffix in _TOKENIZER_SUFFIXES


def write_config(base: Path, folder: Path, *, is_untied: bool) -> None:
    """Copy config.json for plain weights, and for ones that are not shared if `is_untied`."""
    fields: dict[str, Any] = published_shape(str(base))
    fields.pop("quantization_config", None)
    if is_untied:
        for part in (fields, *(v for v in fields.values() if isinstance(v, dict))):
            if part is fields or "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
