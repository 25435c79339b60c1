"""Connects the processes of a run."""

from finetune.env import Launch
from finetune.training.ranks import Ranks


def join(launch: Launch) -> Ranks:
    """Return the ranks of this run, once all are connected.

    Raises:
        FinetuneError: They cannot reach each other.
    """
    if launch.num == 1:
        return Ranks()
    from finetune.training.process_group import ProcessGroup  # it imports torch

    return ProcessGroup(launch)
