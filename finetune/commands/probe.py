"""What `probe` measures: this machine and, with several processes, the network between them."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from finetune.commands.plan import probed
from finetune.env import stores_dir
from finetune.errors import ConfigError
from finetune.training.ranks import Ranks
from offload.plan.machine.machine import Machine
from offload.probe.machine import with_host

PROBE_HOST_S = 2.0


def probed_with_network(dtype: str, ranks: Ranks, *, note: Callable[[str], None]) -> Machine:
    """Return the main rank's machine, with its host and the network between the ranks."""

    def own() -> Machine:
        return with_host(probed(dtype, note=note), folder=stores_dir(), seconds=PROBE_HOST_S)

    machine = ranks.from_main(own)
    if ranks.num == 1:
        return machine
    from finetune.recipe.sections import OffloadSection
    from finetune.training.preflight import torch_device
    from finetune.training.process_group import measure_network

    if ranks.is_main:
        note(f"Measuring the network between {ranks.num} processes ...")
    network = measure_network(ranks, device=torch_device(OffloadSection(), ranks))
    return replace(machine, network=network)


def save_machine(machine: Machine, file: Path, *, is_anyway: bool) -> None:
    """Write a machine to a file.

    Args:
        machine: The measured machine.
        file: The file.
        is_anyway: Whether that of a busy machine is written too; it is marked.

    Raises:
        ConfigError: It was measured while other programs ran.
    """
    if machine.others_frac is not None and not is_anyway:
        raise ConfigError(
            f"{file} was not written: other programs took {machine.others_frac:.0%} of the"
            " processors meanwhile",
            limit="plans with these rates would be of a busy machine",
            hint="close what else computes (`top` names it) and measure again, or"
            f" `sluice probe --save {shlex.quote(str(file))} --anyway`",
        )
    file.write_text(machine.to_json())
