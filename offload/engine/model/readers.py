"""Finds the products of a layer whose values nothing reads in a recompute.

Problem. `offload.engine.recompute` may leave a value out only if no gradient depends on it,
nor does anything else: a norm after it, a gate, a hook, a statistic. The list of readers has no
end.

Idea. A reader keeps what it has read, so look for that. A layer is computed with its graph on a few
tokens, and a `Taint` follows, operation by operation, which memory holds something that was
computed from each linear layer's output. Then the layer's output is dropped and its graph kept. If
some of that memory is still held, by the graph, a module or anything else, the product has a
reader. So it has if an operation handed a value to the host. No kind of layer is known by name.

Then the value is left out, so that any use of it fails: all gradients must be the same to the bit.
This finds reads that torch does not see, such as those by numpy and kernels of others.

What cannot be judged is computed: layers with hooks, compiled layers, code that replaces a forward.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from operator import or_
from typing import Any, cast, get_args

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.engine.decisions import Proven, takes_decisions
from offload.engine.host.slab import Record
from offload.engine.model.hooks import Graph, attempt
from offload.engine.model.layers import LayeredModel
from offload.engine.model.placement import modules_on_device
from offload.engine.recompute import (
    Path,
    TiledMlp,
    Unread,
    WithoutValue,
    can_leave_out,
    compute,
    find_mlps,
    left_out,
    problem_of,
)
from offload.engine.visit_cache import patched
from offload.plan.facts.facts import InventoryRow, TensorClass, WeightInventory

# ---------------------------------------------------------------------------------------------
# Takes inventory of a model: the class of each parameter, and the form in which it is stored.
#
# A parameter's class follows from the module that owns it and the modules around it, as
# transformers builds its models. Norms, attentions and MLPs are recognised by their class names.
# Experts are a module named so, or a block's attribute `experts`; their block has a router, with
# one output per expert, and everything else in the block is shared by all tokens. Parameters that
# match none of these are "other", and are listed too: nothing is left out.

_ATTENTIONS = ("Attention", "Attn", "MLA", "Mixer", "DeltaNet", "Mamba")
_MLPS = ("MLP", "Mlp", "FeedForward", "FFN")
_ROUTERS = ("Router", "Gate", "Gating")
_Kinds = dict[nn.Module, TensorClass]


def inventory_of(layered: LayeredModel, records: Sequence[Record]) -> WeightInventory:
    """Count a model's parameters by class and form; those of towers are left out.

    Args:
        layered: The model, as it runs.
        records: Its layers' layouts.
    """
    forms: dict[int, tuple[str, int]] = {
        id(field.parameter): (field.codec.name, field.num_bytes)
        for record in records
        for field in record.fields
    }
    in_layers = {id(parameter) for parameter in layered.layers.parameters()}
    totals: dict[tuple[TensorClass, str, bool], list[int]] = {}
    for parameter, found in _classes(layered):
        is_trained_there = parameter.requires_grad and id(parameter) not in forms
        kind: TensorClass = "adapters and other trained" if is_trained_there else found
        codec, num_bytes = forms.get(id(parameter), ("native", parameter.nbytes))
        is_in_layers = id(parameter) in in_layers and not is_trained_there
        total = totals.setdefault((kind, codec, is_in_layers), [0, 0, 0])
        for i, count in enumerate((parameter.numel(), parameter.nbytes, num_bytes)):
            total[i] += count
    order = get_args(TensorClass)
    return WeightInventory(
        rows=tuple(
            InventoryRow(
                kind=key[0],
                codec=key[1],
                is_in_layers=key[2],
                num_parameters=totals[key][0],
                decoded_bytes=totals[key][1],
                encoded_bytes=totals[key][2],
            )
            for key in sorted(totals, key=lambda key: (order.index(key[0]), key[1:]))
        )
    )


def _classes(layered: LayeredModel) -> Iterator[tuple[nn.Parameter, TensorClass]]:
    """Return each parameter once, with its class; a tied head is embeddings."""
    model = layered.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kinds: _Kinds = {}
    for layer in layered.layers:
        kinds |= parts_of(layer)
    if head is not None:
        kinds[head] = "head"
    kinds[embedding] = "embeddings"
    seen: set[int] = set()
    for module in [embedding, *modules_on_device(layered)]:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, _class_of(module, name, kinds.get(module, "other"))


def _class_of(module: nn.Module, name: str, around: TensorClass) -> TensorClass:
    if name == "bias" or name.endswith("_bias"):
        return "biases"
    if "norm" in type(module).__name__.lower():
        return "norms"
    return "embeddings" if isinstance(module, nn.Embedding) else around


def parts_of(layer: nn.Module) -> dict[nn.Module, TensorClass]:
    """Return the class of each module of a layer."""
    kinds: _Kinds = {}
    _mark(layer, "other in layers", kinds, name="")  # its own name may match a part's
    return kinds


def _mark(
    module: nn.Module, around: TensorClass, kinds: _Kinds, *, name: str | None = None
) -> None:
    """Set the class of a module of a layer, and of all modules inside it."""
    name = type(module).__name__ if name is None else name
    if around == "other in layers" and any(part in name for part in _ATTENTIONS):
        around = "attention"
    experts = [child for key, child in module.named_children() if _are_experts(key, child)]
    if around == "other in layers" and not experts and any(part in name for part in _MLPS):
        around = "dense MLP"
    kinds[module] = around
    is_layer = any(
        any(p in type(child).__name__ for p in _ATTENTIONS) for child in module.children()
    )
    is_block = bool(experts) and not is_layer and around != "attention"
    for child in module.children():
        if child in experts:
            _mark_all(child, "experts", kinds)
        elif experts and _is_router(child, experts[0]):
            _mark_all(child, "router", kinds)
        else:
            _mark(child, "shared experts" if is_block else around, kinds)


def _mark_all(module: nn.Module, kind: TensorClass, kinds: _Kinds) -> None:
    kinds.update(dict.fromkeys(module.modules(), kind))


def _are_experts(name: str, module: nn.Module) -> bool:
    kind = type(module).__name__
    return name == "experts" or ("Experts" in kind and "Shared" not in kind)


def _is_router(module: nn.Module, experts: nn.Module) -> bool:
    """Return whether a sibling of experts is a router: by name, or by one output per expert."""
    if type(module).__name__.endswith(_ROUTERS):
        return True
    fused = next((len(p) for p in experts.parameters() if p.dim() == 3), 0)
    sizes = {1, len(experts) if isinstance(experts, nn.ModuleList) else fused}
    return isinstance(module, nn.Linear) and module.out_features in sizes


Visit = Callable[[Sequence[Unread]], Graph]
"""Computes a layer with its graph, always the same, leaving these products out."""

_HOOKS = ("forward", "forward_pre", "backward", "backward_pre")
_TABLES = tuple(f"_{kind}_hooks" for kind in _HOOKS)
_GLOBAL_TABLES = tuple(f"_global{table}" for table in _TABLES)
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_NONE: Mapping[str, TiledMlp] = {}
_MAX_PATH = 12  # nodes between a layer's output and a product that is only added to it
_FEW = 4  # tokens of a tile while a layer is inspected
_STEPS = 64  # roundings by which kernels that add up in no fixed order differ


def candidates(
    layer: nn.Module, mlps: Mapping[str, TiledMlp] = _NONE
) -> dict[str, nn.Module | WithoutValue]:
    """Return what could be left out if nothing reads it, by name: linear layers, or whole MLPs."""
    if is_hooked(layer):
        return {}
    found = {
        name: module
        for name, module in layer.named_modules()
        if name and "forward" not in vars(module) and can_leave_out(module)
    }
    inner = {
        f"{name}.base_layer"  # peft wraps a layer once more for each parameter that it adapts
        for name, module in found.items()
        if type(getattr(module, "base_layer", None)) is type(module)
    }
    outside = {
        name: module
        for name, module in found.items()
        if name not in inner and not any(name.startswith(f"{mlp}.") for mlp in mlps)
    }
    return {**outside, **mlps}


def is_hooked(layer: nn.Module) -> bool:
    """Return whether something follows what a layer computes, or its code is replaced."""
    if any(getattr(torch_module, table) for table in _GLOBAL_TABLES):
        return True
    for module in layer.modules():
        own = vars(module)
        if any(own[table] for table in _TABLES) or own.get("_compiled_call_impl") is not None:
            return True
    is_followed = any(p.requires_grad and p._backward_hooks for p in layer.parameters())
    return is_followed or _is_wrapped(layer)


def unread_products(
    layer: nn.Module,
    visit: Visit,
    by: Sequence[torch.Tensor],
    mlps: Mapping[str, TiledMlp] = _NONE,
) -> dict[str, Path]:
    """Return the products that nothing reads, with their paths from the layer's output.

    Args:
        layer: A decoder layer, its weights in place.
        visit: Computes it.
        by: What has a gradient, besides the layer's input.
        mlps: Its parts that `visit` computes tile by tile, by name.
    """
    named = candidates(layer, mlps)
    found = {
        name: Unread(module=named[name], path=path)
        for name, path in unheld_products(layer, visit, mlps).items()
    }
    if not found:
        return {}
    expected = _gradients(visit(()), by)
    return {name: one.path for name, one in found.items() if _is_same(expected, visit, one, by)}


def _is_wrapped(layer: nn.Module) -> bool:
    """Return whether a part of a layer is wrapped by `torch.compile`."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and any(
        isinstance(module, frames.OptimizedModule) for module in layer.modules()
    )


