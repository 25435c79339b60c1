"""A step of preferences against plain fine-tuning on the same tokens, on links of three rates.

    python -m tests.bench.bench_objective [--rounds 5]

On a CPU, whose link is slowed down. In each round every arm runs with a link that costs nothing and
with the slow one, in turn, so that a machine that changes its speed changes it for all. What visits
take is known from the former; the step of each arm is predicted from that by simulating its ops,
and measured in the latter. The last arm is the usual way: the reference in a pass of its own.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from offload.engine.engine import Engine, EngineOptions
from offload.engine.objective import Reference, Scores, StepLoss
from offload.plan.schedule.op import Kind, Route
from offload.plan.schedule.schedule import (
    Order,
    Passes,
    Schedule,
    TransferSizes,
    step_schedule,
    warm_ring,
)
from offload.plan.schedule.simulate import simulate
from offload.plan.schedule.timeline import Timeline
from offload.plan.step import duration_of
from offload.plan.time.costs import Costs, LayerCost, Speed
from tests.bench.bench_engine import SlowLink
from tests.schedules import training_schedule

NUM_LAYERS, NUM_SLOTS, NUM_MICRO_BATCHES = 6, 2, 4
HIDDEN, HEADS, SEQ_LEN = 256, 4, 256
LOADS_FRACS = (0.25, 1.0, 4.0)  # what a load takes of a layer's forward visit
NO_LINK = float("inf")
SFT, DPO, APART = "sft", "dpo", "dpo, reference in a pass of its own"


@dataclass(frozen=True)
class Dpo:
    """The sigmoid loss of pairs (arXiv:2305.18290); rows at even places are chosen."""

    reference: Reference | None = field(default_factory=Reference)

    def loss(self, scores: Scores) -> StepLoss:
        """Return the mean loss of all pairs."""
        ratio_N = scores.policy_N
        if scores.reference_N is not None:
            ratio_N = ratio_N - scores.reference_N
        ratio_R = ratio_N.new_zeros(scores.num_rows).index_add(0, scores.rows_N, ratio_N)
        return StepLoss(
            value=-F.logsigmoid(0.1 * (ratio_R[0::2] - ratio_R[1::2])).mean(), metrics={}
        )


class Bench:
    """One engine, and the same rows for each arm."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # the other core is for the copies
        torch.manual_seed(0)
        self.link = SlowLink()
        config = LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            vocab_size=2048,
        )
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
        adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(LlamaForCausalLM(config), adapter)
        self._engine = Engine(model, device=self.link, options=options)
        self.layer_bytes = self._engine.layer_bytes
        tokens = torch.randint(0, 2048, (NUM_MICRO_BATCHES, 2, SEQ_LEN))
        self._batches = [{"input_ids": rows, "labels": rows} for rows in tokens]

    def step(self, arm: str) -> tuple[float, int, Timeline]:
        """Run one step of an arm; return its wall time, its loads and its timeline."""
        start_s, num_loads, objective = time.perf_counter(), 0, None
        if arm == APART:
            num_loads = self._engine.evaluate(self._batches, objective=Dpo(None)).num_loads
            objective = Dpo(None)
        if arm == DPO:
            objective = Dpo()
        result = self._engine.forward_backward(self._batches, objective=objective, dropout_seed=0)
        timeline = result.timeline
        return time.perf_counter() - start_s, num_loads + result.num_loads, timeline


def costs_of(timelines: Mapping[str, list[Timeline]], layer_bytes: int) -> Costs:
    """Return what visits take where the link costs nothing."""

    def mean_s(arm: str, kind: Kind) -> float:
        spans = [[s.duration_s for s in one.spans if s.kind is kind] for one in timelines[arm]]
        return median(fmean(one) for one in spans)

    layer = LayerCost(
        forward_s=mean_s(SFT, Kind.FORWARD),
        backward_s=mean_s(SFT, Kind.BACKWARD),
        recompute_s=0.0,
        decode_s=0.0,
        weight_bytes=layer_bytes,
        bound="compute",
        reference_s=mean_s(DPO, Kind.REFERENCE),
    )
    return Costs(
        grade="calibrated",
        layers=(layer,) * NUM_LAYERS,
        front_s=mean_s(SFT, Kind.FRONT),
        tail_s=mean_s(SFT, Kind.TAIL),
        optimizer_s=0.0,
        speeds={},
        score_s=mean_s(DPO, Kind.SCORE),
        objective_s=mean_s(DPO, Kind.OBJECTIVE),
        num_references=1.0,
    )


def schedule_of(arm: str, costs: Costs) -> Schedule:
    """List the ops of an arm's step from a warm ring."""
    sizes = TransferSizes.frozen([layer.weight_bytes for layer in costs.layers])
    ring = warm_ring(NUM_SLOTS)
    if arm == SFT:
        return training_schedule(
            sizes,
            ring=ring,
            num_micro_batches=NUM_MICRO_BATCHES,
            order=Order.LAYER_MAJOR,
            trains_front=False,
            input_bytes=(),
        )
    passes = Passes(num_trained=NUM_MICRO_BATCHES, has_reference=arm == DPO)
    return step_schedule(sizes, ring=ring, runs=(passes,), trains_front=False, input_bytes=())


def predicted_s(arm: str, costs: Costs) -> float:
    """Simulate an arm's step; that of the last arm begins with a pass without gradients."""
    schedule = schedule_of(arm, costs)
    if arm != APART:
        return simulate(schedule, duration_of(costs)).step_s
    sizes = TransferSizes.frozen([layer.weight_bytes for layer in costs.layers])
    evaluation = step_schedule(
        sizes,
        ring=warm_ring(NUM_SLOTS),
        runs=(Passes(num_trained=0, num_scored=NUM_MICRO_BATCHES),),
        trains_front=False,
        input_bytes=(),
    )
    training = step_schedule(
        sizes,
        ring=evaluation.ring_after,
        runs=(Passes(num_trained=NUM_MICRO_BATCHES),),
        trains_front=False,
        input_bytes=(),
    )
    return sum(simulate(one, duration_of(costs)).step_s for one in (evaluation, training))


def main() -> None:
    """Print predicted and measured seconds, by rate and arm."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    bench, arms = Bench(), (SFT, DPO, APART)
    for arm in arms:
        bench.step(arm)  # inspects, and fills the slots
    first = costs_of({arm: [bench.step(arm)[2]] for arm in arms}, bench.layer_bytes[0])
    forward_s = NUM_MICRO_BATCHES * first.layers[0].forward_s
    table = Table("link", "arm", "loads", "predicted", "measured", "of sft", "predicted")
    for frac in LOADS_FRACS:
        rate = bench.layer_bytes[0] / (frac * forward_s)
        free = {arm: list[Timeline]() for arm in arms}
        measured = {arm: list[float]() for arm in arms}
        loads = dict.fromkeys(arms, 0)
        for _ in range(rounds):
            for arm in arms:
                bench.link.bytes_per_s = NO_LINK
                free[arm].append(bench.step(arm)[2])
                bench.link.bytes_per_s = rate
                seconds, loads[arm], _timeline = bench.step(arm)
                measured[arm].append(seconds)
        at = costs_of(free, bench.layer_bytes[0]).at({Route.LOAD: Speed(rate)})
        for arm in arms:
            table.add_row(
                f"{rate / 1e6:.0f} MB/s",
                arm,
                str(loads[arm]),
                f"{predicted_s(arm, at):.3f} s",
                f"{median(measured[arm]):.3f} s",
                f"{median(measured[arm]) / median(measured[SFT]):.2f}",
                f"{predicted_s(arm, at) / predicted_s(SFT, at):.2f}",
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
