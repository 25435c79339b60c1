"""Model folders and run folders that are damaged in any way: refused by name, or as if whole."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.e2e import damage
from tests.e2e.damage import Damage, Tally

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3000)]

NUM_CHANGES = 8  # of the values of each JSON file
RUN_FILES = (
    *("recipe.yaml", "experts.json", "metrics.jsonl", "predicted.json", "measured.json"),
    *("report.json", "samples_before.json", "samples_after.json"),
    *("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
)
MODEL_FILES = (
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    "model-00001-of-00003.safetensors",
)


@pytest.fixture(scope="session")
def sharded(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in three files, as large ones are published."""
    folder = tmp_path_factory.mktemp("sharded") / "model"
    shutil.copytree(model_dir, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in range(3):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[number::3]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def recipe(write_recipe: Callable[..., Path], sharded: Path, tmp_path: Path) -> Path:
    return write_recipe(
        model={"path": str(damage.copied(sharded, tmp_path / "model"))},
        train={"steps": 2, "grad_accum_steps": 1},
        output={"checkpoint_every": 1},
        report={"samples": 1},
    )


@pytest.fixture
def finished(recipe: Path, tmp_path: Path, machine_file: Path) -> Path:
    ended = damage.run("finetune", recipe, "--machine", machine_file)
    assert ended.code == 0, ended.err
    return tmp_path / "run"


def header_damages() -> list[Damage]:
    """Return damages of a safetensors file's header."""

    def with_header(change: Callable[[dict], object]) -> Callable[[Path], None]:
        def apply(file: Path) -> None:
            content = file.read_bytes()
            length = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + length])
            text = json.dumps(change(header)).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

        return apply

    def first(**values: object) -> Callable[[dict], object]:
        def change(header: dict) -> dict:
            name = next(key for key in header if key != "__metadata__")
            header[name] |= values
            return header

        return change

    def of_length(number: int) -> Callable[[Path], object]:
        return lambda file: file.write_bytes(number.to_bytes(8, "little") + file.read_bytes()[8:])

    changes: dict[str, Callable[[dict], object]] = {
        "a list": lambda header: [header],
        "nothing": lambda _: {},
        "no dtype": lambda h: {k: {"shape": [1], "data_offsets": [0, 4]} for k in h},
        "shape of text": first(shape=["x"]),
        "negative shape": first(shape=[-1, -4]),
        "huge shape": first(shape=[2**62, 2**62]),
        "shape of fractions": first(shape=[1.5]),
        "no shape": first(shape=None),
        "dtype unknown": first(dtype="Q7"),
        "dtype of lists": first(dtype=[]),
        "dtype narrower": first(dtype="U8"),
        "offsets swapped": first(data_offsets=[8, 0]),
        "offsets negative": first(data_offsets=[-8, 0]),
        "offsets beyond": first(data_offsets=[2**60, 2**60 + 64]),
        "offsets of text": first(data_offsets=["0", "8"]),
        "one offset": first(data_offsets=[0]),
        "offsets of another": first(data_offsets=[16, 16]),
        "another name": lambda h: {f"x.{key}": value for key, value in h.items()},
        "metadata of lists": lambda h: h | {"__metadata__": [1]},
        "a tensor that is a number": lambda h: h | {"extra": 3},
    }
    return [
        *(Damage(label=f"header: {k}", apply=with_header(c)) for k, c in changes.items()),
        Damage(label="header length 0", apply=of_length(0)),
        Damage(label="header length 2**63", apply=of_length(2**63)),
        Damage(label="header length 9", apply=of_length(9)),
    ]


def all_to(weight_map: dict, value: object) -> dict:
    return dict.fromkeys(weight_map, value)


