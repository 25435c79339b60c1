"""The input embedding: whether it may be in host memory, and what a micro-batch moves of it."""

import math

from offload.plan.facts.codec import aligned
from offload.plan.facts.facts import AdapterSpec, ModelFacts
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.trainable import EMBEDDING, VIRTUAL, outer_module_sizes
from offload.plan.facts.workload import Workload
from offload.plan.schedule.lookups import NUM_ROW_BUFFERS

TOKEN_BYTES = 8
ROW_ROUNDS_BYTES = 16 * 2**20  # of gradients by rows on their way between ranks, at most


def rows_bytes(num_rows: int, row_bytes: int) -> int:
    """Return the bytes of some rows of the embedding on their way to the device.

    With them go their tokens, in order, and one row for a token that is not among them.
    """
    return aligned(TOKEN_BYTES * num_rows) + (num_rows + 1) * row_bytes


def most_rows_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what the rows of a micro-batch take at most: if no token of it is there twice."""
    return rows_bytes(_most_rows(facts, workload), _row_bytes(facts, workload))


def most_row_gradients_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what gradients by these rows take at most."""
    return _most_rows(facts, workload) * _row_bytes(facts, workload)


def _most_rows(facts: ModelFacts, workload: Workload) -> int:
    return min(workload.num_tokens, facts.vocab_size)


def _row_bytes(facts: ModelFacts, workload: Workload) -> int:
    return facts.embedding_parameters // facts.vocab_size * workload.dtype_bytes


def row_buffers_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what buffers of rows take, on the device and once more page-locked in host memory."""
    is_on_host = workload.embeddings == "host"
    return NUM_ROW_BUFFERS * most_rows_bytes(facts, workload) if is_on_host else 0


def embedding_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what the embedding takes in host memory; 0 on the device, or if a head holds it."""
    is_on_host = workload.embeddings == "host" and not facts.tie_word_embeddings
    return facts.embedding_parameters * workload.dtype_bytes if is_on_host else 0


def num_trained_on_host(facts: ModelFacts, workload: Workload) -> int:
    """Return how many weights of the embedding train in host memory; 0 if it does not."""
    is_on_host = workload.embeddings == "host"
    return outer_module_sizes(facts, workload.adapter).get(EMBEDDING, 0) if is_on_host else 0


def row_sum_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what the sums of its gradients take there, in fp32."""
    return FP32_BYTES * num_trained_on_host(facts, workload)


def most_step_rows(facts: ModelFacts, workload: Workload, num_micro_batches: float) -> int:
    """Return of how many rows a rank has gradients in a step, at most."""
    return min(math.ceil(num_micro_batches * workload.num_tokens), facts.vocab_size)


def step_row_bytes(facts: ModelFacts, workload: Workload, num_micro_batches: float) -> int:
    """Return what the sums of a rank's gradients by rows take, in fp32, with those on their way.

    Of several ranks each first adds up those of its own micro-batches.
    """
    if not num_trained_on_host(facts, workload):
        return 0
    num_rows = most_step_rows(facts, workload, num_micro_batches)
    width = facts.embedding_parameters // facts.vocab_size
    return ROW_ROUNDS_BYTES + num_rows * (TOKEN_BYTES + FP32_BYTES * width)


def summed_row_bytes(num_rows: int, row_bytes: int, *, num_ranks: int) -> int:
    """Return what a rank that adds up gradients by rows gets from the others, if all are alike.

    Args:
        num_rows: Of each rank.
        row_bytes: Of the gradient by a row, as it is sent.
        num_ranks: Processes that share a step.
    """
    return (num_ranks - 1) * (TOKEN_BYTES * (1 + num_rows) + num_rows * row_bytes)


def new_row_gradients_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what a micro-batch's new gradients by rows take on the device, if it trains."""
    if not num_trained_on_host(facts, workload):
        return 0
    return most_row_gradients_bytes(facts, workload) + _row_bytes(facts, workload)


def places_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what a micro-batch keeps for them: the row of each token."""
    return TOKEN_BYTES * workload.num_tokens if num_trained_on_host(facts, workload) else 0


def why_on_device(facts: ModelFacts, adapter: AdapterSpec) -> str:
    """Return why the embedding has to be on the device; nothing if it may be in host memory.

    Args:
        facts: The model.
        adapter: What trains.
    """
    outer = outer_module_sizes(facts, adapter)
    if facts.tie_word_embeddings and outer.get(EMBEDDING):
        return "it trains, and is the head too"
    if VIRTUAL in outer and not adapter.num_past:
        return "virtual tokens train, which it looks up"
    if outer.get(EMBEDDING) and adapter.whole is None:
        return "a copy of it trains next to an adapter, on the device"
    return ""
