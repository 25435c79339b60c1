"""Six variants of the quickstart together, and one after the other, in one process.

Run it by `python -m tests.bench.bench_sweep --steps 10`. What a run learns is the same to the bit
in both (`tests/e2e/test_sweep.py`), so only time is compared: that of the processor and that of
the clock. Everything is imported, and the machine measured, before either begins.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import finetune.training.attach  # noqa: F401 - imported before anything is timed
from finetune.report.screen import Screen
from finetune.sweep.variants import Variant, variants_of
from offload.probe.machine import probe
from tests.e2e.sweeps import opened_and_trained

GRID = ("train.lr=2e-3,5e-3,1e-2", "adapter.rank=4,16")


def main() -> None:
    """Time both, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--eval-every", type=int, default=5)
    options = parser.parse_args()
    fixed = (f"train.steps={options.steps}", "train.warmup_steps=1", "report.samples=0")
    words = (*GRID, *fixed, f"output.eval_every={options.eval_every}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.json"
        file.write_text(probe(device="cpu", seconds=1.0, dtype="float32").to_json())
        took: dict[str, object] = {"steps": options.steps}
        for name in ("together", "one after the other"):
            place = f"output.dir={Path(folder) / name.replace(' ', '-')}"
            runs = variants_of("quickstart", [*words, place], is_zipped=False, max_runs=64).runs
            waves = [runs] if name == "together" else [[run] for run in runs]
            took[name] = timed(waves, file)
        Console(width=400).print(json.dumps(took), highlight=False)


def timed(waves: Sequence[Sequence[Variant]], machine_file: Path) -> dict[str, float]:
    """Run waves of runs; return seconds of the processor, of the clock, and layers loaded."""
    screen = Screen(Console(quiet=True), is_verbose=False)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for wave in waves:
        opened_and_trained([run.recipe for run in wave], machine_file, screen)
    found = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}
    return found | {"num_loads": sum(map(loads_of, waves))}


def loads_of(wave: Sequence[Variant]) -> int:
    """Return layers loaded in the steps of runs that shared them."""
    file = wave[0].recipe.output.run_dir / "metrics.jsonl"
    return sum(json.loads(line)["num_loads"] for line in file.read_text().splitlines())


if __name__ == "__main__":
    main()