def unheld_products(
    layer: nn.Module,
    visit: Visit,
    mlps: Mapping[str, TiledMlp] = _NONE,
    others: Mapping[str, nn.Module] | None = None,
) -> dict[str, Path]:
    """Return the products of which a graph holds nothing, nor anything else does.

    Args:
        layer: A decoder layer, perhaps without values.
        visit: Computes it.
        mlps: Its parts that `visit` computes tile by tile, by name.
        others: More of its modules to judge, whether they can leave their values out or not.
    """
    named, taint = {**candidates(layer, mlps), **(others or {})}, Taint()
    nodes: dict[int, list[Node | None]] = {}
    if not named:
        return {}
    with _marked(list(named.values()), taint, nodes), taint:
        graph = visit(())
    end, logits = graph.said[0].grad_fn, graph.said[1:]  # noqa: F841  # logits are held on purpose
    del graph
    readers = taint.held | taint.read
    found: dict[str, Path] = {}
    for i, name in enumerate(named):
        called = nodes.get(i, [])
        if len(called) == 1 and not readers >> i & 1:
            paths = list(_paths(end, called[0]))
            if len(paths) == 1:
                found[name] = paths[0]
    return found


def _marked(
    modules: Sequence[nn.Module | WithoutValue], taint: "Taint", nodes: dict[int, list[Node | None]]
) -> AbstractContextManager[None]:
    """Follow what is computed from the outputs of modules meanwhile."""

    def call(i: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        y = forward(*args, **kwargs)
        is_tensor = isinstance(y, torch.Tensor)
        nodes.setdefault(i, []).append(y.grad_fn if is_tensor else None)
        if is_tensor:
            taint.mark(y, 1 << i)
        return y

    return patched(
        *(
            (vars(module), {"forward": partial(call, i, cast("Any", module).forward)})
            for i, module in enumerate(modules)
        )
    )


class Taint(TorchDispatchMode):
    """Follows which memory holds something that was computed from marked tensors.

    Attributes:
        read: Marks whose values an operation handed to the host, one bit each.
    """

    def __init__(self) -> None:
        """Follow nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._marks: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.read = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip the wrapper per operation that disables dynamo: what is followed runs eagerly."""
        return False

    @property
    def held(self) -> int:
        """Marks of memory that is still held."""
        return _union(self._marks.values())

    def mark(self, tensor: torch.Tensor, marks: int) -> None:
        """Follow a tensor's memory."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._marks[key] = self._marks.get(key, 0) | marks
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: int, _: object) -> None:
        self._alive.pop(key, None)
        self._marks.pop(key, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; what it makes of marked memory, or writes to, is marked."""
        given = _tensors((args, kwargs))
        marks = _union(self._marks.get(t.untyped_storage()._cdata, 0) for t in given)
        out = func(*args, **(kwargs or {}))
        if not marks:
            return out
        leaves = tree_leaves(out)
        is_host = any(isinstance(leaf, int | float | complex) for leaf in leaves)
        if is_host or any(tag in func.tags for tag in _READS):
            self.read |= marks
        written = given if func._schema.is_mutable else []
        for tensor in (*_tensors(leaves), *written):
            self.mark(tensor, marks)
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _union(marks: Iterable[int]) -> int:
    return reduce(or_, marks, 0)


def _paths(node: Node | None, end: Node | None, depth: int = _MAX_PATH) -> Iterator[Path]:
    """Yield the ways from one node of a graph to another."""
    if node is None or end is None or not depth:
        return
    if node is end:
        yield ()
        return
    for index, (following, _) in enumerate(node.next_functions):
        for path in _paths(following, end, depth - 1):
            yield ((node.name(), index), *path)


Gradients = tuple[torch.Tensor | None, ...]


def _gradients(graph: Graph, by: Sequence[torch.Tensor]) -> Gradients:
    """Return a graph's gradients without adding them to any `.grad`."""
    said = [one for one in graph.said if one.requires_grad]
    given = [torch.linspace(-1, 1, x.numel()).to(x).view(x.shape) for x in said]
    return torch.autograd.grad(said, [graph.input_BTD, *by], given, allow_unused=True)


def _is_same(expected: Gradients, visit: Visit, unread: Unread, by: Sequence[torch.Tensor]) -> bool:
    """Return whether the gradients are the same without a product's value."""
    try:
        graph = attempt(partial(visit, (unread,)))
        found = None if graph is None else _gradients(graph, by)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a hook on a tensor reads the product in the backward
        return False
    if found is None:
        return False
    if all(map(_are_equal, expected, found)):
        return True
    again = _gradients(visit(()), by)
    is_fixed = all(map(_are_equal, expected, again))
    return not is_fixed and all(map(_are_close, expected, found))


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _are_close(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    slack = _STEPS * torch.finfo(one.dtype).eps * float(one.abs().max())
    return torch.allclose(one, other, rtol=0, atol=slack)


class TiledMlps:
    """Finds the parts of layers that can be computed some tokens at a time."""

    def __init__(self, *, chunk_tokens: int) -> None:
        """Take how many at a time."""
        self._chunk_tokens = chunk_tokens
        self._decides = Proven[bool]({})

    def of(self, layer: nn.Module, run: Callable[[], object]) -> dict[str, TiledMlp]:
        """Return a layer's, by name.

        Args:
            layer: A decoder layer, its weights in place.
            run: Computes it on a few tokens, without a graph.

        Raises:
            ValueError: One of them does not compute each token by itself, or may not.
        """
        if is_hooked(layer):
            return {}
        mlps = {}
        for name, found in find_mlps(layer, run).items():
            module, x = layer.get_submodule(name), found.x
            make = partial(TiledMlp, module, num_features=found.num_features)
            asked = partial(takes_decisions, partial(_computed, module, x))
            problem = problem_of(make(chunk_tokens=_FEW), x)
            if problem is None and self._decides.of(module, asked, given=x.dtype):
                problem = "may compute something else for more tokens, or for other values"
            if problem:
                raise ValueError(f"`{name}` {problem}")
            trained = [p for p in module.parameters() if p.requires_grad]
            paths = unread_products(module, partial(_mlp_graph, module, x), trained)
            unread = [Unread(module=module.get_submodule(n), path=at) for n, at in paths.items()]
            mlps[name] = make(chunk_tokens=self._chunk_tokens, unread=unread)
        return mlps


def _computed(module: nn.Module, like: torch.Tensor, *rows: int) -> None:
    compute(module, torch.empty(*rows, like.shape[-1], dtype=like.dtype, device=like.device))


def _mlp_graph(module: nn.Module, x: torch.Tensor, unread: Sequence[Unread]) -> Graph:
    leaf = x.detach().requires_grad_()
    with torch.enable_grad(), left_out(unread) as left:
        y = compute(module, leaf)
    return Graph(input_BTD=leaf, said=(y,), is_as_found=left.is_as_found(y))
