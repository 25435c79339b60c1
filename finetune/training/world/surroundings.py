"""What must be alike on all ranks of a run: it changes the last bits of what they compute."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = (
    *("sluice-finetune", "torch", "transformers", "peft", "accelerate", "bitsandbytes"),
    *("tokenizers", "triton"),
)


def surroundings() -> dict[str, str]:
    """Return versions of packages that change numerics; on a CPU also what its sums depend on."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if torch.cuda.is_available():
        found["tf32"] = str(torch.backends.cuda.matmul.allow_tf32)
    else:
        found["torch's threads"] = str(torch.get_num_threads())
        found["torch's CPU code"] = torch.backends.cpu.get_cpu_capability()
    return found
