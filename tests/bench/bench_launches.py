"""What a step would save if its launches took no time, by plan: the most that CUDA graphs can give.

    python -m tests.bench.bench_launches [RECIPE ...] [--cards rtx4090,rtx5090] [--set KEY=VALUE]

A line for each recipe and card: the planned step, and what of it is left out when launches take no
time. Without a recipe, all shipped ones.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from finetune.planning.candidates import chooser, full_requests
from finetune.planning.request import with_backend
from finetune.planning.subject import subject_of
from offload.errors import SluiceError
from offload.plan.machine.machine import named_machine
from offload.plan.plan import Plan, costs_of, with_costs
from tests.bench.record import ROOT

CARDS = "rtx3060-12gb,rtx4090,rtx5090,h100"


def planned(recipe: str, card: str, overrides: list[str]) -> Plan:
    """Plan a recipe's step on a card.

    Raises:
        SluiceError: It does not fit, or the recipe is wrong.
    """
    subject = subject_of(recipe, overrides)
    wanted, facts = subject.recipe, subject.facts
    machine = with_backend(wanted, facts, named_machine(card, dtype=wanted.model.dtype))
    return chooser(wanted)(facts, machine, full_requests(wanted, facts, num_ranks=1)).plan


def without_launches(plan: Plan) -> float:
    """Return the seconds of the same step when the host issues operations in no time."""
    launch_s = replace(plan.machine.launch_s, value=1e-12)
    machine = replace(plan.machine, launch_s=launch_s)
    return with_costs(plan, costs_of(plan.facts, machine, plan.request)).step_s


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--cards", default=CARDS)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    given = parser.parse_args()
    recipes = given.recipes or sorted(map(str, (ROOT / "recipes").glob("*.yaml")))
    for recipe in recipes:
        for card in given.cards.split(","):
            name = f"{Path(recipe).stem:20} {card:14}"
            try:
                plan = planned(recipe, card, given.overrides)
            except SluiceError:
                sys.stdout.write(f"{name} does not fit\n")
                continue
            typical, free_s = plan.request.typical, without_launches(plan)
            sizes = f"{plan.request.num_micro_batches} x {typical.num_tokens} tokens"
            saved = 1 - free_s / plan.step_s
            sys.stdout.write(f"{name} {plan.step_s:9.3f} s {saved:7.2%} saved, {sizes}\n")


if __name__ == "__main__":
    main()
