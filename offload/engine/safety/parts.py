"""Finds the products of a layer that nothing reads in a recompute, and the MLPs that can be cut.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules import module as torch_module

from offload.engine.closeness import are_close
from offload.engine.decisions import Proven, takes_decisions
from offload.engine.internals import HOOKS, TorchDispatchMode, has_hooks, memory_key, tree_leaves
from offload.engine.model.visits import Graph, attempt
from offload.engine.recompute import (
    Path,
    TiledMlp,
    Unread,
    WithoutValue,
    can_leave_out,
    compute,
    left_out,
)
from offload.engine.safety.watch import FollowsMemory
from offload.engine.visit_cache import patched

Visit = Callable[[Sequence[Unread]], Graph]
"""Computes a layer with its graph, always the same, leaving these products out."""

_GLOBAL_TABLES = tuple(f"_global{table}" for table in HOOKS)
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_NONE: Mapping[str, TiledMlp] = {}
_MAX_PATH = 12  # nodes between a layer's output and a product that is only added to it
_STEPS = (
    64  # roundings by which kernels differ that are of other shapes, or add up in no fixed order
)


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
        if has_hooks(module) or own.get("_compiled_call_impl") is not None:
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


class Taint(FollowsMemory):
    """Follows which memory holds something that was computed from marked tensors.

    Attributes:
        read: Marks whose values an operation handed to the host, one bit each.
    """

    def __init__(self) -> None:
        """Follow nothing yet."""
        super().__init__()
        self.read = 0

    @property
    def held(self) -> int:
        """Marks of memory that is still held."""
        return _union(self._known.values())

    def mark(self, tensor: torch.Tensor, marks: int) -> None:
        """Follow a tensor's memory."""
        self._know(tensor, self._known.get(memory_key(tensor), 0) | marks)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; what it makes of marked memory, or writes to, is marked."""
        given = _tensors((args, kwargs))
        marks = _union(self._known.get(memory_key(t), 0) for t in given)
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
    if _are_all(torch.equal, expected, found):
        return True
    again = _gradients(visit(()), by)
    is_fixed = _are_all(torch.equal, expected, again)
    return not is_fixed and _are_all(_are_close, expected, found)


def _are_all(
    alike: Callable[[torch.Tensor, torch.Tensor], bool], expected: Gradients, found: Gradients
) -> bool:
    """Return whether gradients are alike in pairs, and none where there is none."""
    pairs = zip(expected, found, strict=True)
    return all(a is b if a is None or b is None else alike(a, b) for a, b in pairs)


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    slack = _STEPS * torch.finfo(one.dtype).eps * float(one.abs().max())
    return torch.allclose(one, other, rtol=0, atol=slack)


# ---------------------------------------------------------------------------------------------
# Finds the parts of layers that may be computed some tokens at a time.
#
# They are modules whose operations all act within a token (`find_mlps`), whose values show it
# (`problem_of`), and that take no decision by the number or the values of tokens.

_aten = torch.ops.aten
_MIN_LINEARS, _MATRIX_DIM = 2, 2
_FEW = 4  # tokens of a tile while a layer is inspected


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FoundMlp:
    """A module whose operations all act within a token."""

    x: torch.Tensor  # an input that it was given, (..., K)
    num_features: int  # features of its output


def find_mlps(layer: nn.Module, run: Callable[[], object]) -> dict[str, FoundMlp]:
    """Return the outermost modules of a layer that can be computed tile by tile, by name.

    Args:
        layer: A decoder layer without hooks, perhaps without values.
        run: Computes it once, without a graph.
    """
    named = {
        name: module
        for name, module in layer.named_modules()
        if name and "forward" not in vars(module) and _has_linears(module)
    }
    within = _WithinTokens(named)
    with ExitStack() as stack:
        for name, module in named.items():
            vars(module)["forward"] = partial(within.call, name, module)
            stack.callback(vars(module).pop, "forward", None)
        stack.enter_context(within)
        run()
    found = within.found()
    return {
        name: one
        for name, one in found.items()
        if not any(name.startswith(f"{outer}.") for outer in found)
    }


def problem_of(mlp: TiledMlp, x: torch.Tensor) -> str | None:
    """Return what shows that an MLP does not compute each token by itself, from values.

    A token that is NaN makes what depends on it NaN, forward and backward.

    Args:
        mlp: With tiles that cut `x`.
        x: An input of several tokens.
    """
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        whole = compute(mlp.module, leaf)
    parts = mlp.value(leaf.detach())
    if not are_close(whole, parts, steps=_STEPS):
        return "gives other values in parts"
    for token in (0, x[..., 0].numel() - 1):
        marked = x.detach().clone()
        marked.view(-1, x.shape[-1])[token] = torch.nan
        if _others_are_nan(compute(mlp.module, marked), token):
            return "computes a token from another"
        ones = torch.ones_like(whole)
        ones.view(-1, ones.shape[-1])[token] = torch.nan
        (of_x,) = torch.autograd.grad(whole, [leaf], ones, retain_graph=True)
        if _others_are_nan(of_x, token):
            return "takes a token's gradient from another"
    return None


def _others_are_nan(y: torch.Tensor, token: int) -> bool:
    is_nan = y.detach().reshape(-1, y.shape[-1]).isnan().any(dim=-1)
    is_nan[token] = False
    return bool(is_nan.any())


def _has_linears(module: nn.Module) -> bool:
    """Return whether a module has several matrices, and no stack of them."""
    dims = [p.dim() for p in module.parameters()]
    return dims.count(_MATRIX_DIM) >= _MIN_LINEARS and max(dims) <= _MATRIX_DIM


_SHAPED = {
    *(_aten.view.default, _aten._unsafe_view.default, _aten.t.default, _aten.detach.default),
    *(_aten.transpose.int, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.alias.default),
    *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.slice.Tensor),
    *(_aten.clone.default, _aten._to_copy.default, _aten.copy_.default, _aten.cat.default),
    *(_aten.new_empty.default, _aten.empty_like.default, _aten.zeros_like.default),
    *(_aten.expand.default, _aten.native_layer_norm.default),
}
# Products, and which argument holds the tokens.
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.mm.out: 0,
    _aten.addmm.default: 1,
    _aten.addmm.out: 1,
    _aten.addmm_.default: 1,
}
_MEANS = {_aten.mean.dim, _aten.sum.dim_IntList}
_DRAWS = torch.Tag.nondeterministic_seeded


class _WithinTokens(TorchDispatchMode):
    """Follows what modules compute from their inputs, and notes those that leave a token."""

    def __init__(self, named: dict[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._own = {name: {id(p) for p in module.parameters()} for name, module in named.items()}
        self._reached: dict[str, dict[int, torch.Tensor]] = {}  # by module: storages, kept alive
        self._active: list[str] = []
        self._calls: dict[str, list[FoundMlp]] = {name: [] for name in named}
        self._widest: dict[str, int] = {}
        self._refused: set[str] = set()

    def found(self) -> dict[str, FoundMlp]:
        """Return the modules that were called once, on tokens, and widen them inside."""
        return {
            name: calls[0]
            for name, calls in self._calls.items()
            if name not in self._refused
            and len(calls) == 1
            and self._widest.get(name, 0) > max(calls[0].x.shape[-1], calls[0].num_features)
        }

    def call(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a module and follow what it computes."""
        own = cast("Any", type(module))
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or x.dim() < _MATRIX_DIM or name in self._active:
            self._refused.add(name)
            return own.forward(module, *args, **kwargs)
        self._reached[name] = {memory_key(x): x}
        self._active.append(name)
        try:
            y = own.forward(module, x)
        finally:
            self._active.pop()
            self._reached.pop(name)
        if isinstance(y, torch.Tensor) and y.shape[:-1] == x.shape[:-1] and y.dtype == x.dtype:
            one = FoundMlp(x=x.detach().clone(), num_features=y.shape[-1])
            self._calls[name].append(one)
        else:
            self._refused.add(name)
        return y

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and judge it for each module that it is a part of."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:  # asked of fake tensors
            return out
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        for name in self._active:
            reached = self._reached[name]
            leaves = [t if t._base is None else t._base for t in given if t.requires_grad]
            if any(leaf.is_leaf and id(leaf) not in self._own[name] for leaf in leaves):
                self._refused.add(name)  # a gradient would be lost
            if not any(memory_key(t) in reached for t in given):
                if _DRAWS in func.tags:
                    self._refused.add(name)
                continue
            if not _is_within_tokens(func, args, reached):
                self._refused.add(name)
            reached |= {memory_key(t): t for t in results}  # what is written to is returned too
            width = max((t.shape[-1] for t in results if t.dim()), default=0)
            self._widest[name] = max(self._widest.get(name, 0), width)
        return out


def _is_within_tokens(func: Any, args: Sequence[Any], reached: dict[int, torch.Tensor]) -> bool:
    """Return whether an operation keeps tokens, its rows, apart."""
    if _DRAWS in func.tags:
        return False
    if func in _PRODUCTS:
        factors = args[_PRODUCTS[func] : _PRODUCTS[func] + 2]
        return memory_key(factors[0]) in reached and memory_key(factors[1]) not in reached
    if func in _MEANS:
        return list(args[1] or ()) in ([-1], [args[0].dim() - 1])
    return func in _SHAPED or torch.Tag.pointwise in func.tags


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
