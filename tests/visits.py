"""What a visit of a layer launches and moves, counted, and what the plan says of it.

The engine's own visits run on a layer of a real shape without values: no weight is in memory, and
nothing is computed. Attention is one kernel forward and one backward, as on a GPU. A fused operator
counts as one launch with its operands, and so does each of our Triton kernels: declared, until a
card has shown it.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.adapter.lora import add_lora
from finetune.model.empty import empty_from
from finetune.recipe.adapters import LoraSection
from offload.engine.experts.lora import register
from offload.engine.experts.products import gate_of, goes_through_interface
from offload.engine.model.layers import LayeredModel
from offload.engine.model.visits import attempt, visit_with_graph, visit_without_graph
from offload.engine.recompute import Unread
from offload.engine.safety.parts import candidates, unheld_products
from offload.engine.tracing.cuda_kernels import Capability, CudaKernels
from offload.engine.tracing.tracer import fake_copy, num_experts, values_are_unasked
from offload.engine.tracing.visits import SilentLauncher, traced_experts
from offload.engine.visit_cache import VISIT_CACHE
from offload.plan.facts.facts import AdapterSpec, adapted_linears
from offload.plan.machine.machine import ExpertsImplementation, Implementation, named_machine
from offload.plan.time.adapters import visit_norm, visit_scale
from offload.plan.time.costs import layer_work
from offload.plan.time.pricer import Pricer
from offload.plan.time.roofline import OPS_PER_CALL, Work
from tests.builders import model_facts, workload
from tests.counted import Counted

RANK, NUM_TOKENS = 16, 512
CAPABILITY: Capability = (9, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Levers:
    """How a layer is computed.

    Attributes:
        is_grouped: Whether branches of linears are ours, at the base's precision; else peft's.
        is_fused: Whether norms, rotations and gates are one operator each.
        leaves_out: Whether a recompute leaves out what nothing reads.
        experts: The expert kernels.
        is_dora: Whether adapters are DoRA, on linears alone, in a visit of one micro-batch.
    """

    is_grouped: bool
    is_fused: bool
    leaves_out: bool
    experts: ExpertsImplementation
    is_dora: bool = False


OFF = Levers(is_grouped=False, is_fused=False, leaves_out=False, experts="grouped_mm")
ON = Levers(is_grouped=True, is_fused=True, leaves_out=True, experts="triton")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A forward, a recompute or a backward.

    Attributes:
        num_launches: Kernels.
        num_calls: Functions of our own that issue some of them.
        num_bytes: Read and written outside of large products and attention.
    """

    num_launches: float
    num_calls: float
    num_bytes: int

    @property
    def host_ops(self) -> float:
        """Operators that the host issues in the same time."""
        return self.num_launches + OPS_PER_CALL * self.num_calls


PARTS = ("forward", "recompute", "backward")
# A shape for each family of those that are shipped.
SHAPES = (
    *("llama-3.1-8b", "mistral-7b-v0.3", "qwen3-8b", "gemma-3-27b-text"),
    *("qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b", "gpt-oss-20b"),
)
MIXTURES = SHAPES[4:]
Visit = Mapping[str, Part]
Shape = Mapping[str, Any]


class _Kernels:
    """In place of the module of Triton kernels: counts launches, and what they read and write.

    That is what a kernel has besides the rows and matrices of a large product.
    """

    MOVED: Mapping[str, Sequence[str]] = {
        "activate": ("out", "gates"),
        "activate_backward": ("gates", "of_gates", "out", "of_weights"),
    }

    def __init__(self) -> None:
        self.num_launches = self.num_bytes = 0
        self._name = ""

    def __getattr__(self, name: str) -> Self:
        self._name = name
        return self

    def __getitem__(self, grid: object) -> Self:
        return self

    def __call__(self, **given: Any) -> None:
        self.num_launches += 1
        moved = [given[name] for name in self.MOVED.get(self._name, ("out",))]
        num_rows = given["token_S"].numel()
        if self._name == "sum_outer":
            self.num_bytes += num_rows * given["num_n"] * given["right"].itemsize
        elif self._name == "multiply" and given["num_n"] <= RANK:
            self.num_bytes += num_rows * given["num_k"] * given["rows"].itemsize
        self.num_bytes += sum(x.numel() * x.itemsize for x in moved if x is not None)


class _Counting:
    """Counts a visit part by part."""

    def __init__(self, kernels: _Kernels) -> None:
        self.parts: dict[str, Part] = {}
        self._kernels = kernels

    @contextmanager
    def part(self, name: str, *, num_attention: int) -> Iterator[None]:
        self._kernels.num_launches = self._kernels.num_bytes = 0
        with Counted() as counted:
            yield
        self.parts[name] = Part(
            num_launches=counted.total_ops + self._kernels.num_launches + num_attention,
            num_calls=0,
            num_bytes=counted.total_bytes + self._kernels.num_bytes,
        )


