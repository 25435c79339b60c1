"""Files that are damaged in any way: refused by name, or as if whole."""

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from finetune.recipe.recipe import recipes_dir, shipped_recipes
from offload.plan.machine.machine import named_machine
from tests.e2e import damage
from tests.e2e.damage import Damage, Tally

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


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
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


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
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


# --------------------------------------------------------------------------------------- fuzz plans


UNKNOWN = ("phi3", "cohere", "opt", "bloom", "ministral")


def damage_each(
    file: Path, text: str, damages: list[Damage], argv: list[object], *, what: str
) -> Tally:
    tally = Tally()
    for one in damages:
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        file.unlink(missing_ok=True)
        file.write_text(text)
        one.apply(file)
        tally.add(f"{what}: {one.label}", damage.run(*argv), file.name, "train.seq_len")
    return tally


def config_texts() -> dict[str, str]:
    folder = recipes_dir() / "shapes"
    shapes = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))}
    chosen = {name: json.dumps(fields) for name, fields in shapes.items()}
    from transformers import AutoConfig

    for name in UNKNOWN:
        fields = AutoConfig.for_model(name).to_dict() | {"num_hidden_layers": 2}
        chosen[name] = json.dumps(fields)
    return chosen


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_configs(seed: int, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    texts = config_texts()
    names = list(texts)
    tally = Tally()
    for number, one in enumerate(
        [*damage.of_any_file(), *damage.of_json_file(seed=1000 * seed, num=90)]
    ):
        name = names[(number * 7 + seed) % len(names)]
        argv: list[object] = ["plan", file, "--machine", "rtx4090"]
        if number % 4 == 3:
            argv = ["fit", file, "--vram", "24"]
        found = damage_each(file, texts[name], [one], argv, what=name)
        tally.ends.update(found.ends)
        tally.faults.extend(found.faults)
    tally.require_none("configs")


@pytest.mark.exhaustive
def test_machine_files(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    text = named_machine("rtx4090").to_json()
    damages = [*damage.of_any_file(), *damage.of_json_file(seed=0, num=400)]
    argv: list[object] = ["plan", "qwen3_8b_lora_3060", "--machine", file]
    damage_each(file, text, damages, argv, what="machine").require_none("machine files")


def yaml_texts() -> list[str]:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]\n"
        for x, y in zip("abcdefgh", "bcdefghi", strict=True)
    )
    start = shipped_recipes()["quickstart"].read_text()
    return [
        bomb,
        start + bomb,
        start.replace("train:", "train: !!python/object/apply:os.system [ls]\n#"),
        start.replace("name:", "name: !!python/name:os.system\n  x:"),
        start.replace("name:", "name: !!binary |\n    R0lGODlhDAAMAIQAAP\n  x:"),
        start.replace("name:", "name: !!timestamp 2001-12-14t21:59:43.10-05:00\n  x:"),
        start.replace("name:", "name: !!set {a, b}\n  x:"),
        start.replace("name:", "name: !!int x\n  x:"),
        start.replace("name:", "name: !!float x\n  x:"),
        start.replace("name:", "name: !!bool x\n  x:"),
        start.replace("name:", "name: !!null x\n  x:"),
        start.replace("train:", "train: !!omap\n  - a: 1\n#"),
        start.replace("train:", "train: !!map\n"),
        start.replace("train:", "train: !mine\n"),
        start.replace("train:", "!!int train:"),
        start.replace("train:", "!!python/name:os.system train:"),
        start.replace("train:", "? [a, b]\n: c\ntrain:"),
        start.replace("train:", "<<: {a: 1}\ntrain:"),
        start + start,
        "---\n" + start + "---\n" + start,
        "%YAML 9.9\n---\n" + start,
        "%TAG ! tag:example.com,2000:\n---\n" + start,
        "#" * 10_000_000,
        "a: " + "x" * 10_000_000,
        "train: {lr: " + "1" * 100_000 + "}",
        "train: [" + "a, " * 500_000 + "]",
        "\n".join(f"k{i}: {i}" for i in range(300_000)),
        "train:\n" + "\n".join(f"  k{i}: {i}" for i in range(3000)),
        "a: " * 5000,
        "- " * 50_000,
        "? " * 5000,
        "[" * 200_000,
        "{a: " * 3000 + "}" * 3000,
        "\t" + start,
        start.replace("\n", "\r"),
        start.replace("\n", "\r\n"),
        start.replace("  ", "\t"),
        "\ufeff" + start,
        "\x85",
        "\x07",
        "\ud7ff\ue000",
    ]


