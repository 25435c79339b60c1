"""Each file of a finished run, with a bit flipped or cut off: it is refused, or nothing changes.

A file is read as the program reads it, and what comes back is compared with what was there before.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.errors import CheckpointError
from finetune.files.manifest import MANIFEST
from finetune.report.explain import explain
from finetune.report.prediction import require_unchanged
from finetune.run.checkpoint import Checkpoints
from finetune.run.run_dir import RunDir, require_whole_adapter
from finetune.run.run_files import SAMPLES, read_sealed
from offload.errors import SluiceError
from tests.e2e.runs import run

NUM_FLIPS, NUM_CUTS = 200, 60  # of each file that is read, and a tenth of them of the others
STEP = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What damage has led to: how often, and the files of those that must not be."""

    counts: Counter[str]
    bad: list[str]


class Prepared:
    """A finished run, and what is read of it while all is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = RunDir(path)
        folder = self.run.checkpoints.folder(STEP)
        self._tensors = load_file(folder / "trained.safetensors")
        self._train = self.run.recipe().train
        self._data_hash = json.loads((folder / "state.json").read_text())["data_hash"]
        self.readers: dict[str, Callable[[], Any]] = {
            f"checkpoints/{folder.name}/{name}": self.checkpoint
            for name in ("state.json", "trained.safetensors", "optimizer.pt", MANIFEST)
        } | {
            f"adapter/{name}": self.adapter
            for name in ("adapter_config.json", "adapter_model.safetensors", MANIFEST)
        }
        self.readers |= {
            "recipe.yaml": self.run.recipe,
            "experts.json": self.run.experts_implementation,
            "metrics.jsonl": self.metrics,
            "predicted.json": self.explanation,
            "measured.json": self.explanation,
            "samples_before.json": lambda: read_sealed(SAMPLES, path / "samples_before.json"),
            "samples_after.json": lambda: read_sealed(SAMPLES, path / "samples_after.json"),
        }
        # written for people and other programs: whatever happens to them, nothing changes
        self.unread = ("report.json", "report.html", "trace.json", "gantt.svg", "adapter/README.md")
        self.readers |= dict.fromkeys(self.unread, self.everything)

    def checkpoint(self) -> Any:
        parameters, optimizer = self._fresh()
        restored = Checkpoints(self.path / "checkpoints").read(
            STEP, parameters, data_hash=self._data_hash
        )
        restored.put_into(parameters, optimizer)
        return plain({**parameters, "optimizer": optimizer.state_dict()})

    def adapter(self) -> Any:
        require_whole_adapter(self.path / "adapter")
        config = json.loads((self.path / "adapter" / "adapter_config.json").read_text())
        return config, plain(load_file(self.path / "adapter" / "adapter_model.safetensors"))

    def metrics(self) -> Any:
        notes = self.run.drop_metrics_after(STEP)
        if notes:  # a resume goes on and says so
            raise CheckpointError(notes[0], limit="", hint="")
        return self.run.read_metrics()

    def explanation(self) -> Any:
        require_unchanged(self.path, self.run.read_metrics())
        return explain(self.path).to_json()

    def everything(self) -> Any:
        return self.checkpoint(), self.adapter(), self.explanation(), self.run.recipe()

    def _fresh(self) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
        parameters = {n: torch.nn.Parameter(torch.zeros_like(t)) for n, t in self._tensors.items()}
        train = self._train
        return parameters, torch.optim.AdamW(
            parameters.values(), lr=train.lr, weight_decay=train.weight_decay
        )


def plain(tree: Any) -> Any:
    """Return a tree of tensors as values that `==` compares, to the bit."""
    if isinstance(tree, torch.Tensor):
        content = tree.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(tree.dtype), tuple(tree.shape), content
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return tree


@pytest.fixture
def prepared(tmp_path, write_recipe, machine_file, capsys) -> Prepared:
    recipe = write_recipe(report={"samples": 4})
    assert run("finetune", recipe, "--machine", machine_file) == 0
    capsys.readouterr()
    return Prepared(tmp_path / "run")


def attack(
    prepared: Prepared, damaged: Callable[[bytes, random.Random], bytes], num: int
) -> Outcome:
    """Damage each file so many times, and read it."""
    outcome = Outcome(counts=Counter(), bad=[])
    for name, read in prepared.readers.items():
        file, chance = prepared.path / name, random.Random(name)
        content, expected = file.read_bytes(), read()
        file.chmod(0o644)
        for _ in range(num // 10 if name in prepared.unread else num):
            file.write_bytes(damaged(content, chance))
            try:
                found = read()
            except SluiceError as error:
                named = str(file.parent) in str(error) or file.name in str(error)
                kind = "refused" if named else "refused without a name"
            except Exception as error:  # noqa: BLE001 - what must not be
                kind = f"traceback {type(error).__name__}"
            else:
                kind = "harmless" if found == expected else "silent"
            outcome.counts[kind] += 1
            if kind not in ("refused", "harmless"):
                outcome.bad.append(f"{name}: {kind}")
            outcome.counts[f"harmless in {file.name}"] += kind == "harmless"
        file.write_bytes(content)
    return outcome


def flipped(content: bytes, chance: random.Random) -> bytes:
    at, bit = chance.randrange(len(content)), chance.randrange(8)
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


def cut(content: bytes, chance: random.Random) -> bytes:
    first = min(64, len(content))
    near = chance.choice([chance.randrange(first), len(content) - 1 - chance.randrange(first)])
    return content[: chance.choice([near, chance.randrange(len(content))])]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("damaged", "num"), [(flipped, NUM_FLIPS), (cut, NUM_CUTS)])
def test_no_damage_passes_in_silence(damaged, num, prepared: Prepared, capsys) -> None:
    outcome = attack(prepared, damaged, num)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{damaged.__name__}: {num} times in each of {len(prepared.readers)} files:"
            f" {dict(sorted(outcome.counts.items()))}; bad: {Counter(outcome.bad)}\n"
        )
    assert not outcome.bad
