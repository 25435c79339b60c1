"""Configs, machine files and recipes that are damaged in any way: refused by name, or planned."""

import json
import random
from pathlib import Path

import pytest
import yaml

from finetune.recipe.recipe import recipes_dir, shipped_recipes
from offload.plan.machine.machine import named_machine
from tests.e2e import damage
from tests.e2e.damage import Damage, Tally

pytestmark = pytest.mark.exhaustive

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
