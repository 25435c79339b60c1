"""Which files hold a model's weights, and what their headers may say."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from finetune.errors import ModelError
from finetune.export.merge import BaseWeights
from finetune.files.shards import INDEX, weight_files
from finetune.files.tensors import open_tensors, read_header
from finetune.model.checkpoint import _weight_files


def publish(folder: Path, weight_map: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.ones(2)}, folder / "x.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/{}/x.safetensors", "sub/../../x.safetensors", "..", "", "x.bin"]
)
def test_an_index_that_leads_out_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    """A model's index could name any file of the machine as its weights (#16)."""
    publish(tmp_path, {})
    folder = publish(tmp_path / "model", {"a": name.format(tmp_path)})
    for read in (weight_files, lambda path: _weight_files(str(path)), BaseWeights):
        with pytest.raises(ModelError, match=rf"{INDEX} cannot be read: weight_map\.a is .*same"):
            read(folder)


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = publish(tmp_path / "snapshots" / "1234", {"a": "x.safetensors"})
    (tmp_path / "blobs").mkdir()
    for name in ("x.safetensors", INDEX, "config.json"):
        (snapshot / name).rename(tmp_path / "blobs" / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert weight_files(snapshot) == [snapshot / "x.safetensors"]
    assert torch.equal(BaseWeights(snapshot).read("a"), torch.ones(2))


def test_a_file_that_an_index_names_must_be_there(tmp_path: Path) -> None:
    folder = publish(tmp_path / "model", {"a": "x.safetensors", "b": "y.safetensors"})
    with pytest.raises(ModelError, match=r"model has no y\.safetensors; "):
        weight_files(folder)


@pytest.mark.parametrize("chosen", ["x.safetensors", "y.safetensors"])
def test_of_a_tensor_in_two_files_the_index_decides(chosen: str, tmp_path: Path) -> None:
    """The last file was taken, whatever the index said (#41)."""
    folder = publish(tmp_path, {"a": chosen, "b": "y.safetensors", "c": "x.safetensors"})
    both = {"a": torch.ones(2), "c": torch.ones(1)}, {"a": torch.zeros(2), "b": torch.ones(1)}
    for name, tensors in zip("xy", both, strict=True):
        save_file(tensors, folder / f"{name}.safetensors")
    wanted = both["xy".index(chosen[0])]["a"]
    assert torch.equal(BaseWeights(folder).read("a"), wanted)
    assert torch.equal(open_tensors(_weight_files(str(folder)))["a"][...], wanted)
    publish(folder, {"b": "y.safetensors", "c": "x.safetensors"})
    save_file(both[0], folder / "x.safetensors")
    with pytest.raises(ModelError, match=r"a is in .*x\.safetensors and in .*y\.safetensors; "):
        BaseWeights(folder)
    with pytest.raises(ModelError, match=r"a is in .*x\.safetensors and in .*y\.safetensors; "):
        open_tensors(_weight_files(str(folder)))


def with_header(file: Path, change: Callable[[dict[str, dict]], object]) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = json.dumps(change(json.loads(content[8 : 8 + length]))).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda _: [1],
        lambda h: h | {"c": 3},
        lambda h: h | {"b": h["b"] | {"shape": [-1, -3]}},
        lambda h: h | {"b": h["b"] | {"shape": ["3"]}},
        lambda h: h | {"b": h["b"] | {"shape": [2**62, 2**62]}},
        lambda h: h | {"b": h["b"] | {"dtype": "I16"}},
        lambda h: h | {"b": h["b"] | {"dtype": []}},
        lambda h: h | {"b": h["b"] | {"data_offsets": [12, 0]}},
        lambda h: h | {"b": h["b"] | {"data_offsets": h["a"]["data_offsets"]}},
        lambda h: h | {"b": h["b"] | {"data_offsets": [0]}},
        lambda h: h | {"b": h["b"] | {"dtype": "Q7"}},
        lambda h: h | {"__metadata__": [1]},
        lambda h: {"a": h["a"]},
    ],
)
def test_a_header_that_the_maintained_reader_refuses_is_refused(
    change: Callable[[dict[str, dict]], object], tmp_path: Path
) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3), "b": torch.zeros(3)}, file)
    assert [place.spec.shape for place in read_header(file).values()] == [(3,), (3,)]
    with_header(file, change)
    with pytest.raises(SafetensorError):
        load_file(file)
    with pytest.raises(ModelError, match=r"x\.safetensors is cut off or damaged: "):
        open_tensors([str(file)])


@pytest.mark.parametrize("length", [0, 3, 2**20, 2**63])
def test_the_length_of_a_header_is_not_believed(length: int, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3)}, file)
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(ModelError, match="is cut off or damaged"):
        read_header(file)
    file.write_bytes(file.read_bytes()[:5])
    with pytest.raises(ModelError, match="is cut off or damaged"):
        read_header(file)
