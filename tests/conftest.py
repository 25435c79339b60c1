"""What holds for all tests: their environment, and whether one that needs a GPU may be skipped."""

import contextlib
import importlib
import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

pytest_plugins = ["pytester"]


# Exact tests rely on cuBLAS's workspace, which must be set before CUDA starts. The models of tests
# are tiny: on busy cores the threads of torch's runtime and of bitsandbytes' wait for each other
# longer than they work. Without a GPU Triton's programs are interpreted, which is decided as it is
# imported: here, for the conftest files of folders import it before pytest is configured.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where a GPU is required, let no test that needs one be skipped, whatever the reason."""
    report = yield
    is_required = os.environ.get("REQUIRE_GPU") == "1" and item.get_closest_marker("gpu")
    if is_required and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped although REQUIRE_GPU=1: {report.longrepr}"
    return report


@pytest.fixture
def llama_cpp_clone() -> Path:
    """Return a clone of llama.cpp that LLAMA_CPP names, with its converter's packages in `.venv`.

    Its sources are in the source package of llama-cpp-python too, under vendor/llama.cpp.
    """
    folder = os.environ.get("LLAMA_CPP")
    if folder is None:
        pytest.skip("LLAMA_CPP names no clone of llama.cpp")
    return Path(folder)
