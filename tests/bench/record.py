"""What benches write beside their numbers: which code, machine and libraries; and quantiles."""

import hashlib
import platform
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests/bench/results"
CODE = ("cli.py", "finetune", "offload", "tests", "recipes")
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "liger-kernel",
)
UNKNOWN = "unknown"


def git(*args: str) -> str:
    """Return what git says; `unknown` where this is no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return done.stdout.strip()


def median(row: Mapping[str, Any], key: str) -> float:
    """Return the median of one of a row's quantities."""
    quantity = row[key]
    assert isinstance(quantity, Mapping)
    return float(quantity["p50"])


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the 20th, 50th and 80th percentile."""
    if len(values) < 2:
        return dict.fromkeys(("p20", "p50", "p80"), values[0])
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"p20": cuts[1], "p50": statistics.median(values), "p80": cuts[7]}


def versions() -> dict[str, str | None]:
    """Return the versions of what computes; None is not installed.

    Of torch it is the build, which a wheel's own version need not name: 2.11.0+cu130 computes on
    a card and 2.11.0+cpu does not.
    """
    import torch

    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found | {"torch": str(torch.__version__)}


def code_digest(root: Path = ROOT) -> str:
    """Return a name of the code that is here, the same with git and without."""
    digest = hashlib.sha256()
    for path in sorted(_sources(root)):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for name in CODE:
        path = root / name
        yield from [path] if path.is_file() else path.rglob("*.py")
        yield from path.rglob("*.yaml")


def code() -> dict[str, Any]:
    """Return which code this is. What is no checkout counts as changed; its digest still tells."""
    return {
        "git_sha": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
        "code_sha256": code_digest(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_name() -> str:
    """Return what the processor calls itself, and how many cores there are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} x {len(names)}"


def gpu() -> dict[str, Any]:
    """Return the first card, its driver and its link; None is what nobody tells."""
    keys = ("name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
    names = ("gpu", "driver", "vram_mib", "pcie_gen", "pcie_width")
    found: list[str] = []
    if shutil.which("nvidia-smi"):
        query = [f"--query-gpu={','.join(keys)}", "--format=csv,noheader,nounits"]
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, check=False)
        found = done.stdout.splitlines()[0].split(", ") if done.stdout.strip() else []
    if len(found) == len(names):
        return dict(zip(names, found, strict=True))
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return dict.fromkeys(names) | {"gpu": name}


def host_bytes() -> int:
    """Return the memory of the host."""
    total = Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]
    return int(total) * 1024
