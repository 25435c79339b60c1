"""Files of an adapter and of a run: read whole, or refused by name."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft.config
import peft.utils.save_and_load
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from finetune.adapter.lora import load_adapter
from finetune.errors import CheckpointError, ModelError
from finetune.export.adapter_delta import Changes
from finetune.files.atomic import JsonFile
from finetune.files.manifest import (
    MANIFEST,
    clear_partial,
    damage,
    is_sealed_json,
    is_sealed_yaml,
    sealed_json,
    sealed_yaml,
    whole_folder,
)
from finetune.files.shards import INDEX, weight_files
from finetune.files.tensors import open_tensors, read_header
from finetune.model.base_weights import BaseWeights
from finetune.run.adapter_folder import require_adapter_files
from finetune.run.run_dir import RunDir
from tests.parity.tiny_models import tiny_model

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an adapter, on a machine on which the hub may not be asked for anything."""
    folder = tmp_path / "run" / "adapter"
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(tiny_model("qwen3"), config).save_pretrained(str(folder))
    (tmp_path / "run" / "recipe.yaml").write_text("model: {}")

    def ask(*_args: object, **_kwargs: object) -> str:
        pytest.fail("the hub is asked")

    for module in (peft.config, peft.utils.save_and_load):
        for name in ("hf_hub_download", "file_exists"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, ask)
    return folder


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_missing_is_not_looked_for_on_the_hub(
    name: str, adapter: Path, tmp_path: Path
) -> None:
    """peft asked the hub for a repository that is called like the run (#16)."""
    (adapter / name).unlink()
    for read in (
        lambda: RunDir(tmp_path / "run").require_adapter(),
        lambda: load_adapter(tiny_model("qwen3"), adapter),
        lambda: Changes(tiny_model("qwen3"), adapter),
    ):
        with pytest.raises(CheckpointError, match=rf"adapter.*{name}"):
            read()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("r", value) for value in (0, "4", None, 1.5, 2**40)),
        *(("lora_alpha", value) for value in ("x", None, float("nan"), 1e300)),
        *(("target_modules", value) for value in (3, [1], {"a": 1})),
        *(("rank_pattern", value) for value in ({"q_proj": 0}, ["q_proj"])),
        *(("use_rslora", value) for value in ("no", 1)),
        ("lora_dropout", 7),
        ("modules_to_save", "lm_head"),
        ("peft_type", None),
    ],
)
def test_a_setting_of_another_type_is_named(key: str, value: object, adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=rf"adapter_config\.json cannot be read: {key}"):
        require_adapter_files(adapter)


