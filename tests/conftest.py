"""What holds for all tests: their environment, their processes, and which skips are expected."""

import gc
import math
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from zlib import crc32

import hypothesis
import pytest
import torch

from offload.probe import load

pytest_plugins = ["pytester"]

PARTED = ("slow", "bench")  # tests of which CI runs another part with each commit
NUM_THOROUGH_PARTS = 4  # and of thorough ones it runs one of so many
EXPECTED_SKIPS = (
    "torch sees no CUDA device",
    "there is a CUDA device",  # what holds without one
    "LLAMA_CPP names no clone",
    "needs root",
    "lm_eval is not installed",
    "no file system in memory",
    "chromium is not installed",
)

# Exact tests rely on cuBLAS's workspace, which must be set before CUDA starts. The models of tests
# are tiny: on busy cores the threads of torch's runtime and of bitsandbytes' wait for each other
# longer than they work. Without a GPU Triton's programs are interpreted, which is decided when
# Triton is first imported: so this is set before any test module is.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The program sets this before it imports transformers; here tests import it first.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL counts its trainers
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Checkpoints and reports are written through to the disk, which tests would wait for. So files of
# tests are in memory where there is room, but for those of tests that are marked `disk`.
MEMORY, ROOM_BYTES = Path("/dev/shm"), 4 * 2**30
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# No property fails by how long an example takes: machines are busy.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
load.MAX_OTHERS_FRAC = math.inf  # nor is what tests print another thing on a busy machine
os.environ.pop("COLUMNS", None)  # else tables are as wide as the terminal, or as a worker says


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run tests of one file in this process, where a debugger can stop them, and those of a GPU."""
    files = {Path(argument.partition("::")[0]) for argument in config.args}
    is_one_file = len(files) == 1 and files.pop().is_file()
    return 0 if is_one_file or config.option.markexpr == "gpu" else None


def pytest_collectstart() -> None:
    gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "of slow tests run the K-th of N parts, counted from 1, and a part of thorough ones"
    parser.addoption("--part", metavar="K/N", type=_part, help=said)


def _part(text: str) -> tuple[int, int]:
    part, num_parts = map(int, text.split("/"))
    if not 1 <= part <= num_parts:
        raise ValueError(text)
    return part, num_parts


def _is_in_part(item: pytest.Item, part: int, num_parts: int) -> bool:
    if not any(map(item.get_closest_marker, PARTED)):
        if item.get_closest_marker("thorough") is None:
            return True
        num_parts = min(num_parts, NUM_THOROUGH_PARTS)
    return crc32(item.nodeid.encode()) % num_parts == part % num_parts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with long tests; a worker that has none left takes some of the others'."""
    if config.option.part is not None:
        part, num_parts = config.option.part
        kept = [item for item in items if _is_in_part(item, part - 1, num_parts)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of full collections: a sixth of the default run.

    It stays so: what a test trains would unfreeze it. Nothing asks for the count of what is frozen,
    which walks all of it: 20 ms per test.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    for name in ("freeze", "unfreeze"):
        setattr(gc, name, lambda: None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that needs a GPU and is skipped where one is required."""
    report = yield
    if os.environ.get("REQUIRE_GPU") == "1" and item.get_closest_marker("gpu"):
        _fail_if_skipped(report, "REQUIRE_GPU=1")
    elif os.environ.get("CI") == "true" and not _is_expected(report):
        _fail_if_skipped(report, "CI=true")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module that skips itself in CI, where all that tests need is there."""
    report = yield
    if os.environ.get("CI") == "true" and not _is_expected(report):
        _fail_if_skipped(report, "CI=true")
    return report


def _is_expected(report: pytest.TestReport | pytest.CollectReport) -> bool:
    return any(reason in str(report.longrepr) for reason in EXPECTED_SKIPS)


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport, why: str) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped although {why}: {report.longrepr}"


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return pytest's own folder, or for a test that is marked `disk` one on a disk."""
    if request.node.get_closest_marker("disk") is None:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def llama_cpp_clone() -> Path:
    """Return a clone of llama.cpp that LLAMA_CPP names, with its converter's packages in `.venv`.

    Its sources are in the source package of llama-cpp-python too, under vendor/llama.cpp.
    """
    folder = os.environ.get("LLAMA_CPP")
    if folder is None:
        pytest.skip("LLAMA_CPP names no clone of llama.cpp")
    return Path(folder)


@pytest.fixture(scope="session")
def machine_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the rates of this machine's CPU, measured once."""
    from offload.probe.machine import probe

    file = tmp_path_factory.mktemp("machine") / "here.json"
    file.write_text(probe(device="cpu", seconds=0.5, dtype="float32").to_json())
    return file