HOSTILE = (
    *("1e300", "-1", "0", "1e-300", ".inf", ".nan", "null", "true", "''", "[]", "{}", "[[]]", "x"),
    *("9" * 400, "1e999", "0x10", "0o7", "1_000", "12:30", "~", "!!str 1", "!!int x", "*a", "&a 1"),
    *("1000000000000", "1000000000000000000", "0.1", "{a: {b: {c: d}}}", '"\\0"', "../../x", "|"),
    *("/dev/zero", "/proc/self/mem", "~nobody/x", "'\\ud800'", "a" * 5000, "[1, 2, x]", "-0.0"),
)


@pytest.mark.exhaustive
def test_recipes(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    shipped = shipped_recipes()
    tally = Tally()
    texts = [(f"text {i}", text) for i, text in enumerate(yaml_texts())]
    start = yaml.safe_load(shipped["qwen3_8b_lora_3060"].read_text())
    from finetune.recipe.recipe import sections, settings

    paths = [(section, key) for section in sections() for key in settings(section)]
    chance = random.Random(0)
    for section, key in paths:
        for value in chance.sample(HOSTILE, 6):
            fields = {name: dict(part) for name, part in start.items()}
            fields.setdefault(section, {}).pop(key, None)
            body = yaml.safe_dump(fields[section]) if fields[section] else ""
            rest = yaml.safe_dump({k: v for k, v in fields.items() if k != section})
            indented = "".join(f"  {line}\n" for line in body.splitlines())
            texts.append(
                (
                    f"{section}.{key}: {value[:40]}",
                    f"{rest}{section}:\n{indented}  {key}: {value}\n",
                )
            )
    for label, text in texts:
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        places = (file.name, label.partition(":")[0], "model.config")
        tally.add(f"validate {label}", damage.run("validate", file), *places)
        tally.add(f"plan {label}", damage.run("plan", file, "--machine", "rtx4090"), *places)
    for i in range(100):
        content = start
        for _ in range(1 + i % 3):
            content = damage.changed(json.loads(json.dumps(content)), random.Random(i))
        file.write_text(yaml.safe_dump(content))
        ended = damage.run("plan", file, "--machine", "rtx4090")
        tally.add(f"seed {i}", ended, file.name, "model.config")
    for one in damage.of_any_file():
        text = shipped["quickstart"].read_text()
        found = damage_each(file, text, [one], ["validate", file], what="any")
        tally.ends.update(found.ends)
        tally.faults.extend(found.faults)
    tally.require_none("recipes")


@pytest.mark.exhaustive
def test_flags(tmp_path: Path) -> None:
    tally = Tally()
    for value in ("inf", "nan", "-1", "0", "1e300", "1e30", "x", "", "1e-300", "-inf"):
        for argv in (
            ["plan", "qwen3_8b_lora_3060", "--machine", "rtx4090", "--ram", value],
            ["plan", "qwen3_8b_lora_3060", "--machine", "rtx4090", "--link", value],
            ["plan", "qwen3_8b_lora_3060", "--machines", "all", "--ram", value],
            ["fit", "qwen3-8b", "--vram", value],
            ["fit", "qwen3-8b", "--vram", "24", "--ram", value],
            ["fit", "qwen3-8b", "--vram", "24", "--link", value],
            ["plan", "qwen3_8b_lora_3060", "--machine", "rtx4090", f"offload.vram_budget={value}"],
            [
                "plan",
                "qwen3_8b_lora_3060",
                "--machine",
                "rtx4090",
                f"train.tokens_per_step={value}",
            ],
            ["plan", "qwen3_8b_lora_3060", "--machine", "rtx4090", f"train.epochs={value}"],
        ):
            ended = damage.run(*argv)
            if ended.code == 2:
                tally.ends["usage"] += 1
            else:
                tally.add(" ".join(argv), ended, value, "--ram", "--link", "--vram")
    tally.require_none("flags")
