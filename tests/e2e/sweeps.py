"""Two runs' directories, compared file by file for what a run has learned."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

# of metrics.jsonl; the others are times and loads, which runs that share a step share
LEARNED = ("step", "loss", "grad_norm", "lr", "num_tokens", "num_label_tokens")


def states(folder: Path) -> dict[str, dict[str, object]]:
    """Return what a sweep has written of its runs, by name."""
    content = json.loads((folder / "sweep.json").read_text())
    return {one["name"]: one for one in content["runs"]}


def learned(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in row.items()
            if name in LEARNED or name.startswith(("eval_", "rewards/", "logps/"))
        }
        for row in rows
    ]


def assert_same_bits(run_dir: Path, alone: Path) -> None:
    """Compare losses, checkpoints and adapters of a run that shared its steps with one alone."""
    assert learned(run_dir) == learned(alone)
    assert len(learned(alone)[0]) >= len(LEARNED)
    names = sorted(path.name for path in (alone / "checkpoints").iterdir())
    assert names == sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names
    for name in names:
        mine, other = (folder / "checkpoints" / name for folder in (run_dir, alone))
        assert_same_tensors(mine / "trained.safetensors", other / "trained.safetensors")
        assert_same_states(
            *(torch.load(folder / "optimizer.pt", weights_only=True) for folder in (mine, other))
        )
        states = [json.loads((folder / "state.json").read_text()) for folder in (mine, other)]
        assert states[0] == states[1]
    weights = "adapter_model.safetensors"
    assert_same_tensors(run_dir / "adapter" / weights, alone / "adapter" / weights)
    config = "adapter_config.json"
    assert (run_dir / "adapter" / config).read_text() == (alone / "adapter" / config).read_text()


def assert_same_tensors(mine: Path, other: Path) -> None:
    found, expected = load_file(mine), load_file(other)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_same_states(found: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert isinstance(found, dict)
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same_states(found[key], value)
    elif isinstance(expected, list):
        assert isinstance(found, list)
        for mine, other in zip(found, expected, strict=True):
            assert_same_states(mine, other)
    else:
        assert found == expected
