"""Passes of sampling as planned against passes that ran, and what rounds take on named cards.

    python -m tests.bench.bench_sampling passes [--rounds 9] [--machine FILE]
    python -m tests.bench.bench_sampling cards

`passes` runs on a CPU with one thread: a model of random weights whose layers are streamed, through
copies as fast as they are and slowed down to a link. The machine is probed first, or read from a
file of `sluice probe --dtype float32 --save FILE`. Of the passes after the second the fastest
counts, as others may use the machine. Where loads set the time of a pass its seconds are compared,
else those of the computing thread.

`cards` has no measurement. A row is a plan of a training step with as many slots as it chooses, or
with all layers in slots, and what a round takes with it: 16 prompts of 256 tokens with 8 answers of
256 tokens each, groups by prompt, and all rows in one group.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.planning.candidates import chooser, full_requests
from finetune.planning.request import with_backend
from finetune.planning.subject import model_subject
from offload.engine.engine import Engine, EngineOptions
from offload.errors import SluiceError
from offload.plan.machine.machine import GIB, Machine, named_machine
from offload.plan.plan import Plan, plan, with_costs
from offload.plan.sampling import SamplingRequest, pass_seconds, plan_sampling
from offload.plan.schedule.op import Route
from offload.plan.time.costs import Speed
from offload.probe.machine import PROBE_S, probe
from tests.bench.bench_engine import SlowLink
from tests.builders import lora, model_facts, request, workload

NUM_LAYERS, PROMPT_TOKENS = 8, 32
TARGETS = ["q_proj", "v_proj"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and the link that its layers are copied over."""

    name: str
    config: dict[str, Any]
    link_bytes_per_s: float | None  # None for copies as fast as they are
    slots: tuple[int, ...]


def _config(model_type: str, hidden: int, **more: int) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "vocab_size": 2048,
        **more,
    }


_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
SHAPES = (
    Shape(name="tiny", config=_config("qwen3", 64), link_bytes_per_s=None, slots=(2, 8)),
    Shape(name="dense", config=_config("qwen3", 512), link_bytes_per_s=None, slots=(2, 5, 8)),
    Shape(
        name="dense, slow link",
        config=_config("qwen3", 512),
        link_bytes_per_s=1.5e8,
        slots=(2, 5),
    ),
    Shape(
        name="mixture",
        config=_config("qwen3_moe", 256, **_EXPERTS),
        link_bytes_per_s=None,
        slots=(2, 8),
    ),
)
GROUPS, ROWS = (1, 4, 16), (1, 8)


def planned(shape: Shape, machine: Machine, num_slots: int) -> Plan:
    """Plan a small step of a shape with these slots, its link at the rate that it is given."""
    one = workload(seq_len=64, dtype_bytes=4, adapter=lora(rank=8, targets=tuple(TARGETS)))
    asked = request(one, num_slots=num_slots, num_micro_batches=1)
    found = plan(model_facts(shape.config), machine, asked)
    if shape.link_bytes_per_s is None:
        return found
    costs = found.costs.at({Route.LOAD: Speed(shape.link_bytes_per_s)})
    return with_costs(found, replace(costs, grade="calibrated"))


def attached(shape: Shape, num_slots: int) -> Engine:
    """Stream the layers of a model of this shape."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape.config)
    base = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = get_peft_model(base, LoraConfig(r=8, target_modules=TARGETS)).eval()
    link = SlowLink()
    if shape.link_bytes_per_s is not None:
        link.bytes_per_s = shape.link_bytes_per_s
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
    return Engine(model, device=link, options=options)


def passes_s(
    engine: Engine, *, num_groups: int, num_rows: int, num_rounds: int
) -> tuple[float, float, int]:
    """Return the seconds of a pass of one token, those of its thread, and its loads."""
    prompts = torch.randint(0, 2048, (num_groups, num_rows, PROMPT_TOKENS))
    tokens = torch.randint(0, 2048, (num_groups, num_rows, 1))
    wall_s, cpu_s = [], []
    with engine.generation() as generation:
        generation.next_logits(dict(enumerate(prompts)))
        generation.next_logits(dict(enumerate(tokens)))
        before = generation.num_loads
        for _ in range(num_rounds):
            start_s, busy_s = time.perf_counter(), time.thread_time()
            generation.next_logits(dict(enumerate(tokens)))
            wall_s.append(time.perf_counter() - start_s)
            cpu_s.append(time.thread_time() - busy_s)
        num_loads = (generation.num_loads - before) // num_rounds
    return min(wall_s), min(cpu_s), num_loads


def measured(machine: Machine, *, num_rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each shape, number of slots, and size of groups."""
    for shape in SHAPES:
        for num_slots in shape.slots:
            engine, one = attached(shape, num_slots), planned(shape, machine, num_slots)
            for num_groups in GROUPS:
                for num_rows in ROWS:
                    wall_s, cpu_s, num_loads = passes_s(
                        engine, num_groups=num_groups, num_rows=num_rows, num_rounds=num_rounds
                    )
                    asked = SamplingRequest(
                        num_prompts=num_groups,
                        num_answers=num_rows,
                        prompt_tokens=PROMPT_TOKENS,
                        longest_prompt=PROMPT_TOKENS,
                        new_tokens=num_rounds,
                        groups_share=False,
                    )
                    found = plan_sampling(one, asked)
                    predicted_s = pass_seconds(
                        one,
                        num_groups=num_groups,
                        num_rows=num_rows,
                        num_past=PROMPT_TOKENS + 1 + num_rounds // 2,
                    )
                    is_moving = found.limited_by == "link"
                    yield (
                        shape.name,
                        f"{num_slots}",
                        f"{num_groups} x {num_rows}",
                        f"{num_loads} {found.loads_per_pass}",
                        f"{predicted_s * 1e3:.1f}",
                        f"{wall_s * 1e3:.1f}",
                        f"{cpu_s * 1e3:.1f}",
                        f"{predicted_s / (wall_s if is_moving else cpu_s):.2f}",
                        found.limited_by,
                    )
            engine.close()


