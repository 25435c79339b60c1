"""Gathers what a card's machine lacks into one archive, small enough to be carried there.

    python -m tests.bench.gpu.wheels            runs/wheels/site.tar.xz, and what it weighs

and there, from the root of the checkout:

    mkdir -p runs/site && tar -xf runs/wheels/site.tar.xz -C runs/site
    export PYTHONPATH=$PWD/runs/site

Wheels are of Python 3.12 on Linux, x86-64, as pip finds them by name. Of bitsandbytes only the
library for CUDA 13.0 is kept, which torch 2.11.0+cu130 loads; of pyarrow, which TRL cannot do
without, no Flight, no cloud's file system and no test, and its libraries without their symbols.
Compressed together they are a third of the wheels. The folder is ignored by git.
"""

import argparse
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.record import ROOT

FOLDER, ARCHIVE = ROOT / "runs/wheels", "site.tar.xz"
MOST_BYTES = 32_000_000
"""What is left of the 64 MiB that may be carried, with the tree's 20 and some room."""
FILTERS = ({"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 7})
PYTHON, PLATFORMS = "3.12", ("2_28", "2_24", "2_17")


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package to be carried.

    Attributes:
        name: As pip knows it, with a limit where the project has one.
        why: What needs it.
        drops: Patterns of files that are left out.
    """

    name: str
    why: str
    drops: tuple[str, ...] = ()


PACKAGES = (
    Package(name="transformers>=5.23", why="the project", drops=("transformers/cli/*",)),
    Package(name="peft>=0.21", why="the project"),
    Package(name="pydantic>=2.11", why="the project"),
    Package(name="pydantic-core", why="pydantic"),
    Package(name="annotated-types", why="pydantic"),
    Package(name="typing-inspection", why="pydantic"),
    Package(name="typing-extensions>=4.16", why="pydantic"),
    Package(
        name="bitsandbytes>=0.50",
        why="the project",
        drops=(
            "bitsandbytes/libbitsandbytes_rocm*",
            "bitsandbytes/libbitsandbytes_xpu*",
            "bitsandbytes/libbitsandbytes_cuda1[12]*",
            "bitsandbytes/libbitsandbytes_cuda13[1-9]*",
        ),
    ),
    Package(name="liger-kernel", why="peers"),
    Package(name="trl>=1.16", why="peers"),
    Package(name="datasets>=4", why="TRL"),
    Package(name="dill<0.4.2", why="datasets"),
    Package(name="multiprocess<0.70.20", why="datasets"),
    Package(
        name="pyarrow",
        why="TRL, datasets",
        drops=(
            "pyarrow/include/*",
            "pyarrow/src/*",
            "pyarrow/tests/*",
            "pyarrow/libarrow_flight*",
            "pyarrow/libarrow_s3*",
            "pyarrow/libarrow_python_flight*",
            "pyarrow/libarrow_python*.so",
            "pyarrow/libarrow_python*.so.*.*",
            "pyarrow/_flight*",
            "pyarrow/_s3fs*",
            "pyarrow/_azurefs*",
            "pyarrow/_gcsfs*",
            "pyarrow/_hdfs*",
            "pyarrow/_orc*",
            "pyarrow/_pyarrow_cpp_tests*",
            "pyarrow/*.pyx",
            "pyarrow/*.pxd",
            "pyarrow/*.pxi",
        ),
    ),
)


def main() -> int:
    """Gather all, print the sizes, and say so if they are too many bytes."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        site.mkdir()
        for package in PACKAGES:
            wheel = fetched(package, Path(scratch))
            num_bytes = unpacked(wheel, package.drops, site)
            say(
                f"{wheel.name}: {mb(wheel.stat().st_size)}, {mb(num_bytes)} unpacked; {package.why}"
            )
        archive = FOLDER / ARCHIVE
        pack(site, archive)
    size = archive.stat().st_size
    say(f"{archive}: {mb(size)}")
    if size > MOST_BYTES:
        sys.stderr.write(f"error: that is more than {mb(MOST_BYTES)}, which may be carried\n")
    return int(size > MOST_BYTES)


def fetched(package: Package, folder: Path) -> Path:
    """Download a package's wheel, without what it needs."""
    target = Path(tempfile.mkdtemp(dir=folder))
    platforms = [f"--platform=manylinux_{version}_x86_64" for version in PLATFORMS]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"),
            *(*platforms, "--platform=manylinux2014_x86_64", f"--dest={target}", package.name),
        ],
        check=True,
    )
    (wheel,) = target.glob("*.whl")
    return wheel


def unpacked(wheel: Path, drops: Sequence[str], site: Path) -> int:
    """Unpack what is kept of a wheel; return its bytes.

    Raises:
        ValueError: A pattern drops nothing: the package has changed, and its size with it.
    """
    total, left = 0, set(drops)
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            matching = {drop for drop in drops if Path(info.filename).match(drop)}
            inside = {d for d in drops if d.endswith("/*") and info.filename.startswith(d[:-1])}
            left -= matching | inside
            if matching | inside or info.is_dir():
                continue
            file = Path(archive.extract(info, site))
            if ".so" in file.name and shutil.which("strip"):
                subprocess.run(["strip", "--strip-unneeded", str(file)], check=False)
            total += file.stat().st_size
    if left:
        raise ValueError(f"{wheel.name} has nothing like {', '.join(sorted(left))}")
    return total


def pack(site: Path, archive: Path) -> None:
    """Compress a folder; the same files give the same bytes."""
    part = archive.with_suffix(".part")  # what is cut off is not taken for all of it
    with (
        lzma.open(part, "wb", filters=FILTERS) as out,
        tarfile.open(fileobj=out, mode="w|") as packed,
    ):
        for path in sorted(site.rglob("*")):
            if path.is_file():
                info = packed.gettarinfo(str(path), str(path.relative_to(site)))
                info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
                with path.open("rb") as file:
                    packed.addfile(info, file)
    part.replace(archive)


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def mb(num_bytes: int) -> str:
    """Return megabytes in words."""
    return f"{num_bytes / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
