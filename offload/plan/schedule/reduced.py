"""What of a run's gradients crosses the network between ranks, and in which portions."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """Bytes that each rank sends so that the gradients of all ranks are added up.

    Attributes:
        layers: Of what each layer has alone, in forward order: final once its backward has ended.
        rest: Of all else: final once the whole backward has.
    """

    layers: tuple[int, ...]
    rest: int

    @classmethod
    def of(
        cls, layers: tuple[int, ...], rest: int, *, element_bytes: int, num_ranks: int
    ) -> "Reduced":
        """Return what an all-reduce sends that no other can undercut: 2 (N - 1) / N of its data.

        Args:
            layers: Elements that each layer has alone.
            rest: All others.
            element_bytes: Of an element on the network.
            num_ranks: N.
        """

        def sent(num_elements: int) -> int:
            return 2 * (num_ranks - 1) * -(-num_elements // num_ranks) * element_bytes

        return cls(layers=tuple(map(sent, layers)), rest=sent(rest))