def show_passes(file: Path | None, *, num_rounds: int) -> None:
    """Print predicted and measured passes."""
    torch.set_num_threads(1)  # the other core is for the copies
    if file is None:
        machine = probe(device="cpu", dtype="float32", seconds=PROBE_S)
    else:
        machine = Machine.from_json(file.read_text())
    table = Table(title=f"one pass, {NUM_LAYERS} layers, {PROMPT_TOKENS} tokens and more in caches")
    for column in ("model", "slots", "groups x rows", "loads, planned"):
        table.add_column(column)
    for column in ("predicted, ms", "measured, ms", "of its thread", "ratio", "limited by"):
        table.add_column(column, justify="right")
    for row in measured(machine, num_rounds=num_rounds):
        table.add_row(*row)
        sys.stderr.write(" ".join(row) + "\n")
    Console().print(table)


MODELS, CARDS, RAM_GIB = ("qwen3-8b", "qwen3-30b-a3b"), ("rtx3060", "rtx4090", "rtx5090"), 96
CODECS = ("native", "bf16_packed", "nf4")
ROUND = SamplingRequest(
    num_prompts=16,
    num_answers=8,
    prompt_tokens=256,
    longest_prompt=256,
    new_tokens=256,
    groups_share=False,
)


def of_card(model: str, card: str, codec: str, num_slots: int | None) -> Plan:
    """Plan a step of a shipped shape.

    Raises:
        SluiceError: It does not fit.
    """
    settings = [f"offload.codec={codec}"]
    settings += [] if num_slots is None else [f"offload.num_slots={num_slots}"]
    subject = model_subject(model, settings)
    wanted, facts = subject.recipe, subject.facts
    machine = named_machine(card, dtype=wanted.model.dtype, ram_bytes=RAM_GIB * GIB)
    machine = with_backend(wanted, facts, machine)
    return chooser(wanted)(facts, machine, full_requests(wanted, facts, num_ranks=1)).plan


def rounds() -> Iterator[tuple[str, ...]]:
    """Yield a row for each model, card and form of the layers, streamed and, if it fits, not."""
    for model, card, codec in itertools.product(MODELS, CARDS, CODECS):
        words, seen = (model, card, codec), set[int]()
        for asks_all in (False, True):
            try:
                num_layers = model_subject(model, []).facts.num_layers
                made = of_card(model, card, codec, num_layers if asks_all else None)
                one, together = (
                    plan_sampling(made, replace(ROUND, groups_share=shares))
                    for shares in (False, True)
                )
            except SluiceError:
                if not asks_all:
                    yield (*words, "does not fit")
                continue
            if made.num_slots in seen:
                continue
            seen.add(made.num_slots)
            assert one.cache_bytes is not None
            yield (
                *words,
                f"{made.num_slots} of {num_layers}",
                f"{one.loads_per_pass}",
                f"{one.num_batches} x {one.groups_per_batch}",
                f"{one.cache_bytes / GIB:.2f}",
                f"{one.pass_s:.2f}",
                f"{one.tokens_per_s:,.0f}",
                f"{one.sample_s / 60:.1f}",
                one.limited_by,
                f"{together.tokens_per_s:,.0f}",
                f"{together.sample_s / 60:.1f}",
                together.limited_by,
                f"{made.step_s:.1f}",
            )


def show_rounds() -> None:
    """Print what rounds take."""
    table = Table(title=f"16 prompts x 8 answers of 256 tokens, {RAM_GIB} GiB of RAM, by plan")
    for column in ("model", "card", "layers as"):
        table.add_column(column)
    for column in (
        *("slots", "loads", "batches", "caches, GiB", "pass, s", "tokens/s", "min", "limited by"),
        *("tokens/s together", "min", "limited by", "a step, s"),
    ):
        table.add_column(column, justify="right")
    for row in rounds():
        table.add_row(*row)
    Console(width=170).print(table)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("passes", "cards"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--machine", type=Path)
    given = parser.parse_args()
    if given.what == "passes":
        show_passes(given.machine, num_rounds=given.rounds)
    else:
        show_rounds()


if __name__ == "__main__":
    main()
