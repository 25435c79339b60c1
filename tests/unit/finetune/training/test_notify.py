"""The command that hears how a run ended: what it is given, and what it cannot do to the run."""

import io
import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from finetune.errors import ConfigError, DivergedError
from finetune.planning.subject import subject_of
from finetune.recipe.recipe import with_settings
from finetune.report.screen import Screen
from finetune.run.run_dir import RunDir
from finetune.training import notify
from finetune.training.ranks import Ranks
from finetune.training.run import Run
from tests.unit.finetune.report.made_up import write_run


class _Second(Ranks):
    @property
    def is_main(self) -> bool:
        return False


def run_with(command: str | None, folder: Path, ranks: Ranks | None = None) -> Run:
    recipe = with_settings(subject_of("qwen3-8b", []).recipe, {"report.notify": command})
    return Run(
        recipe=recipe,
        dir=RunDir(folder),
        ranks=ranks or Ranks(),
        device=torch.device("cpu"),
        screen=Screen(Console(file=io.StringIO(), width=400), is_verbose=False),
        is_resumed=False,
    )


def shown(run: Run) -> str:
    file = run.screen.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def told(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "heard.json").read_text())
    return content


DIVERGED = DivergedError("the loss is nan", limit="it must be finite", hint="a lower rate")
WRONG = ConfigError("it is wrong", limit="it must be right", hint="a lower rate")


@pytest.mark.parametrize(("error", "event"), [(DIVERGED, "divergence"), (WRONG, "error")])
def test_a_failure_is_told_and_goes_on(error: ConfigError, event: str, tmp_path: Path) -> None:
    run = run_with(f"tee {tmp_path / 'heard.json'}", tmp_path)
    write_run(tmp_path, slow_s=[0.0, 0.0])
    with pytest.raises(type(error)) as raised, notify.failures_notified(run):
        raise error
    assert raised.value is error
    assert told(tmp_path) == {
        **{"event": event, "run": run.recipe.output.name, "dir": str(tmp_path)},
        **{
            "message": f"{error.what}; {error.limit}",
            "hint": "a lower rate",
            "step": 2,
            "loss": 1.0,
        },
    }
    assert shown(run) == ""


def test_a_bug_is_told_too_and_no_other_rank_tells(tmp_path: Path) -> None:
    command = f"tee {tmp_path / 'heard.json'}"
    with (
        pytest.raises(KeyError),
        notify.failures_notified(run_with(command, tmp_path, ranks=_Second())),
    ):
        raise KeyError("x")
    notify.notify(run_with(None, tmp_path), "end", message="none")
    assert not (tmp_path / "heard.json").exists()
    with pytest.raises(KeyError), notify.failures_notified(run_with(command, tmp_path)):
        raise KeyError("x")
    assert told(tmp_path)["event"] == "error"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('no network')", "ended with 1: no network"),
        ("import time; time.sleep(60)", "was ended after 0.2 s"),
        (None, "cannot be run: No such file or directory"),
    ],
)
def test_a_command_that_fails_or_hangs_is_a_note(
    program: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "0.2" in said:
        monkeypatch.setattr(notify, "TIME_LIMIT_S", 0.2)
    words = [sys.executable, "-c", program] if program else [str(tmp_path / "gone")]
    run = run_with(shlex.join(words), tmp_path)
    notify.notify(run, "end", message="it is written")
    assert shown(run) == f"report.notify: `{run.recipe.report.notify}` {said}\n"


def test_a_damaged_file_of_metrics_hides_no_failure(tmp_path: Path) -> None:
    run = run_with(f"tee {tmp_path / 'heard.json'}", tmp_path)
    run.dir.metrics_file.write_text("{\n{}\n")
    notify.notify(run, "end", message="it is written")
    assert "step" not in told(tmp_path)
    assert shown(run) == ""
