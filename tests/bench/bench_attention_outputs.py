"""Layers computed again, attention or whole graphs kept and sent, on links of three rates.

    python -m tests.bench.bench_attention_outputs [--rounds 5]

On a CPU, whose link is slowed down. In each round every arm runs with a link that costs nothing and
with the slow one, in turn, so that a machine that changes its speed changes it for all. What visits
take is known from the former; the step of each arm is predicted from that by simulating its ops,
and measured in the latter.
"""

import argparse
import time
from dataclasses import replace
from statistics import fmean, median

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from offload.engine.batch import shape_of
from offload.engine.engine import Engine, EngineOptions
from offload.plan.facts.linears import output_bytes
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import Order, Residency, TransferSizes, warm_ring
from offload.plan.schedule.simulate import simulate
from offload.plan.schedule.timeline import Timeline
from offload.plan.step import duration_of
from offload.plan.time.costs import Costs, LayerCost
from tests.bench.bench_engine import SlowLink
from tests.schedules import training_schedule

NUM_LAYERS, NUM_SLOTS, NUM_MICRO_BATCHES = 4, 2, 1
HIDDEN, HEADS, SEQ_LEN = 256, 4, 1024
LOADS_FRACS = (0.06, 0.25, 1.0)  # what a load takes of a layer's forward visit
NO_LINK = float("inf")
ARMS = {
    "computed again": Residency(num_slots=NUM_SLOTS),
    "all kept": Residency(num_slots=NUM_SLOTS, num_kept_outputs=NUM_LAYERS),
    "half sent": Residency(num_slots=NUM_SLOTS, num_sent_outputs=NUM_LAYERS // 2),
    "all sent": Residency(num_slots=NUM_SLOTS, num_sent_outputs=NUM_LAYERS),
    "graphs kept": Residency(num_slots=NUM_SLOTS, num_kept_graphs=NUM_LAYERS),
    "half of graphs sent": Residency(num_slots=NUM_SLOTS, num_sent_graphs=NUM_LAYERS // 2),
    "graphs sent": Residency(num_slots=NUM_SLOTS, num_sent_graphs=NUM_LAYERS),
}


class Bench:
    """One engine for each arm, over models of one shape."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # the other core is for the copies
        self.link = SlowLink()
        self._engines = {name: self._attached(residency) for name, residency in ARMS.items()}
        self.layer_bytes = self._engines["computed again"].layer_bytes
        tokens = torch.randint(0, 512, (NUM_MICRO_BATCHES, 1, SEQ_LEN))
        self._batches = [{"input_ids": rows, "labels": rows} for rows in tokens]

    def _attached(self, residency: Residency) -> Engine:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            vocab_size=512,
        )
        adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        options = EngineOptions(
            num_slots=residency.num_slots,
            codec="native",
            tier="ram",
            store_dir=None,
            stash="device",
            trained_weights="device",
            head_chunk_tokens=1024,
            num_kept_graphs=residency.num_kept_graphs,
            num_sent_graphs=residency.num_sent_graphs,
            num_kept_outputs=residency.num_kept_outputs,
            num_sent_outputs=residency.num_sent_outputs,
        )
        model = get_peft_model(LlamaForCausalLM(config), adapter)
        return Engine(model, device=_shared(self.link), options=options)

    @property
    def graph_bytes(self) -> int:
        """What the graph of a layer takes."""
        sizes = self._engines["graphs sent"]._bound.executor.found().graph_sizes
        return sizes.of(0, shape_of(1, SEQ_LEN, ())) or 0

    def step(self, arm: str) -> tuple[float, Timeline]:
        """Run one step of an arm; return its wall time and its timeline."""
        start_s = time.perf_counter()
        result = self._engines[arm].forward_backward(self._batches, dropout_seed=0)
        timeline = result.timeline
        return time.perf_counter() - start_s, timeline


def _shared(link: SlowLink) -> SlowLink:
    """Return a device of its own whose link has the same rate at any time."""

    class Same(SlowLink):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            self.bytes_per_s = link.bytes_per_s
            super().copy(target, source)

    return Same()


def costs_of(timelines: dict[str, list[Timeline]], layer_bytes: int, graph_bytes: int) -> Costs:
    """Return what visits take where the link costs nothing."""

    def mean_s(arm: str, kind: Kind) -> float:
        spans = [[s.duration_s for s in one.spans if s.kind is kind] for one in timelines[arm]]
        return median(fmean(one) for one in spans)

    forward_s = mean_s("computed again", Kind.FORWARD)
    backward_s = mean_s("computed again", Kind.BACKWARD)
    layer = LayerCost(
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=backward_s - mean_s("graphs kept", Kind.BACKWARD),
        decode_s=0.0,
        weight_bytes=layer_bytes,
        bound="compute",
        attention_s=backward_s - mean_s("all kept", Kind.BACKWARD),
        pack_s=max(0.0, mean_s("all sent", Kind.FORWARD) - mean_s("all kept", Kind.FORWARD)),
        output_bytes=output_bytes(
            num_heads=HEADS,
            head_features=HIDDEN // HEADS,
            element_bytes=4,
            num_rows=1,
            seq_len=SEQ_LEN,
        ),
        graph_bytes=graph_bytes,
        graph_pack_s=max(
            0.0, mean_s("graphs sent", Kind.FORWARD) - mean_s("graphs kept", Kind.FORWARD)
        ),
    )
    return Costs(
        grade="calibrated",
        layers=(layer,) * NUM_LAYERS,
        front_s=mean_s("computed again", Kind.FRONT),
        tail_s=mean_s("computed again", Kind.TAIL),
        optimizer_s=0.0,
        h2d_bytes_per_s=NO_LINK,
        h2d_latency_s=0.0,
        d2h_bytes_per_s=NO_LINK,
        fetch_bytes_per_s=NO_LINK,
        read_bytes_per_s=NO_LINK,
    )


def predicted_s(costs: Costs, residency: Residency) -> float:
    """Simulate an arm's step."""
    schedule = training_schedule(
        TransferSizes.frozen([layer.weight_bytes for layer in costs.layers]),
        ring=warm_ring(NUM_SLOTS),
        num_micro_batches=NUM_MICRO_BATCHES,
        order=Order.LAYER_MAJOR,
        trains_front=False,
        input_bytes=(),
        num_kept_graphs=residency.num_kept_graphs,
        saved=costs.saved(residency, num_micro_batches=NUM_MICRO_BATCHES),
    )
    return simulate(schedule, duration_of(costs)).step_s


def main() -> None:
    """Print predicted and measured seconds, by rate and arm."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    bench = Bench()
    for arm in ARMS:
        bench.step(arm)  # inspects, and fills the slots
    first = {arm: [bench.step(arm)[1]] for arm in ARMS}
    sizes = bench.layer_bytes[0], bench.graph_bytes
    forward_s = costs_of(first, *sizes).layers[0].forward_s
    table = Table("link", "arm", "predicted", "measured", "of recompute")
    for frac in LOADS_FRACS:
        rate = bench.layer_bytes[0] / (frac * NUM_MICRO_BATCHES * forward_s)
        free = {arm: list[Timeline]() for arm in ARMS}
        measured = {arm: list[float]() for arm in ARMS}
        for _ in range(rounds):
            for arm in ARMS:
                bench.link.bytes_per_s = NO_LINK
                free[arm].append(bench.step(arm)[1])
                bench.link.bytes_per_s = rate
                measured[arm].append(bench.step(arm)[0])
        costs = costs_of(free, *sizes)
        at = replace(costs, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate, fetch_bytes_per_s=rate)
        layer = costs.layers[0]
        for arm, seconds in measured.items():
            table.add_row(
                f"{rate / 1e6:.0f} MB/s",
                arm,
                f"{predicted_s(at, ARMS[arm]):.3f} s",
                f"{median(seconds):.3f} s",
                f"{median(seconds) / median(measured['computed again']):.2f}",
            )
        table.caption = (
            f"forward {layer.forward_s * 1e3:.0f} ms, recompute {layer.recompute_s * 1e3:.0f},"
            f" attention {layer.attention_s * 1e3:.0f}, packing a graph"
            f" {layer.graph_pack_s * 1e3:.1f}; graph {layer.graph_bytes / 1e6:.1f} MB,"
            f" output {layer.output_bytes / 1e6:.1f}, layer {layer.weight_bytes / 1e6:.1f}"
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
