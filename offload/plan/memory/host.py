"""The use of host memory, in named terms."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from offload.plan.facts.embedding import (
    embedding_bytes,
    num_trained_on_host,
    row_buffers_bytes,
    row_sum_bytes,
    step_row_bytes,
)
from offload.plan.facts.facts import ModelFacts, WholeWeights
from offload.plan.facts.head import head_bytes, head_gradient_bytes, num_head_trained_on_host
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import (
    HOST_GRADIENTS,
    HOST_STATES,
    LOW_HALVES,
    WEIGHTS,
    host_update_bytes,
    paged_bytes,
)
from offload.plan.facts.trainable import EMBEDDING, trained_tensor_shapes
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import MIB, Machine
from offload.plan.memory.memory import (
    DATA_WORKERS,
    EMBEDDING_GRADIENTS,
    EMBEDDINGS,
    HEAD,
    HEAD_GRADIENT,
    HOST_TEMPORARIES,
    OTHER_RANKS,
    PAGED_STATES,
    ROWS,
    SENT,
    SLAB,
    STAGING,
    STASH,
    MemoryTerm,
    input_bytes,
    total_bytes,
)
from offload.plan.owners import owned_around, owned_by
from offload.plan.schedule.schedule import NUM_STAGING, PIECE_BYTES

FEATURES = "features of a linear probe"
LOADING_LAYERS = 2
WORKER_BYTES = 256 * MIB
CUDA_PROCESS_BYTES = 2048 * MIB  # 15 runs on an H200, torch 2.11, CUDA 13: 1.8 to 2.2 GiB resident
ADAFACTOR_COPIES = 3  # in fp32, of a tensor: itself, its gradient, its step


LOCKED_TERMS = (STASH, SENT, ROWS, HEAD, HEAD_GRADIENT)
"""Terms of host memory that are page-locked in addition to the layers, if a GPU computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLoad:
    """What one run of a step has in host memory.

    Attributes:
        workload: Its largest micro-batch.
        num_workers: Its data workers of each rank.
        num_stashed: Micro-batches whose layer inputs each rank stashes in host memory.
        num_summed: Of its largest micro-batches, how many have all rows by which each rank adds up
            gradients of an embedding in RAM, before all ranks' are added up; 0 with a single rank.
        feature_bytes: What a head reads that learns alone before the first step.
    """

    workload: Workload
    num_workers: int
    num_stashed: int
    num_summed: float = 0.0
    feature_bytes: int = 0


