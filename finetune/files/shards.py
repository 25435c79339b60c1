"""Which files hold a model's weights: a single one, or shards and the index that names them."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from finetune.errors import ModelError
from finetune.files.atomic import JsonFile

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def _is_file_name(name: str) -> str:
    """Refuse a name that leads out of the folder; links inside it may, as in hub caches."""
    if Path(name).name != name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
        raise ValueError("should be the name of a .safetensors file in the same folder")
    return name


class _Index(BaseModel):
    weight_map: Annotated[
        dict[str, Annotated[str, AfterValidator(_is_file_name)]], Field(min_length=1)
    ]


_INDEX = JsonFile(
    holds=_Index,
    error=ModelError,
    limit="it names the file of each tensor, all of them next to it",
    hint="download the model again",
)


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the name of each tensor's file, which is in the index's own folder.

    Raises:
        ModelError: The index is damaged, or names a file anywhere else.
    """
    weight_map: dict[str, str] = _INDEX.read(index)["weight_map"]
    return weight_map


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights: the single one, or else those that the index names.

    Raises:
        ModelError: One is not there, or the index is damaged or leads out of the folder.
    """
    names = [SINGLE]
    if (folder / INDEX).exists() and not (folder / SINGLE).exists():
        names = sorted(set(read_weight_map(folder / INDEX).values()))
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(
                f"{folder} has no {name}",
                limit=f"a model holds {SINGLE}, or all files that {INDEX} names",
                hint="download the model again; weights in .bin files are not read",
            )
    return [folder / name for name in names]
