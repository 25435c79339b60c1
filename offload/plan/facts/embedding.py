"""The input embedding: whether it may be in host memory, and what a micro-batch moves of it."""

from offload.plan.facts.codec import aligned
from offload.plan.facts.facts import AdapterSpec, ModelFacts
from offload.plan.facts.trainable import EMBEDDING, VIRTUAL, outer_module_sizes
from offload.plan.facts.workload import Workload
from offload.plan.schedule.lookups import NUM_ROW_BUFFERS

TOKEN_BYTES = 8


def rows_bytes(num_rows: int, row_bytes: int) -> int:
    """Return the bytes of some rows of the embedding on their way to the device.

    With them go their tokens, in order, and one row for a token that is not among them.
    """
    return aligned(TOKEN_BYTES * num_rows) + (num_rows + 1) * row_bytes


def most_rows_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what the rows of a micro-batch take at most: if no token of it is there twice."""
    row_bytes = facts.embedding_parameters // facts.vocab_size * workload.dtype_bytes
    return rows_bytes(min(workload.num_tokens, facts.vocab_size), row_bytes)


def row_buffers_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what buffers of rows take, on the device and once more page-locked in host memory."""
    is_on_host = workload.embeddings == "host"
    return NUM_ROW_BUFFERS * most_rows_bytes(facts, workload) if is_on_host else 0


def embedding_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what the embedding takes in host memory; 0 on the device, or if a head holds it."""
    is_on_host = workload.embeddings == "host" and not facts.tie_word_embeddings
    return facts.embedding_parameters * workload.dtype_bytes if is_on_host else 0


def why_on_device(facts: ModelFacts, adapter: AdapterSpec) -> str:
    """Return why the embedding has to be on the device; nothing if it may be in host memory.

    Args:
        facts: The model.
        adapter: What trains.
    """
    outer = outer_module_sizes(facts, adapter)
    if outer.get(EMBEDDING):
        return "it trains"
    if VIRTUAL in outer and not adapter.num_past:
        return "virtual tokens train, which it looks up"
    return ""
