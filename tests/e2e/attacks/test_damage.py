"""Damage, kills, full disks and races: named, and nothing of a run is lost."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
from finetune.run.checkpoint import Checkpoints, state_form
from finetune.run.run_dir import RunDir, require_whole_adapter
from finetune.run.run_files import SAMPLES, read_sealed
from offload.errors import SluiceError
from tests.e2e.forked import Forked, Started
from tests.e2e.runs import adapter, losses, run

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
        tried, stepped = self._fresh()
        for parameter in tried.values():
            parameter.grad = torch.zeros_like(parameter)
        stepped.step()
        parameters, optimizer = self._fresh()
        restored = Checkpoints(self.path / "checkpoints").read(
            STEP, parameters, data_hash=self._data_hash, form=state_form(stepped)
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


# ---------------------------------------------------------------------------------------- disk full


KIB = 1024
NUM_SIZES = 8


def said(process: Started, run_dir: Path) -> str:
    """Return the file that the error names."""
    shown = process.shown
    assert "Traceback" not in shown, shown
    line = next(line for line in shown.splitlines() if line.startswith("error: "))
    assert str(run_dir) in line, shown
    assert "hint: " in shown
    for reason in ("No space left on device", "File too large", "is free", "at most"):
        if reason in line:
            named = line.removeprefix("error: ").split()[0].rstrip(":")
            return f"{Path(named).name.split('-')[0]}: {reason}"
    raise AssertionError(shown)


def resume_and_compare(
    forked: Forked, words: tuple[object, ...], run_dir: Path, whole: Path
) -> None:
    """End a run, now that there is room, and compare it with one that always had it."""
    flags = ("--resume",) if (run_dir / "recipe.yaml").exists() else ()
    last = forked.start(*words, *flags)
    assert last.end() == 0, last.shown
    assert losses(run_dir) == losses(whole)
    ours, expected = adapter(run_dir), adapter(whole)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that can be made smaller and larger."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def used_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*"))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_full_disk_ends_a_run_with_words_and_loses_nothing(
    small_disk: Path, tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"steps": 8}, report={"samples": 4})
    words = ("finetune", recipe, "--machine", machine_file)
    counts: Counter[str] = Counter()
    with Forked(tmp_path) as forked:
        whole = tmp_path / "whole"
        assert forked.start(*words, f"output.dir={whole}").end() == 0
        most = used_bytes(whole)
        for number in range(NUM_SIZES):
            resize(small_disk, 16 * 1024 * KIB)
            run_dir = small_disk / "run"
            shutil.rmtree(run_dir, ignore_errors=True)
            filler = small_disk / "filler"
            filler.write_bytes(b"\1" * (16 * 1024 * KIB - most * (number + 1) // (NUM_SIZES + 1)))
            here = (*words, f"output.dir={run_dir}")
            process = forked.start(*here)
            code = process.end()
            assert code in (0, 1), process.shown
            counts["finished" if code == 0 else said(process, run_dir)] += 1
            filler.unlink()
            resume_and_compare(forked, here, run_dir, whole)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{NUM_SIZES} full disks: {dict(counts)}; all ended equal to the bit, 0 tracebacks\n"
        )


def resize(disk: Path, num_bytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={num_bytes}", str(disk)], check=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_limit_on_the_size_of_files_ends_a_run_with_words_and_loses_nothing(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"steps": 8}, report={"samples": 4})
    words = ("finetune", recipe, "--machine", machine_file)
    counts: Counter[str] = Counter()
    with Forked(tmp_path) as forked:
        whole = tmp_path / "whole"
        assert forked.start(*words, f"output.dir={whole}").end() == 0
        sizes = sorted(file.stat().st_size for file in whole.rglob("*") if file.is_file())
        for limit_bytes in sizes[:: len(sizes) // NUM_SIZES][-NUM_SIZES:]:
            run_dir = tmp_path / f"limit-{limit_bytes}"
            here = (*words, f"output.dir={run_dir}")
            process = forked.start(*here, limit_bytes=max(1, limit_bytes - 1))
            code = process.end()
            assert code in (0, 1), process.shown
            counts["finished" if code == 0 else said(process, run_dir)] += 1
            resume_and_compare(forked, here, run_dir, whole)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{NUM_SIZES} limits: {dict(counts)}; all ended equal to the bit, 0 tracebacks\n"
        )


# -------------------------------------------------------------------------------------------- kills


NUM_KILLS, NUM_STEPS = 40, 60
MOMENTS = ("any", "in a step", "while saving")


def wait_for_moment(process: Started, moment: str, run_dir: Path, chance: random.Random) -> None:
    """Wait for a moment to kill at, or the end of the run."""
    metrics, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"

    def num_rows() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    if moment == "any":  # most of a start's time goes before the first step
        end_s = time.monotonic() + chance.random() * 6
        process.wait_until(lambda: time.monotonic() > end_s)
        return
    goal = num_rows() + chance.randrange(1, 6)
    process.wait_until(lambda: num_rows() >= goal)
    if moment == "while saving":
        process.wait_until(lambda: any(checkpoints.glob("partial-*")))
    time.sleep(chance.random() * 0.02)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_runs_that_are_killed_end_as_one_that_is_not(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"steps": NUM_STEPS}, output={"checkpoint_every": 2})
    words = ("finetune", recipe, "--machine", machine_file)
    chance, counts = random.Random(16), dict.fromkeys(MOMENTS, 0)
    num_runs = 0
    with Forked(tmp_path) as forked:
        whole = tmp_path / "whole"
        assert forked.start(*words, f"output.dir={whole}").end() == 0
        expected = adapter(whole)
        while sum(counts.values()) < NUM_KILLS:
            num_runs += 1
            run_dir = tmp_path / f"killed-{num_runs}"
            code, num_starts = -1, 0
            while code != 0:
                resume = ("--resume",) if (run_dir / "recipe.yaml").exists() else ()
                process = forked.start(*words, f"output.dir={run_dir}", *resume)
                moment = chance.choice(MOMENTS)
                if sum(counts.values()) < NUM_KILLS and num_starts < 8:
                    wait_for_moment(process, moment, run_dir, chance)
                    code = process.end(signal.SIGKILL)
                else:
                    code = process.end()
                num_starts += 1
                assert code in (0, -signal.SIGKILL), process.shown
                counts[moment] += code != 0
            assert losses(run_dir) == losses(whole)
            resumed = adapter(run_dir)
            assert resumed.keys() == expected.keys()
            assert all(torch.equal(resumed[name], expected[name]) for name in expected)
            left = sorted(path.name for path in run_dir.rglob("*partial-*"))
            assert not left
    with capsys.disabled():
        sys.stdout.write(
            f"\n{sum(counts.values())} kills ({counts}) of {num_runs} runs:"
            f" {num_runs} ended equal to the bit, 0 lost\n"
        )


# -------------------------------------------------------------------------------------------- races


NUM_ROUNDS = 6
PAIRS = {
    "start and start": ((), ()),
    "start and overwrite": ((), ("--overwrite",)),
    "overwrite and overwrite": (("--overwrite",), ("--overwrite",)),
    "resume and resume": (("--resume",), ("--resume",)),
    "resume and overwrite": (("--resume",), ("--overwrite",)),
    "resume and start": (("--resume",), ()),
}


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_of_two_that_want_one_directory_one_gets_it(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"steps": 12})
    words = ("finetune", recipe, "--machine", machine_file)
    counts: Counter[str] = Counter()
    with Forked(tmp_path) as forked:
        whole = tmp_path / "whole"
        assert forked.start(*words, f"output.dir={whole}").end() == 0
        for number in range(NUM_ROUNDS):
            for name, (first, second) in PAIRS.items():
                run_dir = tmp_path / f"{name} {number}"
                here = (*words, f"output.dir={run_dir}")
                if "resume" in name:
                    begun = forked.start(*here)
                    begun.wait_until((run_dir / "checkpoints" / "step-0000004").exists)
                    assert begun.end(signal.SIGKILL) == -signal.SIGKILL
                both = [forked.start(*here, *flags) for flags in (first, second)]
                codes = [one.end() for one in both]
                for code, one in zip(codes, both, strict=True):
                    assert "Traceback" not in one.shown, one.shown
                    counts[outcome(code, one)] += 1
                assert 0 in codes, [one.shown for one in both]
                assert losses(run_dir) == losses(whole)
                ours, expected = adapter(run_dir), adapter(whole)
                assert all(torch.equal(ours[tensor], expected[tensor]) for tensor in expected)
                assert not (run_dir / "run.lock").exists()
    with capsys.disabled():
        sys.stdout.write(f"\n{NUM_ROUNDS * len(PAIRS)} races: {dict(counts)}, 0 tracebacks\n")


def outcome(code: int, process: Started) -> str:
    """Say how a process has ended: with the run, or with words for why not."""
    if code == 0:
        return "finished"
    assert code == 1, process.shown
    if re.search(r"is in use by process \d+ on \S+, since 2", process.shown):
        return "was told who writes it"
    assert "holds a run already" in process.shown, process.shown
    return "came after the other and found a run"