def host_terms(
    facts: ModelFacts,
    machine: Machine,
    runs: Sequence[HostLoad],
    *,
    num_ranks: int,
    num_slabs: int,
    rank_device_bytes: int,
) -> tuple[MemoryTerm, ...]:
    """List the terms of host memory in training: one rank's by name, those of the others as a sum.

    On a CPU the process itself is counted with the device's terms, and both use the same memory.

    Args:
        facts: The model.
        machine: The machine that they run on.
        runs: What each run of the step has there; layers are the same for all.
        num_ranks: Processes that share the step on this machine.
        num_slabs: Slabs of all of them together; 0 if layers are on disk.
        rank_device_bytes: Device memory of each rank, which on a CPU is host memory too.
    """
    kinds, workload = Counter(facts.layers), runs[0].workload
    cargo_bytes = sum(num * workload.cargo_bytes(layer) for layer, num in kinds.items())
    largest = max(layer.num_parameters for layer in kinds)
    num_workers = sum(run.num_workers for run in runs)
    slab, is_cuda = cargo_bytes if num_slabs else 0, machine.device == "cuda"
    stash = (facts.num_layers - 1) * sum(
        run.num_stashed * input_bytes(facts, run.workload) for run in runs
    )
    rows = max(row_buffers_bytes(facts, run.workload) for run in runs)
    head, head_gradient = head_bytes(facts, workload), head_gradient_bytes(facts, workload)
    locked = stash + rows + head + head_gradient + locked_update_bytes(workload, num_ranks)
    is_short = num_slabs * slab + num_ranks * locked > machine.pinned_bytes
    staging = 0
    if is_cuda and (is_short or not num_slabs):  # loads pass through a page-locked ring
        staging = NUM_STAGING * min(max(map(workload.cargo_bytes, kinds)), PIECE_BYTES)
    embedding = embedding_bytes(facts, workload)
    terms = (
        MemoryTerm(name=SLAB, num_bytes=slab),
        *_whole_host_terms(facts, workload, num_ranks=num_ranks, is_cuda=is_cuda),
        MemoryTerm(name=EMBEDDINGS, num_bytes=embedding),
        MemoryTerm(
            name=EMBEDDING_GRADIENTS,
            num_bytes=_row_sum_bytes(facts, workload, num_ranks)
            + sum(step_row_bytes(facts, x.workload, x.num_summed) for x in runs if x.num_summed),
        ),
        MemoryTerm(name=ROWS, num_bytes=rows),
        MemoryTerm(name=HEAD, num_bytes=head),
        MemoryTerm(name=HEAD_GRADIENT, num_bytes=head_gradient),
        MemoryTerm(name=STASH, num_bytes=stash),
        MemoryTerm(name=STAGING, num_bytes=staging),
        MemoryTerm(name="loading", num_bytes=LOADING_LAYERS * largest * workload.dtype_bytes),
        MemoryTerm(name=DATA_WORKERS, num_bytes=num_workers * WORKER_BYTES),
        MemoryTerm(name=FEATURES, num_bytes=sum(run.feature_bytes for run in runs)),
        MemoryTerm(
            name=PAGED_STATES,
            num_bytes=sum(
                paged_bytes(
                    trained_tensor_shapes(facts, run.workload.adapter), run.workload.optimizer
                )
                for run in runs
            ),
        ),
        MemoryTerm(name="process", num_bytes=CUDA_PROCESS_BYTES if is_cuda else 0),
    )
    rank_bytes = total_bytes(terms) + (0 if is_cuda else rank_device_bytes)
    others_bytes = (num_ranks - 1) * rank_bytes - (num_ranks - num_slabs) * slab
    others_bytes -= (num_ranks - max(1, num_slabs)) * embedding  # with layers on disk it is shared
    others_bytes -= _split_bytes(facts, workload, num_ranks, is_cuda=is_cuda)
    others = MemoryTerm(name=OTHER_RANKS, num_bytes=others_bytes)
    return tuple(term for term in (*terms, others) if term.num_bytes)


def _split_bytes(facts: ModelFacts, workload: Workload, num_ranks: int, *, is_cuda: bool) -> int:
    """Return what other ranks have less of than the first one, which has all that is shared.

    States and low halves are in memory that all share, and so are weights around the layers, as
    they are updated; gradients are with the rank that updates by them.
    """
    whole = workload.adapter.whole
    if whole is None or num_ranks == 1:
        return 0
    each = host_update_bytes(workload.dtype_bytes, workload.optimizer, whole.low_bytes)
    of_outer = workload.optimizer
    outer = host_update_bytes(workload.dtype_bytes, of_outer, whole.low_bytes)
    shared = (each[LOW_HALVES] + each[HOST_STATES]) * sum(whole.layers)
    shared += (outer[LOW_HALVES] + outer[HOST_STATES]) * whole.num_outer
    on_host = num_trained_on_host(facts, workload)
    shared += each[WEIGHTS] * (whole.num_outer - on_host)
    gradients = num_ranks * each[HOST_GRADIENTS] * _num_owned(whole, num_ranks)
    gradients -= each[HOST_GRADIENTS] * sum(whole.layers)
    if is_cuda:
        own = _num_owned_around(whole, num_ranks, has_rows=on_host > 0)
        gradients += FP32_BYTES * (num_ranks * own - (whole.num_outer - on_host))
    gradients += num_ranks * _row_sum_bytes(facts, workload, num_ranks)
    gradients -= row_sum_bytes(facts, workload)
    return math.floor((num_ranks - 1) * shared + gradients)


