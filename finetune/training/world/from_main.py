"""Tensors that the main rank has and all ranks ask for, one after the other.

A checkpoint of a model's own weights and states is as large as all of it, so no process receives it
at once: each takes what it needs of one tensor before it asks for the next.
"""

import torch

from finetune.run.checkpoint import NamedTensors
from finetune.training.ranks import Ranks


class FromMain:
    """Tensors by name; all ranks ask for the same ones, in the same order."""

    def __init__(self, tensors: NamedTensors | None, *, ranks: Ranks) -> None:
        """Take what the main rank has.

        Args:
            tensors: What there is, on the main rank; None on others.
            ranks: That ask.
        """
        self._tensors, self._ranks = tensors, ranks

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor in memory of its own, or as the main rank has it.

        It takes part in a collective.

        Raises:
            RankError: A rank has failed, or is gone.
        """
        return self._ranks.from_main(lambda: self._of_main(name))

    def _of_main(self, name: str) -> torch.Tensor:
        assert self._tensors is not None
        return self._tensors[name]
