"""What a case is told, and what it may ask of its run."""

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from offload.plan.machine.machine import Machine

PROBE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How this run is set up.

    Attributes:
        out: Directory of the run.
        is_rehearsal: Tiny, on a CPU.
        vram_gib: What the card is made to have; None leaves it to the cases.
        num_layers: Layers of the models; None takes as many as there is time for.
        limit_s: How long the case may take.
        start_s: When it began, by this process's clock.
    """

    out: Path
    is_rehearsal: bool
    vram_gib: float | None
    num_layers: int | None
    limit_s: float
    start_s: float = field(default_factory=time.perf_counter, compare=False)

    @property
    def device(self) -> str:
        """What computes."""
        return "cpu" if self.is_rehearsal else "cuda"

    @property
    def left_s(self) -> float:
        """What is left of the limit, with a little to end in."""
        return 0.95 * self.limit_s - (time.perf_counter() - self.start_s)

    def within(self, limit_s: float) -> "Settings":
        """Return the same settings for a case that begins now."""
        return replace(self, limit_s=limit_s, start_s=time.perf_counter())

    def machine(self, dtype: str) -> Machine:
        """Return this machine as this run has measured it; measure it if nobody has."""
        file = self.out / f"machine-{dtype}.json"
        if not file.exists():
            from offload.probe.machine import probe

            machine = probe(device=self.device, dtype=dtype, seconds=PROBE_S / 5**self.is_rehearsal)
            file.write_text(machine.to_json())
        return Machine.from_json(file.read_text())

    def to_json(self) -> str:
        """Write what another process needs."""
        fields = asdict(self) | {"out": str(self.out)}
        del fields["start_s"]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Read it; the limit counts from now on."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields | {"out": Path(fields["out"])})
