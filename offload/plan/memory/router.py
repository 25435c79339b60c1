"""The memory of routers whose logits have a loss."""

from offload.plan.facts.facts import LayerFacts, ModelFacts
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.workload import Workload

# While the router loss of a layer is computed over the step: the softmax, the gradient of the
# logits, and their masked copies and gradients in fp32.
ROUTER_LOSS_COPIES = 2
ROUTER_LOSS_FP32_COPIES = 3


def router_loss_bytes(facts: ModelFacts, workload: Workload) -> float:
    """Return what the router loss over a step takes: that of one layer."""
    fp32_copies = ROUTER_LOSS_FP32_COPIES * FP32_BYTES / workload.dtype_bytes
    largest = max(router_bytes(layer, workload) for layer in facts.layers)
    return (ROUTER_LOSS_COPIES + fp32_copies) * largest


def router_bytes(layer: LayerFacts, workload: Workload) -> int:
    """Return the bytes of a layer's router logits for one micro-batch, if they have a loss."""
    if not workload.has_router_loss:
        return 0
    return workload.num_tokens * (layer.num_experts or 0) * workload.dtype_bytes
