"""A map of a machine, as a drawing: its memories from top to bottom, and the links between them."""

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel

from finetune.report.format import shown_gib
from offload.plan.machine.machine import Machine, Node, Rate
from offload.plan.plan import Plan


def host_map(machine: Machine, plan: Plan | None) -> RenderableType:
    """Draw the memories of a machine from the fastest to the slowest, each rate with its source.

    Args:
        machine: Its rates and capacities.
        plan: What is to be stored in the memories, if it is known.
    """
    is_cuda = machine.device == "cuda"
    on_device, in_host, on_disk = ("", "", "layers, with `offload.tier: disk`")
    if plan is not None:
        on_device, in_host, on_disk = _planned(plan)
    beside = "while the other direction is busy" if is_cuda else "while the CPU computes"
    locked = f"up to {shown_gib(machine.pinned_bytes)} of it page-locked"
    return Group(
        _memory(
            f"VRAM of {machine.name}" if is_cuda else f"slots, in the RAM of {machine.name}",
            f"{shown_gib(machine.vram_bytes)}, read and written at"
            f" {_shown(machine.memory_bytes_per_s)}",
            on_device,
        ),
        _link(
            ("GPU link" if is_cuda else "copies by a thread", ""),
            ("to the device", _shown(machine.h2d_bytes_per_s)),
            (beside, _shown(machine.h2d_duplex_bytes_per_s)),
            ("to the host", _shown(machine.d2h_bytes_per_s)),
        ),
        _memory(
            "RAM",
            f"{shown_gib(machine.ram_bytes)}, large new tensors at"
            f" {_shown(machine.host_memory_bytes_per_s)}",
            locked if is_cuda else "",
            *(_node(node) for node in machine.nodes),
            in_host,
        ),
        _link(("reads", _shown(machine.disk_bytes_per_s))),
        _memory("disk", on_disk),
    )


def _planned(plan: Plan) -> tuple[str, str, str]:
    """Return what a plan puts into device memory, host memory and on disk."""
    cargo = [cost.weight_bytes for cost in plan.costs.layers]
    slots = f"{plan.num_slots} slots of {shown_gib(max(cargo))}"
    layers = f"{shown_gib(sum(cargo))} of layers"
    is_on_disk = plan.request.is_on_disk
    on_disk = f"planned: {layers}" if is_on_disk else "nothing of this plan"
    return (
        f"planned: {shown_gib(plan.peak_bytes)}, {slots} in it",
        f"planned: {shown_gib(plan.host_bytes)}" + ("" if is_on_disk else f", {layers} in it"),
        on_disk,
    )


def _memory(title: str, *lines: str) -> Panel:
    """Draw a box; empty lines are left out."""
    text = "\n".join(line for line in lines if line)
    return Panel(text, title=title, title_align="left", box=box.SQUARE, expand=False)


def _link(*lines: tuple[str, str]) -> Padding:
    """Draw the link between two boxes."""
    width = max(len(name) for name, value in lines if value)
    rows = [f"|  {name:{width}}  {value}".rstrip() for name, value in lines]
    return Padding("\n".join(rows), (0, 0, 0, 4))


def _node(node: Node) -> str:
    near = ", near the device" if node.is_near else ""
    return (
        f"node {node.number}: {shown_gib(node.ram_bytes)}, {node.num_cpus} CPUs{near};"
        f" a thread copies {_shown(node.copy_bytes_per_s)}"
    )


def _shown(rate: Rate | None) -> str:
    if rate is None:
        return "not measured"
    return f"{rate.value / 1e9:,.1f} GB/s ({rate.source})"
