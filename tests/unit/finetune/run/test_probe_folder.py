from pathlib import Path

import torch

from finetune.run.probe_folder import (
    PROBE,
    ProbeFigures,
    read_figures,
    read_head,
    read_probe,
    read_steps,
    write_probe,
)

HEAD = {"score.weight": torch.arange(6.0).reshape(2, 3)}
STEPS = [{"step": 1, "loss": 0.5}]


def write(folder: Path) -> None:
    figures = ProbeFigures(
        rows="a",
        num_steps=1,
        num_features=4,
        num_parameters=6,
        feature_bytes=48,
        predicted_pass_s=1.0,
        pass_s=1.0,
        steps_s=1.0,
    )
    write_probe(folder, HEAD, figures, STEPS)


def test_a_head_is_read_as_it_was_found(tmp_path: Path) -> None:
    assert read_head(tmp_path, rows="a") == (None, "")
    assert read_probe(tmp_path) is None
    write(tmp_path)
    found, note = read_head(tmp_path, rows="a")
    assert found is not None
    assert torch.equal(found["score.weight"], HEAD["score.weight"])
    assert "ended before" in note
    assert read_steps(tmp_path) == STEPS
    assert read_probe(tmp_path) == {**read_figures(tmp_path), "first": STEPS[0], "last": STEPS[0]}


def test_a_head_of_other_rows_or_that_was_changed_is_not_used(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_head(tmp_path, rows="b")[0] is None
    assert "it is of other rows" in read_head(tmp_path, rows="b")[1]
    file = tmp_path / PROBE / "head.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    found, note = read_head(tmp_path, rows="a")
    assert found is None
    assert "head.safetensors is not what was written" in note
