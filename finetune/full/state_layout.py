"""Where the optimizer states of a layer's weights lie in memory that is copied as one."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from finetune.full.update_rules import States
from offload.plan.facts.codec import aligned


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """One state's bytes, and what they are."""

    offset: int
    num_bytes: int
    shape: torch.Size
    dtype: torch.dtype

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        part = memory[self.offset : self.offset + self.num_bytes]
        return part.view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """Places of states, by weight and by state, and the size of all.

    Attributes:
        places: Name of a weight -> name of a state -> its place.
        num_bytes: Size of all.
    """

    places: Mapping[str, Mapping[str, _Place]]
    num_bytes: int

    @classmethod
    def of(cls, states: Mapping[str, States]) -> "StateLayout":
        """Lay states out one after the other.

        Args:
            states: Name of a weight -> its states, perhaps without values.
        """
        places: dict[str, dict[str, _Place]] = {}
        offset = 0
        for name, one in states.items():
            places[name] = {}
            for state, value in one.items():
                num_bytes = value.numel() * value.element_size()
                places[name][state] = _Place(
                    offset=offset, num_bytes=num_bytes, shape=value.shape, dtype=value.dtype
                )
                offset += aligned(num_bytes)
        return cls(places=places, num_bytes=offset)

    def views(self, memory: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        """Return the states inside flat uint8 memory, on whatever device it is."""
        return {
            name: {state: place.view(memory) for state, place in one.items()}
            for name, one in self.places.items()
        }
