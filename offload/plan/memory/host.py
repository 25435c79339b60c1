"""The use of host memory, in named terms."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from offload.plan.facts.embedding import (
    embedding_bytes,
    row_buffers_bytes,
)
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.head import head_bytes
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import (
    HOST_GRADIENTS,
    HOST_STATES,
    LOW_HALVES,
    WEIGHTS,
    host_update_bytes,
    paged_bytes,
)
from offload.plan.facts.trainable import trained_tensor_shapes
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import MIB, Machine
from offload.plan.memory.memory import (
    DATA_WORKERS,
    EMBEDDINGS,
    HEAD,
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
from offload.plan.schedule.schedule import NUM_STAGING, PIECE_BYTES

FEATURES = "features of a linear probe"
LOADING_LAYERS = 2
WORKER_BYTES = 256 * MIB
CUDA_PROCESS_BYTES = 2048 * MIB  # 15 runs on an H200, torch 2.11, CUDA 13: 1.8 to 2.2 GiB resident
ADAFACTOR_COPIES = 3  # in fp32, of a tensor: itself, its gradient, its step


LOCKED_TERMS = (STASH, SENT, ROWS, HEAD)
"""Terms of host memory that are page-locked in addition to the layers, if a GPU computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLoad:
    """What one run of a step has in host memory.

    Attributes:
        workload: Its largest micro-batch.
        num_workers: Its data workers of each rank.
        num_stashed: Micro-batches whose layer inputs each rank stashes in host memory.
        feature_bytes: What a head reads that learns alone before the first step.
    """

    workload: Workload
    num_workers: int
    num_stashed: int
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
    head = head_bytes(facts, workload)
    locked = stash + rows + head + locked_update_bytes(workload)
    is_short = num_slabs * slab + num_ranks * locked > machine.pinned_bytes
    staging = 0
    if is_cuda and (is_short or not num_slabs):  # loads pass through a page-locked ring
        staging = NUM_STAGING * min(max(map(workload.cargo_bytes, kinds)), PIECE_BYTES)
    embedding = embedding_bytes(facts, workload)
    terms = (
        MemoryTerm(name=SLAB, num_bytes=slab),
        *_whole_host_terms(facts, workload, is_cuda=is_cuda),
        MemoryTerm(name=EMBEDDINGS, num_bytes=embedding),
        MemoryTerm(name=ROWS, num_bytes=rows),
        MemoryTerm(name=HEAD, num_bytes=head),
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
    others = MemoryTerm(name=OTHER_RANKS, num_bytes=others_bytes)
    return tuple(term for term in (*terms, others) if term.num_bytes)


def locked_update_bytes(workload: Workload) -> int:
    """Return the page-locked memory that updates of layers need in addition to the layers.

    Gradients arrive there from the device.
    """
    whole = workload.adapter.whole
    if whole is None:
        return 0
    b, optimizer, low_bytes = workload.dtype_bytes, workload.optimizer, whole.low_bytes
    each = host_update_bytes(b, optimizer, low_bytes)[HOST_GRADIENTS]
    return math.ceil(each * sum(whole.layers))


def _whole_host_terms(
    facts: ModelFacts, workload: Workload, *, is_cuda: bool
) -> tuple[MemoryTerm, ...]:
    """List what weights that train take in RAM in addition to themselves.

    If a device computes with them, weights around the layers are there too, and their gradients in
    fp32.
    """
    whole = workload.adapter.whole
    if whole is None:
        return ()
    b, low_bytes = workload.dtype_bytes, whole.low_bytes
    each = host_update_bytes(b, workload.optimizer, low_bytes)
    gradients = each[HOST_GRADIENTS] * sum(whole.layers)
    gradients += FP32_BYTES * whole.num_outer if is_cuda else 0
    copies = each[WEIGHTS] * whole.num_outer if is_cuda else 0
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
