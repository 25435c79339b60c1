"""The GPUs: the driver, each card's memory, who else uses it, and its link to the host."""

from collections.abc import Sequence
from pathlib import Path

from offload.engine.host.nvml import Driver, Gpu, Link
from offload.probe.doctor.finding import Finding, finding
from offload.probe.doctor.system import shown

NVIDIA = "0x10de"  # the vendor's number on PCI
DISPLAY = ("0x0300", "0x0302")  # PCI classes of cards with and without a monitor's plug
# GB/s of one lane in one direction, by generation.
LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
MAX_USED_FRAC = 0.25

_ON_CPU = "training runs on the CPU, at a small part of a GPU's rate"
_PREDICTED = "`sluice plan RECIPE --machine rtx4090` predicts for a card without having it"


def driver_finding(driver: Driver | None, *, root: Path) -> Finding:
    """Report the driver, or the consequence of having none.

    Args:
        driver: From `find_driver`.
        root: Where /sys is found.
    """
    if driver is None:
        if has_nvidia_card(root):
            return finding(
                "GPU",
                f"no CUDA device: an NVIDIA card is there, and no driver answers, so {_ON_CPU}",
                warning="install NVIDIA's driver and restart; in a container `docker run --gpus"
                " all`",
            )
        return finding(
            "GPU",
            f"no CUDA device: there is no NVIDIA driver here, so {_ON_CPU}",
            warning=f"with an NVIDIA card, install its driver; {_PREDICTED}",
        )
    value = f"driver {driver.version}, for CUDA up to {'.'.join(map(str, driver.cuda))}"
    if not driver.gpus:
        return finding(
            "GPU",
            f"no CUDA device: {value}, with no card, so {_ON_CPU}",
            warning="look at `nvidia-smi`; in a container `docker run --gpus all`",
        )
    return finding("GPU", value)


def has_nvidia_card(root: Path) -> bool:
    """Return whether an NVIDIA card is on the PCI bus."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:  # hidden from a container
            continue
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            return True
    return False


def card_findings(gpus: Sequence[Gpu]) -> list[Finding]:
    """Report each card's memory, and who else uses it."""
    return [_card(gpu, number) for number, gpu in enumerate(gpus)]


def link_findings(gpus: Sequence[Gpu], *, are_busy: bool) -> list[Finding]:
    """Report each card's link against what card and slot can.

    Args:
        gpus: As they were read.
        are_busy: Whether they were read during copies: an idle card slows its link.
    """
    return [
        _link(gpu.link, number, is_busy=are_busy)
        for number, gpu in enumerate(gpus)
        if gpu.link is not None
    ]


def _card(gpu: Gpu, number: int) -> Finding:
    value = (
        f"{gpu.name}, sm_{gpu.capability[0]}{gpu.capability[1]},"
        f" {shown(gpu.memory_bytes - gpu.used_bytes)} free of {shown(gpu.memory_bytes)}"
    )
    if gpu.num_processes:
        value += f", {gpu.num_processes} other processes compute on it"
    is_shared = bool(gpu.num_processes) or gpu.used_bytes > MAX_USED_FRAC * gpu.memory_bytes
    fix = "`nvidia-smi` names what uses the card; end it, for a plan counts on what is free"
    return finding(f"GPU {number}", value, warning=fix if is_shared else None)


def _link(link: Link, number: int, *, is_busy: bool) -> Finding:
    name = f"GPU {number} link"
    best = f"{link.max_generation}.0 x{link.max_width}"
    value = f"PCIe {link.generation}.0 x{link.width}"
    is_narrow, is_slow = link.width < link.max_width, link.generation < link.max_generation
    if not is_narrow and not is_slow:
        return finding(name, f"{value}, all that card and slot can{_rate(link)}")
    if not is_narrow and not is_busy:
        return finding(
            name, f"{value} while idle, of {best}: a card raises it once something is copied"
        )
    lanes = (
        "move the card to the slot next to the processor, or whatever shares its lanes (an M.2"
        " drive, a second card) elsewhere; a riser must be made for the generation"
    )
    bios = (
        "set the slot's PCIe generation to Auto in the BIOS, reseat the card, try without a riser"
    )
    return finding(
        name,
        f"{value} of {best}{_rate(link)}: copies take longer in proportion",
        warning=lanes if is_narrow else bios,
    )


def _rate(link: Link) -> str:
    """Return a link's rate in words; empty for an unknown generation."""
    gb_per_s = LANE_GB_PER_S.get(link.generation)
    return "" if gb_per_s is None else f", at most {gb_per_s * link.width:.1f} GB/s each way"