def locked_update_bytes(workload: Workload, num_ranks: int) -> int:
    """Return the page-locked memory that updates of layers need in addition to the layers.

    It is the first rank's: gradients arrive there from the device.
    """
    whole = workload.adapter.whole
    if whole is None:
        return 0
    b, optimizer, low_bytes = workload.dtype_bytes, workload.optimizer, whole.low_bytes
    each = host_update_bytes(b, optimizer, low_bytes)[HOST_GRADIENTS]
    return math.ceil(each * _num_owned(whole, num_ranks))


def _num_owned(whole: WholeWeights, num_ranks: int) -> int:
    """Return how many of the layers' weights the first rank updates."""
    return sum(whole.layers[i] for i in owned_by(0, whole.layers, num_ranks=num_ranks))


def _owned_around(whole: WholeWeights, num_ranks: int) -> dict[str, int]:
    """Return the weights around the layers that it updates, by name."""
    own = owned_around(0, [size for _, size in whole.outer], num_ranks=num_ranks)
    return dict(one for number, one in enumerate(whole.outer) if number in own)


def _num_owned_around(whole: WholeWeights, num_ranks: int, *, has_rows: bool) -> int:
    """Return how many these are, without an embedding whose gradients come by rows."""
    own = _owned_around(whole, num_ranks)
    return sum(number for name, number in own.items() if not (has_rows and name == EMBEDDING))


def _row_sum_bytes(facts: ModelFacts, workload: Workload, num_ranks: int) -> int:
    """Return what the first rank has of the sums of gradients by all rows: those that update."""
    whole = workload.adapter.whole
    is_own = whole is not None and EMBEDDING in _owned_around(whole, num_ranks)
    return row_sum_bytes(facts, workload) if is_own else 0


def _whole_host_terms(
    facts: ModelFacts, workload: Workload, *, num_ranks: int, is_cuda: bool
) -> tuple[MemoryTerm, ...]:
    """List what weights that train take in RAM in addition to themselves.

    Of several ranks it is the first one's, with what all share. Weights around the layers are there
    too if a device computes with them, or several ranks do; from a device their gradients, in fp32.
    An embedding or a head that trains there is counted with its own terms.
    """
    whole = workload.adapter.whole
    if whole is None:
        return ()
    b, low_bytes = workload.dtype_bytes, whole.low_bytes
    each = host_update_bytes(b, workload.optimizer, low_bytes)
    gradients = each[HOST_GRADIENTS] * _num_owned(whole, num_ranks)
    rows, head = num_trained_on_host(facts, workload), num_head_trained_on_host(facts, workload)
    on_host = rows + head
    around = _num_owned_around(whole, num_ranks, has_rows=rows > 0) - head
    gradients += FP32_BYTES * around if is_cuda else 0
    copies = each[WEIGHTS] * (whole.num_outer - on_host) if is_cuda or num_ranks > 1 else 0
    in_layers = [linear.num_weights for layer in facts.layers for linear in layer.linears]
    largest = max(*in_layers, facts.embedding_parameters if whole.num_outer else 0)
    temporaries = ADAFACTOR_COPIES * FP32_BYTES * largest
    num = whole.num_parameters
    outer = host_update_bytes(b, workload.optimizer, low_bytes)
    states = each[HOST_STATES] * sum(whole.layers) + outer[HOST_STATES] * whole.num_outer
    return (
        MemoryTerm(name=LOW_HALVES, num_bytes=math.ceil(each[LOW_HALVES] * num)),
        MemoryTerm(name=HOST_GRADIENTS, num_bytes=math.ceil(gradients)),
        MemoryTerm(name=HOST_STATES, num_bytes=math.ceil(states)),
        MemoryTerm(
            name=HOST_TEMPORARIES,
            num_bytes=temporaries if workload.optimizer == "adafactor" else 0,
        ),
        MemoryTerm(name="weights around the layers, in RAM", num_bytes=math.ceil(copies)),
    )
