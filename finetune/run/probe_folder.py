"""What a probe leaves in the directory of its run: the head that it found, and how.

The folder is written whole, before step 1. A run that is resumed begins with this head, and does
not take the features again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.files.atomic import write_atomically
from finetune.files.manifest import damage, whole_folder

if TYPE_CHECKING:
    import torch

PROBE = "probe"
"""Its name."""
HEAD, FIGURES, STEPS = FILES = ("head.safetensors", "probe.json", "metrics.jsonl")


FEATURES = "features.json"
"""What features took of a head that trains alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureFigures:
    """What features took."""

    num_features: int  # label tokens whose features were kept, those of held-out rows too
    num_parameters: int  # the number of parameters of the head
    feature_bytes: int  # what they took
    predicted_pass_s: float  # the predicted time of the passes over the layers that computed them
    pass_s: float  # the measured time of these passes


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeFigures(FeatureFigures):
    """What a probe took."""

    rows: str  # digest of the examples
    num_steps: int  # the steps of the head
    steps_s: float  # the time of all steps of the head


def write_probe(
    run_dir: Path,
    head: Mapping[str, "torch.Tensor"],
    figures: ProbeFigures,
    steps: Sequence[Mapping[str, Any]],
) -> None:
    """Write a probe that has ended, whole.

    Args:
        run_dir: Of the run.
        head: The weights that it found, by the names that a checkpoint gives them.
        figures: What it took.
        steps: What was learned in each step.

    Raises:
        CheckpointError: It cannot be written.
    """
    from safetensors.torch import save_file  # it imports torch

    with whole_folder(run_dir / PROBE) as partial:
        save_file({name: one.detach().cpu() for name, one in head.items()}, partial / HEAD)
        (partial / FIGURES).write_text(json.dumps(asdict(figures), indent=1) + "\n")
        (partial / STEPS).write_text("".join(json.dumps(row) + "\n" for row in steps))


def write_features(run_dir: Path, figures: FeatureFigures) -> None:
    """Write what features took of a head that trains alone."""
    write_atomically(run_dir / FEATURES, json.dumps(asdict(figures), indent=1) + "\n")


def read_features(run_dir: Path) -> dict[str, Any] | None:
    """Return what features took of a head that trains alone; None where none were taken."""
    file = run_dir / FEATURES
    if not file.exists():
        return None
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def read_head(run_dir: Path, *, rows: str) -> "tuple[dict[str, torch.Tensor] | None, str]":
    """Return the head that a probe of these rows has found, or None; and a note, if there is one.

    The note says that the head was found before, or why its files are not used.
    """
    folder = run_dir / PROBE
    if not folder.exists():
        return None, ""
    found = damage(folder, needs=FILES)
    if found is None and read_figures(run_dir)["rows"] != rows:
        found = "it is of other rows"
    if found is not None:
        return None, f"{folder} is not used, the probe is run again: {found}"
    from safetensors.torch import load_file  # it imports torch

    return load_file(folder / HEAD), "The head is that of the probe, which ended before"


def read_figures(run_dir: Path) -> dict[str, Any]:
    """Return the figures of a probe that has ended."""
    figures: dict[str, Any] = json.loads((run_dir / PROBE / FIGURES).read_text())
    return figures


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return what a probe that has ended has learned in each step."""
    return [json.loads(line) for line in (run_dir / PROBE / STEPS).read_text().splitlines()]


def read_probe(run_dir: Path) -> dict[str, Any] | None:
    """Return the figures of a probe with its `first` and `last` step; None if none has ended."""
    if not (run_dir / PROBE).exists():
        return None
    steps = read_steps(run_dir)
    return {**read_figures(run_dir), "first": steps[0], "last": steps[-1]}
