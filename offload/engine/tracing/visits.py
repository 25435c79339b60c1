"""The bytes of one backward visit and one head chunk of a real model, before it has run.

The executor's own functions run on a copy of the model without weights. Each distinct layer is
visited once, with gradients allocated, as from the second micro-batch on. Everything that a plan
knows exactly is left out: weights, kept inputs, adapters, their gradients.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from offload.engine.experts.gates import gate_of
from offload.engine.experts.interface import goes_through_interface
from offload.engine.model.head import classifier_outputs, is_classifier
from offload.engine.model.layers import Front, LayeredModel, kind_of
from offload.engine.model.readers import candidates, is_hooked, unheld_products
from offload.engine.model.visit import Graph, visit_with_graph
from offload.engine.recompute.tiled import TiledMlp, find_mlps
from offload.engine.recompute.unread import Unread
from offload.engine.tracing.allocator import LiveBytes
from offload.engine.tracing.cuda_kernels import CUDA_WORKSPACES, Capability, CudaKernels
from offload.engine.tracing.experts import traced_experts
from offload.engine.tracing.fake_model import fake_copy, num_experts, rows_are_whole
from offload.engine.tracing.tracer import Tracer
from offload.plan.facts.fused import FusedPart
from offload.plan.memory.traced import TracedBytes


def trace_visits(
    model: Any,
    *,
    batch_size: int,
    seq_len: int,
    is_padded: bool,
    head_chunk_tokens: int,
    capability: Capability | None,
    plain_parts: frozenset[FusedPart] | None = None,
    mlp_chunk_tokens: int | None = None,
) -> TracedBytes:
    """Trace a model with its adapters; it may be on any device and is not changed.

    Args:
        model: As it is handed to `offload.attach`.
        batch_size: Sequences in a micro-batch.
        seq_len: Tokens in each.
        is_padded: Whether there is padding among them.
        head_chunk_tokens: Labelled tokens in a chunk.
        capability: Of the GPU; None for a CPU.
        plain_parts: Of norms, rotations, gates and the loss those that are not computed by fused
            operators; None for all.
        mlp_chunk_tokens: Tokens that an MLP computes at a time; None for all.
    """
    mode, memory = FakeTensorMode(allow_non_fake_inputs=True), LiveBytes()
    fake = fake_copy(model, mode)
    layered = LayeredModel(fake)
    if plain_parts is not None:
        layered.fuse(plain_parts)
    for module in layered.layers.modules():
        if goes_through_interface(module):
            gate_of(module)  # found by values, which fake tensors do not have
    with ExitStack() as stack:
        stack.enter_context(rows_are_whole())
        if capability is not None:
            stack.enter_context(CudaKernels(capability))
        stack.enter_context(mode)
        stack.enter_context(traced_experts(num_experts(layered), capability))
        stack.enter_context(Tracer(memory, CUDA_WORKSPACES if capability is not None else {}))
        for parameter in fake.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        inputs = {"input_ids": torch.zeros(batch_size, seq_len, dtype=torch.long)}
        if is_padded:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        before = memory.live_bytes
        front = layered.front(inputs)
        recorded = memory.live_bytes - before - front.hidden_BTD.untyped_storage().nbytes()
        return TracedBytes(
            visits=_visits(layered, front, memory, mlp_chunk_tokens),
            head_chunk=_head_chunk(layered, front, memory, num_tokens=head_chunk_tokens),
            recorded=recorded,
        )


def _visits(
    layered: LayeredModel, front: Front, memory: LiveBytes, mlp_chunk_tokens: int | None
) -> tuple[int, ...]:
    """Visit each layer that differs from those before it; return the peak of every layer."""
    kept_BTD = torch.empty_like(front.hidden_BTD)
    gradient_BTD = torch.empty_like(kept_BTD)
    peaks: dict[object, int] = {}
    visits = []
    for index, (layer, call) in enumerate(zip(layered.layers, front.calls, strict=True)):
        kind = kind_of(layer, call)
        if kind not in peaks:
            mlps = _mlps(layered, index, front, mlp_chunk_tokens)
            visit = partial(
                visit_with_graph,
                layered,
                index,
                input_BTD=kept_BTD,
                call=call,
                mlps=tuple(mlps.values()),
            )
            unread = _unread(layer, visit, mlps) if mlps else ()
            before = memory.live_bytes
            memory.reset_peak()
            graph = visit(unread=unread)
            graph.backward(gradient_BTD, [torch.zeros_like(x) for x in graph.router_logits])
            del graph
            peaks[kind] = memory.peak_bytes - before
        visits.append(peaks[kind])
    return tuple(visits)


def _mlps(
    layered: LayeredModel, index: int, front: Front, chunk_tokens: int | None
) -> dict[str, TiledMlp]:
    """Return the parts of a layer that are computed in tiles, by their operations alone."""
    layer = layered.layers[index]
    if chunk_tokens is None or is_hooked(layer):
        return {}
    run = partial(layered.layer_forward, index, front.hidden_BTD, front.calls[index])
    with torch.no_grad():
        found = find_mlps(layer, run)
    return {
        name: TiledMlp(
            layer.get_submodule(name), num_features=one.num_features, chunk_tokens=chunk_tokens
        )
        for name, one in found.items()
    }


def _unread(
    layer: nn.Module, visit: Callable[..., Graph], mlps: Mapping[str, TiledMlp]
) -> tuple[Unread, ...]:
    """Return what a recompute leaves out, so that no output of a tiled MLP is counted for it."""
    found = unheld_products(layer, lambda unread: visit(unread=unread), mlps)
    named = candidates(layer, mlps)
    return tuple(Unread(module=named[name], path=path) for name, path in found.items())


def _head_chunk(layered: LayeredModel, front: Front, memory: LiveBytes, *, num_tokens: int) -> int:
    hidden_ND = torch.empty_like(front.hidden_BTD).flatten(0, 1)
    gradient_ND = torch.empty_like(hidden_ND)
    positions_N = torch.arange(min(num_tokens, len(hidden_ND)))
    num_items = torch.full((), len(positions_N))
    before = memory.live_bytes
    memory.reset_peak()
    if is_classifier(layered):
        chunk_1ND = hidden_ND[positions_N].unsqueeze(0).requires_grad_()
        classifier_outputs(layered, chunk_1ND, index=0).sum().backward()
        return memory.peak_bytes - before
    layered.tail_loss(
        hidden_ND,
        positions_N=positions_N,
        next_N=positions_N,
        num_items=num_items,
        gradient_ND=gradient_ND,
    )
    return memory.peak_bytes - before
