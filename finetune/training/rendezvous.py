"""Connects the processes of a run."""

from finetune.env import Launch
from finetune.errors import FinetuneError
from finetune.training.ranks import Ranks


def join(launch: Launch) -> Ranks:
    """Return the ranks of this run, once all are connected.

    Raises:
        FinetuneError: They are on several machines, or cannot reach each other.
    """
    if launch.num == 1:
        return Ranks()
    if launch.num_local != launch.num:
        raise FinetuneError(
            f"{launch.num} processes were launched, {launch.num_local} of them on this machine",
            limit="this version shares a step among the cards of one machine",
            hint=f"`accelerate launch --multi_gpu --num_machines 1"
            f" --num_processes {launch.num_local}`",
        )
    from finetune.training.process_group import ProcessGroup  # it imports torch

    return ProcessGroup(launch)
