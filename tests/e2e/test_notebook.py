"""The notebook for a T4 runs from top to bottom, on a CPU with the quickstart's model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "t4.ipynb"
TINY = f"""
MODEL = {str(ROOT / "recipes" / "quickstart" / "model")!r}
DTYPE, DEVICE, CAP_GIB = "float32", "cpu", 4
SEQ_LEN, TOKENS_PER_STEP, STEPS = 128, 512, 4
"""


def cells() -> list[tuple[list[str], str]]:
    """Return tags and text of each cell of code."""
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return [
        (cell["metadata"].get("tags", []), "".join(cell["source"]))
        for cell in found
        if cell["cell_type"] == "code"
    ]


def test_a_notebook_is_kept_without_outputs() -> None:
    found = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in found)


@pytest.mark.slow
def test_the_notebook_runs_on_a_cpu_with_a_tiny_model(tmp_path: Path) -> None:
    program = [text for tags, text in cells() if "install" not in tags]
    (at,) = [n for n, (tags, _) in enumerate(cells()) if "parameters" in tags]
    program.insert(at, TINY)  # after the parameters: the cell that installs is left out
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    done = subprocess.run(
        ["env", f"PATH={path}", f"PYTHONPATH={ROOT}", sys.executable, "-c", "\n\n".join(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "gradients are equal to the bit" in done.stdout
    assert json.loads(done.stdout.splitlines()[-3])["hardware"]["device"] == "cpu"
