"""The output head: whether its weight may be in host memory, and its size there."""

from offload.plan.facts.embedding import why_on_device
from offload.plan.facts.facts import AdapterSpec, ModelFacts
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.trainable import HEAD, outer_module_sizes
from offload.plan.facts.workload import Workload
from offload.plan.schedule.head import room_bytes


def head_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what the head takes in host memory, and on the link; 0 if it is on the device."""
    is_tied, is_on_host = facts.tie_word_embeddings, workload.head == "host"
    num_parameters = facts.embedding_parameters if is_tied else facts.head_parameters
    return num_parameters * workload.dtype_bytes if is_on_host else 0


def num_head_trained_on_host(facts: ModelFacts, workload: Workload) -> int:
    """Return how many weights of the head train in host memory; 0 if it does not."""
    is_trained = bool(outer_module_sizes(facts, workload.adapter).get(HEAD))
    return facts.head_parameters if is_trained and workload.head == "host" else 0


def head_gradient_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what its gradient takes, in slots and in host memory: it is added up in fp32."""
    return FP32_BYTES * num_head_trained_on_host(facts, workload)


def head_room_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what a head in host memory needs of the slots: its weight, and its gradient."""
    return room_bytes(head_bytes(facts, workload), head_gradient_bytes(facts, workload))


def why_head_on_device(facts: ModelFacts, adapter: AdapterSpec, *, num_ranks: int) -> str:
    """Return why the head has to be on the device; nothing if it may be in host memory.

    Args:
        facts: The model.
        adapter: What trains.
        num_ranks: Processes that share a step.
    """
    if facts.tie_word_embeddings:
        why = why_on_device(facts, adapter)
        return why and f"the embedding has the same weight: {why}"
    if facts.num_classes:
        return f"it has {facts.num_classes} outputs and takes little memory"
    if not facts.head_parameters:
        return "it has no weight"
    num_trained = outer_module_sizes(facts, adapter).get(HEAD, 0)
    if num_trained and adapter.whole is None:
        return "a copy of it trains next to an adapter, on the device"
    if 0 < num_trained < facts.head_parameters:
        return "it trains in part, and its weight does not"
    if num_trained and num_ranks > 1:
        return f"it trains, and {num_ranks} processes add up its gradients on their devices"
    return ""
