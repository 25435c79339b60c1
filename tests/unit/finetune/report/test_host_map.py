from dataclasses import replace

from rich.console import Console

from finetune.planning.request import full_request
from finetune.planning.subject import model_subject
from finetune.report.choice import host_map
from offload.plan.machine.machine import GIB, Machine, Node, Rate, named_machine
from offload.plan.plan import Plan, plan

CARD = named_machine("rtx5090", ram_bytes=96 * GIB)


def drawn(machine: Machine, made: Plan | None = None, *, width: int = 100) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(host_map(machine, made))
    return capture.get().splitlines()


def planned(*overrides: str) -> Plan:
    asked = model_subject("qwen3-1.7b", ["train.tokens_per_step=4096", *overrides])
    return plan(asked.facts, CARD, full_request(asked.recipe, asked.facts, num_ranks=1))


def test_each_memory_and_link_is_drawn_with_its_rate_and_where_that_is_from() -> None:
    text = "\n".join(drawn(CARD))
    for part in (
        "VRAM of rtx5090",
        "30.53 GiB, read and written at 985.6 GB/s (datasheet x 0.55)",
        "to the device                      56.0 GB/s (measured by others)",
        "while the other direction is busy  51.0 GB/s (assumed: 0.91 x h2d)",
        "96.00 GiB, large new tensors at 60.0 GB/s (assumed)",
        "up to 96.00 GiB of it page-locked",
    ):
        assert part in text
    assert "planned" not in text
    assert "|  reads  6.0 GB/s (assumed: PCIe 4.0 NVMe)" in text


def test_what_was_measured_of_nodes_and_disk_is_drawn() -> None:
    rate = Rate(value=8.3e9, source="measured")
    near, far = (
        Node(number=i, num_cpus=8, ram_bytes=48 * GIB, is_near=i == 0, copy_bytes_per_s=rate)
        for i in range(2)
    )
    text = "\n".join(drawn(replace(CARD, nodes=(near, far), disk_bytes_per_s=rate)))
    assert "node 0: 48.00 GiB, 8 CPUs, near the device; a thread copies 8.3 GB/s (meas" in text
    assert "node 1: 48.00 GiB, 8 CPUs; a thread copies 8.3 GB/s (measured)" in text
    assert "|  reads  8.3 GB/s (measured)" in text


def test_the_map_goes_from_the_device_down_to_the_host_in_closed_boxes() -> None:
    lines = drawn(CARD)
    order = [
        next(i for i, line in enumerate(lines) if word in line)
        for word in ("VRAM", "| ", "RAM \u2500")
    ]
    assert order == sorted(order)
    tops = [line for line in lines if line.startswith("\u250c")]
    bottoms = [line for line in lines if line.startswith("\u2514")]
    assert len(tops) == len(bottoms) == 3
    assert all(line.endswith("\u2510") for line in tops)


def test_a_plan_s_map_tells_what_lies_where() -> None:
    made = planned("offload.num_slots=3")
    text = "\n".join(drawn(CARD, made))
    assert "3 slots of 96.0 MiB in it" in text
    assert f"planned: {made.peak_bytes / GIB:.2f} GiB" in text
    assert "2.63 GiB of layers in it" in text
    assert "nothing of this plan" in text
    stored = replace(made, request=replace(made.request, is_on_disk=True))
    on_disk = "\n".join(drawn(CARD, stored))
    assert "planned: 2.63 GiB of layers" in on_disk
    assert "of layers in it" not in on_disk


def test_a_cpu_copies_within_its_own_memory() -> None:
    cpu = replace(CARD, name="a CPU", device="cpu")
    text = "\n".join(drawn(cpu))
    assert "slots, in the RAM of a CPU" in text
    assert "while the CPU computes" in text
    assert "page-locked" not in text
    assert "VRAM" not in text


def test_a_narrow_terminal_wraps_the_map_and_loses_nothing() -> None:
    words = " ".join(drawn(CARD, width=60))
    assert "(assumed: 0.91 x" in words
    assert max(map(len, drawn(CARD, width=60))) <= 60