def index_damages() -> list[Damage]:
    def with_map(change: Callable[[dict], object]) -> Callable[[Path], None]:
        def apply(file: Path) -> None:
            index = json.loads(file.read_text())
            index["weight_map"] = change(index["weight_map"])
            file.write_text(json.dumps(index))

        return apply

    values = ("../model-00001-of-00003.safetensors", "/etc/passwd", "", ".", "..", "x\x00", 7, None)
    return [
        *(
            Damage(label=f"weight_map to {v!r}", apply=with_map(partial(all_to, value=v)))
            for v in (*values, ["a"], {"a": "b"}, "config.json", "sub/x.safetensors")
        ),
        Damage(label="weight_map empty", apply=with_map(lambda _: {})),
        Damage(label="weight_map a list", apply=with_map(list)),
        Damage(label="weight_map lacks one", apply=with_map(lambda m: dict(list(m.items())[1:]))),
        Damage(label="weight_map names more", apply=with_map(lambda m: m | {"x.y": m[min(m)]})),
    ]


def damages_of(name: str, *, seed: int, num: int) -> list[Damage]:
    damages = damage.of_any_file()
    if name.endswith(".json"):
        damages += damage.of_json_file(seed=seed, num=num)
    if name.endswith("index.json"):
        damages += index_damages()
    if name.endswith(".safetensors"):
        damages += header_damages()
    return damages


@pytest.mark.parametrize("name", MODEL_FILES)
def test_model_folders(
    name: str,
    finished: Path,
    recipe: Path,
    sharded: Path,
    machine_file: Path,
    tmp_path: Path,
) -> None:
    tally = Tally()
    model = tmp_path / "model"
    settings = yaml.safe_load(recipe.read_text())
    settings["train"]["steps"] = 1
    settings["output"]["dir"] = str(tmp_path / "again")
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(settings))
    for one in damages_of(name, seed=0, num=NUM_CHANGES):
        damage.copied(sharded, model)
        one.apply(model / name)
        label, names = f"{name}: {one.label}", (name, Path(name).stem, str(model), "chat template")
        if name == "config.json":
            ended = damage.run("plan", recipe, "--machine", machine_file)
            tally.add(f"plan {label}", ended, *names)
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        ended = damage.run("finetune", again, "--machine", machine_file)
        tally.add(f"finetune {label}", ended, *names)
        shutil.rmtree(tmp_path / "merged", ignore_errors=True)
        ended = damage.run("merge", finished, "--out", tmp_path / "merged")
        tally.add(f"merge {label}", ended, *names)
        assert {path.name for path in tmp_path.glob("partial-*")} == set()
    tally.require_none(f"model folders, {name}")


@pytest.mark.parametrize("name", RUN_FILES)
def test_run_folders(
    name: str, finished: Path, recipe: Path, machine_file: Path, tmp_path: Path
) -> None:
    tally = Tally()
    whole = tmp_path / "whole"
    finished.rename(whole)
    for number, one in enumerate(damages_of(name, seed=0, num=NUM_CHANGES)):
        damage.copied(whole, finished)
        one.apply(finished / name)
        names = (name, Path(name).name, str(finished))
        commands: list[list[object]] = [["explain", finished]]
        if name.startswith(("adapter", "recipe")):
            shutil.rmtree(tmp_path / "vllm", ignore_errors=True)
            shutil.rmtree(tmp_path / "merged", ignore_errors=True)
            commands += [
                ["merge", finished, "--out", tmp_path / "merged"],
                ["adapter", finished, "--format", "vllm", "--out", tmp_path / "vllm"],
                ["generate", finished, "--prompt", "x", "--max-new-tokens", 1],
            ]
        for argv in commands:
            tally.add(f"{argv[0]} {name}: {one.label}", damage.run(*argv), *names)
        if name in ("recipe.yaml", "metrics.jsonl", "experts.json") or number % 6 == 0:
            if name.startswith(("recipe", "metrics")):
                shutil.rmtree(finished / "checkpoints" / "step-0000002", ignore_errors=True)
            ended = damage.run("finetune", recipe, "--resume", "--machine", machine_file)
            tally.add(f"resume {name}: {one.label}", ended, *names)
    tally.require_none(f"run folders, {name}")
