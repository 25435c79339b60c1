"""Two ranks of which one is half as fast: shares by the plan against equal ones.

`python -m tests.bench.bench_unequal` runs the quickstart's training on two ranks of one thread, as
two machines over loopback. Each visit of a layer sleeps on top of its work, as a host does while a
card computes; rank 1's sleep for twice as long. Each has a machine file: that of this one, and the
same with half of its rates. By these the plan chooses the shares; the step is predicted as timed
before the first one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from finetune import app
from finetune.env import launch
from offload.engine.executor import Executor
from offload.probe.machine import probe

ROOT = Path(__file__).parents[2]
AS_RANK = "--as-rank"
FORWARD_S, BACKWARD_S = 0.08, 0.2
SLOWDOWN = 2
PORT = 29533
NUM_WARM = 2  # steps that are not counted
WAYS = ("equal", "auto")


def main() -> None:
    """Run both ways in turns, and print a line of JSON for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    console = Console(width=400)
    fixed = (
        f"train.steps={options.steps}",
        f"train.grad_accum_steps={options.micro_batches}",
        *("data.packing=off", "train.micro_batch_size=1", "train.warmup_steps=1"),
        *("report.samples=0", "output.eval_every=null"),
    )
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), fixed)
        for number in range(options.rounds):
            for way in WAYS:
                row = bench.measured(way, number)
                console.print(json.dumps({"round": number} | row), highlight=False)


def train(words: Sequence[str]) -> None:
    """Run the program as a rank whose visits sleep."""
    forward, backward = Executor._forward, Executor._backward
    factor = SLOWDOWN if launch().index else 1

    def late_forward(self: Executor, *args: Any, **settings: Any) -> None:
        time.sleep(factor * FORWARD_S)
        forward(self, *args, **settings)

    def late_backward(self: Executor, *args: Any) -> None:
        time.sleep(factor * BACKWARD_S)
        backward(self, *args)

    Executor._forward = late_forward  # type: ignore[method-assign]
    Executor._backward = late_backward  # type: ignore[method-assign, assignment]
    app.main(words)


@dataclass(frozen=True)
class Bench:
    """Runs of two ranks."""

    folder: Path
    words: Sequence[str]

    def measured(self, way: str, number: int) -> dict[str, Any]:
        """Train on both; return predicted and measured figures of a step."""
        name = f"{way}-{number}"
        ranks = [self._start(rank, name, f"train.shares={way}") for rank in (0, 1)]
        codes = [rank.wait() for rank in ranks]
        assert codes == [0, 0], (self.folder / f"{name}-0.txt").read_text()
        run_dir = self.folder / name / "0"
        plan = json.loads((run_dir / "predicted.json").read_text())["calibrated"]
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text())
        return {
            "shares": recipe["train"]["shares"],
            "predicted_step_s": plan["predicted"]["step_s"],
            "step_s": statistics.median(row["phases_s"]["step"] for row in rows[NUM_WARM:]),
            "losses": [row["loss"] for row in rows],
        }

    def _start(self, rank: int, name: str, *words: str) -> subprocess.Popen[bytes]:
        environment = {
            "PATH": os.environ["PATH"],  # noqa: TID251 - the processes' own
            **{"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": "0", "GROUP_RANK": str(rank)},
            **{"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)},
            **{"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            "XDG_CACHE_HOME": str(self.folder / f"cache-{rank}"),
            "SLUICE_SECRET": "of two machines that are this one",
        }
        with (self.folder / f"{name}-{rank}.txt").open("w") as shown:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", __spec__.name, AS_RANK),
                    *("finetune", "quickstart", *self.words, *words),
                    f"output.dir={self.folder / name / str(rank)}",
                    *("--machine", str(self._machine(rank))),
                ],
                cwd=ROOT,
                env=environment,
                stdout=shown,
                stderr=subprocess.STDOUT,
            )

    def _machine(self, rank: int) -> Path:
        file = self.folder / f"machine-{rank}.json"
        if not (self.folder / "machine-0.json").exists():
            here = json.loads(probe(device="cpu", seconds=1.0, dtype="float32").to_json())
            for number, name in enumerate(("a card", "half a card")):
                for key, rate in here.items():
                    if number and key.endswith("_per_s") and rate is not None:
                        rate["value"] /= SLOWDOWN
                here["launch_s"]["value"] *= SLOWDOWN**number
                text = json.dumps(here | {"name": name})
                (self.folder / f"machine-{number}.json").write_text(text)
        return file


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_RANK]:
        train(sys.argv[2:])
    else:
        main()
