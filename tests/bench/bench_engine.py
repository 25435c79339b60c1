"""Layer-major against the usual order against no streaming, on one model, as shares of R3.

    python -m tests.bench.bench_engine [--device cuda] [--rounds 7] [--out FILE.jsonl]

All arms run in turn within each round, so that a machine that changes its speed changes it for all.
On a CPU the link is slowed down to where break-even is at 4 micro-batches; on a GPU it is the
link that is there. M* is the number of micro-batches at which a forward sweep takes as long as its
loads. R3 is computed from the durations of the step's own visits and the rate of its own loads;
whether streaming slows the visits themselves is told by the tokens per second beside.

The floor is the layer-major step with its copies left out: same ops, same waits, wrong numbers.
What is slower than the floor is exposed transfer time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from offload.engine.engine import Engine, EngineOptions
from offload.engine.streams import CpuDevice
from offload.plan.schedule.op import Kind, Route
from offload.plan.schedule.schedule import Order
from offload.plan.schedule.timeline import Timeline
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import Costs, LayerCost, Speed
from tests.bench.record import git, median

NUM_LAYERS, NUM_SLOTS = 8, 3
BREAK_EVEN = 4  # micro-batches, where the link can be set
LOADS_FRACS = (0.5, 1.0, 2.0)
SHAPES = {
    "cpu": {"hidden_size": 192, "intermediate_size": 512, "seq_len": 128, "rows": 1},
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "seq_len": 1024, "rows": 2},
}


class SlowLink(CpuDevice):
    """A CPU whose copies take the time that a link of some rate would."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_per_s = float("inf")
        self.is_copying = True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        start_s = time.perf_counter()
        if not self.is_copying:
            return
        super().copy(target, source)
        left_s = source.nbytes / self.bytes_per_s - (time.perf_counter() - start_s)
        time.sleep(max(0.0, left_s))


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run the step."""

    name: str
    is_resident: bool = False
    order: Order = Order.LAYER_MAJOR
    is_copying: bool = True


ARMS = (
    Arm(name="no streaming", is_resident=True),
    Arm(name="layer-major"),
    Arm(name="usual order", order=Order.MICRO_BATCH_MAJOR),
    Arm(name="floor", is_copying=False),
)


class Bench:
    """Two engines over one model's shape: streamed and resident."""

    def __init__(self, device: str) -> None:
        if device == "cpu":
            torch.set_num_threads(1)  # the other core is for the copies
        self.device = device
        self.shape = SHAPES[device]
        self._link = SlowLink() if device == "cpu" else None
        torch_device = torch.device(device)
        self._streamed = self._attach(NUM_SLOTS, self._link or torch_device)
        self._resident = self._attach(NUM_LAYERS, torch_device)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.shape["rows"] * self.shape["seq_len"]

    def step(self, arm: Arm, num_micro_batches: int) -> tuple[float, Timeline, int]:
        """Run one step; return its wall time, its timeline and its loads."""
        engine = self._resident if arm.is_resident else self._streamed
        if self._link is not None:
            self._link.is_copying = arm.is_copying
        tokens = torch.randint(
            0, 512, (num_micro_batches, self.shape["rows"], self.shape["seq_len"])
        )
        batches = [{"input_ids": rows, "labels": rows} for rows in tokens]
        engine.wait()
        start_s = time.perf_counter()
        result = engine.forward_backward(batches, dropout_seed=0, order=arm.order)
        timeline = result.timeline
        return time.perf_counter() - start_s, timeline, result.num_loads

    def set_break_even(self, costs: Costs) -> float:
        """Slow the link down to `BREAK_EVEN` micro-batches, or say where the real one stands."""
        forward_s = sum(layer.forward_s for layer in costs.layers)
        moved = (NUM_LAYERS - NUM_SLOTS) * self._streamed.layer_bytes[0]
        if self._link is not None:
            self._link.bytes_per_s = moved / (BREAK_EVEN * forward_s)
            return BREAK_EVEN
        _, timeline, _ = self.step(ARMS[1], 1)
        loads = [span for span in timeline.spans if span.kind is Kind.LOAD]
        rate = sum(span.num_bytes for span in loads) / sum(span.duration_s for span in loads)
        return moved / rate / forward_s

    def costs(self, timeline: Timeline, link_timeline: Timeline) -> Costs:
        """Return what the visits of a resident step cost, and the rate of a streamed one's link."""

        def mean_s(kind: Kind) -> float:
            durations = [span.duration_s for span in timeline.spans if span.kind is kind]
            return sum(durations) / len(durations)

        loads = [span for span in link_timeline.spans if span.kind is Kind.LOAD]
        load_s = sum(span.duration_s for span in loads)
        layer = LayerCost(
            forward_s=mean_s(Kind.FORWARD),
            backward_s=mean_s(Kind.BACKWARD),
            recompute_s=0.0,
            decode_s=0.0,
            weight_bytes=self._streamed.layer_bytes[0],
            bound="compute",
        )
        return Costs(
            grade="calibrated",
            layers=(layer,) * NUM_LAYERS,
            front_s=mean_s(Kind.FRONT),
            tail_s=mean_s(Kind.TAIL),
            optimizer_s=0.0,
            speeds={Route.LOAD: Speed(sum(span.num_bytes for span in loads) / load_s)}
            if load_s
            else {},
        )

    def close(self) -> None:
        """End both engines."""
        self._streamed.close()
        self._resident.close()

    def _attach(self, num_slots: int, device: torch.device | SlowLink) -> Engine:
        options = EngineOptions(
            codec="native",
            tier="ram",
            store_dir=None,
            num_slots=num_slots,
            stash="device",
            trained_weights="device",
            head_chunk_tokens=1024,
            num_kept_graphs=0,
        )
        return Engine(self._model(), device=device, options=options)

    def _model(self) -> nn.Module:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.shape["hidden_size"],
            intermediate_size=self.shape["intermediate_size"],
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=512,
        )
        torch.set_default_dtype(torch.bfloat16 if self.device == "cuda" else torch.float32)
        base = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        return get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"]))


