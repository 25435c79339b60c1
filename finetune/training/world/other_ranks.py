"""What the ranks of a run tell each other of their plans, where these differ."""

from dataclasses import replace

from finetune.training.ranks import Ranks
from offload.plan.plan import Plan


def with_others(plan: Plan, ranks: Ranks) -> Plan:
    """Return a rank's plan with what it waits for; ranks that are planned alike wait for none."""
    if plan.request.own_micro_batches is None:
        return plan
    every = ranks.exchange(plan.as_other)
    others = tuple(one for rank, one in enumerate(every) if rank != ranks.index)
    return replace(plan, others=others)
