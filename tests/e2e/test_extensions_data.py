"""An objective and a data format of a package that is not ours, found by its entry points."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.runs import ROOT, rows_of

OBJECTIVE = '''
"""Pairs whose answers are to be a margin apart."""

from typing import Literal

from pydantic import Field

from finetune.recipe.extensions import Objective, ObjectiveSection, chosen
from offload.registry import Clash


class Apart(ObjectiveSection):
    """Pairs of answers whose log-probabilities are to be a margin apart."""

    formats = ("preference",)
    loss_at = "far_apart.loss:ApartObjective"

    method: Literal["apart"] = chosen("apart")
    margin: float = Field(default=1.0, gt=0, description="How far apart answers are to be.")


EXTENSION = Objective(
    settings=Apart,
    summary="keeps the answers of a pair apart",
    clashes=(Clash(field="train.lr", values=(0.25,), limit="answers fall apart", fix="0.125"),),
)
'''
LOSS = """
from dataclasses import dataclass

import torch

from far_apart.apart import Apart
from finetune.data.step_rows import SectionObjective, ordered
from offload.engine.objective import Scores, StepLoss


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ApartObjective(SectionObjective):
    section: Apart

    def loss(self, scores: Scores) -> StepLoss:
        sums = self.sums(scores)
        better, worse = torch.stack(ordered(sums)).unbind(1)
        apart = sums.policy_A[better] - sums.policy_A[worse]
        loss = (self.section.margin - apart).relu().mean()
        return StepLoss(value=sums.own_part(loss), metrics={"apart": apart.mean().detach()})
"""
FORMAT = '''
"""A question with a good and a bad answer."""

from collections.abc import Mapping
from dataclasses import replace

from finetune.data.answers import Answers, asked_and_said, reading, turns_of_column
from finetune.data.rows import RowForm
from finetune.recipe.extensions import DataFormat
from offload.registry import Clash


def read(row: Mapping[str, object], form: RowForm) -> Answers:
    names = form.column("good"), form.column("bad")
    sides = [turns_of_column(row, name, "assistant", form.ignored) for name in names]
    prompt, *sides = asked_and_said(row, form.column("question"), sides, form.ignored)
    return Answers(prompt=prompt, answers=tuple(sides), values=(1.0, 0.0), names=names)


EXTENSION = DataFormat(
    summary="a question with a good and a bad answer",
    columns=("question", "good", "bad"),
    read=reading(read),
    like="preference",
)
WHOLE = Clash(field="data.too_long", values=("truncate",), limit="rows are whole", fix="drop")
STRICT = replace(EXTENSION, columns=("exam", "good", "bad"), clashes=(WHOLE,))
'''
ENTRY_POINTS = """
[sluice.objectives]
apart = far_apart.apart:EXTENSION
[sluice.data_formats]
judged = far_apart.judged:EXTENSION
strict = far_apart.judged:STRICT
"""
WITHOUT_TORCH = """
import sys

sys.modules |= dict.fromkeys(("torch", "pynvml"))
from finetune.app import main
from finetune.recipe.adapters import ADAPTERS
from finetune.data.rows import RowForm
from finetune.errors import DataError
from finetune.recipe.extensions import FORMATS, OBJECTIVES

recipe, wrong, machine = sys.argv[1:]
assert "apart" in [*OBJECTIVES] and "judged" in [*FORMATS]
assert all(one.settings.__doc__ and one.summary for one in OBJECTIVES.values())
assert all(one.columns and one.summary for one in FORMATS.values())
assert all(one.settings.__doc__ and one.summary for one in ADAPTERS.values())
model = ("model.config=tiny-qwen3-moe", "model.path=null", "model.init=random")
for words, code in (
    (["plan", recipe, "--machine", machine, *model], 0),
    (["plan", wrong, "--machine", machine], 1),
    (["recipes", "schema"], 0),
    (["plan", recipe, "train.lr=0.25"], 1),
    (["plan", recipe, "data.format=strict", "data.too_long=truncate"], 1),
    (["plan", recipe, "data.path=null", 'data.mix=[{"path":"a.jsonl","format":"strict"}]',
      "data.too_long=truncate"], 1),
):
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code == code, words
FORM = {"columns": {}, "system": None, "ignored": (), "loss_on": "assistant"}
try:
    form = RowForm(path="rows", data_format="auto", formats=("strict", "judged"), **FORM)
    form.detected([("rows:1", dict.fromkeys(("exam", "good", "bad"), "a"))])
except DataError as error:
    print(error)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a package, as pip would install it, that is on the path of processes."""
    folder = tmp_path / "installed"
    files = {"__init__": "", "apart": OBJECTIVE, "loss": LOSS, "judged": FORMAT}
    for name, text in files.items():
        file = folder / "far_apart" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    info = folder / "far_apart-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: far-apart\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(ROOT))))
    return folder


def called(*words: object) -> str:
    """Run Python and return what it prints."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout + done.stderr


@pytest.fixture
def recipe(package: Path, tmp_path: Path, write_recipe) -> Path:
    rows = [{"question": f"what follows {n}", "good": f"{n + 1}", "bad": "no"} for n in range(20)]
    (tmp_path / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_recipe(
        objective={"method": "apart", "margin": 50.0},
        data={"path": str(tmp_path / "judged.jsonl"), "format": "auto", "columns": {}},
        output={"eval_every": 3},
    )


def test_extensions_of_another_package_are_planned_refused_and_listed_without_torch(
    recipe: Path, machine_file: Path, tmp_path: Path
) -> None:
    text = recipe.read_text().replace("  margin: 50.0", "  margin: 50.0\n  gamma: 0.5")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text)
    shown = " ".join(called("-c", WITHOUT_TORCH, recipe, wrong, machine_file).split())
    line = text.splitlines().index("  gamma: 0.5") + 1
    assert f"wrong.yaml:{line}: objective.gamma is 0.5 and objective.method is apart" in shown
    assert "apart has method, margin hint: leave `objective.gamma` out" in shown
    assert '"const": "apart"' in shown
    for said in (
        "train.lr is 0.25 and objective.method is apart; answers fall apart hint: `train.lr: 0.1",
        "data.too_long is truncate and data.format is strict; rows are whole hint: `data.too_long:",
        "data.too_long is truncate and data.mix is a.jsonl; rows are whole hint: `data.too_",
        "rows:1 has the keys exam, good, bad, which fit a format that some settings do not go",
        "hint: `data.format: strict`",
    ):
        assert said in shown
    listed = called("-c", "from tests.tools.reference import settings; print(settings())")
    assert "### `objective.method: apart`" in listed
    assert "| `margin` | number above 0 | `1.0` | How far apart answers are to be. |" in listed
    assert "| `judged` | a question with a good and a bad answer | question, good, bad" in listed


def test_a_run_learns_by_an_objective_from_rows_of_another_package(
    recipe: Path, machine_file: Path, tmp_path: Path
) -> None:
    called("cli.py", "finetune", recipe, "--machine", machine_file)
    written = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert written["objective"] == {"method": "apart", "margin": 50.0}
    rows = rows_of(tmp_path / "run")
    assert all(row["loss"] == pytest.approx(50.0 - row["apart"]) for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert "eval_logps/accuracies" in rows[2]
