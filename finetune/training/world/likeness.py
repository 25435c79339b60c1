"""What several ranks have must be the same to the bit: compared by digests, not sent."""

import hashlib
from collections.abc import Mapping, Sequence

import torch

from finetune.errors import FinetuneError
from finetune.training.world.parcel import memory_of


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the SHA-256 of each tensor's bytes, by name."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def difference(
    what: str, every: Sequence[Mapping[str, str]], *, nodes: Sequence[int]
) -> FinetuneError | None:
    """Return the error for what some ranks lack, or have otherwise than the first that has it.

    Each rank has all, or of each machine one rank has each.

    Args:
        what: What is compared.
        every: By rank, digests by name.
        nodes: The machine of each rank.
    """
    names = dict.fromkeys(name for own in every for name in own)
    for node in dict.fromkeys(nodes):
        here = [rank for rank, at in enumerate(nodes) if at == node]
        counts = {name: sum(name in every[rank] for rank in here) for name in names}
        wanted = len(here) if max(counts.values(), default=0) > 1 else 1
        for name, count in counts.items():
            if count < wanted:
                lacks = next(rank for rank in here if name not in every[rank])
                has = next(rank for rank, own in enumerate(every) if name in own)
                return _error(f"{what} on rank {lacks} lack {name}, which rank {has} has")
    for name in names:
        first, *others = [(rank, own[name]) for rank, own in enumerate(every) if name in own]
        unlike = [str(rank) for rank, digest in others if digest != first[1]]
        if unlike:
            return _error(f"{what} on rank {', '.join(unlike)} are not those on rank {first[0]}")
    return None


def _error(what: str) -> FinetuneError:
    return FinetuneError(
        what,
        limit="ranks train one model on one order of rows, the same to the bit",
        hint="give all ranks the same files, package versions and kind of card;"
        " `--resume` continues from the newest checkpoint",
    )


def _digest(tensor: torch.Tensor) -> str:
    content = memory_of(tensor.detach().cpu().contiguous()).numpy().data
    return hashlib.sha256(content).hexdigest()
