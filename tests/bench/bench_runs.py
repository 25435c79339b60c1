"""A step of several runs on a slow link: tokens/s together, share of R3, prediction, host time.

    python -m tests.bench.bench_runs [--rounds 15]

On a CPU, whose link is slowed down until the loads of a step take `BREAK_EVEN` times as long as the
visits of one run: each run alone is at a quarter of break-even. In each round every number of runs
takes a step with a link that costs nothing and with the slow one, in turn, so that a machine that
changes its speed changes it for all. What visits take is known from the former; the step is
predicted by simulating its ops, and measured in the latter. Ratios are those of a round, and their
medians are printed.

Host time is what a step's visits take beyond those of the same micro-batches of a single run, where
the model is so small that Python decides: switching adapters must not cost a rebuild.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from offload.engine.engine import Engine, EngineOptions
from offload.engine.passes.part import RunStep
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import Passes, Schedule, TransferSizes, step_schedule, warm_ring
from offload.plan.schedule.simulate import simulate
from offload.plan.schedule.timeline import Timeline
from offload.plan.step import duration_of
from offload.plan.time.bounds import r3_bound_s
from offload.plan.time.costs import Costs, LayerCost
from tests.bench.bench_engine import SlowLink

NUM_LAYERS, NUM_SLOTS = 8, 2
NUMBERS = (1, 2, 4, 8)
BREAK_EVEN = 4  # runs of one micro-batch
NO_LINK = float("inf")


class Bench:
    """One engine whose model has an adapter for each run, and rows for each."""

    def __init__(self, *, hidden: int, seq_len: int) -> None:
        torch.manual_seed(0)
        self.link, self.tokens = SlowLink(), 2 * seq_len
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=512,
        )
        names = [f"run{number}" for number in range(max(NUMBERS))]
        adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(LlamaForCausalLM(config), adapter, adapter_name=names[0])
        for name in names[1:]:
            model.add_adapter(name, adapter)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        options = EngineOptions(
            num_slots=NUM_SLOTS,
            codec="native",
            tier="ram",
            store_dir=None,
            stash="device",
            trained_weights="device",
            head_chunk_tokens=1024,
            num_kept_graphs=0,
        )
        self._engine = Engine(model, device=self.link, options=options)
        self.layer_bytes = self._engine.layer_bytes[0]
        rows = torch.randint(0, 512, (len(names), 2, seq_len))
        batches = [{"input_ids": one, "labels": one} for one in rows]
        self._batches = dict(zip(names, batches, strict=True))

    def step(self, num_runs: int, *, is_one: bool = False) -> tuple[float, int, Timeline]:
        """Run one step; return its wall time, its loads and its timeline.

        Args:
            num_runs: So many runs of a micro-batch each.
            is_one: Whether the micro-batches are those of one run.
        """
        some = dict(list(self._batches.items())[:num_runs])
        runs = [
            RunStep(micro_batches=[batch], adapter=name, dropout_seed=0)
            for name, batch in some.items()
        ]
        if is_one:
            batches = list(some.values())
            runs = [RunStep(micro_batches=batches, adapter=next(iter(some)), dropout_seed=0)]
        self._engine.wait()
        start_s = time.perf_counter()
        result = self._engine.forward_backward_runs(runs)[0]
        timeline = result.timeline
        return time.perf_counter() - start_s, result.num_loads, timeline


def mean_s(timelines: Sequence[Timeline], kind: Kind) -> float:
    """Return what an op of this kind takes: the median over steps of the mean of each."""
    return median(fmean(s.duration_s for s in one.spans if s.kind is kind) for one in timelines)


def costs_of(timelines: Sequence[Timeline], layer_bytes: int) -> Costs:
    """Return what visits take where the link costs nothing."""
    layer = LayerCost(
        forward_s=mean_s(timelines, Kind.FORWARD),
        backward_s=mean_s(timelines, Kind.BACKWARD),
        recompute_s=0.0,
        decode_s=0.0,
        weight_bytes=layer_bytes,
        bound="compute",
    )
    return Costs(
        grade="calibrated",
        layers=(layer,) * NUM_LAYERS,
        front_s=mean_s(timelines, Kind.FRONT),
        tail_s=mean_s(timelines, Kind.TAIL),
        optimizer_s=0.0,
        h2d_bytes_per_s=NO_LINK,
        h2d_latency_s=0.0,
        d2h_bytes_per_s=NO_LINK,
        fetch_bytes_per_s=NO_LINK,
        read_bytes_per_s=NO_LINK,
    )


def schedule_of(num_runs: int, layer_bytes: int) -> Schedule:
    """List the ops of a step from a warm ring."""
    return step_schedule(
        TransferSizes.frozen([layer_bytes] * NUM_LAYERS),
        ring=warm_ring(NUM_SLOTS),
        runs=[Passes(num_trained=1, has_objective=False)] * num_runs,
        trains_front=False,
        input_bytes=(),
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step on the slow link, and what was predicted from the one before on the fast link."""

    num_loads: int
    step_s: float
    predicted_s: float
    bound_s: float
    speedup: float