def test_an_answer_is_not_given_with_half_an_adapter(adapter: Path) -> None:
    """peft warns of tensors that are missing, and answers with the ones that it drew (#16)."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    load_adapter(tiny_model("qwen3"), adapter)
    save_file({name: t for name, t in tensors.items() if name != NAME}, file)
    with pytest.raises(CheckpointError, match=rf"adapter lacks 1 tensors, such as {NAME}"):
        load_adapter(tiny_model("qwen3"), adapter)
    save_file(tensors | {f"{NAME}.x": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match=r"the model has no place for, 1 tensors, such as "):
        load_adapter(tiny_model("qwen3"), adapter)
    save_file(tensors | {NAME: torch.ones(3, 4)}, file)
    with pytest.raises(
        CheckpointError, match=r"lora_B\.default\.weight of shape \(3, 4\); it has shape"
    ):
        load_adapter(tiny_model("qwen3"), adapter)


def test_damaged_weights_of_an_adapter_are_named(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is cut off or damaged: "):
        require_adapter_files(adapter)
    file.rename(adapter / "adapter_model.bin")  # as peft before safetensors
    with pytest.raises(CheckpointError, match=r"hint: load it with peft and save it again"):
        require_adapter_files(adapter)


# --------------------------------------------------------------------------------------------- json


class Pair(BaseModel):
    number: int
    words: list[str] = []


PAIR = JsonFile(holds=Pair, error=ModelError, limit="it holds a pair", hint="write it again")


def refusal(file: Path) -> str:
    with pytest.raises(ModelError) as caught:
        PAIR.read(file)
    assert (caught.value.limit, caught.value.hint) == ("it holds a pair", "write it again")
    assert len(caught.value.what) < 400 + len(str(file))
    assert caught.value.what.startswith(f"{file} cannot be read: ")
    return caught.value.what.removeprefix(f"{file} cannot be read: ")


def test_what_is_read_is_what_was_written_and_more(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"number": 1, "later": [1]}')
    assert PAIR.read(file) == {"number": 1, "later": [1]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is not JSON: Expecting value"),
        (b'{"number": 1', "it is not JSON: Expecting"),
        (b"\xff\xfe\x00", "it is not JSON: "),
        ('{"number": 1}'.encode("utf-16"), "it is not JSON: 'utf-8' codec can't decode"),
        (b"[" * 100_000, "it is not JSON: maximum recursion depth"),
        (b'{"number": ' + b"9" * 5000 + b"}", "it is not JSON: Exceeds the limit"),
        (b"[]", "it holds [], and should be an object"),
        (b"{}", "number is missing"),
        (b'{"number": "1"}', 'number is "1", and should be a valid integer'),
        (b'{"number": true}', "number is true, and should be a valid integer"),
        (b'{"number": 1, "words": ["a", 2]}', "words.1 is 2, and should be a valid string"),
        (b'{"number": 1, "words": "' + b"a" * 9999 + b'"}', "words is "),
    ],
)
def test_what_is_wrong_is_named_with_its_place(content: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    assert refusal(file).startswith(why)


def test_what_is_no_plain_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    folder, pipe, link = tmp_path / "folder", tmp_path / "pipe", tmp_path / "link"
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to("link")
    assert refusal(folder) == refusal(pipe) == refusal(Path("/dev/zero")) == "it is no file"
    assert refusal(tmp_path / "none") == "No such file or directory"
    assert refusal(link) == "Too many levels of symbolic links"


def test_a_file_too_large_to_be_one_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with file.open("wb") as stream:
        stream.truncate(2**31)
    assert refusal(file) == "it has 2,147,483,648 bytes"


# ----------------------------------------------------------------------------------------- manifest


def write(folder: Path, *, text: str = "content") -> None:
    with whole_folder(folder, unlisted=("README.md",)) as partial:
        (partial / "file.txt").write_text(text)
        (partial / "README.md").write_text("to be edited")


def test_a_folder_is_as_it_was_written_until_a_listed_file_changes(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    write(folder)
    (folder / "README.md").write_text("edited")
    (folder / "notes.txt").write_text("added")
    assert damage(folder, needs=["file.txt"]) is None
    (folder / "file.txt").write_text("Content")
    assert "file.txt is not what was written: its SHA-256 is" in str(damage(folder, needs=[]))
    (folder / "file.txt").write_text("cont")
    assert damage(folder, needs=[]) == "file.txt has 4 bytes in place of 7"
    assert damage(folder, needs=["other.txt"]) == f"{MANIFEST} does not list other.txt"


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    write(folder, text="old")

    def fail() -> None:
        with whole_folder(folder) as partial:
            (partial / "file.txt").write_text("new")
            raise OSError(28, "No space left on device", str(partial / "file.txt"))

    with pytest.raises(CheckpointError, match=r"adapter cannot be written: file\.txt: No space"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert (folder / "file.txt").read_text() == "old"
    assert damage(folder, needs=["file.txt"]) is None


def test_a_link_is_replaced_and_what_it_leads_to_is_kept(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    (tmp_path / "adapter").symlink_to(precious)
    write(tmp_path / "adapter")
    assert not (tmp_path / "adapter").is_symlink()
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_a_folder_can_be_read_by_those_who_could_read_one_made_by_hand(tmp_path: Path) -> None:
    (tmp_path / "by hand").mkdir()
    write(tmp_path / "adapter")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("by hand", "adapter")}
    assert len(modes) == 1


def test_only_what_a_kill_leaves_is_cleared(tmp_path: Path) -> None:
    for name in ("partial-adapter-0123abcd", "partial-adapter", "partial-adapter-mine"):
        (tmp_path / name).mkdir()
    clear_partial(tmp_path, name="adapter")
    assert {path.name for path in tmp_path.iterdir()} == {"partial-adapter", "partial-adapter-mine"}


# --------------------------------------------------------------------------------------------- seal


YAML = "train:\n  lr: 0.1\n  steps: 6\nreport:\n  samples: 4\n"
VALUES = {"loss": 0.25, "rows": [1, 2]}


def test_sealed_files_say_what_they_said() -> None:
    assert yaml.safe_load(sealed_yaml(YAML)) == yaml.safe_load(YAML)
    found = json.loads(sealed_json(json.dumps(VALUES, indent=1)))
    assert {name: found[name] for name in VALUES} == VALUES


def test_files_of_older_versions_have_no_seal() -> None:
    assert is_sealed_yaml(YAML)
    assert is_sealed_json(json.dumps(VALUES))


def test_yaml_that_is_cut_off_is_not_as_it_was_sealed() -> None:
    sealed = sealed_yaml(YAML)
    assert is_sealed_yaml(sealed)
    for num_kept in range(len(sealed)):
        left = sealed[:num_kept]
        assert not is_sealed_yaml(left) or not yaml.safe_load(left)


@pytest.mark.parametrize("bit", range(7))
def test_a_flipped_bit_is_seen_or_changes_nothing(bit: int) -> None:
    sealed = sealed_yaml(YAML)
    for at in range(len(sealed)):
        changed = sealed[:at] + chr(ord(sealed[at]) ^ (1 << bit)) + sealed[at + 1 :]
        assert not is_sealed_yaml(changed) or read_yaml(changed) in (None, yaml.safe_load(YAML))
    content = sealed_json(json.dumps(VALUES, indent=1))
    for at in range(len(content)):
        changed = content[:at] + chr(ord(content[at]) ^ (1 << bit)) + content[at + 1 :]
        assert not is_sealed_json(changed) or read_json(changed) in (None, json.loads(content))


def read_yaml(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------ tensors


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
    for read in (weight_files, BaseWeights):
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
    assert torch.equal(open_tensors(list(map(str, weight_files(folder))))["a"][...], wanted)
    publish(folder, {"b": "y.safetensors", "c": "x.safetensors"})
    save_file(both[0], folder / "x.safetensors")
    with pytest.raises(ModelError, match=r"a is in .*x\.safetensors and in .*y\.safetensors; "):
        BaseWeights(folder)
    with pytest.raises(ModelError, match=r"a is in .*x\.safetensors and in .*y\.safetensors; "):
        open_tensors(list(map(str, weight_files(folder))))


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
