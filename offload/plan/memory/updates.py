"""The temporary memory of a layer's update on the device."""

from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import DEVICE_PIECE_ELEMENTS
from offload.plan.facts.workload import Workload

COPIES = 5  # in fp32, of what is updated at once: master, gradient twice, bits, a state
MUON_BYTES = 4 + 3 * 2 + 2 * 2  # the step in fp32; in bf16 three of it, and two squares at most


def device_update_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return the temporaries of the update of a layer's own weights; 0 if it is on the host.

    Adafactor updates a tensor at a time, Muon a matrix, the others pieces.
    """
    if workload.updates == "host":
        return 0
    linears = [linear for layer in facts.layers for linear in layer.linears]
    if workload.optimizer == "muon":
        largest = max(linear.d_in * linear.d_out for linear in linears)
        return (COPIES * FP32_BYTES + MUON_BYTES) * largest
    largest = max(linear.num_weights for linear in linears)
    at_once = largest if workload.optimizer == "adafactor" else min(largest, DEVICE_PIECE_ELEMENTS)
    return COPIES * FP32_BYTES * at_once
