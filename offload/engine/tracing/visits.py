"""The bytes of one backward visit and one head chunk of a real model, before it has run.

The executor's own functions run on a copy of the model without weights. Each distinct layer is
visited once, with gradients allocated, as from the second micro-batch on. Everything that a plan
knows exactly is left out: weights, kept inputs, adapters, their gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import nn

from offload.engine.experts import fused
from offload.engine.experts.launcher import Blocks, Launcher, blocks_for
from offload.engine.experts.products import Gate, Loop, Routing, gate_of, goes_through_interface
from offload.engine.internals import FakeTensorMode, TorchDispatchMode
from offload.engine.model.layers import (
    Front,
    LayeredModel,
    classifier_outputs,
    is_classifier,
    kind_of,
)
from offload.engine.model.visits import Graph, visit_with_graph
from offload.engine.recompute import TiledMlp, Unread
from offload.engine.safety.parts import candidates, find_mlps, is_hooked, unheld_products
from offload.engine.tracing.cuda_kernels import CUDA_WORKSPACES, Capability, CudaKernels
from offload.engine.tracing.tracer import (
    LiveBytes,
    Tracer,
    fake_copy,
    num_experts,
    values_are_unasked,
)
from offload.plan.facts.workload import FusedPart
from offload.plan.memory.memory import TracedBytes

# ---------------------------------------------------------------------------------------------
# Traces mixtures of experts whose kernels cannot run on fake tensors, by their output shapes.
#
# A loop over experts reads the number of rows of each, and fake tensors have no values: here all
# experts get the same number. Saved tensors do not depend on the routing. Temporary memory for one
# expert at a time grows with the largest expert, so a trace underestimates it.
#
# Triton kernels are not launched. Their launcher allocates all their outputs, so these are counted.


@contextmanager
def traced_experts(num_experts: int, capability: Capability | None) -> Iterator[None]:
    """Let every implementation of experts run on fake tensors.

    Args:
        num_experts: Of a layer.
        capability: Of the GPU, which determines the kernels' layout; None without one.
    """

    def blocks_there(_: object, dtype: torch.dtype, *, rows_per_expert: int) -> Blocks:
        return blocks_for(capability, dtype, rows_per_expert=rows_per_expert)

    with (
        mock.patch.object(Loop, "_read_sizes", staticmethod(_even_sizes)),
        mock.patch.object(fused, "Launcher", SilentLauncher),
        mock.patch.object(fused, "blocks_for", blocks_there),
        _Answers(num_experts),
    ):
        yield


def _even_sizes(routing: Routing) -> list[int]:
    num_rows, num_experts = routing.token_S.numel(), routing.end_E.numel()
    ends = [num_rows * i // num_experts for i in range(num_experts + 1)]
    return [end - start for start, end in pairwise(ends)]


class SilentLauncher(Launcher):
    """Allocates the kernels' outputs, and launches none."""

    def __init__(self, routing: Routing, gate: Gate, blocks: Blocks) -> None:
        """Keep the kernels' configuration."""
        self._kernels = _Silence()
        self._routing, self._gate, self._blocks = routing, gate, blocks
        self._num_rows, self._num_experts = routing.token_S.numel(), routing.end_E.numel()


class _Silence:
    """A module of kernels that do nothing, and keep nothing that they are given."""

    def __getattr__(self, name: str) -> "_Silence":
        return self

    def __getitem__(self, grid: object) -> "_Silence":
        return self

    def __call__(self, **_: object) -> None:
        return None


class _Answers(TorchDispatchMode):
    """Answers what torch and transformers' own loops ask of values."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._num_experts = num_experts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten.nonzero.default:  # which experts have rows, or which rows an expert has
            found, num_experts = args[0], self._num_experts
            is_choice = found.dim() == 2 and min(found.shape) > 1
            num_rows = -(-found.numel() // num_experts) if is_choice else num_experts
            return torch.empty(num_rows, found.dim(), dtype=torch.long)
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped(*args[:3])
        if func is aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))


def _grouped(left: torch.Tensor, right: torch.Tensor, end_E: torch.Tensor) -> torch.Tensor:
    """Return what grouped products do: torch's own answer for fake tensors is for bfloat16."""
    shape = (left.shape[0], right.shape[-1])
    return left.new_empty(shape if right.dim() == 3 else (end_E.numel(), *shape))


_ROWS, _TOKENS = 2, 5


def trace_unread(model: Any) -> tuple[tuple[frozenset[str], ...], int]:
    """Return by layer the names of frozen linears, and of experts, whose products nothing reads.

    And how many features a hidden state has.

    An engine finds them again, with values, before its first step: only that decides what is left
    out.

    Args:
        model: On any device; it is not changed.

    Raises:
        RuntimeError: The model needs values.
        UnsupportedModelError: It cannot be computed layer by layer.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_copy(model, mode).requires_grad_(requires_grad=False)
    layered = LayeredModel(fake)
    kinds: dict[object, frozenset[str]] = {}
    found = []
    with ExitStack() as stack:
        stack.enter_context(values_are_unasked())
        stack.enter_context(mode)
        stack.enter_context(traced_experts(num_experts(layered), None))
        front = layered.front({"input_ids": torch.zeros(_ROWS, _TOKENS, dtype=torch.long)})
        for index, (layer, call) in enumerate(zip(layered.layers, front.calls, strict=True)):
            kind = kind_of(layer, call)
            if kind not in kinds:
                kinds[kind] = _unread(layered, index, front)
            found.append(kinds[kind])
    return tuple(found), front.hidden_BTD.shape[2:].numel()


def _unread(layered: LayeredModel, index: int, front: Front) -> frozenset[str]:
    input_BTD, call = torch.empty_like(front.hidden_BTD), front.calls[index]

    def visit(unread: Sequence[Unread]) -> Graph:
        return visit_with_graph(layered, index, input_BTD=input_BTD, call=call, unread=unread)

    layer = layered.layers[index]
    experts = {name: m for name, m in layer.named_modules() if goes_through_interface(m)}
    return frozenset(unheld_products(layer, visit, others=experts))


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
        stack.enter_context(values_are_unasked())
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
            unread = _unread_of(layer, visit, mlps) if mlps else ()
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


def _unread_of(
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
