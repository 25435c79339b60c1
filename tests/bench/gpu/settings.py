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
        limit_s: How long the case may take, the start of its program included.
        parts: The only ones that a case is to measure; None leaves them to the case.
        start_s: When it was begun, by the clock that all processes share.
    """

    out: Path
    is_rehearsal: bool
    vram_gib: float | None
    num_layers: int | None
    limit_s: float
    parts: tuple[str, ...] | None = None
    start_s: float = field(default_factory=time.perf_counter, compare=False)

    @property
    def device(self) -> str:
        """What computes."""
        return "cpu" if self.is_rehearsal else "cuda"

    @property
    def left_s(self) -> float:
        """What is left of the limit, with a little to end in."""
        return 0.95 * self.limit_s - (time.perf_counter() - self.start_s)

    @property
    def scratch(self) -> Path:
        """Where models and caches are written, which nobody keeps."""
        return self.out.parent / f"{self.out.name}-scratch"

    def wants(self, part: str) -> bool:
        """Tell whether a part is to be measured."""
        return self.parts is None or part in self.parts

    def within(self, limit_s: float, parts: tuple[str, ...] | None) -> "Settings":
        """Return the same settings for a case that begins now."""
        return replace(self, limit_s=limit_s, parts=parts, start_s=time.perf_counter())

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
        return json.dumps(asdict(self) | {"out": str(self.out)})

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Read it."""
        fields: dict[str, Any] = json.loads(text)
        parts = fields["parts"] and tuple(fields["parts"])
        return cls(**fields | {"out": Path(fields["out"]), "parts": parts})
