"""The sums of a run's gradients over its ranks: of each layer while others compute."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from finetune.recipe.sections import TrainSection
from finetune.training.ranks import Ranks
from offload.plan.schedule.schedule import Reduced

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class GradientSums:
    """Adds up the gradients of what trains, in ops of the network lane."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        *,
        layers: Sequence[Collection[str]],
        train: TrainSection,
        ranks: Ranks,
    ) -> None:
        """Share out the weights among the ops.

        Args:
            weights: What the optimizer updates, by name.
            layers: The names of those that each layer has alone.
            train: How they are added up.
            ranks: The processes that share each step.
        """
        self._dtype, self._ranks = DTYPES[train.reduce_dtype], ranks
        own = [set(names) for names in layers]
        self._layers = [[weights[name] for name in weights if name in names] for names in own]
        alone = {name for names in own for name in names}
        self._rest = [weight for name, weight in weights.items() if name not in alone]

    @property
    def reduced(self) -> Reduced:
        """What is sent of each layer, and of all else."""
        return Reduced.of(
            tuple(map(_num_elements, self._layers)),
            _num_elements(self._rest),
            element_bytes=self._dtype.itemsize,
            world_size=self._ranks.num,
        )

    def reduce(self, layer: int | None) -> None:
        """Replace gradients by their sums; waits for the other ranks."""
        weights = self._rest if layer is None else self._layers[layer]
        self._ranks.sum_gradients(weights, dtype=self._dtype)


def _num_elements(weights: Sequence[nn.Parameter]) -> int:
    return sum(weight.numel() for weight in weights)
