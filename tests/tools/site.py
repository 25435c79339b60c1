"""Writes the Plan room as a static page that runs the planner in the browser.

    python -m tests.tools.site            write it to build/site
    python -m tests.tools.site FOLDER     write it there

The page is Python itself, compiled to WebAssembly (Pyodide, from npm, pinned here), the wheel of
pydantic's core for it (from PyPI, of the version that is installed), the pure packages that the
planner imports as they are installed, and the planner's own sources. Serve the folder with any web
server; nothing is loaded from elsewhere.
"""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from finetune.recipe.load import SHIPPED_FACTS, shipped_shapes
from finetune.recipe.recipe import recipes_dir
from finetune.studio.runs import ASSETS, asset, plan_page

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
PYODIDE = "314.0.7"
PYODIDE_FILES = (
    *("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm"),
    *("python_stdlib.zip", "pyodide-lock.json"),
)
PYTHON, PLATFORM = "3.14", "pyemscripten_2026_0_wasm32"  # those of this Pyodide
PURE = ("pydantic", "annotated-types", "typing-extensions", "typing-inspection", "PyYAML", "rich")
CORE = "pydantic-core"
# Asks a question of each kind, and one of each that is refused, and lists the files it imported.
_TRACE = """
import json, sys
from finetune.studio.browser import answered
setup = dict(model="qwen3-30b-a3b", card="rtx4090", num_cards=1, method="lora", rank=8,
             codec="auto", objective="sft", seq_len=2048, tokens_per_step=4096, micro_batch_size=1)
work = dict(data_tokens=1, price_per_hour=0, power_watts=0, price_per_kwh=0)
for change in ({}, {"method": "dora"}, {"method": "all"}, {"objective": "dpo"}, {"card": "x"},
               {"model": "x"}, {"objective": "dpo", "method": "all"},
               {"model": "qwen3-vl-8b", "num_images": 1}):
    for kind in ("plan", "step", "rate", "ways"):
        answered(kind, json.dumps({"setup": setup | change, "work": work}))
files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
print(json.dumps([file for file in files if file]))
"""


def sources() -> list[Path]:
    """Return the project's files that the planner needs, from the root."""
    listed = subprocess.run(
        [sys.executable, "-c", _TRACE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {Path(file) for file in json.loads(listed.stdout)}
    own = {file for file in found if file.is_relative_to(ROOT)} | set(shipped_shapes().values())
    own.add(recipes_dir() / SHIPPED_FACTS)
    for whole in ("offload/plan", "offload/codecs", "offload/optimizers", "finetune/objectives"):
        own |= set((ROOT / whole).rglob("*.py"))  # any of them may be asked for
    return sorted(file.relative_to(ROOT) for file in own)


def write_site(folder: Path) -> None:
    """Write the page and all that it runs, in place of what is in the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    write_page(folder)
    for part in ("pyodide", "python"):
        (folder / part).mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        _vendor_python(Path(scratch), folder)
    write_archive(folder / "python" / "sluice.zip")


def write_page(folder: Path) -> None:
    """Write the page and its files into a new folder, without the planner."""
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text(plan_page(is_static=True), encoding="utf-8")
    for name in ASSETS:
        if name != "runs.js":
            (folder / "assets" / name).write_text(asset(name), encoding="utf-8")


def write_archive(target: Path) -> None:
    """Write the sources that the page runs: all but Python and the package that is compiled."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sources():
            archive.write(ROOT / file, file)
        for package in PURE:
            _add_package(archive, package)


def _vendor_python(scratch: Path, folder: Path) -> None:
    """Fetch Python for the browser, and the one package that is compiled."""
    _run("npm", "pack", "--silent", f"pyodide@{PYODIDE}", cwd=scratch)
    with tarfile.open(scratch / f"pyodide-{PYODIDE}.tgz") as archive:
        archive.extractall(scratch, filter="data")
    for name in PYODIDE_FILES:
        shutil.copy(scratch / "package" / name, folder / "pyodide")
    version = importlib.metadata.version(CORE)
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", "--python-version", PYTHON, "--platform", PLATFORM),
        *("--dest", str(folder / "python"), f"{CORE}=={version}"),
        cwd=scratch,
    )
    wheels = [file.name for file in (folder / "python").glob("*.whl")]
    (folder / "python" / "wheels.json").write_text(json.dumps(wheels))


def _add_package(archive: zipfile.ZipFile, package: str) -> None:
    """Add the Python files of an installed package."""
    for file in importlib.metadata.files(package) or ():
        if file.suffix == ".py" and ".." not in file.parts:
            archive.write(file.locate(), str(file))


def _run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if sys.argv[1:] else SITE
    write_site(target)
    files = [file for file in target.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    sys.stdout.write(f"{target}: {len(files)} files, {size / 1e6:.1f} MB\n")
