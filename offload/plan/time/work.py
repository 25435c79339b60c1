"""Operations and what bounds them: arithmetic, traffic, or the host that issues them."""

from dataclasses import dataclass
from typing import Literal

from offload.plan.machine.machine import Machine

Bound = Literal["compute", "memory", "launch"]
# A function of our own, its part of autograd's graph and its launcher are code of Python: the host
# issues so many of torch's operators in that time. Measured on a CPU: 45 to 56 us for a fused norm
# whose kernel does nothing, 7.4 for an operator of the model's code.
OPS_PER_CALL = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Operations one after another.

    Attributes:
        compute_s: Their arithmetic time.
        memory_s: Their traffic time.
        flops: Their arithmetic.
        num_ops: Their number.
        num_calls: The number of functions of our own that issue some of them.
    """

    compute_s: float = 0.0
    memory_s: float = 0.0
    flops: float = 0.0
    num_ops: float = 0
    num_calls: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            compute_s=self.compute_s + other.compute_s,
            memory_s=self.memory_s + other.memory_s,
            flops=self.flops + other.flops,
            num_ops=self.num_ops + other.num_ops,
            num_calls=self.num_calls + other.num_calls,
        )

    def times(self, factor: float) -> "Work":
        """Return the same operations that many times."""
        return Work(
            compute_s=self.compute_s * factor,
            memory_s=self.memory_s * factor,
            flops=self.flops * factor,
            num_ops=self.num_ops * factor,
            num_calls=self.num_calls * factor,
        )

    def host_s(self, machine: Machine) -> float:
        """Return the time in which the host issues them."""
        return (self.num_ops + OPS_PER_CALL * self.num_calls) * machine.launch_s.value

    def seconds(self, machine: Machine) -> float:
        """Return their time: a GPU overlaps them with launches, on a CPU the two add up."""
        work_s, host_s = self.compute_s + self.memory_s, self.host_s(machine)
        return max(work_s, host_s) if machine.device == "cuda" else work_s + host_s

    def awaited_s(self, machine: Machine) -> float:
        """Return their time where the host issues them only once the device has nothing left."""
        return self.compute_s + self.memory_s + self.host_s(machine)

    def bound(self, machine: Machine) -> Bound:
        """Return what most of their time goes to; a GPU overlaps its work with launches."""
        larger_s = max(self.compute_s, self.memory_s)
        work_s = self.compute_s + self.memory_s if machine.device == "cuda" else larger_s
        if self.host_s(machine) > work_s:
            return "launch"
        return "compute" if self.compute_s == larger_s else "memory"
