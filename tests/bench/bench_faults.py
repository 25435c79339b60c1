"""What each kind of fault of a rank costs: time until all have ended, what they say, the resume.

`python -m tests.bench.bench_faults` causes every fault of `tests/e2e/faults.py` in a run of a tiny
model on two machines that are this one, by `stream` and by `fsdp2`, and prints the rows of a table.
As root it mounts small disks, which it fills; without, those two faults are left out.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from offload.probe.machine import probe
from tests.e2e.conftest import recipe_writer, save_model, write_rows
from tests.e2e.faults import (
    FAULTS,
    SECTIONS,
    WAYS,
    Fault,
    NoDiskError,
    Outcome,
    Resumed,
    Scene,
    restarted,
    resumed_by,
    said,
    suffer,
)
from tests.e2e.forked import Forked

HEAD = (
    *("way", "fault", "s until rank 0 and rank 1 had ended", "exit codes"),
    *("rank 0 says", "rank 1 says", "newest checkpoint", "resume"),
)
RESUMES: Sequence[tuple[str, Callable[[Scene], Resumed]]] = (
    ("`torchrun --max-restarts 1` after SIGKILL", restarted),
    ("resume by one process", lambda scene: resumed_by(scene, 1)),
    ("resume by 2 + 1 ranks", lambda scene: resumed_by(scene, 2, 1)),
)


def main() -> None:
    """Run all, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", type=re.compile, default=re.compile("."), help="Faults by their names."
    )
    parser.add_argument("--way", choices=WAYS, action="append", help="Both without it.")
    options = parser.parse_args()
    show(HEAD)
    show(["---"] * len(HEAD))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Forked(folder) as forked:
            bench = Bench(folder, forked)
            for way in options.way or WAYS:
                for fault in FAULTS:
                    if way in fault.ways and options.only.search(fault.name):
                        bench.fault(way, fault)
                for what, resume in RESUMES:
                    if options.only.search(what):
                        bench.resume(way, what, resume)


class Bench:
    """The scenes, and the rows that are printed of them."""

    def __init__(self, folder: Path, forked: Forked) -> None:
        """Make the model, its rows and this machine's rates."""
        self._folder, self._forked = folder, forked
        self._model = save_model(folder / "model")
        self._rows = write_rows(folder / "rows.jsonl")
        self._machine = folder / "machine.json"
        self._machine.write_text(probe(device="cpu", seconds=0.5, dtype="float32").to_json())
        self._scenes: dict[tuple[str, ...], Scene] = {}

    def fault(self, way: str, fault: Fault) -> None:
        """Cause a fault and print its row."""
        try:
            outcome = suffer(self._scene(way, *fault.more), fault)
        except NoDiskError:
            sys.stderr.write(f"{way}, {fault.name}: mounting a small disk needs root\n")
            return
        show(fault_row(way, fault, outcome))

    def resume(self, way: str, what: str, resume: Callable[[Scene], Resumed]) -> None:
        """Resume and print the row."""
        start_s = time.monotonic()
        resumed = resume(self._scene(way))
        took_s = time.monotonic() - start_s
        show(resume_row(way, what, resumed, took_s=took_s))

    def _scene(self, way: str, *more: str) -> Scene:
        if (way, *more) not in self._scenes:
            folder = self._folder / "-".join((way, *more))
            recipe = recipe_writer(folder, self._model, self._rows)(**SECTIONS)
            self._scenes[way, *more] = Scene(
                folder=folder,
                model=self._model,
                words=("finetune", recipe, "--machine", self._machine, *more),
                way=way,
                forked=self._forked,
            )
        return self._scenes[way, *more]


def fault_row(way: str, fault: Fault, outcome: Outcome) -> list[str]:
    """Return a row, with what falls short of what the fault has to come to in capitals."""
    is_named = all(
        cause in " ".join(shown.split())
        for cause, shown in zip(fault.causes, outcome.shown, strict=True)
    )
    ended = ", ".join(f"{ended_s:.1f}" for ended_s in outcome.ended_s)
    if fault.waited_s:
        ended += f" (limit {fault.waited_s:.0f})"
    codes = ", ".join(map(str, outcome.codes))
    return [
        way,
        fault.name + ("" if is_named else ": NOT NAMED"),
        ended,
        codes if outcome.codes == fault.codes else f"{codes}: NOT {fault.codes}",
        *outcome.said,
        f"step {outcome.checkpoint}" if outcome.checkpoint else "NONE",
        "equal to the bit" if outcome.is_resumed else "FAILS",
    ]


def resume_row(way: str, what: str, resumed: Resumed, *, took_s: float) -> list[str]:
    """Return a row of a resume."""
    codes = ", ".join(map(str, resumed.codes))
    errors = (resumed.loss_error, resumed.weight_error)
    end = "equal to the bit" if not any(errors) else "losses within {:.1e}, adapter {:.1e}"
    first, *others = map(said, resumed.shown)
    second = others[0] if others else ""
    return [way, what, f"{took_s:.1f} in all", codes, first, second, "", end.format(*errors)]


def show(cells: Sequence[str]) -> None:
    """Print a row of a table in Markdown."""
    sys.stdout.write("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