def counted_visit(shape: Shape, levers: Levers, *, num_tokens: int = NUM_TOKENS) -> Visit:
    """Count a visit of the first layer of a model, with adapters of rank 16 on all that it has.

    Args:
        shape: The fields of its config.
        levers: How it is computed.
        num_tokens: Of one sequence.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fake, mode = _without_values(shape, levers)
    layered, kernels = LayeredModel(fake), _Kernels()
    if levers.is_fused:
        layered.fuse()

    class Counting(SilentLauncher):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._kernels = kernels

    with ExitStack() as stack:
        stack.enter_context(values_are_unasked())
        stack.enter_context(CudaKernels(CAPABILITY))
        stack.enter_context(mode)
        stack.enter_context(traced_experts(num_experts(layered), CAPABILITY))
        stack.enter_context(mock.patch("offload.engine.experts.fused.Launcher", Counting))
        for parameter in fake.parameters():
            if parameter.requires_grad:  # as from the second micro-batch on
                parameter.grad = torch.empty_like(parameter)
        front = layered.front({"input_ids": torch.zeros(1, num_tokens, dtype=torch.long)})
        input_BTD, call = torch.empty_like(front.hidden_BTD), front.calls[0]
        visit = partial(visit_with_graph, layered, 0, input_BTD=input_BTD, call=call)
        unread = _unread(layered, visit) if levers.leaves_out else ()
        modules = _modules_of_functions(visit().said[0].grad_fn)
        num_attention = modules.count(CudaKernels.__module__)
        counting = _Counting(kernels)
        stack.enter_context(VISIT_CACHE.in_pass())
        VISIT_CACHE.enter("up")
        with counting.part("forward", num_attention=num_attention):
            visit_without_graph(
                layered, 0, input_BTD=input_BTD, call=call, mlps=(), has_output=False
            )
        VISIT_CACHE.enter("down")
        with counting.part("recompute", num_attention=num_attention):
            graph = visit(unread=unread)
        given_BTD = torch.empty_like(input_BTD)
        of_routers = [torch.zeros_like(x) for x in graph.router_logits]
        with counting.part("backward", num_attention=num_attention):
            graph.backward(given_BTD, of_routers)
    num_calls = len(modules) - num_attention
    return {name: replace(part, num_calls=num_calls) for name, part in counting.parts.items()}


def _without_values(shape: Shape, levers: Levers) -> tuple[Any, FakeTensorMode]:
    """Return an adapted model of one layer, whose tensors have no values."""
    kinds = {key: value[:1] for key, value in shape.items() if key == "layer_types"}
    fields = {**shape, **kinds, "num_hidden_layers": 1, "vocab_size": 64, "eos_token_id": None}
    base: Any = empty_from(fields)
    base = base.to(torch.bfloat16)
    has_experts = any(map(goes_through_interface, base.modules()))
    if has_experts:
        register()
        base.config._experts_implementation = levers.experts
    section = LoraSection(
        rank=RANK,
        alpha=float(RANK),
        experts=has_experts and not levers.is_dora,
        dora=levers.is_dora,
        compute_dtype="auto" if levers.is_grouped else "float32",
    )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_copy(add_lora(base, section, seed=0), mode)
    for module in fake.modules():
        if goes_through_interface(module):
            gate_of(module)  # found by values
    return fake, mode


def _unread(layered: LayeredModel, visit: Any) -> tuple[Unread, ...]:
    """Return what a recompute leaves out: nothing reads it, and all else computes without it."""
    layer = layered.layers[0]
    named = candidates(layer)
    found = unheld_products(layer, lambda unread: visit(unread=unread))
    unread = [Unread(module=named[name], path=path) for name, path in found.items()]
    return tuple(one for one in unread if attempt(partial(visit, unread=(one,))))


def _modules_of_functions(root: Any) -> list[str]:
    """Return the modules of the functions of our own in a graph."""
    found, seen, left = list[str](), set[Any](), [root]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        made_by = getattr(type(node), "_forward_cls", None)
        if made_by is not None:
            found.append(made_by.__module__)
    return found


def priced_visit(shape: Shape, levers: Levers, *, num_tokens: int = NUM_TOKENS) -> Visit:
    """Return what the plan says of the same visit on a card that has grouped products."""
    facts = model_facts(dict(shape))
    layer = facts.layers[0]
    machine = replace(
        named_machine("rtx5090"),
        has_grouped_gemm=True,
        experts_implementation=Implementation(value=levers.experts, source="test"),
    )
    load = workload(
        seq_len=num_tokens,
        adapter=AdapterSpec(
            rank=RANK,
            targets=tuple(x.name for x in layer.linears if x.group != "experts"),
            experts=bool(layer.num_experts) and not levers.is_dora,
            is_dora=levers.is_dora,
            is_in_base_dtype=levers.is_grouped,
        ),
        layer_code="fused" if levers.is_fused else "plain",
        leaves_out=levers.leaves_out,
    )
    at = Pricer(machine=machine, facts=facts, workload=load)
    found = layer_work(at, layer).visits
    works: dict[str, Work] = {name: getattr(found, name) for name in PARTS}
    adapted = adapted_linears(layer, load.adapter)
    scales = sum((visit_scale(at, linear) for linear in adapted), start=Work())
    works |= {name: works[name] + scales for name in ("forward", "recompute")}
    works["forward"] += sum((visit_norm(at, linear) for linear in adapted), start=Work())
    return {
        name: Part(num_launches=work.num_ops, num_calls=work.num_calls, num_bytes=0)
        for name, work in works.items()
    }
