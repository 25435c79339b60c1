"""Two machines over a slow link: how much of their sums overlaps with compute, and by the plan.

`python -m tests.bench.bench_network` makes two machines of this one, as root on Linux: network
namespaces that a pair of virtual cards connects, with `tc` to limit the rate of each direction. The
quickstart's training runs on one rank of one thread in each. Without a limit first, which says how
fast a link would move the bytes of a step in just the time of its backward; then at half, twice and
eight times that rate. The ranks measure the link at their start, as any run does, and plan with it.
About 25 minutes on two idle cores. What is measured is kept in `--folder`, so that the command goes
on where it was stopped; the table at the end is made of it.

Each visit of a layer sleeps for some milliseconds on top of its work, as a host does while a card
computes: otherwise two ranks would fill the cores that the transfers need too.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune import app
from offload.engine.executor import Executor
from offload.probe.machine import probe

ROOT = Path(__file__).parents[2]
INSIDE, AS_RANK = "--inside", "--as-rank"
FORWARD_S, BACKWARD_S = 0.02, 0.05
PORT = 29500
ADDRESSES = ("10.9.0.1", "10.9.0.2")
CARDS = ("sluice0", "sluice1")
FACTORS = (0.5, 2.0, 8.0)
NUM_WARM = 2  # steps that are not counted


def main() -> None:
    """Run all that is left, print a line of JSON for each run, and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument(INSIDE, action="store_true")
    default = Path(tempfile.gettempdir()) / "sluice-bench-network"
    parser.add_argument("--folder", type=Path, default=default)
    options = parser.parse_args()
    if not options.inside:  # again, in a namespace of its own: the machine's network stays as it is
        words = ["unshare", "-n", sys.executable, "-m", __spec__.name, INSIDE, *sys.argv[1:]]
        raise SystemExit(subprocess.run(words, cwd=ROOT, check=False).returncode)
    console = Console(width=400)
    fixed = (
        f"train.steps={options.steps}",
        f"train.grad_accum_steps={options.micro_batches}",
        f"adapter.rank={options.rank}",
        *("train.warmup_steps=1", "report.samples=0", "output.eval_every=null"),
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    kept = Kept(options.folder / "rows.jsonl", fixed)
    with two_machines() as other:
        bench = Bench(options.folder, other, fixed)

        def row(factor: float | None, rate_bits_per_s: int | None) -> dict[str, Any]:
            found = kept.row(factor)
            if found is None:
                load = os.getloadavg()[0]
                found = bench.measured(rate_bits_per_s=rate_bits_per_s)
                found = {"factor": factor, "load_before": load} | found
                kept.add(found)
                console.print(json.dumps(found), highlight=False)
            return found

        free = row(None, None)
        even = 8 * free["sent_bytes"] / free["predicted_backward_s"]
        rows = [free, *(row(factor, int(factor * even)) for factor in FACTORS)]
    console.print(table(rows), highlight=False)


class Kept:
    """What has been measured, in a file that outlives the command, a row on each line."""

    def __init__(self, file: Path, words: Sequence[str]) -> None:
        """Read the rows of the same settings.

        Args:
            file: May be new.
            words: The settings.
        """
        self._file, self._words = file, list(words)
        lines = file.read_text().splitlines() if file.exists() else []
        self._rows = [row for row in map(json.loads, lines) if row["settings"] == self._words]

    def row(self, factor: float | None) -> dict[str, Any] | None:
        """Return the row of a rate; None if it is not there."""
        return next((row for row in self._rows if row["factor"] == factor), None)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row."""
        self._rows.append(row | {"settings": self._words})
        with self._file.open("a") as file:
            file.write(json.dumps(self._rows[-1]) + "\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown, a line for each rate."""
    head = ("limit, Mb/s", "probed, Mb/s", "predicted, measured, s", "hidden")
    lines: list[Sequence[str]] = [head, ("---",) * len(head)]
    for row in rows:
        limit = row["limit_mbit_per_s"]
        lines.append(
            (
                "none" if limit is None else f"{limit:.0f}",
                f"{row['probed_mbit_per_s']:.0f}",
                f"{row['predicted_step_s']:.2f}, {row['step_s']:.2f}",
                f"{row['predicted_hidden_frac']:.0%}, {row['hidden_frac']:.0%}",
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def train(words: Sequence[str]) -> None:
    """Run the program as a rank whose visits sleep."""
    forward, backward = Executor._forward, Executor._backward

    def late_forward(self: Executor, *args: Any, **settings: Any) -> None:
        time.sleep(FORWARD_S)
        forward(self, *args, **settings)

    def late_backward(self: Executor, *args: Any) -> None:
        time.sleep(BACKWARD_S)
        backward(self, *args)

    Executor._forward = late_forward  # type: ignore[method-assign]
    Executor._backward = late_backward  # type: ignore[method-assign, assignment]
    app.main(words)


@contextmanager
def two_machines() -> Iterator[int]:
    """Connect this namespace to a second one; yield the id of a process in that."""
    holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
    try:
        time.sleep(0.5)
        first, second = CARDS
        run("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        run("ip", "link", "set", second, "netns", str(holder.pid))
        for number, card in enumerate(CARDS):
            there = in_machine(number, holder.pid)
            run(*there, "ip", "link", "set", "lo", "up")
            run(*there, "ip", "addr", "add", f"{ADDRESSES[number]}/24", "dev", card)
            run(*there, "ip", "link", "set", card, "up")
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


def in_machine(number: int, other: int) -> tuple[str, ...]:
    """Return the words before a command of a machine."""
    return ("nsenter", "-t", str(other), "-n") if number else ()


def run(*words: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(words, check=True)


@dataclass(frozen=True)
class Bench:
    """Runs of two ranks."""

    folder: Path
    other: int
    words: Sequence[str]

    def measured(self, *, rate_bits_per_s: int | None) -> dict[str, Any]:
        """Train on both machines; return predicted and measured figures of a step."""
        self._limit(rate_bits_per_s)
        name = f"rate-{rate_bits_per_s}"
        ranks = [self._start(rank, name) for rank in (0, 1)]
        codes = [rank.wait() for rank in ranks]
        assert codes == [0, 0], (self.folder / f"{name}-0.txt").read_text()
        run_dir = self.folder / name / "0"
        plan = json.loads((run_dir / "predicted.json").read_text())["calibrated"]
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        phases = [row["phases_s"] for row in rows[NUM_WARM:]]
        found = {
            key: statistics.median(one[key] for one in phases)
            for key in ("step", "backward", "network", "exposed network")
        }
        network = plan["network"]
        return {
            "limit_mbit_per_s": None if rate_bits_per_s is None else rate_bits_per_s / 1e6,
            "probed_mbit_per_s": network["bytes_per_s"] * 8 / 1e6,
            "probed_latency_ms": network["latency_s"] * 1e3,
            "needed_mbit_per_s": network["needed_bytes_per_s"] * 8 / 1e6,
            "sent_bytes": network["num_bytes"],
            "predicted_step_s": plan["predicted"]["step_s"],
            "step_s": found["step"],
            "predicted_backward_s": plan["predicted"]["phases_s"]["backward"],
            "backward_s": found["backward"],
            "predicted_hidden_frac": network["hidden_frac"],
            "hidden_frac": 1 - found["exposed network"] / found["network"],
            "losses": [row["loss"] for row in rows],
        }

    def _limit(self, rate_bits_per_s: int | None) -> None:
        for number, card in enumerate(CARDS):
            there, rule = in_machine(number, self.other), ("dev", card, "root")
            if rate_bits_per_s is not None:
                limit = ("tbf", "rate", f"{rate_bits_per_s}bit", "burst", "64kb", "latency", "1s")
                run(*there, "tc", "qdisc", "replace", *rule, *limit)

    def _start(self, rank: int, name: str, *words: str) -> subprocess.Popen[bytes]:
        environment = {
            "PATH": os.environ["PATH"],  # noqa: TID251 - the processes' own
            **{"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": "0", "GROUP_RANK": str(rank)},
            **{"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)},
            **{"GLOO_SOCKET_IFNAME": CARDS[rank], "OMP_NUM_THREADS": "1"},
            "XDG_CACHE_HOME": str(self.folder / f"cache-{rank}"),
            "SLUICE_SECRET": "of two machines that are this one",
        }
        run_dir = self.folder / name / str(rank)
        shutil.rmtree(run_dir, ignore_errors=True)
        with (self.folder / f"{name}-{rank}.txt").open("w") as shown:
            return subprocess.Popen(
                [
                    *in_machine(rank, self.other),
                    *(sys.executable, "-m", __spec__.name, AS_RANK),
                    *("finetune", "quickstart", *self.words, *words),
                    *(f"output.dir={run_dir}", "--machine", str(self._machine())),
                ],
                cwd=ROOT,
                env=environment,
                stdout=shown,
                stderr=subprocess.STDOUT,
            )

    def _machine(self) -> Path:
        file = self.folder / "machine.json"
        if not file.exists():
            file.write_text(probe(device="cpu", seconds=1.0, dtype="float32").to_json())
        return file


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_RANK]:
        train(sys.argv[2:])
    else:
        main()
