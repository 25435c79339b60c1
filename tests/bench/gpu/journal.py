"""The rows of a run: each written as it is measured, and read again by the next start."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.gpu.cases import OF_CARD
from tests.bench.gpu.settings import Settings
from tests.bench.record import RESULTS, code, cpu_name, gpu, host_bytes, versions

Row = dict[str, Any]
ROWS = "rows.jsonl"
SAME = ("code_sha256", "gpu", "rehearsal", "vram_gib")
"""Rows that differ in one of these are of another run."""
SAME_CARD = SAME[1:]
"""Of a kept row of card and host alone, which code is no matter."""
RATES = (
    "gemm_flops_per_s",
    "expert_gemm_flops_per_s",
    "attention_flops_per_s",
    "memory_bytes_per_s",
    "h2d_bytes_per_s",
    "h2d_duplex_bytes_per_s",
    "d2h_bytes_per_s",
    "launch_s",
)
PARTS, CASE = "parts", "case"
"""Rows of these names are not measurements: which parts a case has, and how it ended."""
MAX_ERROR_LETTERS = 400


class Journal:
    """The rows of one run; those of a case are added under its name.

    Rows that are kept in tests/bench/results count as its own if the same code measured them on
    this card, or if they are of the card alone: nothing is measured twice.

    Attributes:
        case: Whose rows are added.
    """

    def __init__(self, settings: Settings, case: str, kept: Path = RESULTS) -> None:
        """Read what is there."""
        self._file, self.case, self._settings = settings.out / ROWS, case, settings
        self._common = common(settings)
        of_others = [row for file in sorted(kept.glob("*.jsonl")) for row in read(file)]
        self._rows = [row for row in of_others if self._counts(row)]
        self._rows += [row for row in read(self._file) if self._is_same(row, SAME)]

    @property
    def rows(self) -> Sequence[Row]:
        """All rows of this run, of all cases."""
        return self._rows

    def expect(self, parts: Sequence[str]) -> None:
        """Say which parts this case has."""
        if {"parts": list(parts)}.items() <= self._last(PARTS).items():
            return
        self._write(PARTS, {"parts": list(parts)})

    def has(self, part: str) -> bool:
        """Tell whether a part of this case was measured, or failed."""
        return bool(self._last(part))

    def add(self, part: str, **fields: Any) -> None:
        """Write a measurement down."""
        self._write(part, fields)

    def fail(self, part: str, error: BaseException | str) -> None:
        """Write down why a part has none."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._write(part, {"error": text[:MAX_ERROR_LETTERS]})

    def end(self, state: str, **fields: Any) -> None:
        """Write down how the case ended."""
        self._write(CASE, {"state": state} | fields)

    def is_complete(self) -> bool:
        """Tell whether every part of this case has a row."""
        parts = self._last(PARTS).get("parts")
        return parts is not None and all(map(self.has, parts))

    def _last(self, part: str) -> Row:
        own = [r for r in self._rows if (r["case"], r["part"]) == (self.case, part)]
        return own[-1] if own else {}

    def _counts(self, kept: Mapping[str, Any]) -> bool:
        return self._is_same(kept, SAME_CARD if kept["case"] in OF_CARD else SAME)

    def _is_same(self, row: Mapping[str, Any], names: Sequence[str]) -> bool:
        return all(row.get(name) == self._common[name] for name in names)

    def _write(self, part: str, fields: Row) -> None:
        is_cut = self._file.exists() and not self._file.read_bytes().endswith(b"\n")
        row = {"case": self.case, "part": part} | fields | self._common | self._rates(fields)
        self._rows.append(row)
        with self._file.open("a") as file:
            file.write("\n" * is_cut + json.dumps(row) + "\n")

    def _rates(self, fields: Row) -> Row:
        """Return the rates that this run has measured, by the type of weights."""
        rates = {}
        for file in sorted(self._settings.out.glob("machine-*.json")):
            machine = json.loads(file.read_text())
            rates[machine["dtype"]] = {name: machine[name]["value"] for name in RATES}
        return {} if "rates" in fields else {"rates": rates}


def common(settings: Settings) -> Row:
    """Return what every row says of the code, the machine and the run."""
    return {
        "bench": "gpu",
        "rehearsal": settings.is_rehearsal,
        "vram_gib": settings.vram_gib,
        **code(),
        **gpu(),
        "cpu": cpu_name(),
        "host_bytes": host_bytes(),
        "versions": versions(),
    }


def read(file: Path) -> list[Row]:
    """Read rows; a line that was cut off by a kill is left out."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
