"""Which weights a store was made from, and where it lies."""

import hashlib
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune.env import stores_dir
from offload.plan.codec import CodecName


def store_path(model: str, dtype: str, codec: CodecName) -> Path:
    """Return the file of a model's store; another model, dtype or codec has another file."""
    path = str(Path(model).resolve()) if Path(model).is_dir() else model
    key = hashlib.sha256("\n".join((path, dtype, codec)).encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).name)
    return stores_dir() / f"{name}-{dtype}-{codec}-{key}.store"


def identity(folder: Path, dtype: str, codec: CodecName) -> dict[str, Any]:
    """Return what a store depends on: when any of it changes, the store is built anew."""
    files = sorted([folder / "config.json", *folder.glob("*.safetensors*")])
    return {
        "files": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.exists()],
        "dtype": dtype,
        "codec": codec,
        "transformers": version("transformers"),
    }
