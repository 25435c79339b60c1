"""Memory that runs out between the plan and the last step: on one rank, or in a lone process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from finetune.errors import FinetuneError
from finetune.training.ranks import Ranks


@contextmanager
def shortage_named(ranks: Ranks) -> Iterator[None]:
    """Give a shortage of memory the rank, the memory and a way out.

    Raises:
        FinetuneError: The device or the host has no more memory.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        memory = "device" if isinstance(error, torch.OutOfMemoryError) else "host"
        rank = f"rank {ranks.index} " if ranks.num > 1 else "the run "
        said = str(error).partition("\n")[0]
        raise FinetuneError(
            f"{rank}ran out of {memory} memory in a step{f': {said}' if said else ''}",
            limit="the plan had counted on what was free when the run began; checkpoints are good",
            hint="close what else takes it, then `--resume`: the step is planned again",
        ) from error
