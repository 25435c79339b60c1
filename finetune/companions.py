"""What lies beside a model's weights: its config, its tokenizer, its licence."""

import json
import shutil
from pathlib import Path
from typing import Any

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_TOKENIZER = ("tokenizer", "vocab", "merges.txt", "special_tokens", "added_tokens", "chat_template")
_TOKENIZER_SUFFIXES = (".tiktoken", ".model")


def copy_companions(base: Path, tokenizer: Path, folder: Path) -> None:
    """Copy what belongs to the weights: configs, code, licence, and the tokenizer that was used."""
    for file in sorted(base.iterdir()):
        is_weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        is_named = file.name.startswith((".", "README"))
        if file.is_file() and not is_weights and not is_named and not _is_tokenizer(file):
            shutil.copyfile(file, folder / file.name)
    for file in sorted(tokenizer.iterdir()):
        if file.is_file() and _is_tokenizer(file):
            shutil.copyfile(file, folder / file.name)
    templates = tokenizer / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name)
    settings = folder / "tokenizer_config.json"
    if (folder / "chat_template.jinja").exists() and settings.exists():
        # transformers prefers the file, and llama.cpp's converter the setting: leave one
        fields = json.loads(settings.read_text())
        if fields.pop("chat_template", None) is not None:
            settings.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def _is_tokenizer(file: Path) -> bool:
    return file.name.startswith(_TOKENIZER) or file.suffix in _TOKENIZER_SUFFIXES


def write_config(base: Path, folder: Path, *, is_untied: bool) -> None:
    """Copy config.json for plain weights, and for ones that are not shared if `is_untied`."""
    fields: dict[str, Any] = json.loads((base / "config.json").read_text())
    fields.pop("quantization_config", None)
    if is_untied:
        for part in (fields, *(v for v in fields.values() if isinstance(v, dict))):
            if part is fields or "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
