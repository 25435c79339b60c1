"""The memory of routers whose logits have a loss."""

from offload.plan.facts.facts import LayerFacts, ModelFacts
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.workload import Workload

# While the router loss of a micro-batch is computed: the softmax, and the gradient of the logits;
# of a layer where it is over the step, with their masked copies and gradients in fp32.
ROUTER_LOSS_COPIES = 2
ROUTER_LOSS_FP32_COPIES = 3


def router_loss_bytes(facts: ModelFacts, workload: Workload, num_micro_batches: float) -> float:
    """Return what a router loss takes: of one layer over a step, else of all that wait for it."""
    sizes = [router_bytes(layer, workload) for layer in facts.layers]
    if workload.router_loss == "step":
        fp32_copies = ROUTER_LOSS_FP32_COPIES * FP32_BYTES / workload.dtype_bytes
        return (ROUTER_LOSS_COPIES + fp32_copies) * max(sizes)
    return (num_micro_batches + ROUTER_LOSS_COPIES) * sum(sizes)


def router_bytes(layer: LayerFacts, workload: Workload) -> int:
    """Return the bytes of a layer's router logits for one micro-batch, if they have a loss."""
    if workload.router_loss is None:
        return 0
    return workload.num_tokens * (layer.num_experts or 0) * workload.dtype_bytes
