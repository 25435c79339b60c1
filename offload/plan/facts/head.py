"""The output head: whether its weight may be in host memory, and its size there."""

from offload.plan.facts.embedding import why_on_device
from offload.plan.facts.facts import AdapterSpec, ModelFacts
from offload.plan.facts.trainable import HEAD, outer_module_sizes
from offload.plan.facts.workload import Workload


def head_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what the head takes in host memory, and on the link; 0 if it is on the device."""
    is_tied, is_on_host = facts.tie_word_embeddings, workload.head == "host"
    num_parameters = facts.embedding_parameters if is_tied else facts.head_parameters
    return num_parameters * workload.dtype_bytes if is_on_host else 0


def why_head_on_device(facts: ModelFacts, adapter: AdapterSpec) -> str:
    """Return why the head has to be on the device; nothing if it may be in host memory.

    Args:
        facts: The model.
        adapter: What trains.
    """
    if facts.tie_word_embeddings:
        why = why_on_device(facts, adapter)
        return why and f"the embedding has the same weight: {why}"
    if facts.num_classes:
        return f"it has {facts.num_classes} outputs and takes little memory"
    if not facts.head_parameters:
        return "it has no weight"
    if outer_module_sizes(facts, adapter).get(HEAD):
        return "it trains"
    return ""
