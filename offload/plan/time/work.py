"""Operations and what bounds them: arithmetic, traffic, or the host that issues them."""

from dataclasses import dataclass
from typing import Literal

from offload.plan.machine.machine import Machine

Bound = Literal["compute", "memory", "launch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Operations one after another: their arithmetic time, their traffic time, and their number."""

    compute_s: float = 0.0
    memory_s: float = 0.0
    flops: float = 0.0
    num_ops: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            compute_s=self.compute_s + other.compute_s,
            memory_s=self.memory_s + other.memory_s,
            flops=self.flops + other.flops,
            num_ops=self.num_ops + other.num_ops,
        )

    def times(self, factor: float) -> "Work":
        """Return the same operations that many times."""
        return Work(
            compute_s=self.compute_s * factor,
            memory_s=self.memory_s * factor,
            flops=self.flops * factor,
            num_ops=self.num_ops * factor,
        )

    def seconds(self, machine: Machine) -> float:
        """Return their time: a GPU overlaps them with launches, on a CPU the two add up."""
        work_s, launch_s = self.compute_s + self.memory_s, self.num_ops * machine.launch_s.value
        return max(work_s, launch_s) if machine.device == "cuda" else work_s + launch_s

    def bound(self, machine: Machine) -> Bound:
        """Return what most of their time goes to."""
        shares: dict[Bound, float] = {
            "compute": self.compute_s,
            "memory": self.memory_s,
            "launch": self.num_ops * machine.launch_s.value,
        }
        return max(shares, key=lambda name: shares[name])
