"""Four clusters on paper, and which way of sharing a step the plan takes on each."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from finetune.planning.parallel import Way, Ways, compare_ways
from finetune.planning.subject import subject_of
from finetune.report.format import shown_gib, shown_time
from offload.plan.machine.machine import GIB, named_machine, with_interconnect
from offload.plan.schedule.op import OVER_NETWORK

HEAD = ("cluster", "model", "stream", "fsdp2", "`auto`")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """GPUs of one machine, and what is trained on them.

    Attributes:
        name: In words.
        card: Each of them.
        num: How many.
        interconnect: Between them, as `--interconnect` names it.
        model: A shipped shape.
        what: What is trained, in words.
        overrides: Settings for it.
        ram_gib: Installed in the machine; None for what is assumed with the card.
    """

    name: str
    card: str
    num: int
    interconnect: str
    model: str
    what: str = "LoRA"
    overrides: Sequence[str] = ()
    ram_gib: int | None = None


CLUSTERS = (
    Cluster(
        name="8 x H100, NVLink 360 GB/s",
        card="h100",
        num=8,
        interconnect="nvlink",
        model="llama-3.1-70b",
    ),
    Cluster(
        name="8 x H100, NVLink 360 GB/s",
        card="h100",
        num=8,
        interconnect="nvlink",
        model="qwen3-8b",
        what="all weights",
        overrides=("train.what=all",),
    ),
    Cluster(
        name="2 x RTX 3090, PCIe 4.0",
        card="rtx3090",
        num=2,
        interconnect="pcie",
        model="qwen3-8b",
    ),
    Cluster(
        name="4 x RTX 4090, PCIe 4.0, 128 GiB of RAM",
        card="rtx4090",
        num=4,
        interconnect="pcie",
        model="qwen3-32b",
        ram_gib=128,
    ),
)


@cache
def ways_of(cluster: Cluster) -> Ways:
    """Plan both ways on a cluster, in steps of 16,384 tokens."""
    subject = subject_of(cluster.model, cluster.overrides)
    ram_bytes = None if cluster.ram_gib is None else cluster.ram_gib * GIB
    card = named_machine(cluster.card, ram_bytes=ram_bytes)
    machine = with_interconnect(card, cluster.interconnect, world_size=cluster.num)
    return compare_ways(subject.recipe, subject.facts, machine, num_ranks=cluster.num)


def rows() -> list[list[str]]:
    """Return a row for each cluster."""
    found = [(one, ways_of(one)) for one in CLUSTERS]
    return [
        [
            one.name,
            f"{one.model}, {one.what}",
            shown(ways.stream),
            shown(ways.sharded),
            ways.faster.name,
        ]
        for one, ways in found
    ]


def shown(way: Way) -> str:
    """Return a way's time, what it waits for and its memory, or why there is none."""
    if way.plan is None:
        return f"refused: {way.why_not.partition(';')[0]}"
    timeline = way.plan.predict()
    network_s = timeline.exposed_s(*OVER_NETWORK)
    waits_s = network_s if way.plan.request.is_sharded else timeline.stall_s - network_s
    what = "layers" if way.plan.request.is_sharded else "loads"
    waits = f"waits {shown_time(waits_s)} for {what}" if waits_s > 0 else "waits for nothing"
    return f"{shown_time(way.plan.step_s)}, {waits}; {shown_gib(way.plan.peak_bytes)}"
