"""The time of a step of a head alone, on features that are there."""

from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import TALL_COLUMNS, Machine
from offload.plan.time.pricer import Pricer
from offload.plan.time.work import Work

LOSS_OPS = 40
"""Kernels of a product, a loss over all rows with its metrics, and their gradients."""


def head_step_s(
    facts: ModelFacts, machine: Machine, workload: Workload, *, num_features: int
) -> float:
    """Return the seconds of a forward and backward of a head, which computes in fp32.

    Features are gathered in their own type and widened. The product of the forward and that of the
    gradient by the weights are bound by the features that they read, as products of few columns.

    Args:
        facts: Of the model.
        machine: Where it runs.
        workload: Of a micro-batch, for the type of features.
        num_features: Of a step.
    """
    at, size = Pricer(machine=machine, facts=facts, workload=workload), facts.hidden_size
    num_bytes = num_features * size * (3 * workload.dtype_bytes + FP32_BYTES)
    flops = 2 * 2.0 * num_features * size * max(TALL_COLUMNS, facts.num_outputs)
    products = Work(compute_s=flops / machine.tall_fp32_flops_per_s.value, flops=flops)
    return (products + at.traffic(num_bytes, num_ops=LOSS_OPS)).seconds(machine)
