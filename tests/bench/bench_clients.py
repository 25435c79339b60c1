"""What several clients of one engine take together, as planned and as it ran.

    python -m tests.bench.bench_clients [--rounds 9] [--probe-s 10]

On a CPU with one thread: a model of random weights whose layers are streamed through copies that
are slowed down to a link. The machine is probed in the same process. Each client trains on four
rows of 64 tokens again and again, and a frozen copy of it answers a prompt of 32 tokens meanwhile:
a round is a pass forth and back for all clients, and a pass for one token of each answer. Rounds
after the third are timed, the fifth of them that is fastest, as others may use the machine.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.clients.requests import Freeze, Sample, Train
from finetune.clients.scheduler import Scheduler
from offload.engine.adapters import AdapterSettings
from offload.engine.engine import EngineOptions
from offload.engine.objective import Scores, StepLoss
from offload.engine.shared import SharedEngine
from offload.plan.machine.machine import Machine
from offload.plan.plan import Plan, plan, with_costs
from offload.plan.sampling import pass_seconds
from offload.plan.schedule.op import Route
from offload.plan.time.costs import Speed
from offload.probe.machine import probe
from tests.bench.bench_engine import SlowLink
from tests.bench.record import quantiles
from tests.builders import lora, model_facts, request, workload

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "vocab_size": 2048,
}
TARGETS, RANK, LINK_BYTES_PER_S = ("q_proj", "v_proj"), 8, 1e8
CLIENTS, NUM_SLOTS = (1, 2, 4, 8), 2
NUM_ROWS, ROW_TOKENS, PROMPT_TOKENS, NUM_WARM = 4, 64, 32, 3


class Sum:
    """Minus the sum of log-probabilities."""

    reference = None

    def loss(self, scores: Scores) -> StepLoss:
        return StepLoss(value=-scores.policy_N.sum(), metrics={})


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a round takes."""

    wall_s: float
    train_loads: float  # of a pass to train
    decode_loads: float  # of a pass for a token


def attached() -> SharedEngine:
    """Stream the layers of the model, with an adapter of rank 1 as the pattern of others."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIG)
    base = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    pattern = LoraConfig(r=1, target_modules=list(TARGETS))
    model = get_peft_model(base, pattern, adapter_name="pattern").eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    link = SlowLink()
    link.bytes_per_s = LINK_BYTES_PER_S
    options = EngineOptions(
        codec="native",
        tier="ram",
        store_dir=None,
        num_slots=NUM_SLOTS,
        stash="device",
        trained_weights="device",
        head_chunk_tokens=1024,
        num_kept_graphs=0,
    )
    return SharedEngine(model, device=link, options=options)


def measured(num_clients: int, *, num_rounds: int) -> Round:
    """Let clients train and sample together."""
    engine = attached()
    scheduler = Scheduler(
        engine,
        pattern="pattern",
        max_clients=2 * num_clients,
        max_rank=RANK,
        max_cached_tokens=num_clients * (PROMPT_TOKENS + NUM_WARM + num_rounds),
    )
    settings = AdapterSettings(rank=RANK, alpha=16.0, targets=frozenset(TARGETS))
    for number in range(num_clients):
        name = f"client_{number}"
        scheduler.add(name, settings, seed=number)
        ids = torch.randint(0, 2048, (NUM_ROWS, 1, ROW_TOKENS))
        rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
        scheduler.submit(name, Freeze(name=f"frozen_{number}"))
        for _ in range(NUM_WARM + num_rounds):
            scheduler.submit(name, Train(rows=rows, objective=Sum()))
        prompt = torch.randint(0, 2048, (PROMPT_TOKENS,)).tolist()
        asked = Sample(prompt=prompt, max_tokens=NUM_WARM + num_rounds, seed=number)
        scheduler.submit(f"frozen_{number}", asked)
    for _ in range(NUM_WARM):
        scheduler.run_pass()
    before, walls_s = dict(scheduler.num_loads), []
    for _ in range(num_rounds - 1):  # in the last one no answer may be left
        start_s = time.perf_counter()
        scheduler.run_pass()
        walls_s.append(time.perf_counter() - start_s)
    engine.close()
    loads = {kind: (num - before[kind]) / len(walls_s) for kind, num in scheduler.num_loads.items()}
    return Round(
        wall_s=quantiles(walls_s)["p20"],
        train_loads=loads["train"],
        decode_loads=loads["decode"],
    )


def predicted(machine: Machine, num_clients: int, *, num_rounds: int) -> Round:
    """Plan the same: a step that runs share, as sweeps do, and a pass of sampling."""
    adapter = lora(rank=RANK, targets=TARGETS)
    one = request(
        workload(seq_len=ROW_TOKENS, dtype_bytes=4, adapter=adapter),
        num_slots=NUM_SLOTS,
        num_micro_batches=NUM_ROWS,
    )
    found = slowed(
        plan(model_facts(CONFIG), machine, replace(one, others=(one,) * (num_clients - 1)))
    )
    decode_s = pass_seconds(
        found,
        num_groups=num_clients,
        num_rows=1,
        num_past=PROMPT_TOKENS + NUM_WARM + num_rounds // 2,
    )
    return Round(
        wall_s=found.step_s + decode_s,
        train_loads=found.schedule.num_loads,
        decode_loads=CONFIG["num_hidden_layers"] - NUM_SLOTS,
    )


def slowed(found: Plan) -> Plan:
    """Return a plan with the link's rate in place of the machine's."""
    costs = found.costs.at({Route.LOAD: Speed(LINK_BYTES_PER_S)})
    return with_costs(found, replace(costs, grade="calibrated"))


def rows(machine: Machine, *, num_rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each number of clients."""
    alone: tuple[Round, Round] | None = None
    for num in CLIENTS:
        ran = measured(num, num_rounds=num_rounds)
        planned = predicted(machine, num, num_rounds=num_rounds)
        alone = alone or (ran, planned)
        trained = num * NUM_ROWS * ROW_TOKENS
        yield (
            f"{num}",
            f"{ran.train_loads:.0f} {planned.train_loads:.0f}",
            f"{ran.decode_loads:.0f} {planned.decode_loads:.0f}",
            f"{planned.wall_s * 1e3:.0f}",
            f"{ran.wall_s * 1e3:.0f}",
            f"{planned.wall_s / ran.wall_s:.2f}",
            f"{trained / ran.wall_s:,.0f}",
            f"{num / ran.wall_s:.1f}",
            f"{num * alone[0].wall_s / ran.wall_s:.2f}",
            f"{num * alone[1].wall_s / planned.wall_s:.2f}",
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--probe-s", type=float, default=10.0)
    given = parser.parse_args()
    torch.set_num_threads(1)  # the other core is for the copies
    machine = probe(device="cpu", dtype="float32", seconds=given.probe_s)
    table = Table(title=f"rounds of clients, {LINK_BYTES_PER_S / 1e6:.0f} MB/s, {NUM_SLOTS} slots")
    for column in (
        *("clients", "loads to train, planned", "to decode", "predicted, ms", "measured, ms"),
        *("ratio", "trained tokens/s", "sampled tokens/s", "of one client's", "predicted"),
    ):
        table.add_column(column, justify="right")
    for row in rows(machine, num_rounds=given.rounds):
        table.add_row(*row)
        sys.stderr.write(" ".join(row) + "\n")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
