"""The software: what is installed, and whether torch's build supports these GPUs."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from offload.engine.host.nvml import Driver, Gpu
from offload.probe.doctor.finding import Finding, finding

PACKAGE = "sluice-finetune"
NEEDED = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "datasets", "numpy")
OPTIONAL = ("triton",)


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """What torch was built for.

    Attributes:
        version: Of torch.
        cuda: The CUDA version that it was built with; None for a build for CPUs.
        sees_cuda: Whether it finds a device.
        architectures: What its kernels were compiled for: sm_90, or compute_90 for any later one.
    """

    version: str
    cuda: str | None
    sees_cuda: bool
    architectures: tuple[str, ...]


def torch_build() -> TorchBuild | str:
    """Import torch, and return its build, or why it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:  # it is missing, or one of its libraries is
        return without_paths(f"{type(error).__name__}: {error}", home=Path.home())
    sees_cuda = torch.cuda.is_available()
    return TorchBuild(
        version=torch.__version__,
        cuda=torch.version.cuda,
        sees_cuda=sees_cuda,
        architectures=tuple(torch.cuda.get_arch_list()) if sees_cuda else (),
    )


def torch_finding(build: TorchBuild | str, driver: Driver | None) -> Finding:
    """Report whether torch can compute on this machine's GPUs.

    Args:
        build: From `torch_build`.
        driver: From `find_driver`; None where there is none.
    """
    name = "torch"
    if isinstance(build, str):
        return Finding(
            name=name,
            value=f"cannot be imported: {build}",
            status="error",
            hint="`pip install --force-reinstall torch`, as https://pytorch.org/get-started says",
        )
    made_for = "for CPUs" if build.cuda is None else f"for CUDA {build.cuda}"
    value = f"{build.version}, built {made_for}"
    gpus = driver.gpus if driver is not None else ()
    if driver is None or not gpus:
        return finding(name, value)
    if build.cuda is None:
        return finding(
            name,
            f"{value}, so the GPU is not used",
            warning="install a CUDA build: https://pytorch.org/get-started",
        )
    if not build.sees_cuda:
        newest = ".".join(map(str, driver.cuda))
        return finding(
            name,
            f"{value}, and sees no CUDA device; the driver runs CUDA up to {newest}",
            warning="update the driver, or install a torch that was built for its CUDA;"
            " `unset CUDA_VISIBLE_DEVICES` if that hides the card",
        )
    unfit = [gpu for gpu in gpus if not fits(gpu.capability, build.architectures)]
    if unfit:
        return Finding(
            name=name,
            value=f"{value}, without kernels for {unfit[0].name} ({_sm(unfit[0])}); it has"
            f" {', '.join(build.architectures)}",
            status="error",
            hint="install a torch that was built for this card: https://pytorch.org/get-started",
        )
    return finding(name, f"{value}, with kernels for {', '.join(sorted({*map(_sm, gpus)}))}")


def fits(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether a card runs kernels that were compiled for these architectures.

    sm_86 runs on 8.6 and 8.9, and not on 9.0; compute_86 is compiled for any card from 8.6 on when
    it is loaded.
    Source: CUDA C++ programming guide, binary and PTX compatibility.
    """
    for architecture in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if found is None:
            continue
        made_for = int(found[2]), int(found[3])
        if found[4] == "a":
            if capability == made_for:
                return True
        elif capability >= made_for and (found[1] == "compute" or capability[0] == made_for[0]):
            return True
    return False


def versions(version_of: Callable[[str], str | None], *, python: str, has_gpu: bool) -> Finding:
    """Report the versions of Python and the packages in use.

    Args:
        version_of: Of an installed package; None for one that is not.
        python: Of Python.
        has_gpu: Whether experts may be computed by Triton.
    """
    found = {name: version_of(name) for name in (PACKAGE, *NEEDED, *OPTIONAL)}
    value = f"python {python}, sluice {found.pop(PACKAGE) or '(a checkout)'}, {_listed(found)}"
    missing = [name for name in NEEDED if found[name] is None]
    if missing:
        return Finding(
            name="versions",
            value=value,
            status="error",
            hint=f"`pip install {' '.join(missing)}`",
        )
    lacks_triton = has_gpu and found["triton"] is None
    return finding("versions", value, warning="`pip install triton`" if lacks_triton else None)


def installed_version(package: str) -> str | None:
    """Return a package's version, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def without_paths(text: str, *, home: Path) -> str:
    """Return a message with only the last part of each path: folders may name a user."""
    text = text.replace(str(home), "~")
    return re.sub(r"(?:~|[\w.-]*)/(?:[^\s:'\"/]+/)*([^\s:'\"/]*)", r"\1", text)


def _listed(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())


def _sm(gpu: Gpu) -> str:
    return "sm_{}{}".format(*gpu.capability)