def shared_steps(bench: Bench, rounds: int) -> Table:
    """Measure and predict steps of 1, 2, 4 and 8 runs on the slow link."""
    for number in NUMBERS:
        bench.step(number)  # inspects, and fills the slots
    first = costs_of([bench.step(1)[2]], bench.layer_bytes)
    visit_s = first.layers[0].forward_s + first.layers[0].backward_s
    loads_s = BREAK_EVEN * NUM_LAYERS * visit_s
    rate = 2 * (NUM_LAYERS - NUM_SLOTS) * bench.layer_bytes / loads_s
    rows: dict[int, list[Row]] = {number: [] for number in NUMBERS}
    for _ in range(rounds):
        for number in NUMBERS:
            bench.link.bytes_per_s = NO_LINK
            free = [bench.step(number)[2]]
            bench.link.bytes_per_s = rate
            step_s, num_loads, _timeline = bench.step(number)
            at = replace(costs_of(free, bench.layer_bytes), h2d_bytes_per_s=rate)
            schedule = schedule_of(number, bench.layer_bytes)
            one_s = rows[1][-1].step_s if number > 1 else step_s
            rows[number].append(
                Row(
                    num_loads=num_loads,
                    step_s=step_s,
                    predicted_s=simulate(schedule, duration_of(at)).step_s,
                    bound_s=r3_bound_s(at, num_slots=NUM_SLOTS, num_micro_batches=number),
                    speedup=number * one_s / step_s,
                )
            )
    table = Table("runs", "loads", "tokens/s", "of one", "predicted", "measured", "error", "of R3")
    for number, some in rows.items():
        step_s = median(row.step_s for row in some)
        table.add_row(
            str(number),
            str(some[-1].num_loads),
            f"{number * bench.tokens / step_s:,.0f}",
            f"{median(row.speedup for row in some):.2f}",
            f"{median(row.predicted_s for row in some):.3f} s",
            f"{step_s:.3f} s",
            f"{median(row.predicted_s / row.step_s for row in some) - 1:+.1%}",
            f"{median(row.bound_s / row.step_s for row in some):.0%}",
        )
    return table


def host_times(bench: Bench, rounds: int) -> Table:
    """Measure what a micro-batch's visit takes with an adapter of its own, and with one for all."""
    bench.link.bytes_per_s = NO_LINK
    for number in NUMBERS:
        bench.step(number)
        bench.step(number, is_one=True)
    found = {(number, is_one): list[Timeline]() for number in NUMBERS for is_one in (False, True)}
    for _ in range(rounds):
        for (number, is_one), timelines in found.items():
            timelines.append(bench.step(number, is_one=is_one)[2])
    table = Table("micro-batches", "forward, a run each", "of one run", "backward, a run each")
    table.add_column("of one run")
    for number in NUMBERS:
        figures = [
            f"{mean_s(found[number, is_one], kind) * 1e6:,.0f} us"
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for is_one in (False, True)
        ]
        table.add_row(str(number), *figures)
    return table


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)  # the other core is for the copies
    console = Console(width=150)
    console.print(shared_steps(Bench(hidden=128, seq_len=128), rounds))
    console.print(host_times(Bench(hidden=32, seq_len=8), 2 * rounds))


if __name__ == "__main__":
    main()
