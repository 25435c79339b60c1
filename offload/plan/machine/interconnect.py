"""What connects the GPUs of a machine, for plans of cards that are not here.

NVLink by the cards' datasheets, of which each direction is half of the sum that they name: A100 600
GB/s, H100 and H200 900, B200 1,800. How much of it collectives reach is assumed until it is
measured.
"""

from collections.abc import Mapping
from dataclasses import replace

from offload.errors import MachineError
from offload.plan.machine.machine import Machine, Network, Rate

NVLINK_GB_PER_S: Mapping[str, float] = {"a100": 300, "h100": 450, "h200": 450, "b200": 900}
REACHED_FRAC = 0.8
NVLINK, PCIE = "nvlink", "pcie"
# Between processes: a few words, and the first bytes of a sum.
LATENCY = Rate(value=1e-3, source="assumed")


def with_interconnect(machine: Machine, name: str, *, num_ranks: int) -> Machine:
    """Return a machine whose cards are connected so.

    Args:
        machine: One of the cards, with its host.
        name: `nvlink`; `pcie`, the link that loads weights too; or each direction in GB/s.
        num_ranks: How many cards.

    Raises:
        MachineError: It is none of these, or the card is not known to have it.
    """
    if name == PCIE:
        link = machine.h2d_duplex_bytes_per_s
        rate = replace(link, source=f"assumed: a copy, {link.source}")
    elif name == NVLINK:
        sheet = NVLINK_GB_PER_S.get(machine.name)
        if sheet is None:
            raise MachineError(
                f"--interconnect nvlink, but no NVLink is known of {machine.name}",
                limit=f"known are {', '.join(NVLINK_GB_PER_S)}",
                hint="`--interconnect pcie`, or the rate of each direction in GB/s",
            )
        rate = Rate(
            value=REACHED_FRAC * sheet * 1e9,
            source=f"assumed: {REACHED_FRAC:.0%} of NVLink's {sheet:g} GB/s each way",
        )
    else:
        rate = Rate(value=_given(name) * 1e9, source="given")
    network = Network(num_ranks=num_ranks, latency_s=LATENCY, bytes_per_s=rate)
    return replace(machine, network=network)


def _given(name: str) -> float:
    try:
        found = float(name)
    except ValueError:
        found = 0.0
    if not 1e-3 <= found <= 1e6:
        raise MachineError(
            f"--interconnect {name}",
            limit="it is nvlink, pcie, or what each direction carries in GB/s",
            hint="`--interconnect nvlink`, or `--interconnect 25`",
        )
    return found
