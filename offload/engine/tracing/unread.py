"""Finds the products that nothing reads in a recompute, of a model without values."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from offload.engine.experts.interface import goes_through_interface
from offload.engine.model.layers import Front, LayeredModel, kind_of
from offload.engine.model.readers import unheld_products
from offload.engine.model.visit import Graph, visit_with_graph
from offload.engine.recompute.unread import Unread
from offload.engine.tracing.experts import traced_experts
from offload.engine.tracing.fake_model import fake_copy, num_experts, rows_are_whole

_ROWS, _TOKENS = 2, 5


def trace_unread(model: Any) -> tuple[frozenset[str], ...]:
    """Return by layer the names of frozen linears, and of experts, whose products nothing reads.

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
        stack.enter_context(rows_are_whole())
        stack.enter_context(mode)
        stack.enter_context(traced_experts(num_experts(layered), None))
        front = layered.front({"input_ids": torch.zeros(_ROWS, _TOKENS, dtype=torch.long)})
        for index, (layer, call) in enumerate(zip(layered.layers, front.calls, strict=True)):
            kind = kind_of(layer, call)
            if kind not in kinds:
                kinds[kind] = _unread(layered, index, front)
            found.append(kinds[kind])
    return tuple(found)


def _unread(layered: LayeredModel, index: int, front: Front) -> frozenset[str]:
    input_BTD, call = torch.empty_like(front.hidden_BTD), front.calls[index]

    def visit(unread: Sequence[Unread]) -> Graph:
        return visit_with_graph(layered, index, input_BTD=input_BTD, call=call, unread=unread)

    layer = layered.layers[index]
    experts = {name: m for name, m in layer.named_modules() if goes_through_interface(m)}
    return frozenset(unheld_products(layer, visit, others=experts))
