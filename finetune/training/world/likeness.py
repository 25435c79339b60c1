"""What several ranks have must be the same to the bit: compared by digests, not sent."""

import hashlib
from collections.abc import Mapping, Sequence

import torch

from finetune.errors import FinetuneError
from finetune.training.world.parcel import memory_of


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the SHA-256 of each tensor's bytes, by name."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def difference(what: str, every: Sequence[Mapping[str, str]]) -> FinetuneError | None:
    """Return the error for what some ranks have otherwise than the first that has it.

    Args:
        what: What is compared.
        every: By rank, digests by name; a rank that has none of a name is not compared.
    """
    for name in dict.fromkeys(name for own in every for name in own):
        first, *others = [(rank, own[name]) for rank, own in enumerate(every) if name in own]
        unlike = [str(rank) for rank, digest in others if digest != first[1]]
        if unlike:
            return FinetuneError(
                f"{what} on rank {', '.join(unlike)} are not those on rank {first[0]}",
                limit="ranks train one model on one order of rows, the same to the bit",
                hint="give all ranks the same files, package versions and kind of card;"
                " `--resume` continues from the newest checkpoint",
            )
    return None


def _digest(tensor: torch.Tensor) -> str:
    content = memory_of(tensor.detach().cpu().contiguous()).numpy().data
    return hashlib.sha256(content).hexdigest()
