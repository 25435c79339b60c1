import subprocess
import sys
from pathlib import Path

import pytest

from finetune.env import launch_notes

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_run_without_a_launcher_has_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_notes() == ()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")  # of a cluster's own scripts
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert launch_notes() == ()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "mixed_precision: bf16 has no effect here"),
        ("ACCELERATE_USE_FSDP", "true", "fsdp: true has no effect here"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "deepspeed: true has no effect here"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend: INDUCTOR has no effect here"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "gradient_accumulation_steps: 4 has no"),
    ],
)
def test_a_setting_of_accelerate_that_does_nothing_is_named(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    (note,) = launch_notes()
    assert note.startswith(f"accelerate's {said}")


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_one_process_where_another_launcher_was_asked_for_two_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "2")
    (note,) = launch_notes()
    assert f"was asked for 2 processes ({name}), and this run is one by itself" in note
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch_notes() == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ((), []),
        (("--num_processes", "1"), []),
        (
            ("--num_processes", "2"),
            ["accelerate was asked for several processes and has started this one alone"],
        ),
        (
            ("--mixed_precision", "bf16", "--dynamo_backend", "inductor"),
            ["accelerate's mixed_precision: bf16", "accelerate's dynamo_backend: INDUCTOR"],
        ),
    ],
)
def test_what_accelerate_itself_hands_on_is_named(
    words: tuple[str, ...], notes: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "notes.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from finetune.env import launch_notes\n"
        "for note in launch_notes(): print('note:', note)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--cpu", *words, str(script)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    found = [line for line in ended.stdout.splitlines() if line.startswith("note: ")]
    assert len(found) == len(notes)
    assert all(line.startswith(f"note: {note}") for line, note in zip(found, notes, strict=True))
