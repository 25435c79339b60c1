"""What a step of named cards is predicted to take, at the prices of two commits.

    python -m tests.bench.bench_prices [--levers]

The prices before are those of commit afa2df0: a card has the memory that it is sold with, 0.8 of
each datasheet rate is reached unless an owner measured more, kernels that fuse their passes are no
faster than eager ones, and a loop over experts multiplies at the rate of grouped products. At
either prices a step is planned with norms, rotations and gates by the models' own code, and fused;
then at the prices of now in less RAM, and without sent graphs, without anything kept or sent. Last
comes one lever after the other at both prices, and the seconds saved at the prices before: as a
share of those saved at the prices of now, and of those from none before to all now.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from finetune.planning.candidates import chosen_plan, full_requests
from finetune.planning.request import with_configured_backend
from finetune.planning.subject import model_subject
from finetune.report.format import shown_break_even, shown_gib, shown_time
from offload.errors import DoesNotFitError
from offload.plan.machine import machine as prices
from offload.plan.machine.cards import CARDS
from offload.plan.machine.machine import GIB, Machine, named_machine
from offload.plan.plan import Plan
from offload.plan.time import pricer

ALL_RATES = dict.fromkeys(("consumer", "workstation", "server"), 0.8)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step that is planned at both prices, in RAM that holds it."""

    name: str
    model: str
    card: str
    settings: tuple[str, ...]


CASES = (
    Case(
        name="Qwen3-30B-A3B bf16 r8, RTX 5090, 6 x 1 x 8192",
        model="qwen3-30b-a3b",
        card="rtx5090",
        settings=(
            *("train.seq_len=8192", "train.micro_batch_size=1", "train.tokens_per_step=49152"),
            *("adapter.rank=8", "adapter.alpha=16", "adapter.targets=attention"),
            *("adapter.experts=true", "offload.codec=native", "train.optimizer=adamw_8bit"),
        ),
    ),
    Case(
        name="Llama-3.1-8B nf4 r8, RTX 4090, 4 x 2 x 2048",
        model="llama-3.1-8b",
        card="rtx4090",
        settings=(
            *("train.seq_len=2048", "train.micro_batch_size=2", "train.tokens_per_step=16384"),
            *("adapter.rank=8", "adapter.alpha=16", "offload.codec=nf4"),
        ),
    ),
    Case(
        name="Qwen3-32B nf4 r16, RTX 4090, 8 x 1 x 2048",
        model="qwen3-32b",
        card="rtx4090",
        settings=(
            *("train.seq_len=2048", "train.micro_batch_size=1", "train.tokens_per_step=16384"),
            *("adapter.rank=16", "adapter.alpha=32", "offload.codec=nf4"),
        ),
    ),
    Case(
        name="Qwen3-30B-A3B bf16 r8, RTX 5090, a loop over experts",
        model="qwen3-30b-a3b",
        card="rtx5090",
        settings=(
            *("train.seq_len=8192", "train.micro_batch_size=1", "train.tokens_per_step=49152"),
            *("adapter.rank=8", "adapter.alpha=16", "adapter.targets=attention"),
            *("adapter.experts=true", "offload.codec=native", "train.optimizer=adamw_8bit"),
            "model.experts_implementation=eager",
        ),
    ),
)


NO_GRAPHS, NO_OUTPUTS = "offload.sent_graphs=none", "offload.attention_outputs=none"
LESS: dict[str, tuple[str, ...]] = {
    "nothing kept or sent": (NO_GRAPHS, NO_OUTPUTS, "offload.kept_graphs=0"),
    "no graphs sent": (NO_GRAPHS,),
    "all": (),
}


@dataclass(frozen=True, kw_only=True)
class Lever:
    """Settings with which steps are planned, levers before it included.

    Attributes:
        name: What it adds.
        settings: All of them.
        kernels: The code of norms, rotations and gates.
        leaves_out: Whether recomputes leave out what nothing reads.
    """

    name: str
    settings: tuple[str, ...]
    kernels: str = "fused"
    leaves_out: bool = True


KEEPS_NOTHING = LESS["nothing kept or sent"]
LEVERS = (
    Lever(
        name="none",
        settings=("adapter.compute_dtype=float32", *KEEPS_NOTHING),
        kernels="plain",
        leaves_out=False,
    ),
    Lever(name="branches", settings=KEEPS_NOTHING, kernels="plain", leaves_out=False),
    Lever(name="fused layers", settings=KEEPS_NOTHING, leaves_out=False),
    Lever(name="products left out", settings=KEEPS_NOTHING),
    Lever(name="outputs of attention", settings=(NO_GRAPHS,)),
    Lever(name="whole graphs", settings=()),
)


