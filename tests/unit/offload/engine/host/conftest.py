"""A CUDA runtime made for the tests: a shared library whose device numbers stand for faults."""

import shutil
import subprocess
from pathlib import Path

import pytest

MOST_BYTES = 1 << 20
SPENT_DEVICE, KILLING_DEVICE, HANGING_DEVICE = 7, 8, 9

_SOURCE = f"""
#include <signal.h>
#include <stddef.h>
#include <unistd.h>
static int device, last_error;
static int failed(int status) {{ last_error = status; return status; }}
int cudaSetDevice(int index) {{ device = index; return 0; }}
int cudaFree(void *address) {{ return device == {SPENT_DEVICE} ? failed(46) : 0; }}
int cudaGetLastError(void) {{ int status = last_error; last_error = 0; return status; }}
const char *cudaGetErrorString(int status) {{ return status == 2 ? "out of memory" : "other"; }}
int cudaHostRegister(char *address, size_t size, unsigned flags) {{
    if (device == {KILLING_DEVICE}) raise(SIGKILL);
    if (device == {HANGING_DEVICE}) pause();
    if (size > {MOST_BYTES}) return failed(2);
    address[0]++;
    return 0;
}}
int cudaHostUnregister(char *address) {{ return address[0]-- ? 0 : failed(713); }}
"""


@pytest.fixture(scope="session")
def fake_runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a runtime that locks up to MOST_BYTES and counts a range's locks in its first byte."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "cudart.c").write_text(_SOURCE)
    library = folder / "libcudart.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, folder / "cudart.c"], check=True, timeout=60
    )
    return library
