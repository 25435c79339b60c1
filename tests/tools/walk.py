"""What a plain run imports and calls: the modules of all its processes, and the files of a step.

    python -m tests.tools.walk

runs two steps of the quickstart and prints what `core` and `Walk` find.
"""

import ast
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("finetune", "offload")
WORDS = ("finetune", "quickstart", "train.steps=2", "train.warmup_steps=0")

# Each process of a run imports it before anything else.
_NOTED = """
import sys
class Noted:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            with open({file!r}, "a") as file:
                file.write(name + "\\n")
sys.meta_path.insert(0, Noted())
"""


def core(run_dir: Path) -> list[Path]:
    """Return the files of our modules that any process of a plain two-step quickstart imports."""
    names = run_dir / "imports"
    (run_dir / "sitecustomize.py").write_text(_NOTED.format(packages=PACKAGES, file=str(names)))
    paths = os.pathsep.join((str(run_dir), str(ROOT)))
    subprocess.run(
        [
            *("env", f"PYTHONPATH={paths}", sys.executable, str(ROOT / "cli.py"), *WORDS),
            f"output.dir={run_dir / 'run'}",
        ],
        cwd=run_dir,
        check=True,
        capture_output=True,
    )
    return sorted({file for name in names.read_text().split() if (file := _file_of(name))})


def _file_of(name: str) -> Path | None:
    whole = ROOT / Path(*name.split("."))
    files = (whole / "__init__.py", whole.with_suffix(".py"))
    return next((file for file in files if file.exists()), None)


def num_statements(file: Path) -> int:
    """Count the statements of a file, without its documentation."""
    return sum(
        isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(_parsed(file))
    )


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _is_text(node: ast.AST) -> bool:
    is_value = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_value and isinstance(node.value.value, str)  # type: ignore[attr-defined]


class Walk:
    """Our files and functions that are called, each once, in the order of their first call."""

    def __init__(self) -> None:
        """Begin with none."""
        self.functions: dict[tuple[str, str], None] = {}

    @property
    def files(self) -> list[str]:
        """The files, relative to the root."""
        return list(dict.fromkeys(file for file, _ in self.functions))

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Note a call."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PLACES) and code.co_name[0] != "<":
            self.functions[code.co_filename[len(str(ROOT)) + 1 :], code.co_qualname] = None

    def begin(self) -> None:
        """Note the calls of this thread from here on, and of threads that begin."""
        threading.setprofile(self)
        sys.setprofile(self)

    def end(self) -> None:
        """Note no more."""
        sys.setprofile(None)
        threading.setprofile(None)


_PLACES = tuple(str(ROOT / package) for package in PACKAGES)


def walks(run_dir: Path) -> tuple[Walk, Walk]:
    """Return the walk from `app` to the first optimizer step, and that of a warm one after it."""
    from finetune import app
    from finetune.training.session import Session

    start, warm = Walk(), Walk()
    whole: Callable[..., Any] = Session.step
    walked = iter((start, warm))

    def step(self: Session, batch: Any) -> Any:
        walk = next(walked)
        walk.begin()
        record = whole(self, batch)
        walk.end()
        return record

    Session.step = step  # type: ignore[method-assign]
    start.begin()
    try:
        app.app([*WORDS, f"output.dir={run_dir}"])
    except SystemExit as end:
        if end.code:
            raise
    finally:
        start.end()
        Session.step = whole  # type: ignore[method-assign]
    return start, warm


def main() -> None:
    """Print the core, by folder, and both walks."""
    with tempfile.TemporaryDirectory() as folder:
        files = core(Path(folder))
        start, warm = walks(Path(folder) / "walked")
    num = sum(map(num_statements, files))
    lines = [f"core: {num:,} statements of {len(files)} modules", "to the first step:"]
    lines += [f"  {file}" for file in start.files]
    lines.append(f"a warm step: {len(warm.functions)} functions of {len(warm.files)} files:")
    lines += [f"  {file}" for file in warm.files]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