@contextmanager
def before() -> Iterator[None]:
    """Price as the commit before did."""
    eager = 0.8
    with (
        patch.multiple(
            prices, GEMM_FRACS=ALL_RATES, FP32_GEMM_FRACS=ALL_RATES, LISTED_FRAC=1.0, DRIVER_BYTES=0
        ),
        patch.multiple(prices, DESKTOP_BYTES=0, EAGER_FRAC=eager),
        patch.multiple(pricer, EAGER_FRAC=eager, FUSED_FRAC=eager, LOOP_SLOWDOWN=1.0),
    ):
        yield


def as_sold(machine: Machine) -> Machine:
    """Return a card with the memory that it is sold with, and the rate of its large copies."""
    card = CARDS[machine.name]
    memory = machine.memory_bytes_per_s
    if card.measured_memory_gb_per_s is not None:
        memory = replace(memory, value=card.measured_memory_gb_per_s * 1e9)
    return replace(machine, vram_bytes=int(card.memory_gib * GIB), memory_bytes_per_s=memory)


def planned(
    case: Case,
    *,
    is_before: bool,
    kernels: str = "plain",
    more: Sequence[str] = (),
    ram_gib: int = 128,
    leaves_out: bool = True,
) -> Plan | None:
    """Plan a step; None if it does not fit."""
    settings = [*case.settings, f"model.layer_kernels={kernels}", *more]
    subject = model_subject(case.model, settings)
    machine = named_machine(case.card, ram_bytes=ram_gib * GIB)
    if is_before:
        machine = as_sold(machine)
    here = with_configured_backend(subject.recipe, subject.facts, machine)
    requests = [
        replace(
            request,
            typical=replace(request.typical, leaves_out=leaves_out),
            largest=replace(request.largest, leaves_out=leaves_out),
        )
        for request in full_requests(subject.recipe, subject.facts, num_ranks=1)
    ]
    try:
        return chosen_plan(subject.facts, here, requests)
    except DoesNotFitError:
        return None


def figures(plan: Plan | None) -> list[str]:
    """Return what changes with prices."""
    if plan is None:
        return ["does not fit"]
    rate = plan.tokens_per_step / plan.step_s
    return [
        f"{shown_time(plan.step_s)}, {rate:,.0f} tokens/s",
        f"{plan.num_slots} slots, {plan.num_kept_graphs} kept and"
        f" {plan.residency.num_sent_graphs} sent graphs",
        f"{plan.residency.num_kept_outputs} kept and"
        f" {plan.residency.num_sent_outputs} sent outputs",
        f"{shown_gib(plan.peak_bytes)} of {shown_gib(plan.machine.vram_bytes)}",
        f"N* {shown_break_even(plan.break_even_tokens)}",
    ]


def lever_rows(case: Case) -> Iterator[tuple[str, str, str]]:
    """Yield the seconds of a step with one lever after the other, and shares of those saved."""
    seconds: list[tuple[float, float]] = []
    for lever in LEVERS:
        both = []
        for is_before in (True, False):
            with before() if is_before else nullcontext():
                plan = planned(
                    case,
                    is_before=is_before,
                    kernels=lever.kernels,
                    more=lever.settings,
                    leaves_out=lever.leaves_out,
                )
            both.append(math.nan if plan is None else plan.step_s)
        seconds.append((both[0], both[1]))
        yield lever.name, f"{both[0]:.2f}", f"{both[1]:.2f}"
    (old, new), (last_old, last_new) = seconds[0], seconds[-1]
    yield "saved", f"{old - last_old:.2f}", f"{new - last_new:.2f}"
    yield "of those saved now", f"{(old - last_old) / (new - last_new):.2f}", ""
    yield "of those from none before to all now", f"{(old - last_old) / (old - last_new):.2f}", ""


def main() -> None:
    """Print a column for each price, and below each step that with fused layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--levers", action="store_true", help="only one lever after the other")
    if not parser.parse_args().levers:
        show_prices()
    for case in CASES[:3]:
        table = Table(f"{case.name}, 128 GiB", "prices before", "prices now")
        for row in lever_rows(case):
            table.add_row(*row)
        Console(width=150).print(table)


def show_prices() -> None:
    """Print steps at both prices, and in less RAM with less kept or sent."""
    table = Table("step", "prices before", "prices now")
    for case in CASES:
        for kernels in ("plain", "fused"):
            with before():
                old = figures(planned(case, is_before=True, kernels=kernels))
            new = figures(planned(case, is_before=False, kernels=kernels))
            table.add_row(f"{case.name}, {kernels} layers", "\n".join(old), "\n".join(new))
    Console(width=150).print(table)
    table = Table("step, fused layers, prices now", *LESS)
    for case in CASES:
        for ram_gib in (64, 128):
            plans = (
                planned(case, is_before=False, kernels="fused", more=more, ram_gib=ram_gib)
                for more in LESS.values()
            )
            cells = ("\n".join(figures(plan)[:3]) for plan in plans)
            table.add_row(f"{case.name}, {ram_gib} GiB", *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
