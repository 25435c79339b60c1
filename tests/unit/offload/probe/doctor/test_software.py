"""What the doctor says of torch's build and of what is installed."""

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload.engine.host.nvml import Driver, Gpu
from offload.probe.doctor import (
    NEEDED,
    TorchBuild,
    fits,
    torch_build,
    torch_finding,
    versions,
    without_paths,
)
from offload.probe.machine import installed_version

BUILD = TorchBuild(
    version="2.13.0+cu130",
    cuda="13.0",
    sees_cuda=True,
    architectures=("sm_75", "sm_86", "sm_90", "compute_120"),
)


def a_driver(capability: tuple[int, int]) -> Driver:
    gpu = Gpu(
        name="RTX 4090",
        capability=capability,
        memory_bytes=24 * 2**30,
        used_bytes=0,
        num_processes=0,
        link=None,
    )
    return Driver(version="570.86.10", cuda=(12, 8), gpus=(gpu,))


@pytest.mark.parametrize(
    ("capability", "architectures", "is_fit"),
    [
        ((8, 6), ("sm_86",), True),
        ((8, 9), ("sm_86",), True),  # a later card of the same major version
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_86",), False),
        ((9, 0), ("compute_86",), True),  # compiled when it is loaded
        ((7, 5), ("compute_86",), False),
        ((12, 0), ("sm_90", "sm_120"), True),
        ((12, 0), ("sm_90a",), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100f",), True),
        ((8, 6), ("gfx1100", ""), False),
        ((8, 6), (), False),
    ],
)
def test_kernels_run_on_the_cards_that_cuda_says(capability, architectures, is_fit) -> None:
    assert fits(capability, architectures) is is_fit


def test_a_build_with_kernels_for_the_card_is_well() -> None:
    found = torch_finding(BUILD, a_driver((8, 9)))
    assert found.status == "ok"
    assert found.value == "2.13.0+cu130, built for CUDA 13.0, with kernels for sm_89"


def test_a_build_without_kernels_for_the_card_cannot_train_on_it() -> None:
    found = torch_finding(BUILD, a_driver((6, 1)))
    assert found.status == "error"
    assert "without kernels for RTX 4090 (sm_61); it has sm_75, sm_86" in found.value


def test_a_build_for_cpus_beside_a_card_is_a_warning() -> None:
    build = replace(BUILD, version="2.13.0+cpu", cuda=None, sees_cuda=False, architectures=())
    found = torch_finding(build, a_driver((8, 9)))
    assert found.status == "warning"
    assert found.value == "2.13.0+cpu, built for CPUs, so the GPU is not used"
    assert torch_finding(build, None).status == "ok"


def test_a_driver_that_is_too_old_for_the_build_is_a_warning() -> None:
    found = torch_finding(replace(BUILD, sees_cuda=False), a_driver((8, 9)))
    assert found.status == "warning"
    assert found.value.endswith("sees no CUDA device; the driver runs CUDA up to 12.8")
    assert "CUDA_VISIBLE_DEVICES" in found.hint


def test_torch_that_cannot_be_imported_makes_training_impossible() -> None:
    found = torch_finding("ImportError: libcudart.so.13: cannot open shared object file", None)
    assert found.status == "error"
    assert "libcudart.so.13" in found.value
    assert "pip install" in found.hint


def test_the_build_is_that_of_this_torch() -> None:
    build = torch_build()
    assert isinstance(build, TorchBuild)
    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda)


def test_versions_are_those_that_are_installed() -> None:
    found = versions(installed_version, python=platform.python_version(), has_gpu=False)
    assert found.status == "ok"
    assert f"python {platform.python_version()}, sluice " in found.value
    assert f"torch {torch.__version__}" in found.value


def test_a_missing_package_makes_training_impossible_and_missing_triton_does_not() -> None:
    def version_of(package: str) -> str | None:
        return None if package in ("peft", "triton", "sluice-finetune") else "1.0"

    found = versions(version_of, python="3.12.1", has_gpu=True)
    assert (found.status, found.hint) == ("error", "`pip install peft`")
    assert "sluice (a checkout)" in found.value
    assert "peft missing" in found.value
    known = dict.fromkeys(NEEDED, "1.0")
    found = versions(known.get, python="3.12.1", has_gpu=True)
    assert (found.status, found.hint) == ("warning", "`pip install triton`")
    assert versions(known.get, python="3.12.1", has_gpu=False).status == "ok"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("libc10.so: cannot open", "libc10.so: cannot open"),
        ("/home/al bert/env/torch/lib/a.so: undefined", "a.so: undefined"),
        (
            "no 'x' from 'torch' (/opt/albert/torch/__init__.py)",
            "no 'x' from 'torch' (__init__.py)",
        ),
        ("~/env/b.so and /home/al bert", "b.so and ~"),
    ],
)
def test_messages_keep_no_folders(text: str, expected: str) -> None:
    assert without_paths(text, home=Path("/home/al bert")) == expected
