"""Recipes with drawn settings, planned as by a user: what is refused is changed as hints say.

python -m tests.drawn_recipes 2000    count what plans at once, and after hints
"""

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from random import Random

import yaml

from finetune.commands.plan import HostOptions, planned
from finetune.recipe.recipe import Recipe
from offload.errors import SluiceError

BASE = {
    "model": {"config": "tiny-qwen3-moe", "init": "random"},
    "data": {"path": "org/rows"},
    "train": {"seq_len": 64, "grad_accum_steps": 4, "steps": 10},
    "output": {"name": "drawn"},
}
MODELS = ("tiny-qwen3", "tiny-qwen3-moe")
MORE: Mapping[str, tuple[object, ...]] = {
    "data.packing": ("on", "off"),
    "data.max_rows": (100,),
    "data.mix": ([{"path": "org/a"}, {"path": "org/b", "system": "Be brief."}],),
    "adapter.rank": (4,),
    "adapter.dropout": (0.1,),
    "adapter.targets": (["q_proj", "v_proj"], []),
    "adapter.modules_to_save": (["norms"], ["embed_tokens"], ["lm_head"], ["q_proj"]),
    "train.what": ("adapter", "head", "all", ["norms"], ["last_1_layers"]),
    "train.seq_len": (32, 128),
    "train.micro_batch_size": ("auto", 2),
    "train.grad_accum_steps": (1, 6),
    "train.tokens_per_step": (512, 700),
    "train.steps": (1, 40),
    "train.epochs": (1.0,),
    "train.warmup_steps": (2, 20),
    "train.warmup_ratio": (0.1, 0.99),
    "train.num_cycles": (2, 30),
    "train.early_stopping_min_delta": (0.1,),
    "train.shares": ("equal", [3, 1], [2, 2]),
    "offload.num_slots": ("all", 2, 3),
    "offload.kept_graphs": ("all", 0, 1, 99),
    "offload.head_chunk": (64,),
    "offload.mlp_chunk": ("whole", 32),
    "offload.vram_budget": (8.0,),
    "output.eval_every": (2, 50),
    "report.samples": (3,),
    "report.log_to": (["tensorboard"],),
}
"""Values to draw in addition to a field's choices and examples."""
NAMES = frozenset(
    f"{section}.{name}"
    for section, names in (
        ("model", ("path", "config", "tokenizer")),
        ("data", ("path", "eval_path")),
        ("output", ("name", "dir")),
    )
    for name in names
)
"""Settings that name files and models."""


def choices() -> dict[str, list[object]]:
    """Return the values to draw from, by setting: those that a field lists, and some of MORE."""
    schema = Recipe.model_json_schema()
    found: dict[str, list[object]] = {}
    for section, reference in schema["properties"].items():
        whole = schema["$defs"][reference["$ref"].rpartition("/")[2]]
        every = [one["properties"].items() for one in whole.get("oneOf", [whole])]
        for name, described in chain.from_iterable(every):
            path = f"{section}.{name}"
            parts = described.get("anyOf", [described])
            values = [value for part in parts for value in _listed(part)]
            values += described.get("examples", [])
            values += MORE.get(path, ())
            if values and path not in NAMES:
                found[path] = [*found.get(path, ()), *values]
    return found | {"model.config": list(MODELS)}


def _listed(part: Mapping[str, object]) -> list[object]:
    if part.get("type") == "boolean":
        return [True, False]
    listed = part.get("enum", [part["const"]] if "const" in part else [])
    assert isinstance(listed, list)
    return listed


CHOICES = choices()


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Settings over a small recipe, and GPUs that share its steps."""

    settings: Mapping[str, object]
    num_gpus: int = 1

    def plan(self, folder: Path) -> None:
        """Plan the recipe on a named card.

        Raises:
            SluiceError: It is refused.
        """
        file = folder / "drawn.yaml"
        file.write_text(yaml.safe_dump(BASE))
        words = [f"{path}={json.dumps(value)}" for path, value in self.settings.items()]
        host = HostOptions(ram_gib=64, link_gb_per_s=None, num_gpus=self.num_gpus)
        planned(
            str(file),
            words,
            machine="rtx3060",
            host=host,
            wants_ways=False,
            form="json",
            note=lambda _text: None,
        )

    def changed(self, hint: str) -> "Asked":
        """Return what a hint says in its first way: settings, GPUs, or a setting less."""
        way = re.split(r",? or (?=`|leave)", hint, maxsplit=1)[0]
        settings, num_gpus = dict(self.settings), self.num_gpus
        for path, value in re.findall(r"`(\w+\.\w+): ([^`]+)`", way):
            settings[path] = yaml.safe_load(value)
        for path in re.findall(r"`(\w+\.\w+)`", way) if "leave" in way else ():
            settings.pop(path, None)
        for number in re.findall(r"`--gpus (\d+)`", way):
            num_gpus = int(number)
        return replace(self, settings=settings, num_gpus=num_gpus)


@dataclass(kw_only=True)
class Way:
    """How a recipe came to plan."""

    asked: Asked
    refusals: list[str] = field(default_factory=list)
    is_planned: bool = False


def followed(asked: Asked, folder: Path, *, most: int) -> Way:
    """Plan, and change what is refused as the hints say, at most so many times."""
    way = Way(asked=asked)
    for _ in range(most + 1):
        try:
            way.asked.plan(folder)
        except SluiceError as error:
            way.refusals.append(str(error))
            before = way.asked
            for hint in re.findall(r"hint: (.+)", str(error)):
                way.asked = way.asked.changed(hint)
            if way.asked == before:
                return way
        else:
            way.is_planned = True
            return way
    return way


def drawn(random: Random) -> Asked:
    """Return some settings."""
    paths = random.sample(sorted(CHOICES), random.randint(0, 8))
    settings = {path: random.choice(CHOICES[path]) for path in paths}
    return Asked(settings=settings, num_gpus=random.choice((1, 1, 2)))


def main(number: int) -> None:
    """Count what so many drawn recipes come to, and show those that never plan."""
    counts: Counter[str] = Counter()
    random = Random(0)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(number):
            asked = drawn(random)
            way = followed(asked, Path(folder), most=8)
            kind = f"planned after {len(way.refusals)} hints" if way.refusals else "planned at once"
            counts[kind if way.is_planned else "not planned"] += 1
            if not way.is_planned:
                sys.stdout.write(f"{asked}\n" + "\n".join(way.refusals[-2:]) + "\n\n")
    sys.stdout.writelines(f"{kind}: {count}\n" for kind, count in sorted(counts.items()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