def measure(bench: Bench, *, num_rounds: int) -> list[dict[str, object]]:
    """Run all arms at all numbers of micro-batches; return one row for each."""
    for arm in ARMS:
        bench.step(arm, 1)  # warm-up
    _, resident, _ = bench.step(ARMS[0], BREAK_EVEN)
    break_even = bench.set_break_even(bench.costs(resident, resident))
    rows = []
    for frac in LOADS_FRACS:
        num_micro_batches = max(1, round(frac * break_even))
        found: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in ARMS}
        steps = {arm.name: bench.step(arm, num_micro_batches) for arm in ARMS}  # warms the ring
        for _ in range(num_rounds):
            steps = {arm.name: bench.step(arm, num_micro_batches) for arm in ARMS}
            for name, seconds in shares(bench, steps, num_micro_batches).items():
                found[name].append(seconds)
        for name, samples in found.items():
            rows.append(summary(bench, name, samples, frac, num_micro_batches, steps[name][2]))
    return rows


def shares(
    bench: Bench, steps: dict[str, tuple[float, Timeline, int]], num_micro_batches: int
) -> dict[str, dict[str, float]]:
    """Return step time, share of R3 and exposed transfer of each arm of a round."""
    link = steps["layer-major"][1]
    floor_s = steps["floor"][0]
    found = {}
    for name, (wall_s, timeline, _) in steps.items():
        costs = bench.costs(timeline, link)
        r3_s = r3_bound_s(costs, num_slots=NUM_SLOTS, num_micro_batches=num_micro_batches)
        found[name] = {
            "step_s": wall_s,
            "r3_share": r3_s / wall_s,
            "exposed_s": wall_s - floor_s,
        }
    return found


def summary(
    bench: Bench,
    name: str,
    samples: list[dict[str, float]],
    frac: float,
    num_micro_batches: int,
    num_loads: int,
) -> dict[str, object]:
    """Return one row: quantiles over the rounds."""

    def quantiles(key: str) -> dict[str, float]:
        values = sorted(sample[key] for sample in samples)
        cuts = statistics.quantiles(values, n=10, method="inclusive")
        return {"p20": cuts[1], "p50": statistics.median(values), "p80": cuts[7]}

    tokens = bench.tokens * num_micro_batches
    step_s = quantiles("step_s")
    return {
        "bench": "engine",
        "git_sha": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
        "device": bench.device,
        "torch": torch.__version__,
        "arm": name,
        "micro_batches": num_micro_batches,
        "of_break_even": frac,
        "num_loads": num_loads,
        "tokens_per_s": {key: tokens / value for key, value in step_s.items()},
        "step_s": step_s,
        "r3_share": quantiles("r3_share"),
        "exposed_s": quantiles("exposed_s"),
        "n": len(samples),
    }


def show(rows: list[dict[str, object]], print_line: Callable[[object], None]) -> None:
    """Print the rows as a table."""
    table = Table(title="medians over the rounds")
    for column in ("M/M*", "M", "arm", "loads", "step", "tokens/s", "of R3", "exposed"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['of_break_even']}",
            f"{row['micro_batches']}",
            f"{row['arm']}",
            f"{row['num_loads']}",
            f"{median(row, 'step_s') * 1e3:.0f} ms",
            f"{median(row, 'tokens_per_s'):,.0f}",
            f"{median(row, 'r3_share'):.1%}",
            f"{median(row, 'exposed_s') * 1e3:+.0f} ms",
        )
    print_line(table)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=list(SHAPES), default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bench = Bench(options.device)
    rows = measure(bench, num_rounds=options.rounds)
    bench.close()
    show(rows, Console().print)
    if options.out is not None:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
